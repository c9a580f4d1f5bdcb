"""The notices that travel with the batches of a write.

Decides how a notice is framed and when the notice of a whole write is complete. Does not decide what a notice says.

NIXL delivers a notice once the stores of its own call have arrived; between calls no order is promised. So every batch
carries the notice, numbered, and the write's has come when those of all batches have.
"""

from __future__ import annotations

import struct

__all__ = ["Notices", "pack"]

_HEAD = struct.Struct("<4sQII")  # mark, number of the write, batch, batches
_MARK = b"pkv1"
_OPEN = 4096  # incomplete writes per peer; more than any peer has under way


def pack(number: int, batch: int, batches: int, notice: bytes) -> bytes:
    """The frame of one batch."""
    return _HEAD.pack(_MARK, number, batch, batches) + notice


class Notices:
    """What has come, by peer. Bounded; what is not ours or too much is counted in `dropped`."""

    def __init__(self) -> None:
        self.dropped = 0
        self._complete: list[tuple[str, bytes]] = []
        self._partial: dict[str, dict[int, set[int]]] = {}

    def add(self, agent: str, frame: bytes) -> None:
        """One frame from NIXL. A repeated one counts once."""
        if len(frame) < _HEAD.size or not frame.startswith(_MARK):
            self.dropped += 1
            return
        _, number, batch, batches = _HEAD.unpack_from(frame)
        partial = self._partial.setdefault(agent, {})
        seen = partial.setdefault(number, set())
        if batch < batches:
            seen.add(batch)
        if len(seen) == batches:
            del partial[number]
            self._complete.append((agent, frame[_HEAD.size :]))
        elif len(partial) > _OPEN:
            del partial[next(iter(partial))]
            self.dropped += 1

    def take(self) -> list[tuple[str, bytes]]:
        """(agent, notice) of the writes that are complete since the last call."""
        found, self._complete = self._complete, []
        return found

    def forget(self, agent: str) -> None:
        """Drops what is incomplete from a peer that is gone."""
        self._partial.pop(agent, None)
