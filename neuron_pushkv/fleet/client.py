"""A small client for engines and routers: timed completions with token ids, and metrics as numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from neuron_pushkv.errors import FleetError


@dataclass(frozen=True)
class Answer:
    """What came of one streamed completion."""

    tokens: tuple[int, ...]
    first_seconds: float
    """From sending the request to the first token."""
    last_seconds: float
    """From sending the request to the last token."""

    @property
    def seconds_per_token(self) -> float:
        """Mean time between two tokens; 0 for a single one."""
        return (self.last_seconds - self.first_seconds) / max(1, len(self.tokens) - 1)


def complete(client: httpx.Client, url: str, prompt: Sequence[int], max_tokens: int, model: str = "tiny") -> Answer:
    """Greedy, streamed, exactly ``max_tokens`` long. Raises :class:`FleetError` if the server does not answer so."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    first = last = 0.0
    begun = time.monotonic()
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise FleetError(f"{url} answered {response.status_code}: {response.read().decode(errors='replace')}")
            for line in response.iter_lines():
                fresh = _tokens(url, line)
                if fresh:
                    last = time.monotonic() - begun
                    first = first or last
                    tokens += fresh
    except httpx.HTTPError as error:
        raise FleetError(f"{url} does not answer: {error!r}") from error
    if len(tokens) != max_tokens:
        raise FleetError(f"{url} ended its answer after {len(tokens)} of {max_tokens} tokens")
    return Answer(tuple(tokens), first, last)


class Metrics:
    """One reading of a Prometheus endpoint."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    @classmethod
    def of(cls, client: httpx.Client, url: str) -> Metrics:
        """Read ``url``'s ``/metrics``. Raises :class:`FleetError` if it can't be read."""
        try:
            response = client.get(f"{url}/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise FleetError(f"the metrics of {url} can't be read: {error!r}") from error
        return cls(response.text)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name that have these labels; 0 if there are none."""
        return sum(sample.value for sample in self._samples if sample.name == name and _has(sample.labels, labels))

    def label(self, name: str, label: str) -> str:
        """One label's value on the first sample of that name that has it; empty if there is none."""
        return next((s.labels[label] for s in self._samples if s.name == name and label in s.labels), "")


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return wanted.items() <= labels.items()


def _tokens(url: str, line: str) -> list[int]:
    """The token ids in one line of a server-sent event stream."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return []
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise FleetError(f"{url} ended the answer with an error: {event['error']}")
    return [token for choice in event.get("choices", []) for token in choice.get("token_ids") or []]
