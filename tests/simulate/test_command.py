"""``pushkv simulate``: what it prints and writes, and that each figure says that it is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from neuron_pushkv import cli

QUICK = ("--requests", "40", "--warm-up", "5", "--replications", "2", "--output", "16")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["simulate", *arguments])


def passed(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "AIConfigurator 0.12" in result.stdout
    return result.stdout


def tables(text: str) -> list[list[str]]:
    """Each table's lines from its title to its rule."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if "(simulated, not measured)" in line:
            found.append([])
        if found and (not found[-1] or not found[-1][-1].startswith("━")):
            found[-1].append(line)
    return found


def test_every_column_of_figures_says_simulated() -> None:
    text = passed("run", *QUICK)
    figures, phases = tables(text)
    for head in (figures, phases):
        assert head[1].count("simulated") == 3
    for name in (
        "TTFT median",
        "TPOT p99",
        "ITL p90",
        "E2EL median",
        "goodput",
        "D's slots",
        "waiting at P",
        "transfer",
    ):
        assert name in text


def test_json_says_so_too_and_holds_all(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    passed("run", *QUICK, "--mode", "push", "--turns", "2", "--return-path", "--json", str(path))
    document = json.loads(path.read_text())
    assert document["simulated"] is True
    assert document["service_times"]["source"].startswith("AIConfigurator")
    (case,) = document["cases"]
    assert case["scenario"]["return_path"] is True
    assert case["scenario"]["input"] == "4096"
    simulated = case["simulated"]
    assert set(simulated["ttft_ms"]) == {"mean", "median", "p90", "p99"}
    assert simulated["ttft_ms"]["median"]["half_width_95"] >= 0
    assert {"tpot_ms", "itl_ms", "e2e_ms", "phase_ms", "throughput", "goodput", "utilisation", "kv_gigabytes"} <= set(
        simulated
    )
    assert len(case["simulated_parked_gigabytes_over_time"]) == 50
    # No figure stands anywhere else.
    assert set(case) - {"scenario", "seed", "replications"} == {"simulated", "simulated_parked_gigabytes_over_time"}


def test_the_same_seed_prints_the_same() -> None:
    assert passed("run", *QUICK, "--seed", "3") == passed("run", *QUICK, "--seed", "3")
    assert passed("run", *QUICK, "--seed", "3") != passed("run", *QUICK, "--seed", "4")


def test_report_is_one_html_file_of_what_was_printed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    passed("run", *QUICK, "--mode", "pull", "--report", str(path))
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "(simulated, not measured)" in text
    assert "src=" not in text
    assert "AIConfigurator 0.12" in text


def test_a_setting_can_be_varied(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    text = passed("run", *QUICK, "--vary", "prefix-hit=0,0.5", "--mode", "push", "--json", str(path))
    assert text.count("push") == 2
    cases = json.loads(path.read_text())["cases"]
    assert [case["scenario"]["prefix_hit"] for case in cases] == [0, 0.5]
    first, second = (case["simulated"]["ttft_ms"]["mean"]["mean"] for case in cases)
    assert second < first


def test_where_push_pays(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    passed("paying", *QUICK, "--vary", "input=1024,8192", "--rate", "0.5", "--json", str(path))
    cases = json.loads(path.read_text())["cases"]
    assert [case["against"]["scenario"]["mode"] for case in cases] == ["late-push", "pull"] * 2
    assert [case["quicker"] for case in cases][2:] == ["push", "push"]


def test_capacity_names_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    text = passed("capacity", *QUICK, "--rate", "4", "--slo-ttft-ms", "2000", "--json", str(path))
    answer = json.loads(path.read_text())["simulated_answer"]
    assert f"simulated: {answer['prefills']} P and {answer['decodes']} D serve 90% of requests" in text
    assert "simulated: no fleet that was tried" in passed("capacity", *QUICK, "--slo-ttft-ms", "1", "--rate", "0.1")


def test_parked_compares_with_littles_law() -> None:
    quick = ("--keep-seconds", "20", "--turns", "2", "--input", "512", "--output", "8", "--replications", "2")
    text = passed("parked", *quick, "--rate", "0.5")
    assert "by Little's law" in text


def test_threshold_is_a_row_for_each_context() -> None:
    text = passed("threshold", "--posting-us", "0")
    assert len([line for line in text.splitlines() if "│" in line]) == 6
    assert "never" in passed("threshold", "--rail-gigabytes", "0.1")


def test_published_figures_stand_beside_simulated_ones(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    text = passed("published", "--replications", "1", "--json", str(path))
    for value in ("540", "1,744", "10.4", "778", "460", "2,334", "702"):
        assert value in text
    rows = json.loads(path.read_text())["cases"]
    assert all(row["assumptions"] for row in rows)
    assert len({row["figure"] for row in rows}) == 8
    assert {row["published_ms"] for row in rows} == {540, 1744, 7, 10.4, 778, 460, 2334, 702}

    def simulated(figure: str, assumption: str) -> float:
        (found,) = (r for r in rows if r["figure"] == figure and assumption in r["assumptions"])
        return float(found["simulated_ms"]["mean"])

    assert simulated("TTFT push", "every prompt cold") > 5000
    assert simulated("TTFT push", "fitted to this figure") == pytest.approx(540, rel=0.15)
    assert simulated("TTFT pull", "D posts its reads inline") > 600
    assert simulated("TPOT pull", "in the background") == pytest.approx(simulated("TPOT push", "cached"), rel=0.02)
    # 555 + 30 + 805 MB at 6 GB/s + 5.4, a little less since the last prompt has 24,572 tokens.
    assert simulated("TTFT Qwen3-32B, no return path", "P cold") == pytest.approx(724.5, abs=1)
    fitted = {row["figure"] for row in rows if row["fitted"]}
    assert fitted == {"TTFT push", "TPOT pull", "TTFT GLM-5-FP8, no return path"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "--rate", "0"), "simulate: rate: "),
        (("run", "--rate", "fast"), "simulate: rate: "),
        (("run", "--input", "32768"), "ends at prompts of 24,576 tokens"),
        (("run", "--table", "no-such"), "service times no-such can't be read"),
        (("run", "--vary", "speed=1"), "--vary takes NAME=VALUE"),
        (("run", *QUICK, "--json", "no/such/folder/x"), "no/such/folder/x can't be written"),
        (("threshold", "--rails", "0"), "simulate: rails: "),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: tuple[str, ...], sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("pushkv: ")
    assert sentence in line


def test_without_simpy_it_says_what_to_install_and_the_rest_works() -> None:
    program = "import sys\nsys.modules['simpy'] = None\nfrom neuron_pushkv.cli import main\nmain(sys.argv[1:])\n"

    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    assert without("--version").returncode == 0
    done = without("simulate", "run", *QUICK)
    assert done.returncode == 2
    assert done.stderr == "pushkv: pushkv simulate needs SimPy: pip install 'neuron-pushkv[simulate]'\n"
