"""Which of two paths the bytes of a prompt take: packed through staging, or direct, block by block.

Decides by what each would cost. Does not decide whether the packed path has the memory (its host knows), nor what the
paths do.
"""

from __future__ import annotations

from typing import NamedTuple

from .fabric import Fabric, Op
from .hardware import Hardware
from .posting import post_s
from .staging import gather_s, scatter_s
from .wire import device_bytes_per_s


class PathCosts(NamedTuple):
    """Seconds that a prompt is on its way by either path, both sides' engines at work."""

    packed_s: float
    direct_s: float

    @property
    def packed(self) -> bool:
        """Whether packed is no slower."""
        return self.packed_s <= self.direct_s


def path_costs(
    hardware: Hardware,
    fabric: Fabric,
    bytes_total: float,
    pieces: int,
    op: Op = "WRITE",
    gather_share: float = 1.0,
    scatter_share: float = 1.0,
) -> PathCosts:
    """Costs of `bytes_total` on the wires of the busiest device, in `pieces` when posted block by block.

    *_share: what of it one device gathers or scatters. Packed: gather, wire and scatter, one after the other. Direct:
    posting and wire, which overlap. Errors: as `post_s` and `gather_s`.
    """
    wire_s = bytes_total / device_bytes_per_s(fabric, op)
    gathered_s = gather_s(hardware, bytes_total * gather_share, busy=True)
    scattered_s = scatter_s(hardware, bytes_total * scatter_share, busy=True)
    posted_s = post_s(fabric, pieces, int(bytes_total), op, order="allocated")
    return PathCosts(gathered_s + wire_s + scattered_s, max(wire_s, posted_s))
