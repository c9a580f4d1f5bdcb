"""One deadline after the other with few timers: most are put off or dropped long before they are due."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls `act` when `at` is past. A timer that is due too early is set anew only then, and none is ever cancelled
    because nothing is awaited any more: so a deadline that is set for every token costs one addition.
    """

    __slots__ = ("_act", "_due", "_loop", "_timer", "at")

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
        self._loop = loop
        self._act: Callable[[], None] | None = act
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # of the timer
        self.at = math.inf

    def set(self, seconds: float) -> None:
        """From now; it replaces the one before."""
        self.at = at = self._loop.time() + seconds
        if at < self._due:
            self._arm()

    def until(self, at: float) -> None:
        """As the loop's clock says."""
        self.at = at
        if at < self._due:
            self._arm()

    def clear(self) -> None:
        """Nothing is awaited."""
        self.at = math.inf

    def close(self) -> None:
        """Nothing will be awaited any more."""
        self.at = math.inf
        self._act = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = self.at
        self._timer = self._loop.call_at(self.at, self._look)

    def _look(self) -> None:
        self._timer, self._due = None, math.inf
        if self.at == math.inf:
            return
        if self._loop.time() < self.at - 0.002:  # it has been put off
            self._arm()
        elif self._act is not None:
            self.at = math.inf
            self._act()
