"""One fleet for all end-to-end tests: prefill, decode, router, and an undivided engine to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from neuron_pushkv.fleet import Fleet
from tests.e2e.deployment import DECODE, ROOT, ROUTER, UNDIVIDED, Deployment, Question, fleet_settings, tokens


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these start vLLM, and the first of them waits for the fleet's start."""
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    def change(values: dict[str, Any]) -> None:
        values["engines"].append({"name": UNDIVIDED, "role": "undivided", "port": 1})
        (decode,) = (engine for engine in values["engines"] if engine["name"] == DECODE)
        decode["arguments"] = ["--worker-extension-cls=tests.e2e.corruption.Corruption"]
        decode["environment"] = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
        values["start_seconds"] = 200

    with Fleet(fleet_settings(change), tmp_path_factory.mktemp("fleet")) as fleet:
        fleet.wait_ready()
        running = Deployment(fleet)
        with running.client:
            for name in (ROUTER, UNDIVIDED):
                running.ask(name, Question(tokens(40, seed=99), max_tokens=2))
            yield running
