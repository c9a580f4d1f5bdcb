"""Metrics in vLLM's form: `KVConnectorStats` that add up over ranks and steps, and Prometheus metrics.

Decides names and buckets of the Prometheus metrics; what is counted is decided in `metric_names.py`. vLLM fetches
statistics with a step's output; what happens while an engine takes none comes by an `Intake` (`outlet.py`).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pushkv.reference.metric_names import COUNTERS, FROM_THE_START, GAUGES, TIMES, Tally
from pushkv.reference.outlet import Intake, address, parts_of

log = logging.getLogger(__name__)

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
    """`pushkv:*`, one series per engine and label. A gauge is the sum over all ranks of the last that each has told."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        self._readings: dict[int, Tally] = {engine: Tally() for engine in per_engine_labelvalues}
        self._lock = threading.Lock()
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._counters = {
            name: counter(name=f"pushkv:{name}", documentation=says, labelnames=[*labelnames, "what"])
            for name, says in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(
                name=f"pushkv:{name}", documentation=says, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
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
        try:
            self._intake = Intake(_addresses(vllm_config, per_engine_labelvalues), self.observe)
        except OSError as error:
            log.warning("metrics come with an engine's steps alone: %s", error)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        with self._lock:  # vLLM and an intake
            self._observe(Tally(transfer_stats_data), engine_idx)

    def _observe(self, tally: Tally, engine_idx: int) -> None:
        values = [str(value) for value in self._values[engine_idx]]
        for name, added in tally.data["counters"].items():
            short, _, what = name.partition(":")
            if short in self._counters and added > 0:
                self._counters[short].labels(*values, what).inc(added)
        readings = self._readings[engine_idx]
        readings.data["gauges"].update(tally.data["gauges"])
        for name, value in readings.gauges().items():
            if name in self._gauges:
                self._gauges[name].labels(*values).set(value)
        for name, observed in tally.data["times"].items():
            if name in self._times:
                series = self._times[name].labels(*values)
                for one in observed:
                    series.observe(one)


def _addresses(vllm_config: Any, engines: Any) -> dict[int, list[str]]:
    """Of all outlets, by engine: with data parallelism vLLM numbers the ids of its engines, each in its own process."""
    parallel, engine_id = vllm_config.parallel_config, vllm_config.kv_transfer_config.engine_id
    several = int(parallel.data_parallel_size) > 1
    return {
        engine: [
            address(f"{engine_id}_dp{engine}" if several else engine_id, part)
            for part in parts_of(int(parallel.tensor_parallel_size))
        ]
        for engine in engines
    }
