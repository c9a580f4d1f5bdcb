"""One request on its way through the cluster. Data only."""

from __future__ import annotations

from array import array
from typing import Any


class Request:
    """A leg of a request at one engine, as that engine's scheduler sees it; the two legs share their ``flight``."""

    __slots__ = (
        "blocks", "computed", "first_step", "flight", "freed", "got", "index", "input_len", "last_step", "output_len",
        "prefill_only", "target",
    )  # fmt: skip

    def __init__(self, flight: Flight, output_len: int, *, prefill_only: bool) -> None:
        self.flight = flight
        self.index = flight.index
        self.input_len = flight.input_len
        self.output_len = output_len
        self.prefill_only = prefill_only
        self.blocks = array("i")
        self.computed = 0
        self.freed = False
        self.target = flight.input_len
        self.got = 0
        self.first_step = self.last_step = -1

    @property
    def tokens(self) -> int:
        """Prompt tokens and tokens generated before its present run of steps."""
        return self.input_len + self.got


class Flight:
    """What the client and the connector know of a request: its legs, its times (ticks), its transfer."""

    __slots__ = (
        "arrival", "bytes", "d", "decode", "descriptors", "failed", "first_token", "held_d", "held_p", "id", "index",
        "input_len", "landed", "landing", "leg_end", "output_len", "over", "p", "packed", "post", "prefill",
        "prefill_start", "register", "wire",
    )  # fmt: skip

    def __init__(self, index: int, arrival: int, input_len: int, output_len: int) -> None:
        self.index = index
        self.id = str(index)
        self.arrival = arrival
        self.input_len = input_len
        self.output_len = output_len
        self.prefill = self.decode = 0
        self.p: Request | None = None
        self.d: Request | None = None
        self.leg_end = self.first_token = self.landed = self.landing = -1
        self.bytes = self.descriptors = 0
        self.post = self.wire = 0
        self.held_p = self.held_d = self.prefill_start = -1
        self.packed = self.failed = self.over = False
        self.register: Any = None
