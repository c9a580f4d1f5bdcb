"""The router's metrics, as Prometheus reads them.

Decides names and labels. Labels come from closed lists and from the server list, never from a client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

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
FROM_THE_START = (("reloads", "done"), ("reloads", "refused"), ("refused", "429"))
"""They are there before they count: an alert on a first event needs the 0 before it."""
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "active": ("requests that the engines have", ()),
    "queued": ("requests that wait", ()),
    "held_bytes": ("bytes of requests without an answer, and of answers that are not whole or not taken", ()),
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


class _Histogram:
    """counts: of each bucket, and of what is above all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0


class RouterMetrics:
    """One per router; `text` is what `/metrics` answers.

    Counting happens for every request, in one thread: plain numbers do it. prometheus_client writes them down.
    """

    def __init__(self) -> None:
        self.gauges: dict[str, float] = dict.fromkeys((name for name, (_, labels) in GAUGES.items() if not labels), 0.0)
        self._counts: dict[tuple[str, ...], int] = {(name,): 0 for name, (_, labels) in COUNTERS.items() if not labels}
        self._counts |= dict.fromkeys(FROM_THE_START, 0)
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._servers: list[tuple[tuple[str, str], dict[str, float]]] = []

    def count(self, *name_and_labels: str) -> None:
        """A counter's name, and the values of its labels."""
        counts = self._counts
        counts[name_and_labels] = counts.get(name_and_labels, 0) + 1

    def observe(self, name: str, seconds: float) -> None:
        histogram = self._histograms[name]
        histogram.counts[bisect_left(histogram.bounds, seconds)] += 1
        histogram.total += seconds

    def servers(self, found: Iterable[tuple[str, str, bool, int, int]]) -> None:
        """Role, name, whether it answers, outstanding tokens, connections: of those in the list, no others."""
        names = ("server_up", "server_outstanding_tokens", "server_connections")
        self._servers = [
            ((role, server), dict(zip(names, map(float, values), strict=True))) for role, server, *values in found
        ]

    def text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        text: bytes = generate_latest(registry)
        return text

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        for name, (says, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, says, labels=labels)
            for key, count in self._counts.items():
                if key[0] == name:
                    counter.add_metric(key[1:], count)
            yield counter
        for name, (says, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, says, labels=labels)
            if name in self.gauges:
                gauge.add_metric((), self.gauges[name])
            for server, values in self._servers if labels else ():
                gauge.add_metric(server, values[name])
            yield gauge
        for name, (says, bounds) in HISTOGRAMS.items():
            kept = self._histograms[name]
            buckets = zip([*map(_shown, bounds), "+Inf"], accumulate(kept.counts), strict=True)
            histogram = HistogramMetricFamily(PREFIX + name, says)
            histogram.add_metric((), list(buckets), kept.total)
            yield histogram


def _shown(bound: float) -> str:
    """As prometheus_client writes it."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
