"""The notices that travel with the batches of a write.

Decides how a notice is framed, when the notice of a whole write is complete, and how much is kept until then. Does not
decide what a notice says, nor which ones are expected.

NIXL delivers a notice once the stores of its own call have arrived; between calls no order is promised. So every batch
carries the notice, numbered, and the write's has come when those of all batches have. What a peer says of its batches
is believed only as far as there is a `Room` for it, so nothing that it says makes this side keep more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

__all__ = ["LEAST_BYTES", "LEAST_DESCRIPTORS", "NOTICE_BYTES", "Notices", "Room", "batches_at_most", "pack"]

NOTICE_BYTES: Final = 64
"""Longest notice, without its frame."""
LEAST_DESCRIPTORS: Final = 64
LEAST_BYTES: Final = 1 << 20
"""A batch holds so many descriptors, or so many bytes together with the next one; only the last holds less."""

_HEAD = struct.Struct("<4sQII")  # mark, number of the write, batch, batches
_MARK = b"pkv1"
_BATCH = slice(12, 16)  # of a frame
_PEERS = 64  # that are heard when nobody says whom to expect
_WRITES = 4096  # of one of them, more than any has under way
_BATCHES = 1 << 16


def pack(number: int, batch: int, batches: int, notice: bytes) -> bytes:
    """The frame of one batch."""
    return _HEAD.pack(_MARK, number, batch, batches) + notice


def batches_at_most(writes: int, descriptors: int, size_bytes: int) -> int:
    """Batches of so many writes that have so many descriptors and bytes together."""
    return writes + descriptors // LEAST_DESCRIPTORS + 2 * size_bytes // LEAST_BYTES


class Room:
    """Which batches have come of writes that are not complete: at most `writes`, of `batches` together."""

    __slots__ = ("_seen", "batches", "writes")

    def __init__(self, writes: int, batches: int) -> None:
        self.writes, self.batches = writes, batches
        self._seen: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        """Writes that are not complete."""
        return len(self._seen)

    def add(self, write: bytes, batch: int, batches: int) -> bool | None:
        """Whether `write` is complete now; None if there is no room for it. A batch that comes twice counts once."""
        seen = self._seen.get(write)
        if seen is None:
            if len(self._seen) >= self.writes or batches > self.batches:
                return None
            self.batches -= batches
            seen = self._seen[write] = set()
        seen.add(batch)
        if len(seen) < batches:
            return False
        del self._seen[write]
        self.batches += batches
        return True


class Notices:
    """What has come. Whatever is no notice, or has no room, is dropped and counted in `refused`.

    Until `expect` says which notices have room, those of the first peers have.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._complete: list[tuple[str, bytes]] = []
        self._rooms: dict[str, Room] = {}
        self._room: Callable[[str, bytes], Room | None] = self._of_peer

    def expect(self, room: Callable[[str, bytes], Room | None]) -> None:
        """From now on `room(agent, notice)` says where that notice has room: None for one that nobody waits for."""
        self._room = room
        self._rooms.clear()

    def add(self, agent: str, frame: bytes) -> None:
        """One frame from NIXL. Frames that differ in more than their batch are of different writes."""
        if not _HEAD.size <= len(frame) <= _HEAD.size + NOTICE_BYTES or not frame.startswith(_MARK):
            self.refused += 1
            return
        _, _, batch, batches = _HEAD.unpack_from(frame)
        notice = frame[_HEAD.size :]
        room = self._room(agent, notice) if batch < batches else None
        complete = room.add(frame[: _BATCH.start] + frame[_BATCH.stop :], batch, batches) if room is not None else None
        if complete is None:
            self.refused += 1
        elif complete:
            self._complete.append((agent, notice))

    def take(self) -> list[tuple[str, bytes]]:
        """(agent, notice) of the writes that are complete since the last call."""
        found, self._complete = self._complete, []
        return found

    def forget(self, agent: str) -> None:
        """Drops what is incomplete from a peer that is gone."""
        self._rooms.pop(agent, None)

    def _of_peer(self, agent: str, notice: bytes) -> Room | None:
        if agent not in self._rooms and len(self._rooms) < _PEERS:
            self._rooms[agent] = Room(_WRITES, _BATCHES)
        return self._rooms.get(agent)
