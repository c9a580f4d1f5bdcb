"""Gather and scatter on tensors against the element-wise oracle of the layout tests."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.model.layout import Part, block_table, dense_layout, pair, plan, plan_gather, plan_scatter
from pushkv.reference.copies import Copier, CopyError
from pushkv.reference.pools import SegmentPool
from tests.layout.oracle import Engine, alive, contents, tables
from tests.layout.scenarios import Scenario, assert_same, dense

torch: Any = pytest.importorskip("torch", reason="copies are torch operations")


def flat(buffers: list[Any], dice: random.Random) -> list[Any]:
    """The buffers as tensors on the same memory."""
    return [torch.from_numpy(buffer) for buffer in buffers]


def segments_for(pool: SegmentPool, size: int, offset: int, dice: random.Random) -> list[int]:
    ids = dice.sample(range(pool.count), -(-(size + offset) // pool.segment_bytes))
    return sorted(ids) if dice.random() < 0.3 else ids


def check(scenario: Scenario, segment_bytes: int, offset: int, kind: Any = Copier) -> None:
    """P's rows, gathered into scattered segments, carried over, and scattered by D, are what the oracle writes."""
    rng, dice = np.random.default_rng(scenario.seed), random.Random(scenario.seed)
    p = Engine("P", scenario.models, scenario.src_stores, tp=scenario.src_tp, stages=scenario.src_stages)
    d = Engine(
        "D", scenario.models, scenario.dst_stores, tp=scenario.dst_tp, stages=scenario.dst_stages, share=scenario.share
    )
    part = scenario.part
    src = tables(scenario.models, scenario.src_stores, 0, scenario.held, part.stop, dice, scenario.spare)
    dst = tables(scenario.models, scenario.dst_stores, scenario.dst_first, part.stop, part.stop, dice, scenario.spare)
    both = zip(scenario.models, zip(scenario.src_stores, scenario.dst_stores, strict=True), strict=True)
    spans = [alive(model, *stores, part) for model, stores in both]
    rows = contents(scenario.models, scenario.held, rng)
    p.randomize(rng)
    p.write(rows, src, spans)
    d.randomize(rng)
    before = d.snapshot()
    d.write(rows, dst, spans)
    expected = d.snapshot()
    d.restore(before)
    p_before = p.snapshot()
    for shard in pair(p.layouts, d.layouts):
        size = shard.part_bytes(part)
        pools = [SegmentPool(2 * (-(-(size + offset) // segment_bytes)) + 1, segment_bytes) for _ in range(2)]
        ids = [segments_for(pool, size, offset, dice) for pool in pools]
        for pool in pools:
            pool.tensor.fill_(0xA5)
        sides = (p.ranks[shard.src_rank], d.ranks[shard.dst_rank])
        copiers = [
            kind(flat(side.buffers, dice), pool.tensor, segment_bytes) for side, pool in zip(sides, pools, strict=True)
        ]
        assert copiers[0].gather(plan_gather(shard, src, part), ids[0], offset).done()
        packed = np.concatenate(
            [np.empty(0, np.uint8), *(pools[0].tensor.numpy()[i * segment_bytes :][:segment_bytes] for i in ids[0])]
        )
        others = np.ones(len(pools[0].tensor), bool)
        for where in np.flatnonzero(np.ones(size)) + offset:
            others[ids[0][where // segment_bytes] * segment_bytes + where % segment_bytes] = False
        assert (pools[0].tensor.numpy()[others] == 0xA5).all()  # nothing beside the part was touched
        for position, segment in enumerate(ids[1]):
            piece = packed[position * segment_bytes :][:segment_bytes]
            pools[1].tensor.numpy()[segment * segment_bytes :][: len(piece)] = piece
        copiers[1].scatter(plan_scatter(shard, dst, part), ids[1], offset).wait()
    assert_same(d.snapshot(), expected)
    assert_same(p.snapshot(), p_before)


@settings(max_examples=80)
@given(dense(), st.sampled_from([1, 7, 16, 64, 1000]), st.integers(0, 20))
def test_dense_layouts(scenario: Scenario, segment_bytes: int, offset: int) -> None:
    check(scenario, segment_bytes, offset)


@settings(max_examples=30)
@given(dense(hybrid=True), st.sampled_from([5, 48, 1000]))
def test_hybrid_layouts(scenario: Scenario, segment_bytes: int) -> None:
    check(scenario, segment_bytes, 0)


CACHE = {"num_blocks": 64, "block_tokens": 16, "kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("src_axes", "dst_axes"), [("interleaved", "interleaved"), ("nhd_apart", "hnd_paired"), ("nhd_stacked", "LBHNC")]
)
@pytest.mark.parametrize("aligned", [True, False])
def test_real_sizes_against_direct_spans(src_axes: str, dst_axes: str, aligned: bool) -> None:
    """Wide rows, odd regions' beginnings, and segments that spans straddle: packed equals direct."""
    rng = np.random.default_rng(3)
    src = dense_layout("P", src_axes, ["a", "b"], **CACHE)
    dst = dense_layout("D", dst_axes, ["a", "b"], **{**CACHE, "block_tokens": 32})
    (shard,) = pair([src], [dst])
    part = Part.whole(5 * (not aligned), 300 + 20 * aligned)
    src_table, dst_table = block_table(rng.permutation(64)[:20]), block_table(rng.permutation(64)[:10])
    skip = 0 if aligned else 3
    regions = [
        [torch.from_numpy(rng.integers(0, 256, size + skip, np.uint8))[skip:] for size in layout.regions]
        for layout in (src, dst)
    ]
    wanted = [region.clone() for region in regions[1]]
    spans = plan(shard, [src_table], [dst_table], part).spans()
    for a, b, c, e, n in zip(
        spans.src_region, spans.src_offset, spans.dst_region, spans.dst_offset, spans.length, strict=True
    ):
        wanted[c][e : e + n] = regions[0][a][b : b + n]
    segment = 1 << 16 if aligned else 12345
    pool = SegmentPool(shard.part_bytes(part) // segment + 5, segment)
    ids = rng.permutation(pool.count)[: -(-shard.part_bytes(part) // segment)].tolist()
    Copier(regions[0], pool.tensor, segment).gather(plan_gather(shard, [src_table], part), ids)
    Copier(regions[1], pool.tensor, segment).scatter(plan_scatter(shard, [dst_table], part), ids)
    assert all(torch.equal(have, want) for have, want in zip(regions[1], wanted, strict=True))


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    layout = dense_layout("P", "nhd_apart", ["a"], **CACHE)
    (shard,) = pair([layout], [layout])
    part = Part.whole(0, 64)
    gather = plan_gather(shard, [block_table([5, 1, 2, 3])], part)
    regions = [torch.ones(size, dtype=torch.uint8) for size in layout.regions]
    pool = SegmentPool(64, 4096)
    pool.tensor.fill_(0)
    need = gather.total_bytes // 4096
    copier = Copier(regions, pool.tensor, 4096)
    for segments in (range(need - 1), [*range(need - 1), 64], [*range(need - 1), -1]):
        with pytest.raises(CopyError):
            copier.gather(gather, list(segments))
    with pytest.raises(CopyError):
        Copier([region[:4096] for region in regions], pool.tensor, 4096).gather(gather, list(range(need)))
    with pytest.raises(CopyError):
        Copier(regions[:1], pool.tensor, 4096).gather(gather, list(range(need)))
    assert not pool.tensor.any()
    with pytest.raises(CopyError):
        Copier([torch.ones(8)], pool.tensor, 4096)


def test_operations_do_not_grow_with_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = dense_layout("P", "nhd_apart", [f"layers.{i}" for i in range(4)], **{**CACHE, "num_blocks": 600})
    (shard,) = pair([layout], [layout])
    regions = [torch.zeros(size, dtype=torch.uint8) for size in layout.regions]
    counts = []
    for blocks in (100, 500):
        ids = np.random.default_rng(1).permutation(600)[:blocks]
        gather = plan_gather(shard, [block_table(ids)], Part.whole(0, 16 * blocks))
        pool = SegmentPool(gather.total_bytes // (1 << 20) + 1, 1 << 20)
        calls = []
        real = torch.index_select
        monkeypatch.setattr(torch, "index_select", lambda *a, **k: calls.append(1) or real(*a, **k))  # noqa: B023
        Copier(regions, pool.tensor, 1 << 20).gather(gather, list(range(pool.count)))
        monkeypatch.setattr(torch, "index_select", real)
        counts.append(len(calls))
    assert counts == [8, 8]  # one per region
