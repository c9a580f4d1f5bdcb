"""What is known of the process behind a link: its facts, and what this rank writes there and hears from there.

Decides which layouts are paired: the receiving rank's, and those of the ranks of the sending engine that feed it, as
several of them may hold the same heads and only one of them writes. That the engines fit as wholes is known by then
(``facts.refusal``): what the senders hold for the receiver's siblings is left out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pushkv.model.layout import Shard, pair
from pushkv.reference.facts import Facts, siblings
from pushkv.reference.office import feeders


class Fellow:
    """Made when the handshake fits. ``outgoing`` and ``incoming`` are ``None`` when nothing goes that way between these
    two ranks. ``bases``: addresses of the peer's cache regions.

    Raises ``LayoutError`` that names both sides when the caches cannot be mapped, ``ValueError`` when the
    tensor-parallel sizes do not divide one another.
    """

    __slots__ = ("agent", "bases", "device", "facts", "incarnation", "incoming", "outgoing")

    def __init__(self, incarnation: int, me: Facts, them: Facts) -> None:
        self.incarnation, self.facts = incarnation, them
        self.agent = ""
        self.bases = np.asarray([region.address for region in them.regions], np.int64)
        self.device = them.regions[0].device if them.regions else 0
        self.outgoing = _shard(me, them) if me.role != "decode" and them.role != "prefill" else None
        self.incoming = _shard(them, me) if me.role != "prefill" and them.role != "decode" else None


def _shard(source: Facts, target: Facts) -> Shard | None:
    """What the rank of ``source`` writes into the rank of ``target``."""
    wanted = {view.key for view in target.layout.views}
    ranks = siblings(source)
    feeding = [ranks[rank] for rank in feeders(target.rank, target.tp_size, source.tp_size)]
    mine = [replace(one, views=tuple(view for view in one.views if view.key in wanted)) for one in feeding]
    return next((shard for shard in pair(mine, [target.layout]) if shard.src_rank == source.rank), None)
