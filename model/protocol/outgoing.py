"""What a sender keeps: writes, shards, transfers and links. Records, and the one checked move of a shard's state.

Decides nothing: ``sending`` moves them, ``sender`` hears events.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import NEVER
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.seen import Seen
from pushkv.model.protocol.states import SENDING, Sending

_WITHOUT_MEMORY, _WITH_MEMORY = Sending.REGISTERED, Sending.PROMISED

PACKING: Final = 0
POSTABLE: Final = 1
CLAIMED: Final = 2
BROKEN: Final = 3


class Write(msgspec.Struct, eq=False):
    """One part of one shard on its way: packing, postable, claimed (active), broken (perhaps active)."""

    handle: int
    shard: Shard
    part: int
    start: int
    stop: int
    last: bool
    bytes: int
    stage: int = PACKING
    due: float = NEVER


class Shard(msgspec.Struct, eq=False):
    """One attempt on one link."""

    link: SenderLink
    outgoing: Transfer
    attempt: int
    tokens: int
    packed: bool
    memory: Any
    state: Sending
    planned: int = -1
    parts: int = 0
    done: int = 0
    writes: dict[int, Write] = {}
    notices: list[msg.Message] = []
    waiting: bool = False
    requeue: bool = False
    closing: str = "fail"
    reason: str = ""

    @classmethod
    def of(cls, link: SenderLink, outgoing: Transfer, m: msg.Register) -> Shard:
        """The shard that ``m`` registers."""
        state = _WITHOUT_MEMORY if m.memory is None else _WITH_MEMORY
        return cls(link, outgoing, m.attempt, m.tokens, m.packed, m.memory, state)

    def move(self, event: str) -> None:
        try:
            self.state = SENDING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of {self.outgoing.transfer_id} in state {self.state}") from None

    def active(self) -> int:
        count = 0
        for write in self.writes.values():
            if write.stage >= CLAIMED:
                count += 1
        return count


class Transfer(msgspec.Struct, eq=False):
    """One transfer at this rank: the prefill and the shards that read it."""

    transfer_id: str
    begun: bool = False
    started: bool = False
    final: bool = False
    chunked: bool = False
    overdue: bool = False
    tokens: int = 0
    computed: int = 0
    bytes_per_token: int = 0
    peer: str = ""
    fanout: int = 1
    shards: dict[ev.Link, Shard] = {}
    open: int = 0
    closed: int = 0
    readers: int = 0
    ended: bool = False
    told: bool = False
    released: bool = False
    reason: str = ""
    due: float = NEVER


class SenderLink:
    """What this sender knows of one receiving rank's incarnation."""

    __slots__ = ("base", "incarnation", "key", "live", "seen", "tombstones", "up")

    def __init__(self, key: ev.Link, incarnation: int, floor: int, open_per_link: int) -> None:
        self.key = key
        self.incarnation = incarnation
        self.up = True
        self.seen = Seen(open_per_link)
        self.base = floor
        self.seen.raise_floor(floor)
        self.live: dict[int, Shard] = {}
        self.tombstones: OrderedDict[int, list[msg.Message]] = OrderedDict()
