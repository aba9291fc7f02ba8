"""``pushkv simulate``: questions to the model."""

from __future__ import annotations

import math
from typing import Any

import click

from neuron_pushkv.simulate import report
from neuron_pushkv.simulate.capacity import best, fleets, offered, parked_tokens
from neuron_pushkv.simulate.options import Session, common_options, scenario_options, varied
from neuron_pushkv.simulate.published import ALL_ASSUME, CONVERSATION, LOAD, rows
from neuron_pushkv.simulate.replication import difference
from neuron_pushkv.simulate.scenario import MODES, Mode, Scenario, changed, scenario
from neuron_pushkv.simulate.threshold import break_even, recompute_seconds, transfer_seconds

OF_A_TRANSFER = ("block_tokens", "floor_ms", "rails", "rail_gigabytes", "posting_us")


@click.group()
def simulate() -> None:
    """What a fleet would do, by a model: nothing here is measured. docs/simulation.md says what is modelled."""


_modes = click.option(
    "--mode", "modes", type=click.Choice(MODES), multiple=True, default=MODES, help="One or several; all if not given."
)


@simulate.command()
@scenario_options("mode")
@_modes
@click.option("--vary", metavar="NAME=A,B,C", help="A setting, and the values it takes one after the other.")
@common_options
def run(session: Session, modes: tuple[Mode, ...], vary: str | None = None, **settings: Any) -> None:
    """Push, late push and pull under the same load."""
    if vary is None:
        results = [session.simulate(scenario({**settings, "mode": mode})) for mode in modes]
        session.show(report.details(results), report.phases(results))
        session.end("run", cases=[report.as_json(result) for result in results])
        return
    name, values = varied(vary, settings)
    rows = [(value, session.simulate(changed(each, mode=mode))) for value, each in values for mode in modes]
    session.show(report.summary(f"By {name}", name, rows))
    session.end("run", varied=name, cases=[report.as_json(result) for _, result in rows])


@simulate.command()
@scenario_options("mode")
@click.option("--vary", metavar="NAME=A,B,C", default="input=1024,2048,4096,8192,16384", show_default=True)
@common_options
def paying(session: Session, vary: str, **settings: Any) -> None:
    """Where push stops paying: its TTFT and TPOT less those of late push and of pull, under the same load."""
    name, values = varied(vary, settings)
    headings = ("push\nTTFT mean ms", "less\nTTFT ms", "less\nTPOT ms")
    table = report.headed(
        f"Push against the others by {name}", (name, "against", "quicker to the first token"), headings
    )
    cases = []
    for value, base in values:
        push = session.simulate(changed(base, mode="push"))
        for mode in MODES[1:]:
            other = session.simulate(changed(base, mode=mode))
            gain = difference(push, other, "ttft_ms.mean")
            verdict = "undecided" if not gain.sure else "push" if gain.mean < 0 else mode
            per_token = difference(push, other, "tpot_ms.mean") if "tpot_ms.mean" in push else None
            cells = [
                report.shown(push["ttft_ms.mean"]),
                report.shown(gain),
                report.shown(per_token) if per_token else "",
            ]
            table.add_row(value, mode, verdict, *cells)
            cases.append({"against": report.as_json(other), "push": report.as_json(push), "quicker": verdict})
    session.show(table)
    session.end("paying", varied=name, cases=cases)


@simulate.command()
@scenario_options("prefills", "decodes")
@click.option(
    "--goal",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of requests within it.",
)
@common_options
def capacity(session: Session, goal: float, **settings: Any) -> None:
    """How many P and D a load needs for the SLO (--slo-ttft-ms, --slo-tpot-ms)."""
    base = scenario(settings)
    load = offered(base, session.table)
    tried = fleets(base, session.table, goal, session.simulate)
    headings = ("within SLO", "TTFT p90 ms", "TPOT p90 ms", "P busy", "D's slots", "network", "posting")
    table = report.headed(f"Fleets, mode {base.mode}, fewest engines first", ("P", "D", "enough"), headings)
    times = ("goodput.share", "ttft_ms.p90", "tpot_ms.p90")
    shares = ("prefill", "decode_slots", "network", "posting")
    for each in tried:
        cells = [report.shown(each.result[name]) if name in each.result else "" for name in times]
        cells += [f"{each.result[f'utilisation.{name}'].mean:.0%}" for name in shares]
        fleet = each.result.scenario
        table.add_row(str(fleet.prefills), str(fleet.decodes), "yes" if each.enough else "no", *cells)
    answer = best(tried)
    wanted = f"{goal:.0%} of requests with TTFT <= {base.slo_ttft_ms:g} ms and TPOT <= {base.slo_tpot_ms:g} ms"
    if answer is None:
        verdict = f"simulated: no fleet that was tried serves {wanted}; one request alone may already be too slow"
    else:
        fleet = answer.result.scenario
        verdict = f"simulated: {fleet.prefills} P and {fleet.decodes} D serve {wanted} at {base.rate:g} a second"
    session.show(table)
    session.console.print(
        f"the load alone keeps {load.prefills:.2f} P busy and fills the slots of {load.decodes:.2f} D", soft_wrap=True
    )
    session.console.print(verdict, soft_wrap=True)
    found = None if answer is None else {"prefills": fleet.prefills, "decodes": fleet.decodes}
    session.end(
        "capacity",
        goal=goal,
        simulated_answer=found,
        cases=[{"enough": t.enough, **report.as_json(t.result)} for t in tried],
    )


@simulate.command()
@scenario_options("return_path", "requests", "warm_up")
@common_options
def parked(session: Session, **settings: Any) -> None:
    """KV memory of D that conversations take while they wait for their next turn.

    Without other settings: 10 turns of 2,048 tokens each, 0.1 conversations a second. Runs until four times the
    time that KV is kept have passed, and counts the second half.
    """
    settings = {"turns": 10, "input": 2048, "rate": 0.1, **settings, "return_path": True}
    base = scenario({**settings, "requests": 1, "warm_up": 0})
    span = base.keep_seconds + base.turns * (base.think_seconds + 1)
    requests = math.ceil(4 * span * base.rate)
    base = changed(base, requests=requests, warm_up=requests // 2)
    result = session.simulate(base)
    gigabytes = session.table.kv_bytes_per_token / 1e9
    expected = parked_tokens(base) * gigabytes
    rows = (
        ("parked at all D, GB a rank, mean", report.shown(result["kv_gigabytes.parked"])),
        ("most at one D, GB a rank", report.shown(result["kv_gigabytes.parked_peak_of_one"])),
        ("held by requests at all D, GB a rank, mean", report.shown(result["kv_gigabytes.held_at_decode"])),
        ("conversations whose KV gave way", report.shown(result["evicted_conversations"])),
        ("TTFT of the last turn, median ms", report.shown(result["ttft_last_turn_ms.median"])),
    )
    table = report.headed("KV that waits for the next turn", ("",), ("figure",))
    for row in rows:
        table.add_row(*row)
    session.show(table)
    session.console.print(f"by Little's law, without eviction: {expected:,.1f} GB a rank at all D", soft_wrap=True)
    session.end("parked", littles_law_gigabytes=expected, cases=[report.as_json(result)])


@simulate.command()
@scenario_options(*(set(Scenario.model_fields) - set(OF_A_TRANSFER)))
@common_options
def threshold(session: Session, **settings: Any) -> None:
    """What kv_recompute_threshold should be: from how many tokens on fetching is quicker than computing."""
    base = scenario(settings)
    headings = ("fetch from\ntokens on", "fetching them\ntakes ms", "computing them\ntakes ms")
    table = report.headed("Break-even on idle engines", ("cached before",), headings)
    cases = []
    for context in (0, *(tokens for tokens, _ in session.table.prefill_ms[:-1])):
        tokens = break_even(context, base, session.table)
        times: tuple[float, ...] = ()
        if tokens is not None:
            fetching = transfer_seconds(tokens, base, session.table)
            times = (fetching * 1000, recompute_seconds(tokens, context, session.table) * 1000)
        cells = (f"{tokens:,}" if tokens is not None else "never", *(f"{time:.1f}" for time in times))
        table.add_row(f"{context:,}", *cells)
        cases.append(
            {"cached": context, report.MARK: {"break_even_tokens": tokens, "fetch_and_compute_ms": list(times)}}
        )
    session.show(table)
    session.end("threshold", scenario=base.model_dump(mode="json"), cases=cases)


@simulate.command()
@common_options
def published(session: Session) -> None:
    """The published figures of two P5en beside simulated ones, with the assumptions that each needs."""
    table = report.headed("Published figures, ms", ("figure", "published"), ("ms",))
    table.add_column("assumptions", ratio=1)
    cases = []
    for row in rows(session.table, session.simulate, session.replications):
        simulated = report.shown(row.simulated) + (" (fitted)" if row.fitted else "")
        table.add_row(row.figure, f"{row.published:,g}", simulated, row.assumptions)
        cases.append(
            {
                "figure": row.figure,
                "published_ms": row.published,
                "simulated_ms": report.estimate_json(row.simulated),
                "assumptions": row.assumptions,
                "fitted": row.fitted,
            }
        )
    session.show(table, ALL_ASSUME)
    session.end(
        "published", load=LOAD.model_dump(mode="json"), conversation=CONVERSATION.model_dump(mode="json"), cases=cases
    )
