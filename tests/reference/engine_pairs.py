"""P and D with their real ranks and offices, for the tests of whole prompts, of chunks and of preemptions."""

from __future__ import annotations

import random
from collections.abc import Callable

from pushkv.model.protocol import events as ev
from pushkv.model.protocol.outgoing import Shard
from pushkv.reference.ports import BlockIds
from pushkv.reference.rank import Rank

from .inprocess import BLOCKS, Engine

Pair = tuple[Engine, Engine]
Make = Callable[..., Pair]
TWO = [(2, 1), (1, 2), (2, 2)]


class Hosts:
    """Hands out blocks, in no order."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def blocks(self, engine: Engine, tokens: int) -> tuple[list[int]]:
        return (self.dice.sample(range(1, BLOCKS), -(-tokens // engine.block)),)


def hand_over(pair: Pair, tid: str, tokens: int, packed: bool, base: int = 0) -> tuple[str, bool]:
    """(why D does not have it, whether P has sent it); what D has is right."""
    p, d = pair
    hosts = Hosts(tokens)
    source, target = hosts.blocks(p, tokens), hosts.blocks(d, tokens)
    p.prefill(tid, tokens, source)
    d.fill("before", base, target)
    reason = d.load(tid, p, base, tokens, target, packed)
    if not reason:
        d.check(tid, base, tokens, target)
        d.check("before", 0, base, target)
    return reason, p.sent(tid, source, tokens)


def two_lives(p: Engine, d: Engine, seed: int = 11) -> tuple[tuple[list[int]], tuple[list[int]], tuple[list[int]]]:
    """P's blocks for 200 tokens before and after a preemption, and D's."""
    hosts, each = Hosts(seed), -(-200 // p.block)
    blocks = hosts.dice.sample(range(1, BLOCKS), 2 * each)
    return (blocks[:each],), (blocks[each:],), hosts.blocks(d, 200)


def shards(rank: Rank) -> list[Shard]:
    """Of the transfer that ``rank`` sends, when it knows all of them, else none. The rank goes on meanwhile."""
    for transfer in list(rank.endpoint.sender._transfers.values()):
        found = list(transfer.shards.values())
        if len(found) == transfer.fanout:
            return found
    return []


def ended(p: Engine, d: Engine, source: BlockIds) -> None:
    """P's engine learns that the prefill of "t" has ended. Where one rank sends to one, D does not wait for that."""
    if p.tp * d.tp > 1:
        p.compute("t", 200, source)


def computed_again(p: Engine, d: Engine, source: BlockIds, target: BlockIds) -> None:
    """What P has preempted of the 200 tokens of "t" is computed in ``source``, in two chunks; what D has is right."""
    p.say(ev.Computed("t", 0, False))
    p.chunk("t", 96, source)
    p.chunk("t", 200, source)
    ended(p, d, source)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", source, 200)
