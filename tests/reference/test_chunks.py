"""Chunks from engine to engine: they leave as they are computed, and a preemption or an abort between two of them harms
nobody.
"""

from __future__ import annotations

import random

import pytest

from pushkv.model.protocol import events as ev

from .channels import until
from .device_like import Event, on_a_device
from .engine_pairs import TWO, Hosts, Make, computed_again, ended, hand_over, shards, two_lives
from .inprocess import BLOCKS
from .said import chunk, wanted

pytest.importorskip("torch", reason="the caches are torch tensors")


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_what_was_preempted_gives_way_though_a_part_has_landed(pair: Make, p_tp: int, d_tp: int) -> None:
    """A finished prompt gets its landing memory; it is sent again from its first token, out of other blocks."""
    p, d = pair(p_tp, d_tp, landing_bytes=(8 // d_tp) << 12)
    first, second, target = two_lives(p, d, 2)
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))
    p.chunk("t", 128, first)
    assert until(lambda: all(transport.posted for transport in p.transports))
    p.preempt("t", 128, first)
    assert hand_over((p, d), "heir", 100, True) == ("", True)
    assert d.office.ledger.counters["gave_way"] == 1
    p.say(ev.Computed("t", 0, False))
    for tokens in (96, 200):
        p.chunk("t", tokens, second)
    p.compute("t", 200, second)  # what gave way gets memory when it is finished
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", second, 200)
    for rank in p.ranks:
        assert until(lambda rank=rank: len(rank.records) == 2)
        heir, again = sorted(record["bytes"] for record in rank.drain_records())
        assert again > 2.2 * heir  # 200 tokens, and 128 in vain
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("late", [False, True], ids=["done", "enqueued"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_chunks_leave_as_they_are_computed(pair: Make, p_tp: int, d_tp: int, late: bool) -> None:
    """All of it is in D's memory before P's engine says that the prompt is finished. One rank tells another at once;
    where there are more, the last part is told of when P's engine cannot preempt the prompt any more.
    """
    p, d = pair(p_tp, d_tp)
    hosts = Hosts(3)
    source, target = hosts.blocks(p, 200), hosts.blocks(d, 200)
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))
    for tokens in (64, 128, 192, 200):
        p.chunk("t", tokens, source, late=late)

    def all_written() -> bool:
        sent = [shards(rank) for rank in p.ranks]
        return all(each and all(shard.kept for shard in each) for each in sent)

    if p_tp * d_tp > 1:
        assert until(all_written)
        assert not d.office.news
        p.compute("t", 200, source)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", source, 200)
    if p_tp * d_tp == 1:
        p.compute("t", 200, source)  # the engine has learnt it: nobody needs to hear
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "waiting"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_a_preempted_prefill_keeps_what_has_landed(pair: Make, p_tp: int, d_tp: int, landed: bool) -> None:
    """Its blocks are overwritten in the next step: gathers under way are waited for, and those that have not begun
    (here for want of staging memory) are begun anew from the blocks that it gets next. Nothing is written twice.
    """
    p, d = pair(p_tp, d_tp, staging_bytes=(16 << 12) if landed else (1 << 12))
    if not landed:
        for transport in p.transports:
            transport.delay_s = 0.01
    first, second, target = two_lives(p, d, 4)
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))
    p.chunk("t", 64, first)
    p.chunk("t", 128, first)
    if landed:
        assert until(lambda: all(t.posted for t in p.transports))
    p.preempt("t", 128, first)
    computed_again(p, d, second, target)
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
    d.say(wanted("t", p.address, 200, 200, True))
    p.chunk("t", 128, source)
    p.preempt("t", 128, source)
    p.say(ev.Abort("t", "prefill aborted"))
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
    first, second, target = two_lives(p, d, 6)
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))

    def step(tokens: int, where: tuple[list[int]]) -> Event:
        p.step += 1
        p.say(chunk("t", where, tokens, p.step))
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
    p.say(ev.Computed("t", 0, False))
    three, four = step(96, second), step(200, second)
    p.fill("t", 200, second)
    three.set()
    four.set()
    ended(p, d, second)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", second, 200)
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("seed", range(12))
def test_random_chunks(pair: Make, seed: int) -> None:
    """Several prompts at once, chunks of any length, preemptions and aborts at any time, little staging, slow writes:
    what lands is right, what does not has its verdict, and every block list is answered for.
    """
    dice = random.Random(seed)
    p, d = pair(*dice.choice([(1, 1), (2, 1), (1, 2)]), staging_bytes=dice.choice((2, 4, 16)) << 12)
    if dice.random() < 0.5:
        for rank in p.ranks:
            on_a_device(rank)
    for transport in p.transports:
        transport.delay_s = dice.choice((0.0, 0.004))
    pool = dice.sample(range(1, BLOCKS), BLOCKS - 1)
    live: dict[str, tuple[int, int, tuple[list[int]]]] = {}
    targets, tokens_of, aborted = {}, {}, set()
    for number in range(3):
        tid = f"t{number}"
        tokens_of[tid] = tokens = dice.randrange(20, 160)
        p.begin(tid, tokens)
        live[tid] = (0, tokens, ([pool.pop() for _ in range(-(-tokens // p.block))],))
        targets[tid] = (dice.sample(range(1, BLOCKS), -(-tokens // d.block)),)
        d.say(wanted(tid, p.address, tokens, tokens, True))
    lives = 6
    while live:
        tid = dice.choice(list(live))
        done, tokens, blocks = live[tid]
        chance = dice.random()
        if chance < 0.15 and lives and done:
            lives -= 1
            if dice.random() < 0.5:  # its next step was scheduled, and does not come to run
                p.step += 1
                p.say(chunk(tid, blocks, tokens, p.step))
            p.preempt(tid, done, blocks)
            enough = len(pool) >= len(blocks[0])
            spare = [pool.pop() for _ in blocks[0]] if enough else dice.sample(blocks[0], len(blocks[0]))
            if enough:
                pool += blocks[0]
            p.say(ev.Computed(tid, 0, False))
            live[tid] = (0, tokens, (spare,))
        elif chance < 0.2 and lives:
            lives -= 1
            p.say(ev.Abort(tid, "prefill aborted"))
            p.until(ev.Release, tid)
            p.fill("somebody else", tokens, blocks)
            aborted.add(tid)
            del live[tid]
        else:
            new = min(tokens, done + dice.randrange(1, 80))
            told = tokens if new == tokens else new // 32 * 32
            if told:
                p.chunk(tid, told, blocks, late=dice.random() < 0.3)
            live[tid] = (new, tokens, blocks)
            if new == tokens:
                p.compute(tid, tokens, blocks)
                p.until(ev.Release, tid)
                p.fill("somebody else", tokens, blocks)
                del live[tid]
    for tid, target in targets.items():
        reason = d.scatter(tid, 0, tokens_of[tid], target)
        assert reason == ("prefill aborted" if tid in aborted else "")
        if not reason:
            d.check(tid, 0, tokens_of[tid], target)
    for engine in (p, d):
        engine.emptied()


def test_a_fence_may_overtake_the_words_of_the_step_before(pair: Make) -> None:
    """The office of an engine with several ranks is another process: what it says of a chunk comes after the fence that
    ends it, and is not believed.
    """
    p, d = pair(2, 1)
    first, second, target = two_lives(p, d, 7)
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))
    assert until(lambda: d.office.ledger.landing_free < d.office.ledger.segments)
    p.step = 1
    for rank in p.ranks:
        rank.enqueued(1)
        rank.fence(["t"], 2)
    p.fill("somebody else", 64, first)
    p.say(chunk("t", first, 64, 1))
    assert not until(lambda: any(transport.posted for transport in p.transports), patience_s=0.2)
    p.say(ev.Preempted("t"))
    computed_again(p, d, second, target)
    for engine in (p, d):
        engine.emptied()


def test_a_prompt_that_is_computed_is_not_behind_one_that_is_not(pair: Make) -> None:
    """D asks for the first prompt when its step is over, and the second's gather waits for the next step already."""
    p, d = pair(1, 1)
    late = on_a_device(p.ranks[0])
    hosts = Hosts(9)
    sources = {name: hosts.blocks(p, 60) for name in ("first", "second")}
    targets = {name: hosts.blocks(d, 60) for name in sources}
    for name in sources:
        p.begin(name, 60)
    d.say(wanted("second", p.address, 60, 60, True))
    steps = []
    for number, (name, source) in enumerate(sources.items(), 1):
        event = Event()
        steps.append(event)
        p.say(chunk(name, source, 60, number))
        p.ranks[0]._mark = lambda event=event: event  # type: ignore[method-assign]
        p.ranks[0].enqueued(number)
    assert until(lambda: late.waited == 1)
    p.fill("first", 60, sources["first"])
    steps[0].set()
    d.say(wanted("first", p.address, 60, 60, True))
    assert d.scatter("first", 0, 60, targets["first"]) == ""
    assert not steps[1].query()
    p.fill("second", 60, sources["second"])
    steps[1].set()
    assert d.scatter("second", 0, 60, targets["second"]) == ""
    for name, source in sources.items():
        d.check(name, 0, 60, targets[name])
        assert p.sent(name, source, 60)
    for engine in (p, d):
        engine.emptied()


def test_a_chunk_waits_for_its_own_step_only(pair: Make) -> None:
    """Also when it waits for staging memory while the next step is told of: that one has not run yet."""
    p, d = pair(1, 1, staging_bytes=1 << 12)
    on_a_device(p.ranks[0])
    hosts = Hosts(8)
    source, target = hosts.blocks(p, 200), hosts.blocks(d, 200)
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))
    p.fill("t", 128, source)
    for number, tokens in enumerate((128, 200), 1):
        event = Event()
        p.say(chunk("t", source, tokens, number))
        p.ranks[0]._mark = lambda event=event: event  # type: ignore[method-assign]
        p.ranks[0].enqueued(number)
        if number == 1:
            event.set()

    def first_chunk_is_sent() -> bool:
        """All its whole parts, that is: the one that reaches into the second chunk must wait."""
        return any(shard.done and shard.planned >= 112 for shard in shards(p.ranks[0]))

    assert until(first_chunk_is_sent)
    assert not event.query()
    p.fill("t", 200, source)
    event.set()
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", source, 200)
    for engine in (p, d):
        engine.emptied()
