"""Hypothesis strategies for pairs of engines, and the check that every one of them must pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import strategies as st

from pushkv.model.layout import (
    BlockTable,
    GroupKind,
    LayoutError,
    Part,
    Plan,
    Shard,
    count_spans,
    pair,
    plan,
    plan_gather,
    plan_scatter,
    scatter_ahead,
)

from .oracle import Bytes, Engine, Model, Store, alive, contents, move, tables

Planner = Callable[[Shard, Sequence[BlockTable], Sequence[BlockTable], Part], Plan]


@dataclass(frozen=True)
class Scenario:
    models: tuple[Model, ...]
    src_stores: tuple[Store, ...]
    dst_stores: tuple[Store, ...]
    src_tp: int
    dst_tp: int
    src_stages: int
    dst_stages: int
    part: Part
    held: int  # tokens that P holds
    dst_first: int  # D's first slot
    spare: int
    share: bool
    seed: int


_STORE = Store("BHNT", 4, 40)
CASE = Scenario(
    models=(Model(("layers.0", "layers.1"), kv_heads=4, head_dim=3),),
    src_stores=(_STORE,),
    dst_stores=(replace(_STORE, axes="BNH", block_tokens=8),),
    src_tp=1,
    dst_tp=2,
    src_stages=1,
    dst_stages=1,
    part=Part.whole(8, 21),
    held=21,
    dst_first=8,
    spare=1,
    share=False,
    seed=7,
)
"""One pair of engines for those who need no other: K and V apart, other axes, other blocks, other TP."""


@st.composite
def stores(draw: st.DrawFn, model: Model, tokens: int, null_block: int | None) -> Store:
    axes = draw(st.permutations("BHN" + draw(st.sampled_from(["", "T", "L", "TL"]))).map("".join))
    kernel = draw(st.sampled_from([1, 2, 3, 4, 8]))
    block = kernel * draw(st.sampled_from([1, 1, 2, 3]))
    pad = draw(st.dictionaries(st.sampled_from([*axes, "C"]), st.integers(1, 3), max_size=2))
    pool = tokens // block + 10 if null_block is None else 2 * tokens + 20  # groups of one pool share its ids
    return Store(axes, block, pool, 0 if model.rows else kernel, pad, null_block)


@st.composite
def dense(draw: st.DrawFn, *, hybrid: bool = False) -> Scenario:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [tp for tp in (1, 2, 3, 4, 6) if heads % tp == 0 or tp % heads == 0]
    layers = tuple(f"layers.{i}" for i in range(draw(st.integers(1, 3))))
    latent = heads == 1 and draw(st.booleans())
    row = draw(st.sampled_from([(1, 1), (2, 1), (3, 2)]))
    models = [Model(layers, heads, *row, ("latent",) if latent else ("k", "v"))]
    if hybrid:
        window = draw(st.integers(1, 12))
        models.append(Model(("swa.0", "swa.1"), heads, *row, kind=GroupKind.WINDOW, window_tokens=window))
        models.append(Model(("mamba.0",), heads, 2, 4, ("conv",), GroupKind.STATE, rows=3))
        models.append(Model(("mamba.1", "mamba.2"), heads, 3, 1, ("ssm",), GroupKind.STATE, rows=1))
    first = draw(st.integers(0, 20))
    start = first + draw(st.integers(0, 6))
    stop = start + draw(st.integers(0, 24))
    null_block = 0 if hybrid else None
    spare = draw(st.integers(0, 1))
    src_tp, dst_tp = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    src_stores, dst_stores = (tuple(draw(stores(model, stop + 8, null_block)) for model in models) for _ in range(2))
    dst_first = draw(st.sampled_from([first, first - first % dst_stores[0].block_tokens, 0]))
    return Scenario(
        tuple(models),
        src_stores,
        dst_stores,
        src_tp,
        dst_tp,
        1 if hybrid else draw(st.integers(1, len(layers))),
        1 if hybrid else draw(st.integers(1, len(layers))),
        Part(start, stop, first, draw(st.booleans())),
        stop + draw(st.integers(0, 5)),
        dst_first,
        spare,
        hybrid and draw(st.booleans()),
        draw(st.integers(0, 1 << 30)),
    )


def check(scenario: Scenario, planner: Planner = plan) -> None:
    """The planner, direct and in two packed halves, leaves D's memory as the oracle does."""
    rng, dice = np.random.default_rng(scenario.seed), random.Random(scenario.seed)
    p = Engine("P", scenario.models, scenario.src_stores, tp=scenario.src_tp, stages=scenario.src_stages)
    share = scenario.share
    d = Engine("D", scenario.models, scenario.dst_stores, tp=scenario.dst_tp, stages=scenario.dst_stages, share=share)
    part = scenario.part
    src = tables(scenario.models, scenario.src_stores, 0, scenario.held, part.stop, dice, scenario.spare)
    dst = tables(scenario.models, scenario.dst_stores, scenario.dst_first, part.stop, part.stop, dice, scenario.spare)
    stores = zip(scenario.src_stores, scenario.dst_stores, strict=True)
    spans = [alive(model, *both, part) for model, both in zip(scenario.models, stores, strict=True)]
    rows = contents(scenario.models, scenario.held, rng)
    p.randomize(rng)
    p.write(rows, src, spans)
    d.randomize(rng)
    before = d.snapshot()
    d.write(rows, dst, spans)
    expected = d.snapshot()

    shards = pair(p.layouts, d.layouts)
    assert len({(shard.src_rank, shard.dst_rank) for shard in shards}) == len(shards)
    d.restore(before)
    for shard in shards:
        direct = planner(shard, src, dst, part)
        moved = move(direct, p.ranks[shard.src_rank].buffers, d.ranks[shard.dst_rank].buffers)
        if planner is plan:  # a broken planner must be caught by the bytes alone
            assert moved == shard.part_bytes(part)
            assert direct.count <= count_spans(shard, part, dst_first_token=scenario.dst_first)
    assert_same(d.snapshot(), expected)

    d.restore(before)
    for shard in shards:
        gather, scatter = plan_gather(shard, src, part), plan_scatter(shard, dst, part)
        wire = rng.integers(0, 256, shard.part_bytes(part), np.uint8)
        assert move(gather, p.ranks[shard.src_rank].buffers, [wire]) == len(wire)
        assert move(scatter, [wire], d.ranks[shard.dst_rank].buffers) == len(wire)
    assert_same(d.snapshot(), expected)

    if scenario.dst_first == 0:
        check_ahead(scenario, p, d, src, dst, before, expected)


def check_ahead(
    scenario: Scenario,
    p: Engine,
    d: Engine,
    src: Sequence[BlockTable],
    dst: Sequence[BlockTable],
    before: list[list[Bytes]],
    expected: list[list[Bytes]],
) -> None:
    """A scatter that was planned before D's blocks were known leaves the same; it is refused where that cannot be."""
    d.restore(before)
    part = scenario.part
    for shard in pair(p.layouts, d.layouts):
        moves = [bundle for bundle in shard.bundles if bundle.tokens(part)[0] < bundle.tokens(part)[1]]
        store = d.stores[0]
        far = store.axes.index("N") < store.axes.index("B") and (store.kernel_tokens or store.block_tokens) > 1
        if moves and (far or any(bundle.kind is not GroupKind.FULL for bundle in moves)):
            with pytest.raises(LayoutError, match="planned when they are known"):
                scatter_ahead(shard, part)
            return
        ahead = Plan(tuple(slotted.onto(dst) for slotted in scatter_ahead(shard, part)))
        wire = np.zeros(shard.part_bytes(part), np.uint8)
        move(plan_gather(shard, src, part), p.ranks[shard.src_rank].buffers, [wire])
        assert move(ahead, [wire], d.ranks[shard.dst_rank].buffers) == len(wire)
        assert ahead.count >= plan_scatter(shard, dst, part).count
    assert_same(d.snapshot(), expected)


def assert_same(found: list[list[Bytes]], expected: list[list[Bytes]]) -> None:
    for rank, (have, want) in enumerate(zip(found, expected, strict=True)):
        for region, (one, other) in enumerate(zip(have, want, strict=True)):
            wrong = np.flatnonzero(one != other)
            assert not len(wrong), f"D rank {rank} region {region}: {len(wrong)} bytes differ, the first at {wrong[0]}"
