"""What a receiver keeps: shards, expected transfers and links. Records, and the one checked move of a shard's state.

Decides nothing: ``receiving`` moves them, ``receiver`` hears events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pushkv.model.protocol import events as ev
from pushkv.model.protocol.deadlines import NEVER
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.states import RECEIVING, Receiving

_FIRST = Receiving.UNSENT


class Shard(msgspec.Struct, eq=False):
    """One registration on one link."""

    link: ReceiverLink
    transfer: Expected
    attempt: int = 0
    registered_at: float = 0.0
    asked: str = ""
    state: Receiving = _FIRST
    offered: bool = False
    finished: bool = False
    parts: set[int] = set()
    parts_in_all: int = -1
    tokens: int = 0

    def move(self, event: str) -> None:
        try:
            self.state = RECEIVING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of {self.transfer.transfer_id} in state {self.state}") from None


class Expected(msgspec.Struct, eq=False):
    """One transfer at this rank, over all the links that feed it; ``open``: shards that are not settled."""

    transfer_id: str
    tokens: int
    packed: bool
    fanout: int
    memory: Any
    open: int
    exposed: bool = False
    shards: list[Shard] = []
    verdict: bool = False
    settled: bool = False
    requeue: bool = False
    offered: bool = False
    offered_finished: bool = False
    reason: str = ""
    due: float = NEVER


class ReceiverLink:
    """What this receiver has open at one sending rank."""

    __slots__ = ("highest", "incarnation", "key", "live", "silent", "unsent", "up")

    def __init__(self, key: ev.Link, highest: int) -> None:
        self.key = key
        self.incarnation = 0
        self.up = self.silent = False
        self.highest = highest
        self.live: dict[int, Shard] = {}
        self.unsent: list[Shard] = []

    def lowest(self) -> int:
        """Lowest attempt that is open; the next one when none is. Attempts open in order, so the first key is the
        lowest.
        """
        for attempt in self.live:
            return attempt
        return self.highest + 1
