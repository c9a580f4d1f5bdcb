"""A device for hosts: copies and the engine's steps go on beside the threads that ask for them, ordered by events."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from pushkv.model.layout import Plan
from pushkv.reference.bell import Bell
from pushkv.reference.copies import Copier
from pushkv.reference.rank import Rank


class Event:
    """As CUDA's."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        assert self._done.wait(30)

    def set(self) -> None:
        self._done.set()


class LateCopy:
    """As `copies.Copy`."""

    def __init__(self, event: Event, lane: int = 0) -> None:
        self._event, self.lane = event, lane

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        self._event.synchronize()


class LateCopier:
    """A copier whose copies run one after the other on a thread, those with an ``after`` on another, behind it."""

    def __init__(self, copier: Copier, delay_s: float) -> None:
        self._copier, self._delay_s = copier, delay_s
        self._lanes: tuple[SimpleQueue[Any], SimpleQueue[Any]] = SimpleQueue(), SimpleQueue()
        self.waited = 0
        for lane in self._lanes:
            threading.Thread(target=self._run, args=(lane,), daemon=True).start()

    def gather(self, plan: Plan, segments: Sequence[int], offset: int = 0, after: Any = None) -> LateCopy:
        event = Event()
        self.waited += after is not None and not after.query()
        self._lanes[after is not None].put((plan, list(segments), offset, after, event))
        return LateCopy(event, int(after is not None))

    def _run(self, lane: SimpleQueue[Any]) -> None:
        while True:
            plan, segments, offset, after, event = lane.get()
            if after is not None:
                after.synchronize()
            time.sleep(self._delay_s)
            self._copier.gather(plan, segments, offset)
            event.set()


def on_a_device(rank: Rank, delay_s: float = 0.002) -> LateCopier:
    """From here on the rank's gathers are as on a device, and a bell rings for them."""
    late = LateCopier(rank.sending.copier, delay_s)
    rank.sending.copier = late  # type: ignore[assignment]
    rank.bell = Bell(rank._ring)
    return late
