"""Metrics in vLLM's form: `KVConnectorStats` that add up over ranks and steps, and Prometheus metrics.

Decides names and buckets of the Prometheus metrics; what is counted is decided in `metric_names.py`. vLLM fetches
statistics with a step's output, so what happens while an engine idles is seen with its next step: the counters are
running totals of the transfer threads, nothing is lost.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pushkv.reference.metric_names import COUNTERS, FROM_THE_START, GAUGES, TIMES, Tally

_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class PushStats(KVConnectorStats):
    """`data` is a `Tally`'s."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=Tally(data).data)

    def reset(self) -> None:
        self.data = Tally().data

    def aggregate(self, other: Any) -> PushStats:
        Tally(self.data).add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return Tally(self.data).summary()

    def is_empty(self) -> bool:
        return Tally(self.data).empty


class PushPromMetrics(KVConnectorPromMetrics):
    """`pushkv:*`, one series per engine and label."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._counters = {
            name: counter(name=f"pushkv:{name}", documentation=says, labelnames=[*labelnames, "what"])
            for name, says in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(name=f"pushkv:{name}", documentation=says, labelnames=labelnames)
            for name, says in GAUGES.items()
        }
        self._times = {
            name: histogram(
                name=f"pushkv:{name.removesuffix('_s')}_seconds",
                documentation=says,
                buckets=_BUCKETS_S,
                labelnames=labelnames,
            )
            for name, says in TIMES.items()
        }

        for engine in per_engine_labelvalues.values():
            for name, what in FROM_THE_START:
                self._counters[name].labels(*map(str, engine), what)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = [str(value) for value in self._values[engine_idx]]
        tally = Tally(transfer_stats_data)
        for name, added in tally.data["counters"].items():
            short, _, what = name.partition(":")
            if short in self._counters and added > 0:
                self._counters[short].labels(*values, what).inc(added)
        for name, value in tally.gauges().items():
            if name in self._gauges:
                self._gauges[name].labels(*values).set(value)
        for name, observed in tally.data["times"].items():
            if name in self._times:
                series = self._times[name].labels(*values)
                for one in observed:
                    series.observe(one)
