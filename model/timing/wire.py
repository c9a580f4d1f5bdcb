"""What the wire carries: link capacities, the time of a lone transfer, and fair shares between many.

Decides rates and closed forms. Does not decide when flows start or end: the simulator asks for new shares then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .fabric import Fabric, Op, Order
from .posting import post_s


def device_bytes_per_s(fabric: Fabric, op: Op = "WRITE") -> float:
    """What all NICs of one device carry together in one direction, at the efficiency of large transfers."""
    return fabric.nic_bytes_per_s * fabric.nics_per_device * fabric.efficiency(op)


def flow_bytes_per_s(
    fabric: Fabric, descriptors: int, bytes_total: int, op: Op = "WRITE", contiguous: bool = True
) -> float:
    """Most that one transfer between two devices can reach when it is alone on them.

    Descriptors below the stripe threshold use one NIC each, in turn: fewer of them than NICs leave NICs idle.
    """
    nics = fabric.nics_per_device
    if descriptors > 0 and bytes_total < fabric.stripe_threshold_bytes * descriptors:
        nics = min(nics, descriptors)
    rate = fabric.nic_bytes_per_s * nics * fabric.efficiency(op)
    return rate if contiguous else min(rate, fabric.scattered_bytes_per_s)


def tail_s(fabric: Fabric, descriptors: int, op: Op = "WRITE") -> float:
    """Seconds that the devices still work on scattered descriptors after the last is posted; 0 where there are none."""
    rates = fabric.rates(op)
    return rates.tail_s + rates.tail_per_descriptor_s * descriptors if descriptors > 0 else 0.0


def transfer_s(
    fabric: Fabric,
    bytes_total: int,
    descriptors: int,
    op: Op = "WRITE",
    contiguous: bool = True,
    busy: bool = False,
    order: Order = "shuffled",
) -> float:
    """Seconds from the start of posting to the completion of a lone transfer between two devices.

    The wire works while the host still posts, so the longer of the two counts; what is fixed (the call and the
    latency) comes on top, and the tail where descriptors are scattered. Nothing to send takes no time.
    Errors: as `post_s`.
    """
    host_s = post_s(fabric, descriptors, bytes_total, op, contiguous, busy, order)
    if host_s == 0.0 and (descriptors == 0 or bytes_total == 0):
        return 0.0
    call_s = min(host_s, fabric.rates(op).call_s)
    bytes_s = bytes_total / flow_bytes_per_s(fabric, descriptors, bytes_total, op, contiguous)
    after_s = fabric.latency_s + (0.0 if contiguous else tail_s(fabric, descriptors, op))
    return call_s + max(host_s - call_s, bytes_s) + after_s


def max_min_rates(flow_paths: Sequence[tuple[int, ...]], capacities: Sequence[float]) -> list[float]:
    """Max-min fair rates by progressive filling.

    `flow_paths[i]`: the links (indices into `capacities`) that flow i crosses; a cap of a single flow is a link of its
    own. All rates rise together; a flow stops when one of its links is full. A flow that crosses no link has an
    infinite rate. Same unit out as in. Errors: `ValueError` for a link that does not exist or a capacity that is not a
    finite number above 0.
    """
    for link, capacity in enumerate(capacities):
        if not (math.isfinite(capacity) and capacity > 0):
            raise ValueError(f"capacity of link {link} is {capacity!r}, expected a finite number above 0")
    rates = [math.inf] * len(flow_paths)
    on_link: dict[int, set[int]] = {}
    for flow, path in enumerate(flow_paths):
        for link in path:
            if not 0 <= link < len(capacities):
                raise ValueError(f"flow {flow} crosses link {link}, there are links 0 to {len(capacities) - 1}")
            on_link.setdefault(link, set()).add(flow)
    left = {link: float(capacities[link]) for link in on_link}
    share = 0.0
    while on_link:
        tightest = min(on_link, key=lambda link: left[link] / len(on_link[link]))
        share = max(share, left[tightest] / len(on_link[tightest]))  # shares never fall but by rounding
        for flow in sorted(on_link[tightest]):
            rates[flow] = share
            for link in set(flow_paths[flow]):
                left[link] -= share
                on_link[link].discard(flow)
        on_link = {link: flows for link, flows in on_link.items() if flows}
    return rates
