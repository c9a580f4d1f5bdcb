"""What a receiver keeps: shards, expected transfers and links. Records, and the one checked move of a shard's state.

Decides nothing: ``receiving`` moves them, ``receiver`` hears events.
"""

from __future__ import annotations

from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol.deadlines import NEVER
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.states import RECEIVING, Receiving

_FIRST = Receiving.UNSENT


class Shard:
    """One registration on one link."""

    __slots__ = (
        "asked",
        "attempt",
        "finished",
        "link",
        "offered",
        "parts",
        "parts_in_all",
        "registered_at",
        "state",
        "tokens",
        "transfer",
    )

    def __init__(self, link: ReceiverLink, transfer: Expected) -> None:
        self.link, self.transfer = link, transfer
        self.attempt = self.tokens = 0
        self.registered_at = 0.0
        self.asked = ""
        self.state: Receiving = _FIRST
        self.offered = self.finished = False
        self.parts: set[int] = set()
        self.parts_in_all = -1

    def move(self, event: str) -> None:
        try:
            self.state = RECEIVING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of {self.transfer.transfer_id} in state {self.state}") from None


class Expected:
    """One transfer at this rank, over all the links that feed it; ``open``: shards that are not settled."""

    __slots__ = (
        "due",
        "exposed",
        "fanout",
        "memory",
        "offered",
        "offered_finished",
        "open",
        "packed",
        "reason",
        "requeue",
        "settled",
        "shards",
        "tokens",
        "transfer_id",
        "verdict",
    )

    def __init__(self, transfer_id: str, tokens: int, packed: bool, fanout: int, memory: Any, links: int) -> None:
        self.transfer_id, self.tokens, self.packed, self.fanout = transfer_id, tokens, packed, fanout
        self.memory = memory
        self.open = links
        self.exposed = self.verdict = self.settled = self.requeue = False
        self.offered = self.offered_finished = False
        self.shards: list[Shard] = []
        self.reason = ""
        self.due: float = NEVER


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
