"""One request on its way through the cluster. Data only."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec


class Request(msgspec.Struct, eq=False):
    """A leg of a request at one engine, as that engine's scheduler sees it; the two legs share their ``flight``."""

    flight: Flight
    index: int
    input_len: int
    output_len: int
    prefill_only: bool
    target: int
    """Tokens to compute before it decodes: the prompt, and after a preemption what was generated too."""
    blocks: array[int]
    computed: int = 0
    freed: bool = False
    got: int = 0
    """Tokens generated before its present run of steps."""
    first_step: int = -1
    last_step: int = -1


class Flight(msgspec.Struct, eq=False):
    """What the client and the connector know of a request: its legs, its times (ticks), its transfer."""

    index: int
    id: str
    arrival: int
    input_len: int
    output_len: int
    prefill: int
    """Numbers of its two engines."""
    decode: int
    packed: bool
    p: Request | None = None
    d: Request | None = None
    leg_end: int = -1
    first_token: int = -1
    landed: int = -1
    landing: int = -1
    held_p: int = -1
    held_d: int = -1
    prefill_start: int = -1
    bytes: int = 0
    descriptors: int = 0
    post: int = 0
    wire: int = 0
    failed: bool = False
    over: bool = False
    register: Any = None

    def leg(self, output_len: int, *, prefill_only: bool) -> Request:
        """A new leg of it."""
        n = self.input_len
        return Request(self, self.index, n, output_len, prefill_only, n, array("i"))
