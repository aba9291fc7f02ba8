"""For an accelerator that can't be asked, a step has finished when vLLM has its outputs: numbers go round."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from neuron_pushkv.connector.metadata import StepNumber
from neuron_pushkv.connector.worker import WorkerSide
from tests.connector.harness import PREFILL, PROMPT, Harness


@dataclass
class Listener:
    """An accelerator's ear: all that it was told, and how many outputs vLLM had then."""

    harness: Harness
    told: list[tuple[int, int]] = field(default_factory=list)

    def begin_step(self, step: int, ended: int) -> None:
        had = len(self.harness.reported)  # One for each step that has been run; its outputs follow at once.
        assert ended <= had
        self.told.append((step, ended))


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "scheduled ahead"])
def test_every_step_that_a_prompt_waits_for_is_told_to_have_ended(model: Path, ahead: bool) -> None:
    harness = Harness(model, chunk=64, ahead=ahead)
    listener = Listener(harness)
    harness.worker._worker = WorkerSide(harness.engine, leads=True, about={}, listener=listener)
    harness.add("p", PROMPT, PREFILL)
    harness.steps()
    ready = [number for number, orders in enumerate(harness.engine.steps, 1) if orders.ready]
    assert len(ready) == 4  # 200 tokens in chunks of 64.
    assert [step for step, _ in listener.told] == list(range(1, len(harness.engine.steps) + 1))
    ends = [ended for _, ended in listener.told]
    assert ends == sorted(ends)
    for step, ended in listener.told:
        assert ended < step
    # vLLM does a step more to say that the request has finished: nothing is left waiting when it falls idle.
    assert ends[-1] == ready[-1]


def test_nobody_is_bothered_where_the_accelerator_knows_by_itself(model: Path) -> None:
    harness = Harness(model, chunk=64)
    harness.add("p", PROMPT, PREFILL)
    harness.steps()
    assert {output.kv_connector_metadata.ended for output in harness.outputs} == {0}


def test_of_several_workers_numbers_the_earliest_counts() -> None:
    assert StepNumber(3).aggregate(StepNumber(4)) == StepNumber(4).aggregate(StepNumber(3)) == StepNumber(3)
