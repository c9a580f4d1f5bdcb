"""Shapes that random pairs of engines seldom have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pushkv.model.layout import Layout, LayoutError, Part, block_table, dense_layout, pair, plan, scatter_ahead

from .oracle import Model, Store
from .scenarios import CASE, check


@pytest.mark.parametrize(("start", "stop"), [(9, 12), (9, 16), (8, 12), (8, 16), (15, 17), (3, 21)])
def test_heads_outside_tokens_are_cut_at_blocks(start: int, stop: int) -> None:
    """Packed bytes in tiles of D's blocks; a part may lie within one."""
    store = Store("BHN", 8, 40)
    model = Model(("a", "b"), kv_heads=2, head_dim=3)
    part = Part.whole(start, stop)
    check(replace(CASE, models=(model,), dst_stores=(store,), dst_tp=1, part=part, dst_first=start))


@pytest.mark.parametrize(
    "store",
    [
        Store("BNH", 1, 60),
        Store("BHN", 8, 40, kernel_tokens=2),
        Store("BHN", 4, 40, kernel_tokens=1),
        Store("NBH", 2, 40),
        Store("HNB", 4, 40, kernel_tokens=2),
    ],
    ids=lambda store: f"{store.axes}-{store.block_tokens}-{store.kernel_tokens}",
)
def test_a_scatter_may_be_planned_ahead(store: Store) -> None:
    """One token a block, several kernel blocks in one, and where the tokens of a block lie far apart it is refused."""
    check(replace(CASE, dst_stores=(store,), dst_first=0))
    check(replace(CASE, dst_stores=(store,), dst_first=0, part=Part.whole(21, 21)))


def test_a_pool_of_one_block_whose_tokens_lie_apart_is_not_planned_ahead() -> None:
    """Also where its one block is as far as its tokens are."""
    size = {"num_blocks": 1, "block_tokens": 4, "kv_heads": 1, "head_dim": 8}
    (shard,) = pair([dense_layout("P", "BNH", ["a"], **size)], [dense_layout("D", "NBH", ["a"], **size)])  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="planned when they are known"):
        scatter_ahead(shard, Part.whole(0, 4))


def _at(name: str, offsets: tuple[int, ...]) -> Layout:
    """One layer at each offset of one region; all else is equal."""
    layers = [chr(ord("a") + number) for number in range(len(offsets))]
    made = dense_layout(
        name, "BNH", layers, num_blocks=4, block_tokens=2, kv_heads=1, head_dim=4, element_bytes=1, parts=("latent",)
    )
    views = tuple(
        replace(view, region=0, offset_bytes=at, block_stride=1000)
        for view, at in zip(made.views, offsets, strict=True)
    )
    return Layout(name, 0, (10_000,), made.groups, views)


@pytest.mark.parametrize(
    "offsets",
    [
        (0, 100, 200, 350, 450),  # a step that breaks off, in a number that does not divide
        (0, 10, 20, 300, 310, 325),  # rows of equal number, not of equal steps
        (0, 10, 20, 300, 310, 320),  # rows of rows
        (0, 10, 20, 300, 310, 320, 700, 710, 720),  # equal rows at unequal distances
        (0, 10, 30, 70),
    ],
)
def test_layers_at_odd_distances_go_to_their_own_places(offsets: tuple[int, ...]) -> None:
    src, dst = _at("P", offsets), _at("D", tuple(2 * at + 8 for at in offsets))
    for one, other in ((src, dst), (dst, src), (src, src)):
        (shard,) = pair([one], [other])
        spans = plan(shard, [block_table([1])], [block_table([2])], Part.whole(0, 2)).spans()
        found = {
            (a + byte, b + byte)
            for a, b, length in zip(
                spans.src_offset.tolist(), spans.dst_offset.tolist(), spans.length.tolist(), strict=True
            )
            for byte in range(length)
        }
        wanted = {
            (p.offset_bytes + 1000 + byte, d.offset_bytes + 2000 + byte)
            for p, d in zip(one.views, other.views, strict=True)
            for byte in range(8)
        }
        assert found == wanted
        assert np.all(spans.src_region == 0) and np.all(spans.dst_region == 0)


@pytest.mark.parametrize(
    ("offsets", "extents", "origins"),
    [
        ((0, 10, 20, 300, 310, 320), [2, 3], 1),
        ((0, 10, 20, 300, 310, 320, 700, 710, 720), [3], 3),
        ((0, 10, 300, 310), [2, 2], 1),
        ((0, 10, 30, 70), [], 4),
    ],
)
def test_equal_distances_are_planned_once(offsets: tuple[int, ...], extents: list[int], origins: int) -> None:
    """However far apart they are on either side."""
    (shard,) = pair([_at("P", offsets)], [_at("D", tuple(2 * at + 8 for at in offsets))])
    (bundle,) = shard.bundles
    assert [dim.extent for dim in bundle.dims] == extents and len(bundle.src.base) == origins


def test_kernel_blocks_divide_logical_blocks() -> None:
    with pytest.raises(LayoutError, match="kernel blocks of 3 tokens do not divide logical blocks of 16"):
        dense_layout("P", "BNH", ["a"], num_blocks=4, block_tokens=16, kv_heads=1, head_dim=4, kernel_block_tokens=3)
    with pytest.raises(LayoutError, match="kernel blocks of 0 tokens"):
        dense_layout("P", "BNH", ["a"], num_blocks=4, block_tokens=16, kv_heads=1, head_dim=4, kernel_block_tokens=0)
