"""What the serving benchmark works out: figures, the order of visits, what engines and vLLM's client are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import figures, load
from benchmarks.serving.__main__ import CHUNK
from benchmarks.serving.contestants import CONTESTANTS, DECODE, PREFILL, Arrangement, Engines, arrange
from benchmarks.serving.handover import Cell, Sample
from benchmarks.serving.phases import phases
from benchmarks.serving.plan import Plan, plan
from benchmarks.serving.report import handover_row, ratio_rows
from neuron_pushkv.telemetry.lines import rendered, transfer_fields
from neuron_pushkv.telemetry.transfer import Transfer

ENGINES = Engines(Path("model"), CHUNK, 8704, 1 << 30, 64, Path("nixl"))


def planned(short: bool = False) -> Plan:
    return plan(
        only=["pushkv", "nixl-push", "undivided"],
        parts=["handover", "load"],
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
    visits = [(number, contestant.name) for number, contestant in planned().visits()]
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
    (ratio,) = ratio_rows(rows)
    assert ratio["other"] == "nixl-push"
    assert ratio["ratio"]["value"] == pytest.approx(1 / 3)
