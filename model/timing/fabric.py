"""Fabric profiles: what posting costs on the host and what the wire carries.

Decides which numbers describe a fabric and what a valid profile is. Does not decide how they combine (`posting`,
`wire`), and reads no file (`profiles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .fields import Fields, ProfileError

Op = Literal["WRITE", "READ"]
Order = Literal["shuffled", "allocated"]


@dataclass(frozen=True, slots=True)
class PostingRates:
    """Host time to make and post a transfer: `call_s` once, and per descriptor one of three; and the device's tail.

    `contiguous_s`: neighbours on both sides, in order. `allocated_s`: in the order in which an engine's block pool
    hands them out, partly neighbours. `shuffled_s`: both sides in random order. `tail_s` and `tail_per_descriptor_s`:
    what scattered descriptors still take on the devices after the last one is posted, beyond latency.
    """

    call_s: float
    shuffled_s: float
    allocated_s: float
    contiguous_s: float
    tail_s: float = 0.0
    tail_per_descriptor_s: float = 0.0

    @classmethod
    def from_fields(cls, fields: Fields) -> PostingRates:
        """Errors: `ProfileError`."""
        made = cls(
            call_s=fields.number("call_s", zero=True),
            shuffled_s=fields.number("shuffled_s", zero=True),
            allocated_s=fields.number("allocated_s", zero=True),
            contiguous_s=fields.number("contiguous_s", zero=True),
            tail_s=fields.number("tail_s", 0.0, zero=True),
            tail_per_descriptor_s=fields.number("tail_per_descriptor_s", 0.0, zero=True),
        )
        fields.finish()
        return made


@dataclass(frozen=True, slots=True)
class Fabric:
    """One way for bytes to get from the memory of one device to that of another.

    `nic_bytes_per_s`: nominal, one direction, of one NIC (or of the NVLink ports of one device, as one);
    `nics_per_device`: how many serve one device; `write_efficiency` and `read_efficiency`: the part of nominal that
    large transfers reach; `stripe_threshold_bytes`: descriptors from this size on are split over all NICs of the
    device, smaller ones take one NIC each, in turn; `scattered_bytes_per_s`: bound on a transfer of scattered
    descriptors, which some transports copy one after the other; `latency_s`: from posting the last descriptor to the
    completion seen, beyond the bytes; `message_s`: one small control message between two engines, one way;
    `busy_factor`: posting takes this much longer while another thread of the same process drives the engine;
    `drain_s`: how long a write of a dead process may still be under way.
    """

    name: str
    write: PostingRates
    read: PostingRates
    busy_factor: float
    nic_bytes_per_s: float
    nics_per_device: int
    write_efficiency: float
    read_efficiency: float
    stripe_threshold_bytes: float
    scattered_bytes_per_s: float
    latency_s: float
    message_s: float
    drain_s: float
    sources: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    @classmethod
    def from_mapping(cls, name: str, profile: Mapping[str, Any]) -> Fabric:
        """Build from a parsed TOML profile. Errors: `ProfileError`, one line, naming the field."""
        fields = Fields(f"fabric {name}", profile)
        posting, wire = fields.table("posting"), fields.table("wire")
        fields.read.add("description")
        made = cls(
            name=name,
            write=PostingRates.from_fields(posting.table("write")),
            read=PostingRates.from_fields(posting.table("read")),
            busy_factor=posting.number("busy_factor"),
            nic_bytes_per_s=wire.number("nic_bytes_per_s"),
            nics_per_device=wire.count("nics_per_device"),
            write_efficiency=wire.fraction("write_efficiency"),
            read_efficiency=wire.fraction("read_efficiency"),
            stripe_threshold_bytes=wire.number("stripe_threshold_bytes", zero=True),
            scattered_bytes_per_s=wire.number("scattered_bytes_per_s"),
            latency_s=wire.number("latency_s", zero=True),
            message_s=wire.number("message_s", zero=True),
            drain_s=wire.number("drain_s", zero=True),
            sources=fields.sources,
            assumed=tuple(fields.assumed),
        )
        for table in (posting, wire, fields):
            table.finish()
        return made

    def rates(self, op: Op) -> PostingRates:
        """Errors: `ProfileError` for an operation that is neither WRITE nor READ."""
        if op == "WRITE":
            return self.write
        if op == "READ":
            return self.read
        raise ProfileError(f"fabric {self.name}: operation is {op!r}, expected WRITE or READ")

    def efficiency(self, op: Op) -> float:
        """Part of the nominal bandwidth that large transfers reach. Errors: as `rates`."""
        self.rates(op)
        return self.write_efficiency if op == "WRITE" else self.read_efficiency
