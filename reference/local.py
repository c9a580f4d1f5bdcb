"""The rank of an engine whose scheduler and worker share a process (one GPU, or a CPU), and what of it was reported:
how the two sides meet.

Decides nothing: a table by engine id. With more than one rank nobody looks here.
"""

from __future__ import annotations

import threading

from pushkv.reference.metric_names import Meter
from pushkv.reference.ports import Rank

_ranks: dict[str, Rank] = {}
_meters: dict[str, Meter] = {}
_lock = threading.Lock()


def put(engine_id: str, rank: Rank, meter: Meter) -> None:
    with _lock:
        _ranks[engine_id], _meters[engine_id] = rank, meter


def get(engine_id: str) -> Rank | None:
    with _lock:
        return _ranks.get(engine_id)


def stale(engine_id: str) -> bool:
    """Whether the rank has something to report that was not; then its next report is due at once."""
    with _lock:
        rank, meter = _ranks.get(engine_id), _meters.get(engine_id)
    if rank is None or meter is None or not meter.stale(rank.counters, rank.gauges):
        return False
    meter.urgent = True
    return True


def forget(engine_id: str, rank: Rank) -> None:
    """Only if it is still this one: an engine may have been started again under the same id."""
    with _lock:
        if _ranks.get(engine_id) is rank:
            del _ranks[engine_id], _meters[engine_id]
