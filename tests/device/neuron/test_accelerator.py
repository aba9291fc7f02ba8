"""Neuron memory over a stand-in for the runtime. What happens is in ``scenes.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron_pushkv.fabric import discovery

from .conftest import Play


def test_a_runtime_that_nobody_has_initialised_is_ours_until_the_end(play: Play) -> None:
    play("opened_here")


def test_the_runtime_of_a_framework_stays_the_frameworks(play: Play) -> None:
    play("opened_by_others")


def test_a_process_with_one_core_may_call_it_by_its_rank(play: Play) -> None:
    play("one_core_by_its_rank")


def test_memory_without_an_address_can_still_be_read_and_written(play: Play) -> None:
    play("unmapped", NEURON_RT_MAP_HBM="0")


def test_an_environment_that_came_too_late_is_named_when_memory_shows_it(play: Play) -> None:
    play("mapped_too_late")


@pytest.mark.skipif(discovery.in_wheel() is None, reason="needs the libfabric of the 'mpich' package")
@pytest.mark.parametrize("first", ["libfabric", "libnrt"])
def test_the_order_of_libfabric_and_libnrt_is_named_where_it_matters(play: Play, first: str) -> None:
    play("libfabric", "new", first)


def test_a_forked_child_is_told_to_be_spawned(play: Play) -> None:
    play("forked")


def test_every_export_is_a_descriptor_of_its_own(play: Play) -> None:
    play("exports")


def test_without_the_newer_function_only_starts_are_exported(play: Play) -> None:
    play("exports_without_offset", "plain")


@pytest.mark.parametrize("kind", ["new", "plain", "old"])
def test_a_runtime_that_exports_nothing_is_no_error_but_for_one_status(play: Play, kind: str) -> None:
    play("no_exports", kind, FAKE_NRT_DMABUF="invalid")


def test_device_memory_that_runs_out_says_so_and_leaks_nothing(play: Play) -> None:
    play("out_of_memory", FAKE_NRT_HBM=str(8 << 20))


def test_slabs_are_aligned_whatever_the_runtime_returns(play: Play) -> None:
    play("addresses_off_alignment", FAKE_NRT_SKEW="12288")


@pytest.mark.parametrize(("kind", "how"), [("new", "in batches"), ("old", "one by one")])
def test_copies_go_to_the_right_slabs(play: Play, kind: str, how: str) -> None:
    play("moves", kind, how)


@pytest.mark.parametrize(("kind", "writes"), [("new", "possible"), ("old", "refused")])
def test_memory_of_the_framework_is_copied_too(play: Play, kind: str, writes: str) -> None:
    play("moves_of_others", kind, writes)


def test_nics_are_asked_for_by_what_the_runtime_knows(play: Play, tmp_path: Path) -> None:
    for device in range(16):
        (tmp_path / f"neuron{device}").touch()
    (tmp_path / "neuron_monitor").touch()
    play(
        "nics",
        "new",
        str(tmp_path),
        NEURON_RT_VISIBLE_CORES="4,12-14",
        FAKE_NRT_BDF="0000:c9:00.0",
        FAKE_NRT_FIRST_DEVICE="2",
    )


def test_the_stand_in_fails_like_the_real_one(play: Play) -> None:
    play("behaves_like_the_real_one", "plain")


def test_threads_may_share_an_accelerator(play: Play) -> None:
    play("from_several_threads")
