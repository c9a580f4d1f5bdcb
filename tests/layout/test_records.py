"""Layouts that contradict themselves are refused; good ones survive the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pushkv.model.layout import AXES, GroupKind, Layout, LayoutError, combine, dense_layout, pair, plan_tail


def _cache(axes: str = "interleaved", **changes: Any) -> Layout:
    settings: dict[str, Any] = {"num_blocks": 10, "block_tokens": 16, "kv_heads": 4, "head_dim": 8}
    return dense_layout("P", axes, changes.pop("layers", ["a", "b"]), **settings | changes)


@pytest.mark.parametrize("axes", [*AXES, "HBN", "NTBLH"])
def test_dense_layouts_fill_their_regions(axes: str) -> None:
    layout = _cache(axes)
    assert sum(layout.regions) == 10 * 16 * 4 * 8 * 2 * 2 * 2
    assert len(layout.views) == 4
    (shard,) = pair([layout], [layout])
    assert plan_tail(shard, [range(10)], 160, [range(10)], 160).total_bytes == sum(layout.regions)


@pytest.mark.parametrize("axes", ["BH", "BHNX", "BBHN", "BHNTT", ""])
def test_axes_must_make_sense(axes: str) -> None:
    with pytest.raises(LayoutError, match="axes"):
        _cache(axes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1}, "group 1 or region 0 does not exist"),
        ({"region": -1}, "group 0 or region -1 does not exist"),
        ({"offset_bytes": -2}, "not negative"),
        ({"offset_bytes": 18}, "ends at byte 20482 of region 0, which has 20480"),
        ({"head_start": 4}, "heads 4 to 4 of 4"),
        ({"head_stop": 5}, "heads 0 to 5 of 4"),
        ({"kv_heads": 1 << 40}, "heads 0 to 4 of"),
        ({"element_bytes": 0}, "must be positive"),
        ({"token_stride": 8}, "overlaps itself, a stride of 8 bytes"),
        ({"block_stride": 2048 - 32}, "overlaps itself"),
        ({"head_stride": -512}, "overlaps itself"),
        ({"block_tokens": 12}, "kernel blocks of 12 tokens do not divide blocks of 16"),
    ],
)
def test_impossible_views_are_refused(changes: dict[str, Any], message: str) -> None:
    layout = _cache(layers=["a"])
    v = layout.views[1]  # lies 16 bytes behind K
    with pytest.raises(LayoutError, match=message):
        replace(layout, views=(layout.views[0], replace(v, **changes)))


def test_names_and_places_are_unique() -> None:
    layout = _cache("nhd_apart", layers=["a"])
    k, v = layout.views
    with pytest.raises(LayoutError, match="layer 'a' has two views called 'k'"):
        replace(layout, views=(k, replace(v, part="k")))
    with pytest.raises(LayoutError, match="'a' 'v' lies where another layer of its group lies"):
        replace(layout, views=(k, replace(v, region=0)))


def test_impossible_groups_and_regions_are_refused() -> None:
    layout = _cache()
    for bad in (
        replace(layout.groups[0], num_blocks=0),
        replace(layout.groups[0], window_tokens=5),
        replace(layout.groups[0], kind=GroupKind.WINDOW),
    ):
        with pytest.raises(LayoutError, match="group 0"):
            replace(layout, groups=(bad,))
    with pytest.raises(LayoutError, match="region of"):
        replace(layout, regions=(1 << 62, *layout.regions[1:]))
    with pytest.raises(LayoutError, match="no layouts"):
        combine([])


def test_two_names_may_share_a_buffer() -> None:
    """Different groups of one pool: kept apart by block ids. Different pools, or pages of different size: not at
    all.
    """
    a, b = _cache(layers=["a"]), _cache(layers=["b"])
    both = combine([a, b], share_regions=True)
    assert both.regions == a.regions and both.views[2].region == both.views[0].region
    with pytest.raises(
        LayoutError, match=r"'a' and 'b' share memory in region 0, but their groups' pools are \[0, 1\]"
    ):
        replace(both, groups=(both.groups[0], replace(both.groups[1], pool=1)))
    with pytest.raises(LayoutError, match=r"pages have \[2048, 1024\] bytes"):
        combine([a, _cache(layers=["b"], block_tokens=8, num_blocks=20)], share_regions=True)
    # different ranges of one buffer need no such care
    size = a.regions[0]
    apart = combine([a, b])
    views = tuple(replace(view, region=0, offset_bytes=view.offset_bytes + view.region * size) for view in apart.views)
    other_pool = (apart.groups[0], replace(apart.groups[1], pool=1))
    assert replace(apart, regions=(2 * size,), views=views, groups=other_pool).regions == (2 * size,)


def test_layouts_survive_the_wire() -> None:
    """The hello carries layouts; what a peer made up does not get past decoding."""
    layout = combine([_cache(), _cache("nhd_apart", layers=["c"], kind=GroupKind.WINDOW, window_tokens=9)])
    wire = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(wire, type=Layout) == layout
    lie = msgspec.to_builtins(layout)
    lie["regions"] = [5, *lie["regions"][1:]]
    with pytest.raises(msgspec.ValidationError, match="ends at byte"):
        msgspec.convert(lie, type=Layout)
