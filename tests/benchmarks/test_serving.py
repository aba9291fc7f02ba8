"""What the serving benchmark works out: figures, the order of visits, what engines and vLLM's client are told."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.serving import conversations, figures, load, watching
from benchmarks.serving.__main__ import CHUNK
from benchmarks.serving.ablation import QUESTIONS
from benchmarks.serving.contestants import CONTESTANTS, DECODE, PREFILL, Arrangement, Engines, arrange
from benchmarks.serving.handover import Cell, Sample
from benchmarks.serving.phases import phases
from benchmarks.serving.plan import Plan, plan
from benchmarks.serving.report import ablation_rows, handover_row, ratio_rows, runs_row
from neuron_pushkv.telemetry.lines import rendered, transfer_fields
from neuron_pushkv.telemetry.transfer import Transfer

ENGINES = Engines(Path("model"), CHUNK, 8704, 1 << 30, 64, 1 << 16, Path("nixl"))


def planned(short: bool = False, parts: tuple[str, ...] = ("handover", "load")) -> Plan:
    return plan(
        Namespace(
            only=["pushkv", "nixl-push", "undivided"],
            parts=parts,
            tokens=[2049, 8193],
            short=short,
            rounds=2,
            repeats=7,
            inputs=[512, 1024],
            outputs=[8],
            rates=[1.0, 2.0],
            datasets=["random"],
            requests=10,
        )
    )


def arranged() -> dict[str, Arrangement]:
    return {contestant.name: arrange(contestant, ENGINES, (3, 4)) for contestant in CONTESTANTS}


def test_intervals_hold_the_median_and_narrow_with_samples() -> None:
    few, many = figures.median([1, 2, 3, 4, 9]), figures.median([1, 2, 3, 4, 9] * 10)
    assert few.value == many.value == 3
    assert few.low < many.low <= 3 <= many.high < few.high
    assert figures.median([5.0]) == figures.Figure(5.0, 5.0, 5.0)


def test_a_ratio_is_of_medians_and_its_interval_takes_in_both() -> None:
    ratio = figures.ratio([1, 2, 3], [4, 4, 4])
    assert (ratio.value, ratio.low, ratio.high) == (0.5, 0.25, 0.75)
    assert figures.ratio([2, 2, 2], [1, 2, 4]).low == 0.5


def test_each_round_visits_all_in_the_order_opposite_to_the_last() -> None:
    visits = [(visit.round, visit.contestant.name) for visit in planned().visits()]
    assert visits == [
        (0, "pushkv"),
        (0, "nixl-push"),
        (0, "undivided"),
        (1, "undivided"),
        (1, "nixl-push"),
        (1, "pushkv"),
    ]


def test_the_short_form_computes_no_long_prompts() -> None:
    assert Cell(8193, cached=False) in planned().handovers
    assert set(planned(short=True).handovers) == {Cell(2049, True), Cell(2049, False), Cell(8193, True)}
    assert len(planned(short=True).loads) == 4


def test_prompts_are_at_least_eight_chunks_long() -> None:
    assert all(cell.tokens >= 8 * CHUNK for cell in planned().handovers)


def test_engines_differ_in_nothing_but_their_connectors() -> None:
    everything = arranged()
    assert len({arrangement.settings.arguments for arrangement in everything.values()}) == 1
    for name, arrangement in everything.items():
        engines = {engine.name: engine for engine in arrangement.settings.engines}
        if name == "undivided":
            assert [engine.cores for engine in engines.values()] == [(3, 4)]
            continue
        assert (engines[PREFILL].cores, engines[DECODE].cores) == ((3,), (4,))
        for engine in engines.values():
            (flag, _) = engine.arguments
            assert flag == "--kv-transfer-config"


@pytest.mark.parametrize("name", ["pushkv", "nixl-push", "nixl-pull"])
def test_decode_is_told_where_prefill_really_listens(name: str) -> None:
    arrangement = arranged()[name]
    (prefill,) = (engine for engine in arrangement.settings.engines if engine.name == PREFILL)
    transfer = json.loads(prefill.arguments[1])
    ports = {
        transfer["kv_connector_extra_config"].get("port"),
        int(prefill.environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", 0)),
    }
    assert arrangement.source["remote_port"] in ports
    assert arrangement.source["remote_engine_id"] == transfer["engine_id"]


def test_the_client_is_told_what_a_cell_says() -> None:
    objective = load.Objective(ttft=100, tpot=20)
    random = load.arguments(load.Cell("random", 512, 8, 2.0, 10), objective, Path("m"), "http://h:1", seed=3)
    assert {"--random-input-len=512", "--random-output-len=8", "--request-rate=2", "--num-prompts=10"} <= set(random)
    assert random[random.index("--goodput") :] == ["--goodput", "ttft:100", "tpot:20"]
    repeated = load.arguments(load.Cell("prefix_repetition", 512, 8, 2.0, 10), objective, Path("m"), "u", seed=3)
    assert {"--prefix-repetition-prefix-len=256", "--prefix-repetition-suffix-len=256"} <= set(repeated)
    assert not any(argument.startswith("--random") for argument in repeated)


def test_phases_are_read_from_the_lines_that_engines_write() -> None:
    moments = {"connected": 0.25, "accepted": 0.5, "committed": 1.0, "arrived": 1.5, "seen": 1.75}
    transfer = Transfer("in", "r", "t", "", "p", None, "", 1, 1, 1, 0.0, moments)
    line = rendered(transfer_fields(transfer, 1.75, "decode", "0"))
    log = f"INFO {line}\nINFO other line with odd_seconds=9\nINFO {line}\n"
    found = phases(log, "kv_received")
    assert found["wait"] == found["transfer"] == [0.5, 0.5]
    assert found["report"] == [0.25, 0.25]
    assert phases(log, "kv_sent") == {}


def test_handover_is_what_prefill_and_a_step_leave_of_the_first_token() -> None:
    cell = Cell(2049, cached=True)
    samples = {"pushkv": Sample(1.0, 0.5, 0.25, 0.3), "nixl-push": Sample(1.5, 0.5, 0.25, 0.9)}
    rows = [handover_row(name, cell, [sample] * 3, {}) for name, sample in samples.items()]
    assert [row["handover"]["value"] for row in rows] == [0.25, 0.75]
    ratios = {row["name"]: row for row in ratio_rows(rows)}
    assert {row["other"] for row in ratios.values()} == {"nixl-push"}
    assert ratios["handover ratio"]["ratio"]["value"] == pytest.approx(1 / 3)
    assert ratios["first ratio"]["ratio"]["value"] == pytest.approx(2 / 3)


def test_variants_of_ours_are_visited_like_contestants() -> None:
    visits = list(planned(parts=("ablation",)).visits())
    one_way = [visit.contestant.name for visit in visits[:6]]
    assert one_way == [f"push_granularity {each}" for each in ("request", "step", "layer")] + [
        f"block_order {each}" for each in ("vllm", "sorted", "runs")
    ]
    assert [visit.contestant.name for visit in visits[6:]] == one_way[::-1]
    assert [visit.contestant.worn for visit in visits[:6]] == [False] * 3 + [True] * 3
    assert dict(visits[0].contestant.extra or {}) == {"provider": "shm", "push_granularity": "request"}


def test_each_question_about_our_mechanisms_gets_a_row_for_each_value() -> None:
    rows = [
        handover_row(question.contestant(value).name, question.cell, [Sample(1.0, 0.5, 0.25, 0.3)], {})
        for question in QUESTIONS
        for value in question.values
    ]
    found = [(row["question"], row["variant"]) for row in ablation_rows(rows)]
    assert found == [(question.name, value) for question in QUESTIONS for value in question.values]


def test_under_load_ours_is_compared_with_each_of_vllms_own() -> None:
    runs = {"pushkv": 10.0, "nixl-push": 20.0, "nixl-pull": 40.0, "undivided": 5.0}
    rows = [runs_row("load", name, "cell", [{"ttft p50": value, "tpot p50": 1.0}] * 3) for name, value in runs.items()]
    found = {(row["name"], row["other"]): row["ratio"]["value"] for row in ratio_rows(rows)}
    assert found == {
        ("ttft p50 ratio", "nixl-push"): 0.5,
        ("ttft p50 ratio", "nixl-pull"): 0.25,
        ("tpot p50 ratio", "nixl-push"): 1.0,
        ("tpot p50 ratio", "nixl-pull"): 1.0,
    }


def test_conversations_are_told_apart_by_their_turns() -> None:
    turn = {"tpot_ms": 1.0, "latency_ms": 9.0}
    turns = [{**turn, "ttft_ms": 50.0, "input_num_turns": 1}, {**turn, "ttft_ms": 10.0, "input_num_turns": 3}] * 2
    found = conversations.figures(turns)
    assert (found["ttft of first turns p50"], found["ttft of later turns p50"]) == (50.0, 10.0)
    assert (found["completed"], found["ttft p50"]) == (4, 30.0)
    recipe = conversations.recipe(conversations.Cell(8, 4, 1024, 128, 16, 2), Path("words"))
    assert recipe["prompt_input"]["num_turns"]["value"] == 8  # questions and answers


def test_memory_that_waits_or_is_parked_is_what_running_requests_do_not_explain() -> None:
    states = [watching.State(running=1, fetching=2, held_share=0.5, parked_bytes=3.0)] * 2
    decode = watching.over_time(DECODE, states, ENGINES, tokens=1024)
    assert decode["waiting_bytes"] == 2 * 1024 * ENGINES.bytes_per_token
    assert decode["slots_occupied"] == 1 / 64
    prefill = watching.over_time(PREFILL, states, ENGINES, tokens=1024)
    assert prefill["parked_bytes"] == ENGINES.kv_bytes / 2 - 1024 * ENGINES.bytes_per_token
    assert prefill["parked_bytes_told"] == 3.0
    assert watching.over_time(DECODE, [], ENGINES, tokens=1) == {}
