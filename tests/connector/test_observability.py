"""docs/observability.md against what is exported, logged and traced."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.logger import _DATE_FORMAT, _FORMAT
from vllm.logging_utils import NewLineFormatter

from neuron_pushkv.connector.connector import PushKVConnector
from neuron_pushkv.router.metrics import Metrics
from neuron_pushkv.telemetry import PHASES
from neuron_pushkv.telemetry.lines import log, transfer_fields
from neuron_pushkv.telemetry.recorder import MAX_WAITING
from tests.telemetry.samples import failed, received, sent

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text()
VLLM_LABELS = ["model_name", "engine"]

Metric = tuple[str, str, tuple[str, ...]]
"""Name, type and labels."""


def documented(prefix: str) -> list[Metric]:
    rows = re.findall(rf"^\| `({prefix}\w+)` \| (\w+) \| (.*?) \|", PAGE, re.MULTILINE)
    return sorted((name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows)


def exported(collectors: Iterable[Any]) -> list[Metric]:
    found = []
    for collector in collectors:
        (metric,) = collector.describe()
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = tuple(label for label in collector._labelnames if label not in VLLM_LABELS)
        found.append((name, metric.type, labels))
    return sorted(found)


def test_every_metric_of_an_engine_is_on_the_page() -> None:
    before = set(REGISTRY._collector_to_names)
    config: Any = SimpleNamespace(kv_transfer_config=None)
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    PushKVConnector.build_prom_metrics(config, kinds, VLLM_LABELS, {0: ["m", "0"]})
    ours = set(REGISTRY._collector_to_names) - before
    for collector in ours:
        REGISTRY.unregister(collector)
    assert len(ours) > 10
    assert documented("vllm:pushkv_") == exported(ours)


def test_every_metric_of_the_router_is_on_the_page() -> None:
    ours = set(Metrics().registry._collector_to_names)
    assert len(ours) > 5
    assert documented("pushkv_router_") == exported(ours)


def test_every_phase_is_on_the_page_in_order() -> None:
    rows = re.findall(r"^\| `(in|out)` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == [(way, phase) for way in ("in", "out") for phase in PHASES[way]]


def test_the_example_has_the_fields_of_a_real_line() -> None:
    (example,) = re.findall(r"event=kv_received .*?(?=\nevent=)", PAGE, re.DOTALL)
    assert re.findall(r"(\w+)=", example) == list(transfer_fields(received(), 1.0, "decode-0", "0.0.0"))
    ends = {
        str(transfer_fields(one, 1.0, "e", "r")["event"]) for one in (received(), sent(), failed(), failed(way="out"))
    }
    assert all(re.search(rf"\b{end}\b", PAGE) for end in ends)
    assert f"{MAX_WAITING:,}" in PAGE


def record() -> logging.LogRecord:
    """As a handler of vLLM's gets it."""
    kept: list[logging.LogRecord] = []
    logger = logging.Logger("neuron_pushkv.transfers")  # noqa: LOG001 one that no handler of anybody else's hangs on
    handler = logging.Handler()
    handler.emit = kept.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    log(logger, logging.WARNING, transfer_fields(failed(), 0.1234567, "decode-0", "0.0.1"))
    return kept[0]


def test_vllms_text_keeps_a_line_on_one() -> None:
    ours = record()
    ours.__dict__.setdefault("vllm_process_name", "EngineCore")
    text = NewLineFormatter(_FORMAT, _DATE_FORMAT).format(ours)
    assert "\n" not in text
    assert "event=kv_receive_failed reason=peer_lost detail=" in text


def test_vllms_json_has_the_fields_as_keys() -> None:
    with warnings.catch_warnings():  # vLLM takes it by its old name.
        warnings.simplefilter("ignore", DeprecationWarning)
        formatters = pytest.importorskip("pythonjsonlogger.jsonlogger", reason="needs vLLM 0.32's python-json-logger")
    found = json.loads(formatters.JsonFormatter("%(levelname)s %(name)s %(message)s").format(record()))
    assert found["name"] == "neuron_pushkv.transfers"
    assert (found["event"], found["reason"], found["detail"]) == ("kv_receive_failed", "peer_lost", failed().detail)
    assert (found["bytes"], found["seconds"], found["connect_seconds"]) == (0, 0.123457, 0.25)
