"""One request on its way through the cluster. Data only."""

from __future__ import annotations

from array import array
from typing import Any


class Request:
    """A leg of a request at one engine, as that engine's scheduler sees it; the two legs share their ``flight``."""

    computed: int = 0
    freed: bool = False
    resumed: bool = False
    """Whether it was preempted before."""
    got: int = 0
    """Tokens generated before its present run of steps."""
    first_step: int = -1
    last_step: int = -1

    def __init__(self, flight: Flight, output_len: int, *, prefill_only: bool) -> None:
        self.flight, self.index, self.input_len, self.output_len = flight, flight.index, flight.input_len, output_len
        self.prefill_only = prefill_only
        self.target = flight.input_len
        """Tokens to compute before it decodes: the prompt, and after a preemption what was generated too."""
        self.blocks: array[int] = array("i")


class Flight:
    """What the client and the connector know of a request: its legs, its times (ticks), its transfer.

    ``prefill`` and ``decode`` are the numbers of its two engines.
    """

    p: Request | None = None
    d: Request | None = None
    leg_end: int = -1
    end: int = -1
    """Of one whose last token has come before P's answer."""
    first_token: int = -1
    gathered: int = -1
    posted: int = -1
    written: int = -1
    landed: int = -1
    asked: int = -1
    launched: int = -1
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

    def __init__(
        self,
        index: int,
        id: str,
        arrival: int,
        input_len: int,
        output_len: int,
        prefill: int,
        decode: int,
        packed: bool,
    ) -> None:
        self.index, self.id, self.arrival = index, id, arrival
        self.input_len, self.output_len = input_len, output_len
        self.prefill, self.decode, self.packed = prefill, decode, packed
