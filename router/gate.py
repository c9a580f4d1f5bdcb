"""How many requests the engines get at once, and who waits: first come, first served, within bounds.

Decides who is refused with 429, and after how long a client should ask again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from pushkv.router.request import Refusal


class Gate:
    """`enter` before a request is dispatched, `leave` after it, however it ended."""

    def __init__(self, most_active: int, most_queued: int, queue_s: float) -> None:
        self.active = 0
        self.most_active, self.most_queued, self._queue_s = most_active, most_queued, queue_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ended = 0.0  # per second, smoothed
        self._last = 0.0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def take(self) -> bool:
        """A place, where one is free and nobody waits for it."""
        if self.active >= self.most_active or self._waiting:
            return False
        self.active += 1
        return True

    async def enter(self) -> None:
        """Raises `Refusal` (429) when the queue is full, or when it was not this one's turn in time."""
        if self.take():
            return
        if len(self._waiting) >= self.most_queued:
            raise Refusal(429, "too many requests", "rate_limit_error", self.retry_after_s())
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._queue_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self.leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise Refusal(429, "too many requests", "rate_limit_error", self.retry_after_s()) from None
            raise

    def leave(self) -> None:
        """The one whose turn it is takes the place."""
        now = time.monotonic()
        gap, self._last = now - self._last, now
        self._ended += (1.0 / max(gap, 1e-4) - self._ended) * min(1.0, gap)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.active -= 1

    def retry_after_s(self) -> int:
        """Whole seconds until those that wait now should have had their turn: 1 to 60."""
        return max(1, min(60, round(len(self._waiting) / max(self._ended, 0.1))))
