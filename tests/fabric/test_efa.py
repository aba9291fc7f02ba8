"""Device memory over the stand-in for libfabric on a machine with EFA: what the library is told, and in what order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from neuron_pushkv.fabric import discovery
from tests.fabric.efa_process import OFFSET

ROOT = Path(__file__).parents[2]
KIB = 1 << 10
MIB = 1 << 20
NEURON, CUDA = 4, 1
RUNS = [(0, 4096, 64), (100, 70000, 4000), (300 * KIB, 250 * KIB, 300 * KIB), (MIB - 8, 0, 8)]
WRITE, REMOTE_READ, REMOTE_WRITE = 0x200, 0x1000, 0x2000

Run: TypeAlias = Callable[..., "Outcome"]


class Outcome(dict[str, Any]):
    """What the process printed, and what the stand-in was told: lines of its log."""

    log: list[str]

    def said(self, start: str) -> list[str]:
        return [line for line in self.log if line.startswith(start)]

    def device_registrations(self) -> list[dict[str, str]]:
        """What ``fi_mr_regattr`` was asked to register of the device's memory, in that order."""
        lines = self.said("regattr")
        found = [dict(part.split("=") for part in line.split()[2:]) | {"card": line.split()[1]} for line in lines]
        return [entry for entry in found if entry["iface"] != "0"]


@pytest.fixture
def run(stand_in: Path, tmp_path: Path) -> Run:
    def start(library: Path | None = stand_in, fake: dict[str, str] | None = None, **case: Any) -> Outcome:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        settings = {"FAKE_DEVICE": str(NEURON), **(fake or {}), "FAKE_LOG": str(log)}
        case["library"] = library and str(library)
        process = subprocess.run(
            [sys.executable, "-W", "error", "-m", "tests.fabric.efa_process", json.dumps(case)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **settings},
            timeout=50,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        outcome = Outcome(json.loads(process.stdout))
        outcome.log = log.read_text().splitlines() if log.exists() else []
        return outcome

    return start


@pytest.mark.parametrize("provider", ["efa", "efa-direct"])
def test_neuron_memory_is_pushed_in_parts_over_two_cards(run: Run, provider: str) -> None:
    fake = {"FAKE_CARDS": "rdmap201s0,rdmap180s0", "FAKE_MOST": str(300 * KIB)}
    out = run(fake=fake, provider=provider, export=None, runs=RUNS)
    assert out["events"] == ["Written", "Arrived"]
    assert out["equal"]
    assert out["kept"] == 0
    assert out["flushes"] >= 1
    # The whole, halves, and then quarters, which are accepted: for each of them and each of the cards a descriptor.
    size = 256 * KIB
    quarters = [(start, size) for start in range(0, MIB, size)]
    halves = [(start, MIB // 2) for start in (0, MIB // 2)]
    assert [tuple(part) for part in out["exported"]][: 2 + 4 + 8] == [(0, MIB)] * 2 + halves * 2 + quarters * 2
    made = [entry for entry in out.device_registrations() if int(entry["length"]) == size][:8]
    assert [entry["card"] for entry in made] == ["rdmap201s0-rdm"] * 4 + ["rdmap180s0-rdm"] * 4
    assert [int(entry["at"], 16) for entry in made] == [out["base"] + start for start, _ in quarters] * 2
    for entry in made:
        assert (entry["fd"], entry["offset"], entry["iface"], entry["device"]) == ("open", str(OFFSET), "4", "-1")
        assert int(entry["access"], 16) == WRITE | REMOTE_WRITE | REMOTE_READ
    # What was tried and refused is closed again.
    assert len(out.said("close")) > 0


def test_a_slow_device_has_seen_everything_when_an_arrival_is_told(run: Run) -> None:
    fake = {"FAKE_CARDS": "rdmap201s0,rdmap180s0", "FAKE_LAZY": "1"}
    out = run(fake=fake, runs=RUNS)
    assert (out["events"], out["equal"]) == (["Written", "Arrived"], True)
    # And without the flush it has not: else this would show nothing.
    out = run(fake=fake, runs=RUNS, flush=False)
    assert (out["events"], out["equal"], out["flushes"]) == (["Written", "Arrived"], False, 0)


def test_a_flush_needs_leave_to_read_and_nothing_else_has_it(run: Run) -> None:
    for flush in (True, False):
        (entry, *_) = run(flush=flush).device_registrations()
        assert int(entry["access"], 16) == WRITE | REMOTE_WRITE | (REMOTE_READ if flush else 0)


def test_what_efa_may_not_do_is_said_before_an_endpoint_is_enabled(run: Run) -> None:
    out = run()
    assert set(out.said("setopt")) == {"setopt shm=0", "setopt p2p=1"}
    assert out.said("getinfo")[0] == "getinfo shm=0 hmem=1"
    out = run(kind="cuda", fake={"FAKE_DEVICE": str(CUDA)})
    assert set(out.said("setopt")) == {"setopt shm=0", "setopt p2p=1", "setopt cuda=0"}
    assert {(entry["iface"], entry["device"]) for entry in out.device_registrations()} == {("1", "3")}
    out = run(kind="host")
    assert set(out.said("setopt")) == {"setopt shm=0"}
    assert out.said("getinfo") == ["getinfo shm=0 hmem=0"] * 2
    assert not out.device_registrations()


def test_an_older_library_that_does_not_know_of_shared_memory_has_the_environment(run: Run) -> None:
    out = run(fake={"FAKE_REFUSE": "shm-unknown"}, runs=RUNS)
    assert out["equal"]


@pytest.mark.parametrize(
    ("fake", "case", "tried"),
    [
        ({}, {"export": 0}, False),  # there is none to be had
        ({}, {"export": 1}, False),  # for the second card there is none
        ({}, {"export": 1, "raises": True}, False),
        ({"FAKE_REFUSE": "dmabuf"}, {"export": None}, True),
        ({"FAKE_VERSION": "1.18"}, {"export": None}, False),  # it doesn't know of them
        ({}, {}, False),
    ],
)
def test_without_descriptors_memory_is_registered_by_its_address(
    run: Run, fake: dict[str, str], case: dict[str, Any], tried: bool
) -> None:
    out = run(fake={"FAKE_CARDS": "rdmap201s0,rdmap180s0", **fake}, runs=RUNS, **case)
    assert out["equal"]
    assert out["kept"] == 0
    entries = out.device_registrations()
    assert ("fd" in entries[0]) == tried
    assert [entry["card"] for entry in entries if "fd" not in entry][:2] == ["rdmap201s0-rdm", "rdmap180s0-rdm"]
    assert out["exported"] == [] or "export" in case


def test_a_peer_that_knows_us_late_is_reached_all_the_same(run: Run) -> None:
    assert run(provider="efa-direct", late=True, runs=RUNS)["equal"]


@pytest.mark.parametrize("provider", ["efa", "efa-direct"])
def test_no_write_is_longer_than_a_card_can_do_with_one_immediate(run: Run, provider: str) -> None:
    out = run(provider=provider, length=65 * MIB, runs=[(0, 0, 64 * MIB + 1)])
    assert (out["max_message"], out["writes"], out["equal"]) == (64 * MIB, 2, True)


def test_only_the_cards_that_are_named_are_used(run: Run) -> None:
    out = run(fake={"FAKE_CARDS": "rdmap201s0,rdmap180s0,rdmap18s0"}, nics=["rdmap18s0"])
    assert {entry["card"] for entry in out.device_registrations()} == {"rdmap18s0-rdm"}


@pytest.mark.parametrize(
    ("preferred", "used", "told"),
    [
        (["rdmap18s0", "rdmap180s0"], ["rdmap180s0-rdm"], "KV goes over rdmap180s0"),
        # One that is there begins with the name of one of these, which is another card for all that.
        (["rdmap18s0", "rdmap20"], ["rdmap201s0-rdm", "rdmap180s0-rdm"], "KV goes over these"),
    ],
)
def test_preferred_cards_that_are_not_there_are_done_without(
    run: Run, preferred: list[str], used: list[str], told: str
) -> None:
    fake = {"FAKE_CARDS": "rdmap201s0,rdmap180s0"}
    out = run(fake=fake, nics=preferred, preferred=True, runs=RUNS)
    assert (out["events"], out["equal"]) == (["Written", "Arrived"], True)
    assert list(dict.fromkeys(entry["card"] for entry in out.device_registrations())) == used
    assert len(out["warnings"]) == 2  # one for each of two transports
    for text in out["warnings"]:
        assert f"nearest to the device are {', '.join(preferred)}, but libfabric 2.1 at " in text
        assert f" has here only: rdmap201s0-rdm, rdmap180s0-rdm; {told}. " in text


def test_preferred_cards_that_are_all_there_are_used_without_a_word(run: Run) -> None:
    out = run(fake={"FAKE_CARDS": "rdmap201s0,rdmap180s0"}, nics=["rdmap180s0"], preferred=True)
    assert {entry["card"] for entry in out.device_registrations()} == {"rdmap180s0-rdm"}
    assert out["warnings"] == []


def test_cards_that_are_asked_for_must_all_be_there(run: Run) -> None:
    out = run(fake={"FAKE_CARDS": "rdmap201s0,rdmap180s0"}, nics=["rdmap180s0", "rdmap18s0"])
    assert re.fullmatch(
        r"FabricError: network cards rdmap180s0, rdmap18s0 were asked for, but with provider 'efa' libfabric 2\.1 at "
        r"\S+ has here only: rdmap201s0-rdm, rdmap180s0-rdm",
        out["error"],
    )


NO_HMEM = r"FabricError: libfabric 2\.1 at \S+ has provider 'efa', but not for {} memory \(not offered with FI_HMEM\); "
GET_CUDA = r"use the libfabric of AWS's EFA software, and see that it finds NVIDIA's driver \(libcuda\.so\.1\)"
NO_P2P = r"fi_setopt of FI_OPT_FI_HMEM_P2P, which asks for .* to the device: Operation not supported \(-95\)"
UNSUPPORTED = (
    r"RegistrationError: 1048576 bytes at 0x\w+ can't be registered with provider 'efa': fi_mr_regattr: Function not "
    r"implemented \(-38\); libfabric 2\.1 at \S+ can't use that neuron memory; "
)
UNMAPPED = (
    "RegistrationError: neuron memory that is not mapped can't be registered, since no card can be shown where it is; "
    "it has to be copied through host memory; "
)
OTHER_KIND = "RegistrationError: neuron memory can't be registered: this transport was opened for host memory"
NO_SHM = "FabricError: provider 'shm' can't be used for neuron memory: .* nothing was .*; use 'efa', .*"
NO_TCP = "FabricError: provider 'tcp' can't be used for cuda memory: .*can't read .*; use 'efa', or transport 'nixl'"


@pytest.mark.parametrize(
    ("fake", "case", "sentence"),
    [
        (
            {"FAKE_DEVICE": "0"},
            {"hint": "libfabric was first"},
            NO_HMEM.format("neuron") + "libfabric was first",
        ),
        ({"FAKE_DEVICE": "0"}, {"kind": "cuda"}, NO_HMEM.format("cuda") + GET_CUDA),
        ({"FAKE_REFUSE": "p2p"}, {"hint": "why"}, f"FabricError: .* can't be opened: {NO_P2P}; why"),
        ({"FAKE_REFUSE": "p2p"}, {"flush": False}, rf"FabricError: .* can't open an endpoint \({NO_P2P}\)"),
        ({"FAKE_DEVICE": "1", "FAKE_REFUSE": "cuda"}, {"kind": "cuda"}, "FabricError: .*FI_OPT_CUDA_API_PERMITTED: .*"),
        ({"FAKE_REFUSE": "regattr"}, {"hint": "libnrt came later"}, f"{UNSUPPORTED}libnrt came later"),
        ({}, {"mapped": False, "hint": "set NEURON_RT_MAP_HBM=1"}, f"{UNMAPPED}set NEURON_RT_MAP_HBM=1"),
        ({}, {"mapped": False, "opened_for": "host", "hint": "why"}, f"{UNMAPPED}why"),
        ({}, {"opened_for": "host"}, OTHER_KIND),
        ({}, {"provider": "shm"}, NO_SHM),
        ({}, {"provider": "tcp", "kind": "cuda"}, NO_TCP),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    run: Run, fake: dict[str, str], case: dict[str, Any], sentence: str
) -> None:
    assert re.fullmatch(sentence, run(fake=fake, **case)["error"])


def test_what_is_refused_for_good_is_not_tried_in_parts(run: Run) -> None:
    out = run(fake={"FAKE_REFUSE": "regattr"}, export=None)
    assert [("fd" in entry) for entry in out.device_registrations()] == [True, False]


def test_mapped_neuron_memory_over_tcp_is_copied_by_the_cpu_with_one_warning(run: Run) -> None:
    library = discovery.in_wheel()
    if library is None:
        pytest.skip("needs the libfabric of the 'mpich' package: pip install mpich")
    out = run(library=library, provider="tcp", runs=RUNS)
    assert (out["events"], out["equal"]) == (["Written", "Arrived"], True)
    warnings = [text for text in out["warnings"] if "copies neuron memory with the CPU through its mapping" in text]
    assert len(warnings) == 2  # one for each of two transports, which register twice each
