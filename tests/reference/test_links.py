"""A transfer comes over several links: what they bring is all that is needed, or it is refused; what has come stays,
whatever becomes of its link meanwhile; and a link keeps a socket while something is open on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pushkv.model.protocol import events as ev
from pushkv.reference import meeting
from pushkv.reference.fellow import Fellow, heads
from pushkv.reference.ports import Address

from .channels import until
from .engine_pairs import Hosts, Make, hand_over
from .inprocess import Channel, Engine, Exchange, Link
from .said import wanted

pytest.importorskip("torch", reason="the caches are torch tensors")

PATHS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
WRONG = [(2, 1, 1), (4, 2, 2), (4, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 4), (2, 4, 4)]


def said(engine: Engine, tp_size: int) -> Any:
    """``engine``, as a router sees it that takes it for another size."""
    return SimpleNamespace(address=Address(engine.name, engine.address.host, engine.address.port, tp_size))


@PATHS
@pytest.mark.parametrize(("p_tp", "d_tp", "told"), WRONG)
def test_a_router_that_names_another_size(pair: Make, p_tp: int, d_tp: int, told: int, packed: bool) -> None:
    """It is refused at once, with both numbers, and costs nothing else."""
    p, d = pair(p_tp, d_tp, lease_s=3.0)
    hosts = Hosts(5)
    source, target = hosts.blocks(p, 100), hosts.blocks(d, 100)
    p.prefill("t", 100, source)
    d.fill("somebody else", 100, target)
    assert (
        d.load("t", said(p, told), 0, 100, target, packed)
        == f"the request says tp_size {told} of 'P', which has {p_tp}"
    )
    d.check("somebody else", 0, 100, target)
    d.emptied()
    assert not p.sent("t", source, 100)
    assert hand_over((p, d), "next", 100, packed) == ("", True)
    for engine in (p, d):
        engine.emptied()


def test_a_prompt_that_is_not_needed_may_be_told_to_the_wrong_ranks(pair: Make) -> None:
    p, d = pair(2, 1, lease_s=1.0)
    hosts = Hosts(5)
    source = hosts.blocks(p, 100)
    p.prefill("t", 100, source)
    d.say(wanted("t", said(p, 1).address, 0, 100, True))
    assert isinstance(d.until(ev.Ready, "t"), ev.Ready)
    d.say(ev.Loaded("t"))
    p.sent("t", source, 100)
    for engine in (p, d):
        engine.emptied()


@PATHS
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_an_engine_that_comes_back_with_another_size(
    exchange: Exchange, tmp_path: Path, before: int, after: int, packed: bool
) -> None:
    """Under the same name. Whichever of the two a request means: what is loaded is right, and in the end it is."""
    d = Engine("D", 1, tmp_path, block=32, fabric_drain_s=0.2)
    (tmp_path / "old").mkdir()
    old = Engine("P", before, tmp_path / "old", block=32)
    assert hand_over((old, d), "old", 100, packed) == ("", True)
    old.stop()
    exchange.transports.clear()
    (tmp_path / "new").mkdir()
    p = Engine("P", after, tmp_path / "new", block=32, lease_s=2.0)
    hosts = Hosts(3)
    loaded = {before: 0, after: 0}
    reasons = []
    end = time.monotonic() + 30.0
    number = 0
    while not loaded[after] and time.monotonic() < end:
        for told in (before, after):
            number += 1
            source, target = hosts.blocks(p, 100), hosts.blocks(d, 100)
            p.prefill(f"t{number}", 100, source)
            reason = d.load(f"t{number}", said(p, told), 0, 100, target, packed)
            if not reason:
                d.check(f"t{number}", 0, 100, target)
                loaded[told] += 1
            reasons.append(reason)
            p.sent(f"t{number}", source, 100)
    assert loaded[after] and not loaded[before], reasons
    for engine in (p, d):
        engine.emptied()
        engine.stop()


@PATHS
@pytest.mark.parametrize(("p_tp", "d_tp", "told"), [(2, 1, 1), (4, 2, 2)])
def test_what_came_is_compared_with_what_is_needed(
    pair: Make, monkeypatch: pytest.MonkeyPatch, p_tp: int, d_tp: int, told: int, packed: bool
) -> None:
    """Whatever the links say: here nobody has looked at them."""
    monkeypatch.setattr(Fellow, "misnamed", lambda *arguments: "")
    p, d = pair(p_tp, d_tp, lease_s=3.0)
    hosts = Hosts(5)
    source, target = hosts.blocks(p, 100), hosts.blocks(d, 100)
    p.prefill("t", 100, source)
    reason = d.load("t", said(p, told), 0, 100, target, packed)
    assert reason.startswith("ranks ") and " of the " in reason, reason
    d.emptied()
    p.sent("t", source, 100)
    assert hand_over((p, d), "next", 100, packed) == ("", True)
    for engine in (p, d):
        engine.emptied()


@pytest.mark.parametrize("cpu", [False, True], ids=["rows", "cpu"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (4, 2), (1, 4)])
def test_each_rank_brings_its_heads(pair: Make, p_tp: int, d_tp: int, cpu: bool) -> None:
    """Each head comes from one of them, and all of them come."""
    p, d = pair(p_tp, d_tp, cpu=cpu)
    for rank in d.ranks:
        covers = [Fellow(1, rank.facts, one.facts).covers for one in p.ranks]
        every = heads(rank.facts.layout)
        assert sum(one.bit_count() for one in covers) == every
        assert sum(covers) == (1 << every) - 1
        assert not Fellow(1, rank.facts, replace(p.ranks[0].facts, role="decode")).covers


@PATHS
@pytest.mark.parametrize("way", ["proven gone", "forgotten", "slept"])
def test_a_link_that_is_gone_when_the_other_lands(pair: Make, way: str, packed: bool) -> None:
    """Rank 0 of P has sent all; then its link is idle, and may be forgotten for another's, before rank 1 has."""
    p, d = pair(2, 1, fabric_drain_s=0.1)
    assert hand_over((p, d), "warm", 40, packed) == ("", True)
    hosts = Hosts(5)
    source, target = hosts.blocks(p, 100), hosts.blocks(d, 100)
    p.transports[1].delay_s = 1.0
    p.prefill("t", 100, source)
    d.say(wanted("t", p.address, 100, 100, packed))
    if not packed:
        assert isinstance(d.until(ev.Admit, "t"), ev.Admit)
        d.say(ev.Allocated("t", lambda: target))
    rank, first = d.ranks[0], ("P", 0)
    assert until(lambda: "t" in rank.landing.inbound and first in rank.landing.inbound["t"].brought)
    assert until(lambda: not rank.endpoint.busy(first)) and rank.endpoint.busy(("P", 1))
    if way == "proven gone":
        rank.receive(ev.ProcessGone(first, rank.fellows[first].incarnation))
    elif way == "forgotten":
        object.__setattr__(rank.settings, "links", 2)
        rank.receive(ev.Greet(("Q", 0)))
    if way != "slept":
        assert until(lambda: first not in rank.fellows)
    if packed:
        assert d.scatter("t", 0, 100, target) == ""
    else:
        assert isinstance(d.until(ev.Ready, "t"), ev.Ready)
        d.say(ev.Loaded("t"))
    d.check("t", 0, 100, target)
    assert p.sent("t", source, 100)
    object.__setattr__(rank.settings, "links", 1024)
    p.transports[1].delay_s = 0.0
    assert hand_over((p, d), "next", 100, packed) == ("", True)
    for engine in (p, d):
        engine.emptied()


def test_a_rank_says_what_is_open(pair: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of links on which nothing is open may be closed: the rank says which, and closes the forgotten."""
    monkeypatch.setattr(meeting, "TRIM_S", 0.0)
    told: dict[str, list[Any]] = {"open": [], "closed": []}
    links = [("P", 0), ("P", 1)]

    def trim(channel: Channel, open_on: Callable[[Link], bool]) -> None:
        if channel.me == ("D", 0):
            told["open"].append([open_on(link) for link in links])

    def close_link(channel: Channel, link: Link) -> None:
        if channel.me == ("D", 0):
            told["closed"].append(link)

    monkeypatch.setattr(Channel, "trim", trim)
    monkeypatch.setattr(Channel, "close_link", close_link)
    p, d = pair(2, 1)
    p.transports[1].delay_s = 0.2
    assert hand_over((p, d), "t", 100, True) == ("", True)
    rank = d.ranks[0]
    rank.wake()
    assert until(lambda: told["open"][-1] == [False, False])
    assert [True, True] in told["open"] and [False, True] in told["open"] and not told["closed"]
    object.__setattr__(rank.settings, "links", 2)
    rank.receive(ev.Greet(("Q", 0)))
    assert until(lambda: bool(told["closed"])) and told["closed"][0] in links
