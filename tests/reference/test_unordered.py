"""Prompts from engine to engine over a fabric whose completion is no arrival: nobody is told before bytes are there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.model.protocol import events as ev

from .channels import until
from .engine_pairs import TWO, Hosts, Make, hand_over
from .inprocess import BLOCKS, DIM, HEADS, LAYERS, AttentionSpec, Exchange
from .said import wanted
from .unordered import unordered

pytest.importorskip("torch", reason="the caches are torch tensors")

WINDOW = 40


class SlidingWindowSpec(AttentionSpec):
    """vLLM's, as far as it is looked at."""


@pytest.fixture(autouse=True)
def fabric(monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> None:
    unordered(monkeypatch, exchange)


def clean(*engines: Any) -> None:
    for engine in engines:
        engine.emptied()
        for rank, transport in zip(engine.ranks, engine.transports, strict=True):
            assert transport.notices.refused == 0 and "stray notice" not in rank.counters
            assert not any(name.startswith("messages_refused") for name, n in rank.counters.items() if n)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), *TWO, (1, 4), (4, 2)])
def test_lengths(pair: Make, p_tp: int, d_tp: int, packed: bool) -> None:
    both = pair(p_tp, d_tp, part_bytes=4096)
    for tokens in (1, 33, 200):
        assert hand_over(both, f"r{tokens}", tokens, packed) == ("", True)
    assert hand_over(both, "tail", 150, packed, base=64) == ("", True)
    clean(*both)


def test_a_late_notice_holds_the_word_and_no_more(pair: Make) -> None:
    p, d = pair(1, 1)
    p.transports[0].held_s = 0.3
    assert hand_over((p, d), "r", 200, True) == ("", True)
    clean(p, d)


@pytest.mark.parametrize("by", ["D", "P"])
def test_memory_is_not_used_again_while_bytes_are_on_their_way(pair: Make, by: str) -> None:
    """All writes of what is given up are done on P, which says nothing of the bytes: the next prompt's stay right."""
    p, d = pair(1, 1)
    fabric = p.transports[0]
    assert hand_over((p, d), "before", 40, True) == ("", True)
    hosts = Hosts(5)
    source, other, target = hosts.blocks(p, 200), hosts.blocks(p, 200), hosts.blocks(d, 200)
    fabric.least_s = fabric.held_s = 0.5
    before = fabric.posted
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))
    p.chunk("t", 128, source)
    assert until(lambda: fabric.posted > before)
    if by == "D":
        d.say(ev.Aborted("t"))
        d.until(ev.Fail, "t")
    p.say(ev.Abort("t", "prefill aborted"))
    if by == "P":
        d.until(ev.Fail, "t")
    assert not p.sent("t", source, 200)
    fabric.least_s = fabric.held_s = 0.0
    p.prefill("next", 200, other)
    d.say(wanted("next", p.address, 200, 200, True))
    assert p.sent("next", other, 200)
    time.sleep(0.6)
    assert d.scatter("next", 0, 200, target) == ""
    d.check("next", 0, 200, target)
    for engine in (p, d):
        engine.emptied()


def test_parts_without_bytes_are_noticed_too(pair: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that has windows only, the first chunks move nothing: D must not wait for what never comes."""
    import torch

    from pushkv.reference.caches import Ranks, layouts_of

    from . import inprocess

    def caches(name: str, tp: int, rank: int, block: int, cpu: bool) -> Any:
        tensors = {layer: torch.zeros(BLOCKS, HEADS, block, 2 * DIM, dtype=torch.int16) for layer in LAYERS}
        spec = SlidingWindowSpec(
            block_size=block, num_kv_heads=HEADS, head_size=DIM, dtype=torch.int16, sliding_window=WINDOW
        )
        group = SimpleNamespace(layer_names=list(LAYERS), kv_cache_spec=spec)
        config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])
        return layouts_of(tensors, config, name=name, ranks=Ranks(tp, rank, HEADS))

    monkeypatch.setattr(inprocess, "caches", caches)
    p, d = pair(1, 1)
    hosts = Hosts(4)
    source, target = hosts.blocks(p, 200), hosts.blocks(d, 200)
    p.begin("t", 200)
    d.say(wanted("t", p.address, 200, 200, True))
    p.chunk("t", 64, source)
    assert until(lambda: p.transports[0].empty == 1)
    for tokens in (128, 200):
        p.chunk("t", tokens, source)
    p.compute("t", 200, source)
    assert d.scatter("t", 0, 200, target) == ""
    d.check("t", 200 - WINDOW + 1, 200, target)
    assert p.sent("t", source, 200)
    clean(p, d)
