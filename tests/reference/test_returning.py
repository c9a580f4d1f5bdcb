"""Keys that come again: while the books or a write of the first transfer are still open, in every way that the machines
refuse it. Both hosts are told of every request how it ends, once, their memory comes back, and the older goes on.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest

from pushkv.model.protocol import events as ev
from pushkv.reference.handles import Handles
from pushkv.reference.ports import BlockIds, Complete, Load, Told

from .channels import until
from .engine_pairs import Hosts, Make, hand_over
from .inprocess import BLOCKS, Engine
from .said import Named, chunk, held, wanted

pytest.importorskip("torch", reason="the caches are torch tensors")

LONG_S = 3600.0


def end_writes(p: Engine) -> None:
    """What hangs goes through."""
    for transport in p.transports:
        transport.delay_s = 0.0
    for rank in p.ranks:
        for posted in list(rank.sending._writes.values()):
            posted.write.due = 0.0


def refused_at_once(p: Engine, request_id: str, source: BlockIds) -> None:
    """P computes "t" as a plain prompt: when it has ended, its blocks are P's."""
    p.say(held(request_id, 100, key="t"), ev.Computed(request_id, 0, False), Complete(request_id, source, 100))
    assert isinstance(p.until(ev.Release, request_id), ev.Release)
    assert not p.until(ev.Finished, request_id).ok


def test_what_stands_behind_a_refused_event_is_heard_in_the_same_step(pair: Make) -> None:
    """A part is packed in the moment in which the machines refuse the begin of another prompt."""
    p, d = pair(1, 1)
    p.say(held("open", 40))
    (rank,) = p.ranks
    assert until(lambda: bool(rank.sending.prompts))
    (key,) = rank.sending.prompts
    packed, behind = rank.sending._packed, []

    def refused_before(handle: int, now: float) -> None:
        behind.append(handle)
        rank.pending.append(ev.Begin(key, 40, 1, False, True))
        packed(handle, now)

    rank.sending._packed = refused_before  # type: ignore[method-assign]
    assert hand_over((p, d), "other", 100, True) == ("", True)
    assert behind and rank.counters["faults:refused event"] == len(behind)


@pytest.mark.parametrize("again", ["t", "another id"])
@pytest.mark.parametrize("apart", [False, True])
def test_while_a_write_hangs_that_has_its_verdict(pair: Make, apart: bool, again: str) -> None:
    p, d = pair(1, 1, apart=apart, write_s=0.3)
    assert hand_over((p, d), "other", 40, True) == ("", True)
    source, target = Hosts(5).blocks(p, 100), Hosts(6).blocks(d, 100)
    p.transports[0].delay_s = LONG_S
    d.say(wanted("t", p.address, 100, 100, True))
    p.prefill("t", 100, source)
    assert not p.sent("t", source, 100)
    for _ in range(2):
        refused_at_once(p, again, source)
    assert p.ranks[0].sending.writes_open == 1
    p.transports[0].delay_s = 0.0
    assert hand_over((p, d), "beside", 40, True) == ("", True)
    end_writes(p)
    assert d.scatter("t", 0, 100, target) == "write took too long"
    d.emptied()
    d.say(wanted(again, p.address, 100, 100, True, key="t"))
    assert d.scatter(again, 0, 100, target) == "write took too long"
    refused_at_once(p, again, source)
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("d_tp", [1, 2])
def test_while_another_rank_still_writes(pair: Make, d_tp: int) -> None:
    """The first rank's write breaks: that is the verdict, and nothing is read any more. The second one's hangs."""
    p, d = pair(2, d_tp)
    assert hand_over((p, d), "other", 40, True) == ("", True)
    source, target = Hosts(5).blocks(p, 100), Hosts(6).blocks(d, 100)
    for transport in p.transports:
        transport.delay_s = LONG_S
    d.say(wanted("t", p.address, 100, 100, True))
    p.prefill("t", 100, source)
    assert until(lambda: all(rank.sending.writes_open for rank in p.ranks))
    for posted in list(p.ranks[0].sending._writes.values()):
        posted.write.state = "broken"
    assert not p.sent("t", source, 100)
    for _ in range(2):
        refused_at_once(p, "t", source)
    assert p.ranks[1].sending.writes_open and p.office.ledger.open() == (0, 1)
    end_writes(p)
    assert d.scatter("t", 0, 100, target) == "write failed"
    assert until(lambda: p.office.ledger.open() == (0, 0))
    refused_at_once(p, "t", source)
    for engine in (p, d):
        engine.emptied()


# ---------------------------------------------------------------- what the machines refuse, whatever the reason


def test_a_prompt_that_the_ledger_does_not_hold(pair: Make) -> None:
    p, _ = pair(2, 1)
    source = Hosts(5).blocks(p, 100)
    p.say(held("older", 100, key="t"))
    assert until(lambda: p.office.ledger.open() == (0, 1))
    p.office._handles.sent("t")
    refused_at_once(p, "t", source)
    assert p.office.ledger.open() == (0, 1) and p.office.counters["requests_refused:ambiguous"] == 1
    assert all(until(lambda rank=rank: "t" in rank.sending.prompts) for rank in p.ranks)


def test_a_prompt_that_the_ledger_does_not_expect(pair: Make) -> None:
    p, d = pair(1, 2)
    d.say(wanted("older", p.address, 100, 100, True, key="t"))
    assert until(lambda: d.office.ledger.expects("t"))
    d.office._handles.received("t")
    d.say(wanted("t", p.address, 100, 100, True))
    assert d.until(ev.Ready, "t") == ev.Fail("t", "t arrived before", True)
    assert d.office.ledger.expects("t") and not len(d.office._handles)


def test_memory_that_the_ledger_does_not_take(pair: Make) -> None:
    p, d = pair(1, 2)
    d.say(wanted("t", p.address, 100, 100, True), ev.Allocated("t", lambda: ([1, 2, 3, 4],)))
    assert isinstance(d.until(ev.Ready, "t"), ev.Fail)
    assert isinstance(d.until(ev.Free, "t"), ev.Free)
    d.emptied()


def test_a_registration_that_a_rank_does_not_take(pair: Make) -> None:
    """Its receiver has one of that id, of which the books know nothing."""
    p, d = pair(1, 2)
    assert hand_over((p, d), "other", 40, True) == ("", True)
    d.ranks[1].receive(ev.Expect("t", (("P", 0),), 100, True, 2))
    assert until(lambda: d.ranks[1].endpoint.receiver.sizes()["transfers"] == 1)
    d.say(wanted("t", p.address, 100, 100, True))
    assert d.until(ev.Ready, "t").reason == "t is open: settle one attempt before the next"
    d.emptied()


@pytest.mark.parametrize("p_tp", [1, 2])
@pytest.mark.parametrize("word", [Complete("t", ([1, 2, 3, 4],), 99), ev.Preempted("t")], ids=["length", "finished"])
def test_a_word_that_the_machines_do_not_believe_ends_its_prompt(pair: Make, p_tp: int, word: Any) -> None:
    p, d = pair(p_tp, 1)
    if isinstance(word, Complete):
        p.say(held("t", 100), ev.Computed("t", 0, False), word)
    else:
        p.prefill("t", 100, Hosts(5).blocks(p, 100))
        p.say(word)
    assert isinstance(p.until(ev.Release, "t"), ev.Release) and p.until(ev.Finished, "t").reason == "refused"
    d.say(wanted("t", p.address, 100, 100, True))
    assert d.until(ev.Ready, "t").reason == "refused"
    for engine in (p, d):
        engine.emptied()


def test_an_identity_that_fails_in_a_way_of_its_own(pair: Make) -> None:
    """Whatever a client sends."""

    class Odd(Named):
        def key(self) -> str:
            raise RuntimeError("no key")

    p, d = pair(2, 1)
    source = Hosts(5).blocks(p, 100)
    word = held("t", 100)
    word.identity.__class__ = Odd
    p.say(word, ev.Computed("t", 0, False), Complete("t", source, 100))
    assert not p.sent("t", source, 100)
    asked = wanted("t", p.address, 100, 100, True)
    d.say(type(asked)("t", lambda: Odd("t"), asked.params, 100, 100, True))  # type: ignore[arg-type, return-value]
    assert d.until(ev.Ready, "t") == ev.Fail("t", "no key", True)
    for engine in (p, d):
        engine.emptied()


def test_a_request_id_that_vllm_uses_again() -> None:
    """For another prompt, while the books have the first one."""
    handles, one, two = Handles(), Named("a", "first"), Named("a", "second")
    for sends in (False, True):
        assert handles.add("a", one, sends) == ""  # type: ignore[arg-type]
        if sends:
            for news in (ev.Finished("first", False, ""), ev.Release("first")):
                assert handles.outward(news).transfer_id == "a"
        assert handles.add("a", two, sends) == ""  # type: ignore[arg-type]
        handles.sent("first") if sends else handles.received("first")
        assert handles.inward(ev.Abort("a", "")).transfer_id == "second"
        assert handles.outward(ev.Release("second") if sends else ev.Ready("second", 0)).transfer_id == "a"
        if not sends:
            handles.received("second")
            assert len(handles) == 0


# ---------------------------------------------------------------- at random


@dataclass
class Life:
    """A prefill: ``told``, once it may have been gathered."""

    name: str
    key: str
    blocks: tuple[list[int]]
    done: int = 0
    told: bool = False


@dataclass
class Walk:
    """Keys that are tried again and again, on both sides and at any time. ``tokens``: of each."""

    p: Engine
    d: Engine
    dice: random.Random
    tokens: int = 96
    lives: dict[str, Life] = field(default_factory=dict)
    waiting: dict[str, tuple[str, BlockIds]] = field(default_factory=dict)
    heard: Counter[tuple[str, type]] = field(default_factory=Counter)
    begun: list[str] = field(default_factory=list)
    gates: list[Event] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    count: int = 0
    keys: int = 0

    def __post_init__(self) -> None:
        each = self.tokens // self.p.block
        ids = self.dice.sample(range(1, BLOCKS), BLOCKS - 1)
        self.free = [(ids[at * each : (at + 1) * each],) for at in range(len(ids) // each)]
        self.holding: dict[str, tuple[list[int]]] = {}

    def name(self) -> str:
        self.count += 1
        return f"request {self.count}"

    def listen(self) -> None:
        while self.p.office.news:
            news: Any = self.p.office.news.popleft()
            self.heard[news.transfer_id, type(news)] += 1
            if isinstance(news, ev.Release) and news.transfer_id in self.holding:
                self.give(self.holding.pop(news.transfer_id))
        while self.d.office.news:
            news = self.d.office.news.popleft()
            key, blocks = self.waiting.pop(news.transfer_id)  # of each, one is heard
            if isinstance(news, ev.Ready) and news.transfer_id not in self.left:
                load = Load(news.transfer_id, key, blocks, 0, self.tokens)
                for loading in [rank.scatter([load]) for rank in self.d.ranks]:
                    assert not loading.wait()
                self.d.check(key, 0, self.tokens, blocks)

    def give(self, blocks: tuple[list[int]]) -> None:
        self.p.fill("somebody else", self.tokens, blocks)
        self.free.append(blocks)

    def move(self, move: str) -> None:
        p, d, dice = self.p, self.d, self.dice
        if move == "dispatch" and len(self.lives) < 4:
            self.keys += 1  # what was handed over is not again: there must be new ones
            self.prefill(f"k{self.keys}")
            self.decode(f"k{self.keys}")
        elif move == "again" and len(self.lives) < 5:
            hanging = [posted.transfer_id for rank in p.ranks for posted in list(rank.sending._writes.values())]
            key = dice.choice(hanging or [f"k{self.keys - dice.randrange(3)}"])
            self.decode(key) if dice.random() < 0.3 else self.prefill(key)
        elif move == "hang":
            for transport in p.transports:
                transport.delay_s, transport.fail = dice.choice([(LONG_S, ""), (0.0, "break"), *[(0.0, "")] * 3])
        elif move == "leave" and self.waiting:
            self.left.add(dice.choice(list(self.waiting)))
            d.say(*[ev.Aborted(name) for name in self.left & self.waiting.keys()])
        elif move == "end writes":
            end_writes(p)
        elif move == "busy" and p.tp > 1:
            self.busy()
        elif move == "done" and self.gates:
            self.gates.pop(0).set()
        elif move in ("chunk", "preempt", "abort") and self.lives:
            getattr(self, move)(dice.choice(list(self.lives.values())))
        elif move == "behind" and p.tp > 1 and (lives := [life for life in self.lives.values() if life.done < 64]):
            life = dice.choice(lives)
            self.busy()
            self.chunk(life)
            self.busy()
            self.preempt(life)
            self.move("done")

    def prefill(self, key: str) -> None:
        if not self.free:
            return  # all are held
        life = Life(self.name(), key, self.free.pop(self.dice.randrange(len(self.free))))
        self.lives[life.name] = life
        self.begun.append(life.name)
        self.p.say(held(life.name, self.tokens, chunked=True, key=key), ev.Computed(life.name, 0, False))

    def decode(self, key: str) -> None:
        name = self.name()
        self.waiting[name] = key, Hosts(self.count).blocks(self.d, self.tokens)
        self.d.say(wanted(name, self.p.address, self.tokens, self.tokens, True, key=key))

    def busy(self) -> None:
        """P's office makes the digest of a long prompt; what is said from now on it hears later."""
        self.gates.append(Event())
        self.begun.append(self.name())
        self.p.say(held(self.begun[-1], 8, ready=self.gates[-1]), ev.Abort(self.begun[-1], ""))

    def chunk(self, life: Life) -> None:
        p = self.p
        life.done += 32
        life.told = True
        p.step += 1
        p.fill(life.key, life.done, life.blocks)
        p.say(chunk(life.name, life.blocks, life.done, p.step))
        for rank in p.ranks:
            rank.enqueued(p.step)
        if life.done == self.tokens:
            p.say(Complete(life.name, life.blocks, self.tokens))
            self.end(life)

    def preempt(self, life: Life) -> None:
        p = self.p
        p.say(ev.Preempted(life.name), Told(p.step + 1))
        for rank in p.ranks:
            rank.fence([life.name], p.step + 1)
        self.give(life.blocks)
        life.blocks, life.done = self.free.pop(self.dice.randrange(len(self.free))), 0
        p.say(ev.Computed(life.name, 0, False))

    def abort(self, life: Life) -> None:
        self.p.say(ev.Abort(life.name, "prefill aborted"))
        self.end(life)

    def end(self, life: Life) -> None:
        """vLLM has done with it: what may be read is held."""
        del self.lives[life.name]
        if not life.told or self.heard[life.name, ev.Release]:
            self.give(life.blocks)
        else:
            self.holding[life.name] = life.blocks

    def finish(self) -> None:
        p, d = self.p, self.d
        while self.gates:
            self.gates.pop(0).set()
        for life in list(self.lives.values()):
            self.abort(life)
        for transport in p.transports:
            transport.fail = ""
        end_writes(p)

        def all_told() -> bool:
            self.listen()
            kinds = ev.Finished, ev.Release
            return not self.waiting and all(self.heard[name, kind] for name in self.begun for kind in kinds)

        assert until(all_told)
        assert not self.holding and set(self.heard.values()) <= {1}
        for engine in (p, d):
            engine.emptied()


MOVES = {
    "dispatch": 6, "again": 5, "chunk": 18, "preempt": 3, "abort": 0.5, "leave": 0.5, "hang": 3, "end writes": 2,
    "busy": 1, "done": 6, "behind": 4,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
def test_at_random(pair: Make, seed: int) -> None:
    dice = random.Random(seed)
    tp, write_s = [(2, 1), (1, 1), (2, 2), (2, 1)][seed % 4], dice.choice((0.1, 30.0))
    p, d = pair(*tp, write_s=write_s, wait_s=5.0, orphan_s=1.0, lease_s=2.0)
    walk = Walk(p, d, dice)
    for move in dice.choices(list(MOVES), list(MOVES.values()), k=120):
        walk.move(move)
        walk.listen()
        if dice.random() < 0.3:
            until(lambda: False, patience_s=0.02)
    walk.finish()
