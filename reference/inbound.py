"""What a rank knows of one transfer that it expects or has. Decides nothing: see `landing.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pushkv.model.layout import Part, Shard
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.reference.notices import Room

if TYPE_CHECKING:
    from pushkv.reference.device_copies import Ahead


class Inbound:
    """Times are seconds of the monotonic clock."""

    __slots__ = (
        "ahead", "attempts", "brought", "early", "exposed_s", "fanout", "heard_s", "landed_s", "left", "links",
        "memory", "noticed", "packed", "parts", "pieces", "refused", "registered_s", "rooms", "sizes", "tokens",
        "transfer_id",
    )  # fmt: skip

    def __init__(self, command: ev.Expect, now: float) -> None:
        self.transfer_id, self.links, self.tokens = command.transfer_id, command.links, command.tokens
        self.packed, self.memory, self.fanout = command.packed, command.memory, command.fanout
        self.refused = False
        self.sizes: dict[ev.Link, int] = {}
        """Bytes of each link in the transfer's segments."""
        self.left: dict[ev.Link, int] = {}
        """Tokens that each link has still to bring."""
        self.brought: dict[ev.Link, tuple[int, list[tuple[Shard, Part, int]]]] = {}
        """Of each link that has brought all its parts: the heads they hold, and where they lie."""
        self.attempts: dict[ev.Link, int] = {}
        self.parts: dict[ev.Link, dict[int, int]] = {}
        self.registered_s = now
        self.exposed_s = self.heard_s = self.landed_s = 0.0
        self.noticed: set[tuple[ev.Link, int]] = set()
        self.early: dict[tuple[ev.Link, int], msg.Written] = {}
        self.rooms: dict[ev.Link, Room] = {}
        self.pieces: list[tuple[Shard, Part, int]] = []
        self.ahead: dict[tuple[int, int], list[Ahead] | None] = {}
