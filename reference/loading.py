"""The scatters of one step, between the engine's thread, which waits for them, and the transfer thread.

Decides who has them when the engine's thread waits no longer. What is copied, and how, is decided in ``landing``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pushkv.reference.copies import marked
from pushkv.reference.ports import Load

if TYPE_CHECKING:
    from pushkv.reference.copies import Copy


class Loading:
    """The scatters of one step, which the engine thread waits for. ``stream``: what it enqueues on, on a device: they
    come behind what is there by now.
    """

    def __init__(self, loads: Sequence[Load], stream: Any = None) -> None:
        self.loads, self._stream = loads, stream
        self.asked_s = time.monotonic()
        self.failed: list[Load] = []
        self._copies: dict[int, Copy] = {}
        self._lock, self._begun = threading.Lock(), threading.Lock()
        self._begun.acquire()  # until they have begun: the bare lock costs the engine's thread less than an event
        self._taken = self._given_up = False

    def take(self) -> bool:
        """By the transfer thread, before it touches a block; ``False``: nobody waits any more, and the blocks may be
        somebody else's.
        """
        with self._lock:
            self._taken = not self._given_up
            return self._taken

    def _give_up(self) -> bool:
        with self._lock:
            self._given_up = not self._taken
            return self._given_up

    def mark(self) -> Any:
        """By the transfer thread, which has the time: an event behind what is enqueued. The forward is not yet: before
        it the engine's thread waits.
        """
        return marked(self._stream)

    def begun(self, copies: Sequence[Copy]) -> None:
        """By the transfer thread: the copies are done (on a host) or enqueued (on a device), all but those of what has
        ``failed``; in the order in which they were asked for.
        """
        self._copies = {copy.lane: copy for copy in copies}  # the last of each lane: the others are over by then
        self._begun.release()

    def wait(self, timeout_s: float = 60.0) -> Sequence[Load]:
        """Return when what is done or enqueued by this thread from now on sees the bytes; of what it returns it does
        not, as it has failed, or nobody has answered. What was copied all the same is over then, too.
        """
        if not self._begun.acquire(timeout=timeout_s) and (
            self._give_up() or not self._begun.acquire(timeout=timeout_s)
        ):
            return self.loads
        for copy in self._copies.values():
            copy.join()
        return self.failed
