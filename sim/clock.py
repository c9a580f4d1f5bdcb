"""simpy's environment with whole ticks, and two short cuts through it.

Decides nothing about order. ``call`` is a timeout with its one callback, and nothing else: no event object is made that
nobody could wait for. ``advance`` moves the clock where no event stands in between, so that whoever would have
scheduled a timeout and waited for it may go on in the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, cast

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event, EventPriority

Entry = tuple[int, int, int, Callable[[Any], None], Any]
"""What the queue holds: when, priority, number; then what is called, and with what."""


class Clock(simpy.Environment):
    """Time in whole ticks: ``ticks`` is the present one. simpy's own events work as ever."""

    def __init__(self, initial_time: int = 0) -> None:
        super().__init__(initial_time)
        self.ticks = initial_time
        self._made = 0
        self._entries = cast("list[Entry]", self._queue)

    @property
    def now(self) -> int:
        """The present tick, for simpy."""
        return self.ticks

    def call(self, when: int, then: Callable[[Any], None], what: Any) -> None:
        """Call ``then(what)`` at ``when``; calls of one tick come in the order of their making."""
        self._made = number = self._made + 1
        heappush(self._entries, (when, NORMAL, number, then, what))

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Let simpy's ``event`` happen after ``delay`` ticks."""
        self._made = number = self._made + 1
        heappush(self._entries, (self.ticks + int(delay), priority, number, _happen, event))

    def step(self) -> None:
        """All that is scheduled, until somebody stops the simulation.

        simpy's ``run`` calls this in a loop, for one event each time. Here the loop is inside.
        """
        entries = self._entries
        while entries:
            self.ticks, _, _, then, what = heappop(entries)
            then(what)
        raise EmptySchedule

    def advance(self, when: int) -> bool:
        """Be at ``when``, and say ``True``, if nothing is scheduled up to and including then."""
        entries = self._entries
        if entries and entries[0][0] <= when:
            return False
        self.ticks = when
        return True


def _happen(event: Event) -> None:
    """simpy's ``step`` for one of its own events."""
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
    for callback in callbacks:
        callback(event)
    if not event._ok and not hasattr(event, "_defused"):
        raise event._value
