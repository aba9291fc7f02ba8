"""What is simulated: engines, network, router and load. One class, every choice once."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from neuron_pushkv.config import PositiveSeconds, Seconds, Strict, parse
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.simulate.lengths import Arrivals, Lengths
from neuron_pushkv.simulate.tables import ServiceTable

Mode = Literal["push", "late-push", "pull"]
MODES: tuple[Mode, ...] = ("push", "late-push", "pull")
Choice = Literal["round-robin", "least-loaded"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class Scenario(Strict):
    """A fleet and its load. Figures that are not the user's own say where they come from."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    mode: Mode = "push"
    """`push`: D is chosen when the request comes, and KV moves while it is computed. `late-push`: D is chosen when
    prefill has ended, and then registers. `pull`: D is chosen when prefill has ended, and reads."""
    prefills: PositiveInt = 1
    """Prefill engines."""
    decodes: PositiveInt = 1
    """Decode engines."""
    slots: PositiveInt = 8
    """Sequences that a decode engine decodes at the same time (vLLM's `max_num_seqs`)."""
    chunk_tokens: PositiveInt = 2048
    """Prompt tokens that a prefill step computes at most (vLLM's `max_num_batched_tokens`)."""
    stream: bool = True
    """With `push`, send what each step has filled; otherwise all of it when prefill has ended."""
    block_tokens: PositiveInt = 16
    """Tokens of a KV block (vLLM's `block_size`): how many descriptors a transfer takes."""
    floor_ms: Seconds = 30.0
    """What a transfer takes besides its bytes. Published for P5en; see docs/simulation.md."""
    rails: PositiveInt = 2
    """Network cards that a rank uses."""
    rail_gigabytes: Positive = 3.0
    """GB/s (10^9 bytes) over each of them. Published for P5en: about 6 GB/s per GPU, which has two."""
    posting: Literal["auto", "inline", "background"] = "auto"
    """Whether posting a transfer's descriptors stops the engine that posts. `auto`: inline with pull, as vLLM's NIXL
    connector posts its reads from the engine's step; in the background with push."""
    posting_us: Seconds = 2.4
    """Microseconds to post one descriptor. vLLM's pull request 35264: 46 ms for 18,880."""
    choose_prefill: Choice = "least-loaded"
    """How the router picks P: by fewest prompt tokens that are left to compute, or in turn."""
    choose_decode: Choice = "least-loaded"
    """How it picks D: by fewest requests, or in turn."""
    decode_kv_tokens: PositiveInt | None = None
    """Tokens that a decode engine's KV cache holds; without end if not given."""
    arrivals: Arrivals = "poisson"
    """How requests (with `turns`, conversations) come: at random, or at equal distances."""
    rate: Positive = 1.0
    """How many of them come a second."""
    requests: PositiveInt = 1000
    """How many come at all, in each replication."""
    warm_up: NonNegativeInt = 100
    """How many of the first are left out of the figures."""
    input: Lengths = Lengths.read("4096")
    """Tokens of a prompt; with `turns`, those that each turn adds."""
    output: Lengths = Lengths.read("128")
    """Tokens of an answer."""
    prefix_hit: Share = 0.0
    """Share of each prompt whose KV P has in its prefix cache."""
    decode_hit: Share = 0.0
    """Share of each prompt whose KV D has in its own, and doesn't ask for."""
    turns: PositiveInt = 1
    """Turns of a conversation: each prompt is all that was said before, and `input` tokens more."""
    think_seconds: Seconds = 10.0
    """From an answer's end to the next turn."""
    return_path: bool = False
    """D keeps a conversation's KV for its next turn, which goes to the same D; P gets from it what it lacks, and sends
    it only what is new."""
    keep_seconds: PositiveSeconds = 480.0
    """How long D keeps it, also after the last turn, which nobody can tell (480: vLLM's `decoder_kv_blocks_ttl`)."""
    recompute_threshold: NonNegativeInt = 0
    """P computes again what it lacks if that is fewer tokens (vLLM's `kv_recompute_threshold`)."""
    slo_ttft_ms: Positive = 1000.0
    """A request is good if its TTFT is at most this,"""
    slo_tpot_ms: Positive = 10.0
    """and its TPOT at most this."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.warm_up >= self.requests:
            raise ValueError(f"warm_up ({self.warm_up}) must be less than requests ({self.requests})")
        if self.return_path and self.turns == 1:
            raise ValueError("return_path is about conversations: set turns to 2 or more")
        room, longest = self.decode_kv_tokens, self.longest_context
        if room is not None and longest > room:
            raise ValueError(f"decode_kv_tokens ({room:,}) must hold the longest request, {longest:,} tokens")
        return self

    @property
    def longest_context(self) -> int:
        """Tokens of the longest request at its end, in the last turn."""
        return self.turns * (self.input.longest + self.output.longest)

    @property
    def inline(self) -> bool:
        """Whether posting stops the engine that posts."""
        return self.posting == "inline" or (self.posting == "auto" and self.mode == "pull")

    def posting_seconds(self, tokens: int, table: ServiceTable) -> float:
        """To post the descriptors of so many tokens, on each rank at the same time."""
        return -(-tokens // self.block_tokens) * table.regions * self.posting_us / 1e6

    def wire_seconds(self, tokens: int, table: ServiceTable) -> float:
        """Of their bytes over all rails of a rank."""
        return tokens * table.kv_bytes_per_token / (self.rails * self.rail_gigabytes * 1e9)

    def fits(self, table: ServiceTable) -> None:
        """Raises :class:`ConfigError` if the table can't tell of it."""
        prompt = self.longest_context - self.output.longest
        if prompt > table.longest:
            raise ConfigError(
                f"the table {table.name} ends at prompts of {table.longest:,} tokens, and here they have up to "
                f"{prompt:,}; ask for shorter ones or fewer turns, or give a table that goes further"
            )
        if self.slots > table.most_sequences:
            raise ConfigError(
                f"the table {table.name} ends at {table.most_sequences} sequences in a decode batch, and slots is "
                f"{self.slots}; ask for fewer, or give a table that goes further"
            )


def scenario(values: dict[str, Any]) -> Scenario:
    """Of settings as a user wrote them. Raises :class:`ConfigError`."""
    return parse(Scenario, values, "simulate")


def changed(base: Scenario, **values: Any) -> Scenario:
    """``base`` with other settings, validated as a whole. Raises :class:`ConfigError`."""
    return scenario({**base.model_dump(), **values})
