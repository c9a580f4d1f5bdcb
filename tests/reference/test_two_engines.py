"""Prompts from engine to engine with their real ranks and offices, for every combination of ranks: the bytes are right,
and nothing is left, whatever is lost or fails; what the traces tell can be played again.
"""

from __future__ import annotations

import random

import pytest

from pushkv.model.protocol import events as ev

from .channels import until
from .engine_pairs import TWO, Hosts, Make, hand_over
from .inprocess import Exchange
from .said import held, wanted

pytest.importorskip("torch", reason="the caches are torch tensors")

LENGTHS = (1, 33, 200)


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
    sent, received = (
        sum(rank.counters.get(name, 0) for rank in engine.ranks)
        for name, engine in zip(("bytes_sent", "bytes_received"), both, strict=True)
    )
    assert sent == received > 0


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
def test_a_lease_is_a_finished_prompt_that_nobody_has_asked_for(pair: Make, packed: bool) -> None:
    p, d = pair(1, 1)
    hosts, rank = Hosts(2), p.ranks[0]
    source, target = hosts.blocks(p, 100), hosts.blocks(d, 100)
    p.say(held("t", 100))
    p.say(ev.Computed("t", 0, False))
    assert until(lambda: "t" in rank.sending.prompts)
    assert rank.gauges["leases"] == 0, "it is still computed"
    p.compute("t", 100, source)
    assert until(lambda: rank.gauges["leases"] == 1)
    assert d.load("t", p, 0, 100, target, packed) == ""
    assert p.sent("t", source, 100)
    assert rank.gauges["leases"] == 0
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
def test_a_scheduler_whose_only_rank_is_in_another_process(pair: Make, packed: bool) -> None:
    """One GPU under vLLM's multiprocess executor, as with data parallelism."""
    both = pair(1, 1, apart=True)
    assert hand_over(both, "r", 150, packed) == ("", True)
    for engine in both:
        engine.emptied()


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
    p.say(held("victim", 100))
    p.say(ev.Computed("victim", 0, False))
    d.say(wanted("victim", p.address, 68, 100, True))
    assert until(lambda: d.office.ledger.landing_free < d.office.ledger.segments)
    assert hand_over((p, d), "heir", 100, True) == ("", True)
    assert d.office.ledger.counters["gave_way"] == 1
    p.compute("victim", 100, source)
    assert d.scatter("victim", 32, 100, target) == ""
    d.check("victim", 32, 100, target)
    assert p.sent("victim", source, 100)
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1)])
def test_scatters_planned_as_parts_come(pair: Make, p_tp: int, d_tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, whose kernel is interpreted here (on one thread: it cannot be on more). A local prefix that has
    grown meanwhile is left alone.
    """
    pytest.importorskip("triton", reason="the kernel is Triton's")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from pushkv.reference.device_copies import DeviceCopier

    p, d = pair(p_tp, d_tp, part_bytes=4096)
    for rank, (_, regions) in zip(d.ranks, d.views, strict=True):
        pool = rank.landing.copier._pool
        rank.landing.copier = DeviceCopier(regions, pool, d.setup.settings.segment_bytes)  # type: ignore[assignment]
    ahead = []
    real = DeviceCopier.scatter_ahead
    monkeypatch.setattr(DeviceCopier, "scatter_ahead", lambda *a: ahead.append(len(a[1])) or real(*a))
    assert hand_over((p, d), "whole", 200, True) == ("", True)
    assert hand_over((p, d), "tail", 150, True, base=64) == ("", True)
    assert len(ahead) == 2 * d_tp and min(ahead) > 1
    hosts = Hosts(9)
    source, target = hosts.blocks(p, 200), hosts.blocks(d, 200)
    p.prefill("grown", 200, source)
    d.say(wanted("grown", p.address, 200, 200, True))
    d.fill("before", 200, target)
    assert d.scatter("grown", 70, 200, target) == ""
    d.check("grown", 70, 200, target)
    d.check("before", 0, 64, target)
    assert p.sent("grown", source, 200)
    for engine in (p, d):
        engine.emptied()
