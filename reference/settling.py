"""When a sender may say that nothing of a registration is on its way any more.

Decides how long `Failed` and `Cancelled` are kept back: by them the receiver knows that it may use the memory again
(evidence E1). Where completion is arrival they go at once. Elsewhere a write that is done here may still be stored
there, in any order; so they wait until the fabric's drain time (`fabric_drain_s`, the one that is granted to the writes
of a dead peer too) has passed since the last write for that registration was over. The protocol takes no harm: any word
may be late.
"""

from __future__ import annotations

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg

Registration = tuple[ev.Link, int]


class Settling:
    """`drain_s`: how long what is done may be on its way; 0: not at all. Kept is what was over within that time."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self._over: dict[Registration, float] = {}
        self._kept: dict[Registration, ev.Send] = {}

    def __len__(self) -> int:
        """Words that are kept back."""
        return len(self._kept)

    def over(self, link: ev.Link, attempt: int, now: float) -> None:
        """A write has ended."""
        if not self.drain_s:
            return
        self._over.pop((link, attempt), None)
        self._over[link, attempt] = now  # the latest is the last
        while self._over and (first := next(iter(self._over))) and self._over[first] + self.drain_s <= now:
            del self._over[first]

    def keep(self, action: ev.Send, now: float) -> bool:
        """Whether this word is kept back; the latest takes the place of the one before."""
        message = action.message
        if not isinstance(message, (msg.Failed, msg.Cancelled)):
            return False
        key = action.link, message.attempt
        if self._over.get(key, now - self.drain_s) + self.drain_s <= now:
            return False
        self._kept[key] = action
        return True

    def due(self, now: float) -> list[ev.Send]:
        """Words that were kept back and may go."""
        if not self._kept:
            return []
        ripe = [key for key in self._kept if self._over.get(key, now - self.drain_s) + self.drain_s <= now]
        return [self._kept.pop(key) for key in ripe]
