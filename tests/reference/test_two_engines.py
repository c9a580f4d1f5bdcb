"""Prompts from engine to engine with their real ranks and offices, for every combination of ranks: the bytes are right,
and nothing is left, whatever is lost or fails; what the traces tell can be played again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pushkv.model.protocol import events as ev
from pushkv.reference import trace

from .channels import until
from .device_like import Event, on_a_device
from .inprocess import BLOCKS, Engine, Exchange, play

pytest.importorskip("torch", reason="the caches are torch tensors")

Pair = tuple[Engine, Engine]
Make = Callable[..., Pair]
LENGTHS = (1, 33, 200)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    return play(monkeypatch)


@pytest.fixture
def pair(exchange: Exchange, tmp_path: Path) -> Iterator[Make]:
    """Makes P and D with so many ranks; at the end their traces are played again."""
    made: list[Engine] = []

    def make(p_tp: int, d_tp: int, *, cpu: bool = False, **more: object) -> Pair:
        blocks = {} if cpu else {"block": 32}
        made.append(Engine(exchange, "P", p_tp, tmp_path, cpu=cpu, **more))
        made.append(Engine(exchange, "D", d_tp, tmp_path, cpu=cpu, **blocks, **more))
        return made[0], made[1]

    yield make
    for engine in made:
        engine.stop()
        assert not any(rank.alive for rank in engine.ranks)
    for path in [path for engine in made for path in engine.traces()]:
        told, expected = trace.replay(path)
        assert told == expected


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


@pytest.mark.parametrize("cpu", [False, True], ids=["rows", "cpu"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 2)])
def test_lengths(pair: Make, p_tp: int, d_tp: int, packed: bool, cpu: bool) -> None:
    """Also with more ranks than the two heads: each is then in several ranks, of which one sends it."""
    both = pair(p_tp, d_tp, cpu=cpu)
    for tokens in LENGTHS:
        assert hand_over(both, f"r{tokens}", tokens, packed) == ("", True)
    assert hand_over(both, "tail", 150, packed, base=64) == ("", True)
    for engine in both:
        engine.emptied()


TWO = [(2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
@pytest.mark.parametrize(("p_tp", "d_tp"), TWO)
def test_lost_frames(pair: Make, exchange: Exchange, p_tp: int, d_tp: int, packed: bool) -> None:
    """A third of all frames is lost: it takes longer, no more."""
    both = pair(p_tp, d_tp, cpu=True)
    assert hand_over(both, "warm", 40, packed) == ("", True)
    dice = random.Random(10 * p_tp + d_tp)
    exchange.drop = lambda frame: dice.random() < 0.33
    for number in range(3):
        assert hand_over(both, f"r{number}", 50 + 30 * number, packed) == ("", True)
    for engine in both:
        engine.emptied()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
@pytest.mark.parametrize("fault", ["raise", "break"])
@pytest.mark.parametrize(("p_tp", "d_tp"), TWO)
def test_writes_that_fail(pair: Make, p_tp: int, d_tp: int, fault: str, packed: bool) -> None:
    """One rank of P cannot write: both sides are told, once, everything comes back, and the next prompt is right."""
    both = pair(p_tp, d_tp)
    assert hand_over(both, "warm", 40, packed) == ("", True)
    broken = both[0].transports[-1]
    broken.fail = fault
    for number in range(2):
        reason, sent = hand_over(both, f"bad{number}", 100, packed)
        assert reason and not sent
    broken.fail = ""
    for engine in both:
        engine.emptied()
    assert hand_over(both, "good", 100, packed) == ("", True)
    for engine in both:
        engine.emptied()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
@pytest.mark.parametrize(("p_tp", "d_tp"), TWO)
def test_slow_writes(pair: Make, p_tp: int, d_tp: int, packed: bool) -> None:
    """The source stays until the last rank has written: P overwrites it as soon as it is told that it may."""
    both = pair(p_tp, d_tp)
    for number, slow in enumerate(both[0].transports):
        slow.delay_s = 0.05 * (1 + number)
    for number in range(2):
        assert hand_over(both, f"slow{number}", 120, packed) == ("", True)
    for engine in both:
        engine.emptied()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_giving_way(pair: Make, p_tp: int, d_tp: int) -> None:
    """A prompt whose prefill has not ended gives its landing memory to one whose has, and lands later; only its tail is
    wanted.
    """
    p, d = pair(p_tp, d_tp, landing_bytes=(4 // d_tp) << 12)
    hosts = Hosts(1)
    source, target = hosts.blocks(p, 100), hosts.blocks(d, 100)
    p.office.tell(ev.Hold("victim", 100))
    p.office.command(ev.Computed("victim", 0, False))
    d.office.arrive("victim", p.address, 68, 100, True)
    assert until(lambda: d.office.ledger.landing_free < d.office.ledger.segments)
    assert hand_over((p, d), "heir", 100, True) == ("", True)
    assert d.office.ledger.counters["gave_way"] == 1
    p.compute("victim", 100, source)
    assert d.scatter("victim", 32, 100, target) == ""
    d.check("victim", 32, 100, target)
    assert p.sent("victim", source, 100)
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("late", [False, True], ids=["done", "enqueued"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_chunks_leave_as_they_are_computed(pair: Make, p_tp: int, d_tp: int, late: bool) -> None:
    """D has everything before P's engine says that the prompt is finished, and P's blocks are free by then."""
    p, d = pair(p_tp, d_tp)
    hosts = Hosts(3)
    source, target = hosts.blocks(p, 200), hosts.blocks(d, 200)
    p.begin("t", 200)
    d.office.arrive("t", p.address, 200, 200, True)
    for tokens in (64, 128, 192, 200):
        p.chunk("t", tokens, source, late=late)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", source, 200)
    p.compute("t", 200, source)  # the engine has learnt it: nobody needs to hear
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "waiting"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_a_preempted_prefill_keeps_what_has_landed(pair: Make, p_tp: int, d_tp: int, landed: bool) -> None:
    """Its blocks are overwritten in the next step: gathers under way are waited for, and those that have not begun
    (here for want of staging memory) read the blocks that it gets next. Nothing is written twice.
    """
    p, d = pair(p_tp, d_tp, staging_bytes=(16 << 12) if landed else (1 << 12))
    if not landed:
        for transport in p.transports:
            transport.delay_s = 0.01
    hosts = Hosts(4)
    blocks = hosts.dice.sample(range(1, BLOCKS), 26)
    first, second, target = (blocks[:13],), (blocks[13:],), hosts.blocks(d, 200)
    p.begin("t", 200)
    d.office.arrive("t", p.address, 200, 200, True)
    p.chunk("t", 64, first)
    p.chunk("t", 128, first)
    if landed:
        assert until(lambda: all(t.posted for t in p.transports))
    p.preempt("t", 128, first)
    p.office.command(ev.Computed("t", 0, False))
    p.chunk("t", 96, second)
    p.chunk("t", 200, second)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", second, 200)
    assert hand_over((p, d), "whole", 200, True) == ("", True)
    for rank in p.ranks:
        assert until(lambda rank=rank: len(rank.records) == 2)
        assert len({record["bytes"] for record in rank.drain_records()}) == 1
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_a_prefill_that_is_aborted_between_chunks(pair: Make, p_tp: int, d_tp: int) -> None:
    """Preempted with a gather that waits, then aborted: everything is answered, nothing is left."""
    p, d = pair(p_tp, d_tp, staging_bytes=1 << 12)
    for transport in p.transports:
        transport.delay_s = 0.01
    hosts = Hosts(5)
    source, target = hosts.blocks(p, 200), hosts.blocks(d, 200)
    p.begin("t", 200)
    d.office.arrive("t", p.address, 200, 200, True)
    p.chunk("t", 128, source)
    p.preempt("t", 128, source)
    p.office.command(ev.Abort("t", "prefill aborted"))
    assert d.scatter("t", 0, 200, target) == "prefill aborted"
    assert not p.sent("t", source, 200)
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_steps_and_gathers_of_a_device(pair: Make, p_tp: int, d_tp: int) -> None:
    """Steps are told of when they are enqueued and compute later: each gather waits for its own on the device, and what
    the fence lets through waits for the gathers.
    """
    p, d = pair(p_tp, d_tp)
    late = [on_a_device(rank) for rank in p.ranks]
    hosts = Hosts(6)
    blocks = hosts.dice.sample(range(1, BLOCKS), 26)
    first, second, target = (blocks[:13],), (blocks[13:],), hosts.blocks(d, 200)
    p.begin("t", 200)
    d.office.arrive("t", p.address, 200, 200, True)

    def step(tokens: int, where: tuple[list[int]]) -> Event:
        p.step += 1
        p.office.blocks("t", where, tokens, p.step)
        p.office.command(ev.Computed("t", tokens, False))
        done = Event()
        for rank in p.ranks:
            rank._mark = lambda: done  # type: ignore[method-assign]
            rank.enqueued(p.step)
        return done

    one = step(64, first)
    assert until(lambda: all(copier.waited for copier in late))  # enqueued behind a step that has not run
    two = step(128, first)
    assert not any(transport.posted for transport in p.transports)
    p.fill("t", 64, first)
    one.set()
    assert until(lambda: all(transport.posted for transport in p.transports))
    p.fill("t", 128, first)
    two.set()
    p.preempt("t", 128, first)
    p.office.command(ev.Computed("t", 0, False))
    three, four = step(96, second), step(200, second)
    p.fill("t", 200, second)
    three.set()
    four.set()
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", second, 200)
    for engine in (p, d):
        engine.emptied()
