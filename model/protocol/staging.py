"""Staging memory of one rank, counted in bytes: who holds how much, and whether there is room for one part more.

Decides the size of a part and the share of a peer. Does not decide who comes next (``sending``) nor where in the
memory a part lies (the host).
"""

from __future__ import annotations

from pushkv.model.protocol.settings import Settings


class Staging:
    """Bytes in use, in all and per peer."""

    __slots__ = ("_by_peer", "_limit", "_part", "_size", "used")

    def __init__(self, settings: Settings) -> None:
        self.used = 0
        self._size = settings.staging_bytes
        self._limit = settings.staging_bytes * settings.staging_share
        self._part = min(int(self._limit) // 2, settings.part_bytes)
        self._by_peer: dict[str, int] = {}

    def part_tokens(self, bytes_per_token: int) -> int:
        """Tokens of the largest part: half of what a peer may stage at the most, so that one is packed while another is
        written.
        """
        return max(1, self._part // bytes_per_token) if bytes_per_token else 1 << 62

    def take(self, peer: str, size: int) -> bool:
        """Take ``size`` bytes for ``peer``, or say that there is no room. What is larger than its share goes alone."""
        mine = self._by_peer.get(peer, 0)
        if (self.used and self.used + size > self._size) or (mine and mine + size > self._limit):
            return False
        self.used += size
        self._by_peer[peer] = mine + size
        return True

    def give_back(self, peer: str, size: int) -> None:
        """``size`` bytes of ``peer`` are free again."""
        self.used -= size
        left = self._by_peer.get(peer, 0) - size
        if left:
            self._by_peer[peer] = left
        else:  # it may be forgotten already: parts of no bytes hold nothing
            self._by_peer.pop(peer, None)
