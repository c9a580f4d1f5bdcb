"""Deadlines of many records: a heap that forgets what was disarmed.

A record carries its own due time in ``due``; an entry whose time is not that any more is stale and skipped. The heap is
rebuilt when stale entries outnumber the live ones, so it stays bounded by what is armed. (A record that is disarmed and
armed for the same time again has two entries that are both right: the earlier one counts.)
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

NEVER = float("inf")


class Timed(Protocol):
    """Anything with a due time in seconds (``NEVER`` when not armed)."""

    due: float


T = TypeVar("T", bound=Timed)


class Alarm:
    """When the soonest of several ``Deadlines`` may be due (s): perhaps too early, since disarming does not look on."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = NEVER


class Deadlines(Generic[T]):
    """The armed records, soonest first; equal times fire in the order of arming. ``alarm`` is set to no later than the
    soonest; whoever lets records fire sets it anew from ``next_at``.
    """

    __slots__ = ("_alarm", "_armed", "_heap", "_order")

    def __init__(self, alarm: Alarm | None = None) -> None:
        self._alarm = alarm or Alarm()
        self._heap: list[tuple[float, int, T]] = []
        self._order = 0
        self._armed = 0

    def __len__(self) -> int:
        """Entries held, stale ones included."""
        return len(self._heap)

    @property
    def armed(self) -> int:
        """How many records are armed."""
        return self._armed

    def arm(self, record: T, at: float) -> None:
        """Fire ``record`` at ``at``, in place of whatever time it was armed for."""
        due = record.due
        if due == at:
            return
        if due == NEVER:
            self._armed += 1
        record.due = at
        if at < self._alarm.at:
            self._alarm.at = at
        self._order = order = self._order + 1
        heap = self._heap
        heappush(heap, (at, order, record))
        if len(heap) > 2 * self._armed + 64:
            first: dict[int, tuple[float, int, T]] = {}
            for entry in sorted(heap):
                if entry[2].due == entry[0]:
                    first.setdefault(id(entry[2]), entry)
            self._heap = list(first.values())  # sorted is a heap

    def disarm(self, record: T) -> None:
        """``record`` does not fire. Harmless when it was not armed."""
        if record.due != NEVER:
            record.due = NEVER
            self._armed -= 1

    def next_at(self) -> float:
        """When the soonest armed record is due; ``NEVER`` without one."""
        heap = self._heap
        while heap and heap[0][2].due != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def pop_due(self, now: float) -> T | None:
        """The next record due by ``now``, disarmed; ``None`` when there is none."""
        if self.next_at() > now:
            return None
        record = heappop(self._heap)[2]
        record.due = NEVER
        self._armed -= 1
        return record
