"""simpy's environment with whole ticks, and two short cuts through it.

Decides nothing about order. ``call`` is a timeout with its one callback, made in one go; ``advance`` moves the clock
where no event stands in between, so that whoever would have scheduled a timeout and waited for it may go on in the
same call.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

import simpy
from simpy.events import NORMAL


class Call(simpy.Event):
    """An event that has been triggered for a later time and has one callback; ``_value`` is what it carries."""

    def __init__(self, env: Clock, then: Callable[[Any], None], what: Any) -> None:
        self.env = env
        self.callbacks = [then]
        self._ok = True
        self._value = what


class Clock(simpy.Environment):
    """Time in whole ticks: ``ticks`` is ``now`` as the integer that it is."""

    @property
    def ticks(self) -> int:
        """The present tick."""
        return self._now  # type: ignore[return-value]

    def call(self, when: int, then: Callable[[Any], None], what: Any) -> None:
        """Call ``then(event)`` at ``when``, with ``what`` as the event's value; events of one tick come in the order
        of their making."""
        heappush(self._queue, (when, NORMAL, next(self._eid), Call(self, then, what)))

    def advance(self, when: int) -> bool:
        """Be at ``when``, and say ``True``, if nothing is scheduled up to and including then."""
        queue = self._queue
        if queue and queue[0][0] <= when:
            return False
        self._now = when
        return True
