"""What ``kv_recompute_threshold`` should be: from how many tokens on fetching KV is quicker than computing it again."""

from __future__ import annotations

from neuron_pushkv.simulate.scenario import Scenario
from neuron_pushkv.simulate.tables import ServiceTable


def transfer_seconds(tokens: int, scenario: Scenario, table: ServiceTable) -> float:
    """Of a transfer that has the network to itself, until its last byte is in place."""
    moving = max(scenario.wire_seconds(tokens, table), scenario.posting_seconds(tokens, table))
    return scenario.floor_ms / 1000 + moving


def recompute_seconds(tokens: int, context: int, table: ServiceTable) -> float:
    """What so many more tokens add to a prefill that begins after ``context`` cached ones.

    The engine computes the prompt's new tokens either way, so the cost of beginning is not counted.
    """
    return table.chunk_seconds(context, context + tokens)


def break_even(context: int, scenario: Scenario, table: ServiceTable) -> int | None:
    """The fewest tokens (whole blocks) after ``context`` cached ones from which on fetching is always quicker, as far
    as the table goes; None if it never is.
    """
    step = scenario.block_tokens
    found = None
    for tokens in range((table.longest - context) // step * step, 0, -step):
        if transfer_seconds(tokens, scenario, table) >= recompute_seconds(tokens, context, table):
            break
        found = tokens
    return found
