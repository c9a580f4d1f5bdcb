"""What a sender keeps: writes, shards, transfers and links. Records, and the one checked move of a shard's state.

Decides nothing: ``sending`` moves them, ``sender`` hears events.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

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


class Write:
    """One part of one shard on its way: packing, postable, claimed (active, or broken and perhaps active)."""

    __slots__ = ("bytes", "due", "handle", "last", "part", "shard", "stage", "start", "stop")

    def __init__(
        self, handle: int, shard: Shard, part: int, start: int, stop: int, last: bool, bytes: int, stage: int
    ) -> None:
        self.handle, self.shard, self.part, self.start, self.stop, self.last = handle, shard, part, start, stop, last
        self.bytes, self.stage = bytes, stage
        self.due: float = NEVER


class Shard:
    """One attempt on one link: what ``m`` registers."""

    __slots__ = (
        "attempt",
        "closing",
        "done",
        "kept",
        "link",
        "memory",
        "notices",
        "outgoing",
        "packed",
        "parts",
        "planned",
        "reason",
        "requeue",
        "state",
        "tokens",
        "waiting",
        "writes",
    )

    def __init__(self, link: SenderLink, outgoing: Transfer, m: msg.Register) -> None:
        self.link, self.outgoing = link, outgoing
        self.attempt, self.tokens, self.packed = m.attempt, m.tokens, m.packed
        self.memory: Any = m.memory
        self.state: Sending = _WITHOUT_MEMORY if m.memory is None else _WITH_MEMORY
        self.planned = -1
        self.parts = self.done = 0
        self.writes: dict[int, Write] = {}
        self.notices: list[msg.Message] = []
        self.kept: msg.Written | None = None
        """What says that the last part is there, while the transfer is not ``sure``."""
        self.waiting = self.requeue = False
        self.closing, self.reason = "fail", ""

    def move(self, event: str) -> None:
        try:
            self.state = SENDING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of {self.outgoing.transfer_id} in state {self.state}") from None

    @property
    def idle(self) -> bool:
        """Nothing of it was sent yet, or its prefill was preempted and it cannot land without more of it: all of it can
        be computed and sent again.
        """
        outgoing = self.outgoing
        lands = outgoing.started or (outgoing.sure and self.planned == outgoing.tokens)
        return not self.parts or not lands

    def active(self) -> int:
        count = 0
        for write in self.writes.values():
            if write.stage >= CLAIMED:
                count += 1
        return count


class Transfer:
    """One transfer at this rank: the prefill and the shards that read it."""

    __slots__ = (
        "alone",
        "begun",
        "bytes_per_token",
        "chunked",
        "closed",
        "computed",
        "due",
        "ended",
        "fanout",
        "final",
        "open",
        "overdue",
        "peer",
        "readers",
        "reason",
        "released",
        "shards",
        "started",
        "tokens",
        "told",
        "transfer_id",
    )

    def __init__(self, transfer_id: str) -> None:
        self.transfer_id = transfer_id
        self.begun = self.started = self.final = self.chunked = self.alone = self.overdue = False
        self.ended = self.told = self.released = False
        self.tokens = self.computed = self.bytes_per_token = 0
        self.open = self.closed = self.readers = 0
        self.fanout = 1
        self.peer = self.reason = ""
        self.shards: dict[ev.Link, Shard] = {}
        self.due: float = NEVER

    @property
    def sure(self) -> bool:
        """Whether a shard that is planned in full lands whatever happens to the prefill: that is final, or this shard
        is all of the transfer, and no other can lack what is lost.
        """
        return self.final or (self.alone and self.fanout == 1)


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
