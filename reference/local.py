"""The rank of an engine whose scheduler and worker share a process (one GPU, or a CPU): how the two sides meet.

Decides nothing: a table by engine id. With more than one rank nobody looks here.
"""

from __future__ import annotations

import threading

from pushkv.reference.ports import Rank

_ranks: dict[str, Rank] = {}
_lock = threading.Lock()


def put(engine_id: str, rank: Rank) -> None:
    with _lock:
        _ranks[engine_id] = rank


def get(engine_id: str) -> Rank | None:
    with _lock:
        return _ranks.get(engine_id)


def forget(engine_id: str, rank: Rank) -> None:
    """Only if it is still this one: an engine may have been started again under the same id."""
    with _lock:
        if _ranks.get(engine_id) is rank:
            del _ranks[engine_id]
