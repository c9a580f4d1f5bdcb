"""How long the host is busy making and posting a transfer.

Decides host time only: on some fabrics posting takes far longer than the bytes (scattered descriptors over UCX and
NVLink: 5 us for 32 KiB that the wire carries in 0.1 us). Does not decide when the bytes are there (`wire`), who posts
(pull: the engine thread; push: a thread beside it), nor how many descriptors a transfer has (`pushkv.model.layout`).
"""

from __future__ import annotations

from .fabric import Fabric, Op, Order


def post_s(
    fabric: Fabric,
    descriptors: int,
    bytes_total: int,
    op: Op = "WRITE",
    contiguous: bool = False,
    busy: bool = False,
    order: Order = "shuffled",
) -> float:
    """Seconds of host time to make and post one transfer of `descriptors` spans.

    `contiguous`: neighbouring spans in order on both sides, nearly free per span. Otherwise `order` says how they lie:
    "allocated", as an engine's block pool hands blocks out, or "shuffled", both sides in random order. `busy`: another
    thread of this process drives an engine meanwhile. Nothing to send costs nothing. `bytes_total` has no effect in the
    present profiles: no measurement shows that a larger descriptor takes longer to post.
    Errors: `ProfileError` for an unknown operation, `ValueError` for a negative size or an unknown order.
    """
    rates = fabric.rates(op)
    if descriptors < 0 or bytes_total < 0:
        raise ValueError(f"a transfer of {descriptors} descriptors and {bytes_total} bytes: both must be 0 or more")
    if order not in ("allocated", "shuffled"):
        raise ValueError(f"descriptor order is {order!r}, expected 'allocated' or 'shuffled'")
    if descriptors == 0 or bytes_total == 0:
        return 0.0
    if contiguous:
        each_s = rates.contiguous_s
    else:
        each_s = rates.allocated_s if order == "allocated" else rates.shuffled_s
    host_s = rates.call_s + each_s * descriptors
    return host_s * fabric.busy_factor if busy else host_s
