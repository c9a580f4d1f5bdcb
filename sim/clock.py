"""simpy's environment with whole ticks, and two short cuts through it.

Decides nothing about order. ``call`` is a timeout with its one callback, made in one go; ``advance`` moves the clock
where no event stands in between, so that whoever would have scheduled a timeout and waited for it may go on in the
same call.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any, ClassVar

import msgspec
import simpy
from simpy.events import NORMAL


class Call(msgspec.Struct, gc=False):
    """What simpy's loop needs of an event that was triggered for a later time; nobody waits for it or asks it anything.

    ``value`` is what it carries to its one callback.
    """

    callbacks: list[Callable[[Any], None]] | None
    value: Any
    _ok: ClassVar[bool] = True


class Clock(simpy.Environment):
    """Time in whole ticks: ``ticks`` is ``now`` as the integer that it is."""

    @property
    def ticks(self) -> int:
        """The present tick."""
        return self._now  # type: ignore[return-value]

    def call(self, when: int, then: Callable[[Any], None], what: Any) -> None:
        """Call ``then(event)`` at ``when``, with ``what`` as the event's value; events of one tick come in the order
        of their making."""
        queue: list[Any] = self._queue
        heappush(queue, (when, NORMAL, next(self._eid), Call([then], what)))

    def advance(self, when: int) -> bool:
        """Be at ``when``, and say ``True``, if nothing is scheduled up to and including then."""
        queue = self._queue
        if queue and queue[0][0] <= when:
            return False
        self._now = when
        return True
