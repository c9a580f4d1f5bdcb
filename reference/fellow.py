"""What is known of the process behind a link: its facts, and what this rank writes there and hears from there.

Decides which layouts are paired: the receiving rank's, and those of the ranks of the sending engine that feed it, as
several of them may hold the same heads and only one of them writes. That the engines fit as wholes is known by then
(``facts.refusal``): what the senders hold for the receiver's siblings is left out. And what of the receiving rank's
cache comes from there: whoever is told that all has come compares that with all there is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pushkv.model.layout import Layout, LayoutError, Shard, pair
from pushkv.model.protocol.events import Link
from pushkv.reference.facts import Facts, siblings
from pushkv.reference.office import feeders


class Fellow:
    """Made when the handshake fits. ``outgoing`` and ``incoming`` are ``None`` when nothing goes that way between these
    two ranks. ``bases``: addresses of the peer's cache regions. ``covers``: a bit for each head of this rank's cache
    that comes from there (``heads``).

    Raises ``LayoutError`` that names both sides when the caches cannot be mapped, ``ValueError`` when the
    tensor-parallel sizes do not divide one another.
    """

    __slots__ = (
        "_tp_size",
        "agent",
        "bases",
        "covers",
        "device",
        "facts",
        "feeds",
        "incarnation",
        "incoming",
        "outgoing",
    )

    def __init__(self, incarnation: int, me: Facts, them: Facts) -> None:
        self.incarnation, self.facts = incarnation, them
        self.agent = ""
        self.bases = np.asarray([region.address for region in them.regions], np.int64)
        self.device = them.regions[0].device if them.regions else 0
        self.outgoing = _shard(me, them) if me.role != "decode" and them.role != "prefill" else None
        self.incoming = _shard(them, me) if me.role != "prefill" and them.role != "decode" else None
        self.feeds = feeders(me.rank, me.tp_size, them.tp_size, them.stages)
        self.covers = 0 if self.incoming is None else _covered(self.incoming, me.layout)
        self._tp_size = me.tp_size

    def misnamed(self, links: tuple[Link, ...], fanout: int) -> str:
        """``""``, or why a transfer from ``links``, each of whose ranks feeds ``fanout`` of ours, would not bring what
        this engine's ranks hold for us: whoever named them took it for an engine of another size.
        """
        fans = max(1, self._tp_size // self.facts.tp_size)
        if fanout == fans and tuple(number for _, number in links) == self.feeds:
            return ""
        told = len(links) * self._tp_size // fanout
        stages = f" in {self.facts.stages} pipeline stages" if self.facts.stages > 1 else ""
        return f"the request says tp_size {told} of {links[0][0]!r}, which has {self.facts.tp_size}{stages}"


def heads(layout: Layout) -> int:
    """Heads over all layers and parts of a cache: so many bits has ``covers`` of peers that bring all of it."""
    return sum(view.head_stop - view.head_start for view in layout.views)


def _covered(shard: Shard, layout: Layout) -> int:
    """The heads of ``layout`` that ``shard`` writes, read off the addresses to which its bytes go."""
    places: dict[tuple[int, int, int], tuple[int, int]] = {}
    for view in layout.views:
        for head in range(view.head_stop - view.head_start):
            place = view.group, view.region, view.offset_bytes + head * view.head_stride
            places[place] = len(places), view.row_bytes
    found = bytearray(len(places) + 7 >> 3)
    for bundle in shard.bundles:
        offsets = np.zeros(1, np.int64)
        for dim in bundle.dims:
            offsets = np.add.outer(offsets, np.arange(dim.extent) * dim.dst_stride).ravel()
        for region, base in zip(bundle.dst.region.tolist(), bundle.dst.base.tolist(), strict=True):
            for start in (base + offsets).tolist():
                place, stop = start, start + bundle.row_bytes
                while place < stop:
                    bit, size = places.get((bundle.dst.group, region, place), (-1, 0))
                    if bit < 0:
                        raise LayoutError(
                            f"bytes for region {region} at {place}, where no head of {layout.name!r} lies"
                        )
                    found[bit >> 3] |= 1 << (bit & 7)
                    place += size
    return int.from_bytes(found, "little")


def _shard(source: Facts, target: Facts) -> Shard | None:
    """What the rank of ``source`` writes into the rank of ``target``."""
    wanted = {view.key for view in target.layout.views}
    ranks = siblings(source)
    feeding = [ranks[rank] for rank in feeders(target.rank, target.tp_size, source.tp_size)]
    mine = [replace(one, views=tuple(view for view in one.views if view.key in wanted)) for one in feeding]
    return next((shard for shard in pair(mine, [target.layout]) if shard.src_rank == source.rank), None)
