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
        ({"region": 1}, "group 0 or region 1 does not exist"),
        ({"offset_bytes": -2}, "not negative"),
        ({"offset_bytes": 18}, "ends at byte 20482 of region 0, which has 20480"),
        ({"head_start": 4}, "heads 4 to 4 of 4"),
        ({"head_stop": 5}, "heads 0 to 5 of 4"),
        ({"kv_heads": 1 << 40}, "heads 0 to 4 of"),
        ({"kv_heads": (1 << 16) + 1}, "heads 0 to 4 of"),
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


def test_an_axis_of_one_may_have_any_stride() -> None:
    """One head is never stepped from, nor one block: tensors say there what they like. Two are."""
    for changes in ({"kv_heads": 1}, {"num_blocks": 1}):
        layout = _cache("BHN", layers=["a"], parts=("latent",), **changes)
        (view,) = layout.views
        axis = "head_stride" if "kv_heads" in changes else "block_stride"
        assert replace(layout, views=(replace(view, **{axis: 0}),)).views[0].layer == "a"
    layout = _cache("BHN", layers=["a"], parts=("latent",), kv_heads=2, num_blocks=2)
    for axis in ("head_stride", "block_stride"):
        with pytest.raises(LayoutError, match="overlaps itself"):
            replace(layout, views=(replace(layout.views[0], **{axis: 0}),))


def test_all_kernel_blocks_lie_in_the_region() -> None:
    """Of those in a logical block the last one, too."""
    layout = _cache(layers=["a"], kernel_block_tokens=4)
    (size,) = layout.regions
    assert size == 10 * 16 * 4 * 8 * 2 * 2
    with pytest.raises(LayoutError, match=f"ends at byte {size} of region 0, which has {size - 1}"):
        replace(layout, regions=(size - 1,))


def test_a_region_may_be_empty_or_as_large_as_can_be() -> None:
    layout = _cache()
    for size in (0, 1 << 61):
        assert replace(layout, regions=(*layout.regions, size)).regions[-1] == size
    for size in (-1, (1 << 61) + 1):
        with pytest.raises(LayoutError, match=f"a region of {size} bytes"):
            replace(layout, regions=(*layout.regions, size))


def test_a_model_may_have_so_many_heads() -> None:
    layout = _cache(layers=["a"])
    many = tuple(replace(view, kv_heads=1 << 16) for view in layout.views)
    assert replace(layout, views=many).views == many


def test_a_pool_may_have_one_block() -> None:
    assert _cache(num_blocks=1).groups[0].num_blocks == 1
    assert _cache(block_tokens=1).groups[0].block_tokens == 1


def test_a_refusal_describes_what_there_is() -> None:
    """Windows are named, and no more than four shapes."""
    window = _cache(kind=GroupKind.WINDOW, window_tokens=9)
    assert "in groups window(16x10, window 9): k heads" in window.describe()
    assert "in groups full(16x10): k heads 0-3 of 4" in _cache().describe()
    for count in (4, 5):
        parts = tuple(f"part{number}" for number in range(count))
        text = _cache("BNH", layers=["a"], parts=parts).describe()
        assert text.count(" heads ") == 4 and text.endswith("; ...") is (count > 4)
    assert Layout("none", 0, (), (), ()).describe() == "'none' rank 0 stage 0: 0 layers in groups : "


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
        replace(layout.groups[0], block_tokens=0),
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


def test_memory_that_is_shared_with_the_first_of_many_is_found() -> None:
    """A long view, a short one within it, and one of another pool behind the short one."""
    a, b, c = (_cache("BNH", layers=[name], parts=("latent",)) for name in "abc")
    all_three = combine([a, b, c])
    (size, *_) = a.regions
    short = replace(all_three.views[1], region=0, group=0, block_stride=0, kv_heads=4, head_start=0, head_stop=1)
    short = replace(short, offset_bytes=512, token_stride=16, block_stride=256)
    late = replace(all_three.views[2], region=0, offset_bytes=size - 64, group=1)
    groups = (all_three.groups[0], replace(all_three.groups[2], pool=1))
    with pytest.raises(LayoutError, match="'a' and 'c' share memory in region 0"):
        Layout("P", 0, (2 * size,), groups, (all_three.views[0], short, late))


def test_shared_regions_are_as_large_as_the_largest() -> None:
    one, other = (_cache("nhd_apart", layers=layers) for layers in (["a", "b"], ["c", "d"]))
    sizes = [[size + more for size, more in zip(one.regions, by, strict=True)] for by in ((6, 1, 5, 2), (5, 7, 4, 3))]
    made = [replace(each, regions=tuple(size)) for each, size in zip((one, other), sizes, strict=True)]
    assert combine(made, share_regions=True).regions == tuple(map(max, *sizes))


def test_layouts_survive_the_wire() -> None:
    """The hello carries layouts; what a peer made up does not get past decoding."""
    layout = combine([_cache(), _cache("nhd_apart", layers=["c"], kind=GroupKind.WINDOW, window_tokens=9)])
    wire = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(wire, type=Layout) == layout
    lie = msgspec.to_builtins(layout)
    lie["regions"] = [5, *lie["regions"][1:]]
    with pytest.raises(msgspec.ValidationError, match="ends at byte"):
        msgspec.convert(lie, type=Layout)
