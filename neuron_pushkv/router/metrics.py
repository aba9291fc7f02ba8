"""What the router counts. One registry per application, so that several can live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """Counters and histograms; every label takes values from a small closed set."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "pushkv_router_requests",
            "Generation requests by how they ended: ok, refused, error, client_left.",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self.legs = Counter(
            "pushkv_router_legs",
            "Requests sent to engines by how they ended: ok, failed, cancelled.",
            ["leg", "outcome"],
            registry=self.registry,
        )
        self.cancellations = Counter(
            "pushkv_router_cancellations",
            "Legs that the router gave up, by cause.",
            ["leg", "cause"],
            registry=self.registry,
        )
        self.upstream_errors = Counter(
            "pushkv_router_upstream_errors",
            "Failures of engines: unreachable, lost, directory, error_event, bad_answer, or the HTTP status.",
            ["leg", "reason"],
            registry=self.registry,
        )
        self.refused = Counter(
            "pushkv_router_refused",
            "Requests that were turned down by the router itself, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "pushkv_router_requests_in_flight", "Generation requests being served.", registry=self.registry
        )
        self.first_event = Histogram(
            "pushkv_router_time_to_first_seconds",
            "From a request's arrival to the first of its answer: the first token where it is streamed.",
            ["endpoint", "stream"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.total = Histogram(
            "pushkv_router_request_seconds",
            "From a request's arrival to its answer's end, however it ended.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
