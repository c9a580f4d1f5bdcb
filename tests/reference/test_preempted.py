"""A prefill that is preempted while its chunks wait here: for the word that their step is enqueued, or for room in
staging. It keeps nothing from others, and goes on when it is computed again.
"""

from __future__ import annotations

from threading import Event

import pytest

from pushkv.model.protocol import events as ev
from pushkv.reference.ports import Complete, Told

from .channels import until
from .engine_pairs import TWO, Make, computed_again, ended, hand_over, shards, two_lives
from .inprocess import Engine
from .said import chunk, held, wanted

pytest.importorskip("torch", reason="the caches are torch tensors")

RANKS = pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])


def told_of(p: Engine, tokens: int, blocks: tuple[list[int]], *, enqueued: bool = False) -> None:
    """The next step computes the first ``tokens`` tokens of ``t``; every rank has heard of it."""
    p.step += 1
    p.say(chunk("t", blocks, tokens, p.step))
    for rank in p.ranks:
        assert until(lambda rank=rank: rank.sending.prompts["t"].last_step == p.step)
        if enqueued:
            rank.enqueued(p.step)


def granted(p: Engine) -> bool:
    """Every rank of P has D's memory."""
    sent = [shards(rank) for rank in p.ranks]
    return all(each and all(shard.memory is not None for shard in each) for each in sent)


def begun(p: Engine, d: Engine, tokens: int = 200) -> None:
    """``t`` runs at P, and D has granted it memory."""
    p.begin("t", tokens)
    d.say(wanted("t", p.address, tokens, tokens, True))
    assert until(lambda: granted(p))


@RANKS
def test_a_step_that_is_not_enqueued_holds_no_staging(pair: Make, p_tp: int, d_tp: int) -> None:
    """The chunk's step was scheduled and never ran, and the prompt is not computed again: another one leaves."""
    p, d = pair(p_tp, d_tp, staging_bytes=2 << 12)
    first, second, target = two_lives(p, d)
    begun(p, d)
    told_of(p, 200, first)
    assert not any(rank.endpoint.sender.staged_bytes for rank in p.ranks)
    p.preempt("t", 200, first)
    assert hand_over((p, d), "other", 64, True) == ("", True)
    computed_again(p, d, second, target)
    for engine in (p, d):
        engine.emptied()


@RANKS
def test_a_part_that_waits_for_room_is_taken_back(pair: Make, p_tp: int, d_tp: int) -> None:
    """One segment of staging for every rank, and slow writes: what is behind the first part waits when P preempts."""
    p, d = pair(p_tp, d_tp, staging_bytes=1 << 12)
    first, second, target = two_lives(p, d)
    begun(p, d)
    for transport in p.transports:
        transport.delay_s = 0.2
    p.fill("t", 200, first)
    told_of(p, 200, first, enqueued=True)
    for rank in p.ranks:
        assert until(lambda rank=rank: rank.sending.writes_open and rank.sending._waiting)
    p.preempt("t", 200, first)
    for rank in p.ranks:
        assert until(lambda rank=rank: not rank.endpoint.sender.staged_bytes)
        assert not rank.sending._waiting
    assert hand_over((p, d), "other", 64, True) == ("", True)
    computed_again(p, d, second, target)
    for engine in (p, d):
        engine.emptied()


@RANKS
@pytest.mark.parametrize("end", ["aborted", "left"])
def test_what_was_taken_back_can_end(pair: Make, p_tp: int, d_tp: int, end: str) -> None:
    """P's client or D's gives it up while it is queued again: everything is answered, nothing is left."""
    p, d = pair(p_tp, d_tp, staging_bytes=1 << 12)
    first, _, target = two_lives(p, d)
    begun(p, d)
    for transport in p.transports:
        transport.delay_s = 0.05
    p.fill("t", 200, first)
    told_of(p, 200, first, enqueued=True)
    p.preempt("t", 200, first)
    if end == "aborted":
        p.say(ev.Abort("t", "prefill aborted"))
        assert d.scatter("t", 0, 200, target) == "prefill aborted"
    else:
        d.say(ev.Aborted("t"))
        d.until(ev.Fail, "t")
    assert not p.sent("t", first, 200)
    for engine in (p, d):
        engine.emptied()


@RANKS
def test_a_chunk_of_the_step_that_fences_is_kept(pair: Make, p_tp: int, d_tp: int) -> None:
    """A prompt that was preempted between two steps is computed again in the next one, of which the ranks are told
    before that step's fence: what they were told of it is not wiped out.
    """
    p, d = pair(p_tp, d_tp)
    first, second, target = two_lives(p, d)
    begun(p, d)
    p.chunk("t", 64, first)
    p.say(ev.Preempted("t"))
    p.say(ev.Computed("t", 0, False))
    told_of(p, 200, second)
    for rank in p.ranks:
        rank.fence(["t"], p.step)
    p.fill("somebody else", 64, first)
    p.fill("t", 200, second)
    for rank in p.ranks:
        rank.enqueued(p.step)
    ended(p, d, second)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", second, 200)
    for engine in (p, d):
        engine.emptied()


def test_what_a_fence_has_overtaken_is_not_told(pair: Make) -> None:
    """The office of an engine with several ranks is another process: a chunk of which a rank hears after the fence that
    ended it takes no staging.
    """
    p, d = pair(2, 1, staging_bytes=2 << 12)
    first, second, target = two_lives(p, d)
    begun(p, d)
    p.step = 1
    for rank in p.ranks:
        rank.enqueued(1)
        rank.fence(["t"], 2)
    p.say(chunk("t", first, 200, 1))
    assert hand_over((p, d), "other", 64, True) == ("", True)
    p.say(ev.Preempted("t"))
    p.say(ev.Computed("t", 0, False))
    p.chunk("t", 200, second)
    ended(p, d, second)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("t", second, 200)
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("ahead", [0, 1, 2], ids=["in time", "of the preemption", "of the prompt"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO])
def test_a_fence_may_be_ahead_of_the_office(pair: Make, p_tp: int, d_tp: int, ahead: int) -> None:
    """Digests of other prompts keep an office that has a thread of its own. The ranks are fenced before it has come to
    the preemption, or to the prompt itself, whose key nobody knows by then: what they hear later is not gathered.
    """
    p, d = pair(p_tp, d_tp, apart=p_tp == 1)
    assert hand_over((p, d), "other", 64, True) == ("", True)
    first, second, target = two_lives(p, d)
    prompt, preemption = Event(), Event()
    posted = [transport.posted for transport in p.transports]
    d.say(wanted("t", p.address, 200, 200, True))
    p.fill("t", 64, first)
    p.step = 1
    if ahead == 2:
        p.say(held("long", 8, ready=prompt))
    p.say(held("request", 200, chunked=True, key="t"), ev.Computed("request", 0, False))
    p.say(chunk("request", first, 64, 1))
    if ahead == 1:
        assert until(lambda: granted(p))
    if ahead:
        p.say(held("longer", 8, ready=preemption))
    p.say(ev.Preempted("request"), Told(2))
    if ahead == 0:
        assert until(lambda: not p.office.inbox)
    for rank in p.ranks:
        rank.fence(["request"], 2)
    p.fill("somebody else", 64, first)
    for rank in p.ranks:
        rank.enqueued(1)
    prompt.set()
    assert until(lambda: granted(p)) or not ahead
    assert not until(lambda: [transport.posted for transport in p.transports] != posted, patience_s=0.1)
    preemption.set()
    p.say(ev.Computed("request", 0, False))
    p.fill("t", 200, second)
    p.step = 2
    p.say(chunk("request", second, 200, 2))
    for rank in p.ranks:
        rank.enqueued(2)
    p.say(Complete("request", second, 200))
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 0, 200, target)
    assert p.sent("request", second, 200)
    for name in ("long", "longer")[2 - ahead :]:
        p.say(ev.Abort(name, "prefill aborted"))
    for engine in (p, d):
        engine.emptied()
    assert not any(rank.sending._fenced for rank in p.ranks)
