"""Plans whose spans are known beforehand, and everything that must be refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pushkv.model.layout import (
    BlockError,
    Group,
    GroupKind,
    Layout,
    LayoutError,
    Part,
    RangeError,
    Shard,
    Spans,
    TooManySpans,
    block_table,
    combine,
    count_spans,
    dense_layout,
    pair,
    plan,
    plan_gather,
    plan_scatter,
    plan_tail,
)

_KIB = 1024


def _cache(name: str, axes: str, layers: int = 1, **changes: Any) -> Layout:
    settings: dict[str, Any] = {"num_blocks": 100, "block_tokens": 16, "kv_heads": 8, "head_dim": 128}
    return dense_layout(name, axes, [f"layers.{i}" for i in range(layers)], **settings | changes)


def _one(src: Layout, dst: Layout) -> Shard:
    (shard,) = pair([src], [dst])
    return shard


def _rows(spans: Spans) -> list[tuple[int, ...]]:
    columns = (spans.src_region, spans.src_offset, spans.dst_region, spans.dst_offset, spans.length)
    return [tuple(row) for row in np.stack(columns, axis=1).tolist()]


def test_interleaved_blocks_are_single_pieces() -> None:
    """vLLM 0.26, Qwen3-32B: one block of one layer is one piece of 64 KiB, however the blocks lie."""
    size = {"num_blocks": 4000, "layers": 64}
    shard = _one(_cache("P", "interleaved", **size), _cache("D", "interleaved", **size))
    rng = random.Random(1)
    src, dst = (rng.sample(range(0, 4000, 2), 1000) for _ in "PD")
    found = plan_tail(shard, [src], 16_000, [dst], 16_000)
    spans = found.spans()
    assert found.count == len(spans) == 64_000 == count_spans(shard, Part.whole(0, 16_000))
    assert set(spans.length.tolist()) == {64 * _KIB}
    assert found.total_bytes == 16_000 * shard.token_bytes == 64_000 * 64 * _KIB
    assert _rows(spans)[1001] == (1, src[1] * 64 * _KIB, 1, dst[1] * 64 * _KIB, 64 * _KIB)


@pytest.mark.parametrize(
    ("axes", "spans", "length"),
    [
        ("interleaved", 1, 256 * _KIB),
        ("nhd_apart", 2, 128 * _KIB),
        ("nhd_stacked", 2, 128 * _KIB),
        ("nhd_paired", 1, 256 * _KIB),
        ("BHLNC", 8, 32 * _KIB),  # heads outside layers: blocks are not whole per layer but per head
        ("LHBNC", 8, 32 * _KIB),
    ],
)
def test_neighbouring_blocks_join(axes: str, spans: int, length: int) -> None:
    """Four blocks side by side on both sides."""
    shard = _one(_cache("P", axes), _cache("D", axes))
    found = plan_tail(shard, [[10, 11, 12, 13]], 64, [[20, 21, 22, 23]], 64).spans()
    if axes == "BHLNC":  # with one layer a block is still one piece
        spans, length = 1, 256 * _KIB
    assert len(found) == spans and set(found.length.tolist()) == {length}


def test_blocks_join_only_when_both_sides_do() -> None:
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    assert plan_tail(shard, [[10, 11, 12, 13]], 64, [[20, 21, 30, 31]], 64).count == 2
    assert plan_tail(shard, [[10, 11, 12, 13]], 64, [[20, 22, 24, 26]], 64).count == 4


def test_cross_layer_rows_are_single_pieces() -> None:
    """One block of all layers together is one span."""
    for axes in ("cross_layer_nhd", "cross_layer_hnd", "BLHNC", "BLNHC", "BHLNC"):
        shard = _one(_cache("P", axes, 6), _cache("D", axes, 6))
        spans = plan_tail(shard, [[7, 3]], 32, [[5, 9]], 32).spans()
        assert len(spans) == 2 and set(spans.length.tolist()) == {6 * 64 * _KIB}, axes


def test_cross_layer_rows_into_layers_apart() -> None:
    shard = _one(_cache("P", "BLHNC", 6), _cache("D", "interleaved", 6))
    spans = plan_tail(shard, [[7, 3]], 32, [[5, 9]], 32).spans()
    assert len(spans) == 12 and set(spans.length.tolist()) == {64 * _KIB}


def test_the_tails_align() -> None:
    """D has two blocks cached and asks for the last 20 of 52 tokens: its first slot gets P's token 32 (fault F01)."""
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    spans = plan_tail(shard, [[10, 20, 30, 40]], 52, [[3, 5]], 20).spans()
    block, row = 64 * _KIB, 512
    whole, *rest = sorted(_rows(spans))
    assert whole == (0, 30 * block, 0, 3 * block, block)
    # the last block is partly filled: 8 heads of 4 tokens each
    assert rest == [(0, 40 * block + h * 16 * row, 0, 5 * block + h * 16 * row, 4 * row) for h in range(8)]


def test_spare_blocks_are_left_alone() -> None:
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    spans = plan_tail(shard, [[10, 20, 99]], 32, [[3, 5, 98]], 32).spans()
    assert spans.src_offset.tolist() == [10 * 64 * _KIB, 20 * 64 * _KIB]
    assert spans.dst_offset.tolist() == [3 * 64 * _KIB, 5 * 64 * _KIB]


def test_zero_tokens_complete_at_once() -> None:
    shard = _one(_cache("P", "interleaved"), _cache("D", "nhd_apart"))
    part = Part.tail(40, 0)
    tables = [block_table([])]
    for found in (
        plan(shard, tables, tables, part),
        plan_gather(shard, tables, part),
        plan_scatter(shard, tables, part),
    ):
        assert found.count == 0 and found.total_bytes == 0 and len(found.spans()) == 0 and not list(found.chunks())
    assert shard.part_bytes(part) == 0 and count_spans(shard, part) == 0


@pytest.mark.parametrize(
    ("src", "src_tokens", "dst", "wanted", "error", "message"),
    [
        ([1, 2], 32, [1, 2], 33, RangeError, "P holds 32 tokens, D wants the last 33"),
        ([1, 2], 32, [1, 2], -1, RangeError, "-1 tokens wanted"),
        ([1, 2], -1, [1, 2], 0, RangeError, "P holds -1 tokens"),
        ([1, 2], 40, [1, 2, 3], 40, BlockError, "P group 0: 2 blocks of 16 from token 0 end at 32"),
        ([1, 2, 3], 40, [1, 2], 40, BlockError, "D group 0: 2 blocks of 16 from token 0 end at 32"),
        ([1, 2, 3], 40, [], 10, BlockError, "D group 0: 0 blocks"),
        ([1, 100], 32, [1, 2], 32, BlockError, "P group 0: block 100 is out of range, the pool has 100"),
        ([0, 100], 32, [1, 2], 32, BlockError, "P group 0: block 100 is out of range, the pool has 100"),
        ([1, 2], 32, [1, -1], 32, BlockError, "D group 0: block -1 is out of range"),
        ([1, 2], 32, [1, 2**64 - 1], 32, BlockError, "block ids are not"),
        ([1, 2], 32, np.array([2**64 - 1], np.uint64), 16, BlockError, "beyond any pool"),
        ([1, 2], 32, np.array([2**63], np.uint64), 16, BlockError, "beyond any pool"),
        ([1, 2], 32, np.array([2**63 - 1], np.uint64), 16, BlockError, "D group 0: block 9223372036854775807 is out"),
        ([1, 2], 32, [1, 2**70], 32, BlockError, "not a flat list"),
        ([1, 2], 32, [1, 2.0], 32, BlockError, "not a flat list of integers"),
        ([1, 2], 32, [[1, 2]], 32, BlockError, "not a flat list of integers"),
        ([1, 2], 32, [[1], [1, 2]], 32, BlockError, "not a flat list"),
        ([1, 2], 32, [True, False], 32, BlockError, "not a flat list of integers"),
        ([1, 2], 32, ["1", "2"], 32, BlockError, "not a flat list of integers"),
        ([4, 4], 32, [1, 2], 32, BlockError, "P pool 0: block 4 is listed twice"),
        ([1, 2], 32, [7, 8, 7], 32, BlockError, "D pool 0: block 7 is listed twice"),
        ([1, 2], 32, [*range(100), 5], 32, BlockError, "101 blocks listed, the pool has 100"),
    ],
)
def test_bad_lists_and_ranges_are_refused(
    src: Sequence[int], src_tokens: int, dst: Sequence[int], wanted: int, error: type[LayoutError], message: str
) -> None:
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    with pytest.raises(error, match=message):
        plan_tail(shard, [src], src_tokens, [dst], wanted)


def test_any_kind_of_integers_names_blocks() -> None:
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    wanted = _rows(plan_tail(shard, [[1, 2]], 32, [[5, 9]], 32).spans())
    for kind in (np.uint64, np.int64, np.uint8, np.int32):
        ids = [np.array(each, kind) for each in ([1, 2], [5, 9])]
        assert _rows(plan_tail(shard, [ids[0]], 32, [ids[1]], 32).spans()) == wanted


def test_packed_halves_refuse_what_the_whole_refuses() -> None:
    """F26: each side looks at its own list."""
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    for ids, message in (([4, 4], "pool 0: block 4 is listed twice"), ([1, 100], "group 0: block 100 is out of range")):
        for half, who in ((plan_gather, "P"), (plan_scatter, "D")):
            with pytest.raises(BlockError, match=f"{who} {message}"):
                half(shard, [block_table(ids)], Part.whole(0, 32))


def test_as_many_spans_as_the_limit_are_made() -> None:
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    found = plan_tail(shard, [[1, 3]], 32, [[5, 9]], 32)
    assert len(found.spans(2)) == 2
    with pytest.raises(TooManySpans):
        found.spans(1)


@pytest.mark.parametrize("first", [0, 16, 24, 40])
@pytest.mark.parametrize("axes", ["interleaved", "nhd_apart", "BNHT"])
def test_the_worst_case_is_counted_exactly(axes: str, first: int) -> None:
    """Wherever the lists begin, when no two blocks are neighbours."""
    shard = _one(_cache("P", "interleaved"), _cache("D", axes, block_tokens=24, num_blocks=90))
    part = Part.whole(40, 150)
    dst = block_table(range(0, 20, 2), first)
    for held in (0, 5):
        src = block_table(range(0, 40, 2), held)
        counted = count_spans(shard, part, src_first_token=held, dst_first_token=first)
        assert plan(shard, [src], [dst], part).count == counted
    if first == part.first:
        assert count_spans(shard, part, src_first_token=held) == counted


def test_tokens_before_a_table_are_refused() -> None:
    shard = _one(_cache("P", "interleaved"), _cache("D", "interleaved"))
    with pytest.raises(RangeError, match="D group 0: token 0 is before the first block"):
        plan(shard, [block_table([1, 2])], [block_table([1, 2], 16)], Part.whole(0, 32))
    with pytest.raises(RangeError):
        block_table([1], -16)
    with pytest.raises(RangeError):
        Part(5, 4, 0, True)
    with pytest.raises(BlockError, match="2 block lists for 1 cache groups"):
        plan(shard, [block_table([1]), block_table([2])], [block_table([1])], Part.whole(0, 16))


def test_one_block_for_two_groups_of_a_pool_is_refused() -> None:
    both = [combine([_cache(name, "BHNT"), _window(name)], share_regions=True) for name in "PD"]
    shard = _one(*both)
    good = [block_table([1]), block_table([2])]
    assert plan(shard, good, good, Part.whole(0, 16)).count > 0
    with pytest.raises(BlockError, match="D pool 0: block 2 is listed twice"):
        plan(shard, good, [block_table([2]), block_table([2])], Part.whole(0, 16))


def _window(name: str, window: int = 8, null_block: int | None = None, block_tokens: int = 16) -> Layout:
    return dense_layout(
        name,
        "BHNT",
        ["swa.0"],
        num_blocks=100,
        block_tokens=block_tokens,
        kv_heads=8,
        head_dim=128,
        kind=GroupKind.WINDOW,
        window_tokens=window,
        null_block=null_block,
    )


def test_only_the_window_moves() -> None:
    """The token at 40 attends to itself and to 33..39, and P has freed the blocks before theirs; D gets all of that
    block.
    """
    shard = _one(_window("P", null_block=0), _window("D", null_block=0))
    found = plan(shard, [block_table([0, 0, 7])], [block_table([0, 0, 9])], Part.whole(0, 40))
    assert found.total_bytes == 8 * 8 * 512 and shard.whole_windows
    with pytest.raises(BlockError, match="need a block that is null"):
        plan(shard, [block_table([0, 0, 0])], [block_table([0, 0, 9])], Part.whole(0, 40))
    early = Part(16, 32, 16, last=True)
    for after in ([7], [7, 0]):  # what lies behind the tokens is not looked at
        assert plan(shard, [block_table([0, *after])], [block_table(after, 16)], early).count > 0
    assert plan(shard, [block_table([0])], [block_table([0])], Part(0, 16, 0, last=False)).count == 0


def test_a_window_moves_as_far_back_as_both_sides_have_it() -> None:
    """It begins at 83. P's block of 16 from 80 is alive, D's block of 32 from 64 cannot be filled; of blocks of 8, 80
    is one.
    """
    part = Part.whole(0, 90)
    for tokens, start, whole in (
        (32, 80, False),
        (16, 80, True),
        (8, 80, True),
        (4, 80, True),
        (2, 82, True),
        (12, 80, False),
    ):
        shard = _one(_window("P"), _window("D", block_tokens=tokens))
        assert shard.part_bytes(part) == (90 - start) * 8 * 512 and shard.whole_windows is whole


def test_a_window_that_is_longer_than_the_prompt_is_all_of_it() -> None:
    shard = _one(_window("P", 9, block_tokens=1), _window("D", 9, block_tokens=1))
    assert shard.part_bytes(Part.whole(0, 5)) == 5 * 8 * 512


def test_one_window_that_cannot_be_kept_is_enough() -> None:
    """D may keep the blocks of a prompt only if it may keep those of every group."""
    p = combine([_window("P"), replace_names(_window("P"), "far")])
    for tokens, whole in ((16, True), (32, False)):
        d = combine([_window("D"), replace_names(_window("D", block_tokens=tokens), "far")])
        assert _one(p, d).whole_windows is whole


def replace_names(layout: Layout, name: str) -> Layout:
    """The same cache, of another layer."""
    return replace(layout, views=tuple(replace(view, layer=name) for view in layout.views))


def test_a_state_has_one_block() -> None:
    layouts = [
        dense_layout(name, "BNH", ["m"], num_blocks=9, block_tokens=16, kv_heads=1, head_dim=50, parts=("ssm",),
                     kernel_block_tokens=3, kind=GroupKind.STATE)
        for name in "PD"
    ]  # fmt: skip
    shard = _one(*layouts)
    assert shard.state_bytes == 300 and shard.token_bytes == 0
    part = Part.whole(16, 90)
    assert count_spans(shard, part) == count_spans(shard, part, src_first_token=5, dst_first_token=7) == 1
    assert _rows(plan(shard, [block_table([4])], [block_table([8])], part).spans()) == [(0, 1200, 0, 2400, 300)]
    with pytest.raises(BlockError, match="a state has one block, 2 listed"):
        plan(shard, [block_table([4, 5])], [block_table([8])], part)


def test_heads_split_under_nhd_stay_bounded() -> None:
    """Each token's heads are a piece of their own: 2 * 64 * 16,000 spans, refused at once but served in chunks."""
    p = _cache("P", "nhd_apart", 64, num_blocks=1001)
    d = [_cache("D", "nhd_apart", 64, num_blocks=1001, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    shard = pair([p], d)[1]
    ids = list(range(1, 1001))
    found = plan_tail(shard, [ids], 16_000, [ids], 16_000)
    assert found.count == 2_048_000 == count_spans(shard, Part.whole(0, 16_000))
    assert found.total_bytes == 16_000 * shard.token_bytes
    with pytest.raises(TooManySpans, match="packed"):
        found.spans()
    first = next(found.chunks(1000))
    assert len(first) == 1000 and set(first.length.tolist()) == {1024}
    assert sum(len(chunk) for chunk in found.chunks()) == found.count
    with pytest.raises(ValueError, match="chunks of 0"):
        next(found.chunks(0))


def test_packed_halves_are_few_and_exact() -> None:
    """Equal caches, packed: as many spans as direct on each side, and the bytes are the payload."""
    size = {"num_blocks": 200, "layers": 4}
    shard = _one(_cache("P", "interleaved", **size), _cache("D", "interleaved", **size))
    ids = random.Random(2).sample(range(0, 200, 2), 50)
    part = Part.whole(0, 800)
    gather, scatter = (half(shard, [block_table(ids)], part) for half in (plan_gather, plan_scatter))
    assert gather.count == scatter.count == 4 * 50
    assert gather.total_bytes == scatter.total_bytes == shard.part_bytes(part) == 800 * shard.token_bytes


@pytest.mark.parametrize("blocks", [(6, 1), (2, 3)])
def test_packed_order_is_layers_then_k_then_v_then_tokens(blocks: tuple[int, int]) -> None:
    """Tokens 3..7 of two layers, from interleaved blocks of 4 into K and V apart in blocks of 2, NHD."""
    small = {"kv_heads": 2, "head_dim": 1, "element_bytes": 1, "layers": 2, "num_blocks": 9}
    shard = _one(_cache("P", "interleaved", block_tokens=4, **small), _cache("D", "nhd_apart", block_tokens=2, **small))
    part = Part.whole(3, 8)
    found = plan_gather(shard, [block_table(blocks)], part).spans()
    wire: dict[int, tuple[int, int]] = {}
    for src_region, src_at, _, dst_at, length in _rows(found):
        wire |= {dst_at + i: (src_region, src_at + i) for i in range(length)}
    expected = [
        (layer, block * 16 + head * 8 + slot * 2 + part_index)
        for layer in range(2)
        for part_index in range(2)
        for block, slot in ((blocks[0], 3), *((blocks[1], slot) for slot in range(4)))
        for head in range(2)
    ]
    assert [wire[i] for i in range(shard.part_bytes(part))] == expected


def test_packed_bytes_serve_a_longer_local_prefix() -> None:
    """D asked from token 16 on and has found 32 in its own cache meanwhile: it scatters the rest; never with a gap."""
    shard = _one(_cache("P", "interleaved"), _cache("D", "hnd_apart", block_tokens=32))
    part = Part.whole(16, 80)
    late = plan_scatter(shard, [block_table([4, 9], 32)], part, 32)
    full = plan_scatter(shard, [block_table([7, 4, 9], 0)], part)
    kept = {row for row in _expand(full) if row[1][1] // (32 * 256 * 8) != 7}
    assert set(_expand(late)) == kept and late.total_bytes == 48 * shard.token_bytes
    assert _rows(plan_scatter(shard, [block_table([7, 4, 9], 0)], part, 16).spans()) == _rows(full.spans())
    assert plan_scatter(shard, [block_table([9], 64)], part, 80).count == 0
    with pytest.raises(RangeError, match="tokens from 0 wanted, the transfer holds 16 to 80"):
        plan_scatter(shard, [block_table([7, 4, 9], 0)], part, 0)


def _expand(found: Any, step: int = 256) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [
        ((src_region, src_at + i), (dst_region, dst_at + i))
        for src_region, src_at, dst_region, dst_at, length in _rows(found.spans())
        for i in range(0, length, step)
    ]


def test_parts_add_up() -> None:
    """The chunks of a transfer carry the same bytes as the whole; window and state groups go with the last."""
    layouts = [combine([_cache(name, "BHNT"), _window(name)]) for name in "PD"]
    shard = _one(*layouts)
    whole, parts = Part.whole(8, 70), [Part(8, 30, 8, False), Part(30, 64, 8, False), Part(64, 70, 8, True)]
    src = [block_table([1, 2, 3, 4, 5]), block_table([11, 12, 13, 14, 15])]
    assert sum(shard.part_bytes(part) for part in parts) == shard.part_bytes(whole)
    together = sorted(row for part in parts for row in _expand(plan(shard, src, src, part)))
    assert together == sorted(_expand(plan(shard, src, src, whole)))


def test_groups_are_checked_against_their_own_pool() -> None:
    assert Group(GroupKind.FULL, 16, 100).null_block is None
    shard = _one(_cache("P", "interleaved", num_blocks=50), _cache("D", "interleaved", num_blocks=100))
    assert plan_tail(shard, [[49]], 16, [[99]], 16).count == 1
    with pytest.raises(BlockError, match="P group 0: block 99"):
        plan_tail(shard, [[99]], 16, [[49]], 16)
