"""The router's metrics, as Prometheus reads them.

Decides names and labels. Labels come from closed lists and from the server list, never from a client.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "pushkv_router_"
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("answers to clients, by status", ("code",)),
    "dispatches": ("requests given to a pair: how, and why so", ("how", "reason")),
    "legs_failed": ("legs that ended without their answer", ("role", "server", "reason")),
    "retries": ("requests tried again on another pair, by what ended the attempt", ("reason",)),
    "identity_mismatches": ("prefill servers that were not the engine that the decode leg had named", ("server",)),
    "identities_learnt": ("identities of prefill engines taken from an answer", ("server",)),
    "prefills_without_transfer": ("prefill legs that were answered without transfer parameters", ("server",)),
    "refused": ("requests refused by the router itself", ("reason",)),
    "clients_gone": ("requests whose client left before the end", ()),
    "streams_broken": ("streams that failed after their first token", ("reason",)),
    "reloads": ("changes of the server list", ("result",)),
}
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "active": ("requests that the engines have", ()),
    "queued": ("requests that wait", ()),
    "server_up": ("whether a server answers", ("role", "server")),
    "server_outstanding_tokens": (
        "prompt and answer tokens that a server has to do with, as guessed",
        ("role", "server"),
    ),
    "server_connections": ("connections to a server", ("role", "server")),
    "draining": ("whether the router is told to stop", ()),
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "first_token_seconds": (
        "from a request's arrival to the first bytes of its answer",
        (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120),
    ),
    "queue_seconds": ("time in the queue", (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30)),
    "dispatch_seconds": (
        "the router's own time from the whole request to its legs, without the queue",
        (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
    ),
}


class RouterMetrics:
    """One per router; `text` is what `/metrics` answers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counters = {
            name: Counter(PREFIX + name, says, labels, registry=self.registry)
            for name, (says, labels) in COUNTERS.items()
        }
        self.gauges = {
            name: Gauge(PREFIX + name, says, labels, registry=self.registry) for name, (says, labels) in GAUGES.items()
        }
        self.histograms = {
            name: Histogram(PREFIX + name, says, buckets=buckets, registry=self.registry)
            for name, (says, buckets) in HISTOGRAMS.items()
        }
        self._children: dict[tuple[str, ...], Counter] = {}

    def count(self, name: str, *labels: str) -> None:
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            counter = self.counters[name]
            child = self._children[key] = counter.labels(*labels) if labels else counter
        child.inc()

    def observe(self, name: str, seconds: float) -> None:
        self.histograms[name].observe(seconds)

    def server(self, role: str, name: str, up: bool, tokens: int, connections: int) -> None:
        self.gauges["server_up"].labels(role, name).set(up)
        self.gauges["server_outstanding_tokens"].labels(role, name).set(tokens)
        self.gauges["server_connections"].labels(role, name).set(connections)

    def clear_servers(self) -> None:
        """Before they are set anew: a server that has left the list has no gauge."""
        for name in ("server_up", "server_outstanding_tokens", "server_connections"):
            self.gauges[name].clear()

    def text(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text
