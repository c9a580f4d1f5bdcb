"""Constructors for the cache shapes that engines use.

Decides: the strides of a densely stored cache from the order of its axes, and which heads a tensor-parallel rank
holds. Does not decide: anything about real tensors; a host that has a tensor's own strides writes `View`s directly.

An axis order is a string, outermost first: B block, H head, N token, T "K then V", L layer. Without L each layer has
its own region; without T, K and V have their own regions. `AXES` names the common ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ._errors import LayoutError
from ._records import Group, GroupKind, Layout, View

AXES: Mapping[str, str] = {
    "nhd_apart": "BNH",
    "hnd_apart": "BHN",
    "nhd_stacked": "TBNH",  # [2, blocks, ...], vLLM FlashAttention until 0.25
    "hnd_stacked": "TBHN",
    "nhd_paired": "BTNH",  # [blocks, 2, ...], FlashInfer
    "hnd_paired": "BTHN",
    "interleaved": "BHNT",  # vLLM 0.26: (blocks, kv_heads, block_tokens, 2 * head_dim)
    "cross_layer_nhd": "BLTNH",
    "cross_layer_hnd": "BLTHN",
    # vLLM 0.32: one allocation, content of one head and token is K|V
    "LBHNC": "LBHNT",
    "LBNHC": "LBNHT",
    "LHBNC": "LHBNT",
    "BLHNC": "BLHNT",
    "BLNHC": "BLNHT",
    "BHLNC": "BHLNT",
}
"""Axis orders by the names used in the field."""


def head_range(kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """[first, stop) of the KV heads of a rank: split evenly, or one each and replicated when there are more ranks
    than heads.

    Raises `LayoutError` if neither number divides the other.
    """
    if not 0 <= tp_rank < tp_size or kv_heads < 1:
        raise LayoutError(f"rank {tp_rank} of {tp_size} with {kv_heads} KV heads")
    if kv_heads % tp_size == 0:
        share = kv_heads // tp_size
        return tp_rank * share, (tp_rank + 1) * share
    if tp_size % kv_heads == 0:
        head = tp_rank // (tp_size // kv_heads)
        return head, head + 1
    raise LayoutError(f"{kv_heads} KV heads cannot be divided over {tp_size} ranks, nor the ranks over the heads")


def dense_layout(
    name: str,
    axes: str,
    layers: Sequence[str],
    *,
    num_blocks: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: str = "bfloat16",
    element_bytes: int = 2,
    tp_size: int = 1,
    tp_rank: int = 0,
    rank: int | None = None,
    stage: int = 0,
    parts: Sequence[str] = ("k", "v"),
    kernel_block_tokens: int | None = None,
    kind: GroupKind = GroupKind.FULL,
    window_tokens: int = 0,
    null_block: int | None = None,
    pad_bytes: Mapping[str, int] | None = None,
) -> Layout:
    """One rank's cache of one group, stored densely in the order `axes` (a key of `AXES` or the axes themselves).

    parts: ("k", "v"), ("latent",) for MLA with kv_heads=1 (replicated over any tp_size), or the names of equally
    shaped states. With kind STATE, `kernel_block_tokens` is the number of rows of a state. pad_bytes: bytes added
    behind each step of an axis ("B": the page is larger than its payload) or behind each row ("C"). Raises
    `LayoutError` for axes that do not fit.
    """
    order = AXES.get(axes, axes)
    if sorted(order.replace("L", "").replace("T", "")) != ["B", "H", "N"] or len(set(order)) != len(order):
        raise LayoutError(f"layout {name!r}: axes {axes!r} must name each of B, H, N once, and L and T at most once")
    head_start, head_stop = head_range(kv_heads, tp_size, tp_rank)
    rows = block_tokens if kernel_block_tokens is None else kernel_block_tokens
    if rows < 1 or (kind is not GroupKind.STATE and block_tokens % rows):
        raise LayoutError(
            f"layout {name!r}: kernel blocks of {rows} tokens do not divide logical blocks of {block_tokens}"
        )
    ratio = 1 if kind is GroupKind.STATE else block_tokens // rows
    extents = {"B": num_blocks * ratio, "H": head_stop - head_start, "N": rows, "T": len(parts), "L": len(layers)}
    padding = pad_bytes or {}
    size = head_dim * element_bytes + padding.get("C", 0)
    strides = {"L": 0, "T": 0}
    for axis in reversed(order):
        strides[axis] = size + padding.get(axis, 0)
        size = strides[axis] * extents[axis]
    regions: list[int] = []
    views: list[View] = []
    where: dict[tuple[int, int], int] = {}  # (layer, part), or 0 for an axis inside the region -> region
    for layer_index, layer in enumerate(layers):
        for part_index, part in enumerate(parts):
            place = (0 if "L" in order else layer_index, 0 if "T" in order else part_index)
            if place not in where:
                where[place] = len(regions)
                regions.append(size)
            views.append(
                View(
                    layer=layer,
                    part=part,
                    group=0,
                    region=where[place],
                    offset_bytes=layer_index * strides["L"] + part_index * strides["T"],
                    dtype=dtype,
                    element_bytes=element_bytes,
                    head_dim=head_dim,
                    kv_heads=kv_heads,
                    head_start=head_start,
                    head_stop=head_stop,
                    block_tokens=rows,
                    block_stride=strides["B"],
                    head_stride=strides["H"],
                    token_stride=strides["N"],
                )
            )
    group = Group(kind, block_tokens, num_blocks, window_tokens, null_block=null_block)
    return Layout(name, tp_rank if rank is None else rank, tuple(regions), (group,), tuple(views), stage)


def combine(layouts: Sequence[Layout], *, share_regions: bool = False) -> Layout:
    """The groups of one rank in one layout, in the given order; name, rank and stage are the first one's.

    share_regions: region i of each lies in the same memory (vLLM's hybrid models: one block pool, different groups
    use different blocks of one buffer). Otherwise the regions follow each other.
    """
    if not layouts:
        raise LayoutError("no layouts to combine")
    regions: list[int] = []
    groups: list[Group] = []
    views: list[View] = []
    for layout in layouts:
        first = 0 if share_regions else len(regions)
        views += [replace(view, group=view.group + len(groups), region=view.region + first) for view in layout.views]
        groups += layout.groups
        for index, size in enumerate(layout.regions):
            if first + index < len(regions):
                regions[first + index] = max(regions[first + index], size)
            else:
                regions.append(size)
    return replace(layouts[0], regions=tuple(regions), groups=tuple(groups), views=tuple(views))
