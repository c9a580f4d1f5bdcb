"""Which rank of P writes what into which rank of D: the handshake's half of the mapping.

Decides: that two engines fit (same layers by *name*, same element type, head size, heads and kinds of groups), which
P rank writes where several hold the same heads (replicated GQA heads, MLA), and the strided shape of each shard. Does
not decide: anything that depends on a request; a `Shard` is made once per pair of engines and used for every
transfer.

A shard's views are boiled down to a few *bundles*: all (layer, part) pairs that have the same strides on both sides.
Within one bundle a request is planned once and repeated over the layers, so the cost of planning does not grow with
their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ._errors import PairingError
from ._records import Group, GroupKind, IntArray, Layout, Part, View

_NAMES_IN_MESSAGE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a bundle. region, base: int64 arrays, one entry per origin: where block 0, token 0 of it lies, in
    bytes.
    """

    group: int
    region: IntArray
    base: IntArray
    ratio: int
    block_tokens: int
    block_stride: int
    token_stride: int

    @property
    def page_tokens(self) -> int:
        """Tokens of a logical block."""
        return self.block_tokens * self.ratio


class Dim(NamedTuple):
    """A repetition that both sides have: heads, K and V, or layers of one region."""

    extent: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """(layer, part) pairs of one shard with equal strides: origins x dims x blocks x tokens x row_bytes."""

    kind: GroupKind
    window_tokens: int
    src: Side
    dst: Side
    dims: tuple[Dim, ...]
    row_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token (of one row, for a state) over all layers of the bundle."""
        size = self.row_bytes * len(self.src.base)
        for dim in self.dims:
            size *= dim.extent
        return size

    @property
    def whole_blocks(self) -> bool:
        """Whether what is alive on P always fills D's blocks from their beginning."""
        return self.kind is not GroupKind.WINDOW or self.src.page_tokens % self.dst.page_tokens == 0

    def tokens(self, part: Part) -> tuple[int, int]:
        """[start, stop) on the token axis: tokens of the prompt, or all rows of a state.

        A window moves from the beginning of the block in which it begins, as far as P still has that block: D's
        engine will cache the whole block, not just the tokens that this request attends to.
        """
        if self.kind is GroupKind.FULL:
            return part.start, part.stop
        if not part.last or part.first == part.stop:
            return 0, 0
        if self.kind is GroupKind.STATE:
            return 0, self.dst.block_tokens
        alive = max(0, part.stop - self.window_tokens + 1)
        held = max(alive - alive % side.page_tokens for side in (self.src, self.dst))
        return max(part.first, held), part.stop


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What P's rank `src_rank` writes into D's rank `dst_rank`.

    token_bytes: bytes per token in the full-attention groups. state_bytes: bytes per transfer in the state groups.
    whole_windows: whether D's first block of a sliding window always arrives from its first token on, so that D may
    keep it in its prefix cache; false where D's blocks are not a divisor of P's.
    """

    src_rank: int
    dst_rank: int
    src_groups: tuple[Group, ...]
    dst_groups: tuple[Group, ...]
    bundles: tuple[Bundle, ...]
    token_bytes: int
    state_bytes: int
    whole_windows: bool

    def part_bytes(self, part: Part) -> int:
        """Payload of a part in bytes, in time that does not depend on its length."""
        total = 0
        for bundle in self.bundles:
            start, stop = bundle.tokens(part)
            total += (stop - start) * bundle.token_bytes
        return total


def pair(src: Sequence[Layout], dst: Sequence[Layout]) -> tuple[Shard, ...]:
    """The shards from all ranks of P (`src`) to all ranks of D (`dst`), ordered by (dst_rank, src_rank).

    Every (layer, part, head) of every D rank is in exactly one shard. Where several P ranks hold a head, the D ranks
    that want it take turns over them. Raises `PairingError`, with both layouts in the message, if the caches cannot
    be mapped.
    """
    if not src or not dst:
        raise PairingError("an engine without ranks")
    src, dst = sorted(src, key=_rank), sorted(dst, key=_rank)  # both engines must come to the same shards
    sources, targets = _holders(src, dst, src), _holders(src, dst, dst)
    missing = [key for key in targets if key not in sources]
    surplus = [key for key in sources if key not in targets]
    if missing or surplus:
        raise _refusal(src[0], dst[0], f"only D has {_names(missing)}, only P has {_names(surplus)}")
    pieces: dict[tuple[int, int], list[_Piece]] = {}
    for key, wanted in targets.items():
        held = sources[key]
        reference = held[0]
        for holder in held[1:] + wanted:
            _compare(reference, holder, src[0], dst[0])
        _assign(held, wanted, pieces)
    shards = []
    for (dst_index, src_index), found in sorted(pieces.items()):
        bundles = tuple(_bundles(src[src_index], dst[dst_index], found))
        shards.append(
            Shard(
                src_rank=src[src_index].rank,
                dst_rank=dst[dst_index].rank,
                src_groups=src[src_index].groups,
                dst_groups=dst[dst_index].groups,
                bundles=bundles,
                token_bytes=sum(b.token_bytes for b in bundles if b.kind is GroupKind.FULL),
                state_bytes=sum(b.token_bytes * b.dst.block_tokens for b in bundles if b.kind is GroupKind.STATE),
                whole_windows=all(bundle.whole_blocks for bundle in bundles),
            )
        )
    return tuple(sorted(shards, key=lambda shard: (shard.dst_rank, shard.src_rank)))


class _Holder(NamedTuple):
    at: int  # which of the side's layouts
    layout: Layout
    view: View

    @property
    def group(self) -> Group:
        return self.layout.groups[self.view.group]


class _Piece(NamedTuple):
    src: View
    dst: View
    head_start: int
    head_stop: int


class _Shape(NamedTuple):
    """What all units of a bundle share; the row's length is kept apart, as fusing changes it."""

    src_group: int
    dst_group: int
    heads: int
    src_block_tokens: int
    dst_block_tokens: int
    src_strides: tuple[int, int, int]
    dst_strides: tuple[int, int, int]


class _Unit(NamedTuple):
    dst_base: int
    src_base: int
    row_bytes: int


def _rank(layout: Layout) -> int:
    return layout.rank


def _holders(
    src: Sequence[Layout], dst: Sequence[Layout], side: Sequence[Layout]
) -> dict[tuple[str, str], list[_Holder]]:
    """(layer, part) -> the ranks that hold some of its heads, in the order of the ranks' views."""
    if len({layout.rank for layout in side}) != len(side):
        raise _refusal(src[0], dst[0], f"two layouts for one rank of {side[0].name!r}")
    holders: dict[tuple[str, str], list[_Holder]] = {}
    for index, layout in enumerate(side):
        for view in layout.views:
            found = holders.setdefault(view.key, [])
            if found and found[0].layout.stage != layout.stage:
                stages = f"{found[0].layout.stage} and {layout.stage}"
                raise _refusal(
                    src[0], dst[0], f"layer {view.layer!r} {view.part!r} is in stages {stages} of {layout.name!r}"
                )
            found.append(_Holder(index, layout, view))
    return holders


def _compare(one: _Holder, other: _Holder, src: Layout, dst: Layout) -> None:
    """Refuses unless both ranks mean the same thing by one head of one token of this layer."""
    facts: list[tuple[str, object, object]] = [
        ("dtype", one.view.dtype, other.view.dtype),
        ("element bytes", one.view.element_bytes, other.view.element_bytes),
        ("head_dim", one.view.head_dim, other.view.head_dim),
        ("KV heads", one.view.kv_heads, other.view.kv_heads),
        ("kind of group", one.group.kind.value, other.group.kind.value),
        ("window", one.group.window_tokens, other.group.window_tokens),
    ]
    if one.group.kind is GroupKind.STATE:
        facts.append(("rows of the state", one.view.block_tokens, other.view.block_tokens))
    for what, first, second in facts:
        if first != second:
            where = f"{what} of layer {one.view.layer!r} {one.view.part!r}"
            reason = f"{where}: {first} in {one.layout.name!r}, {second} in {other.layout.name!r}"
            raise _refusal(src, dst, reason)


def _assign(held: list[_Holder], wanted: list[_Holder], pieces: dict[tuple[int, int], list[_Piece]]) -> None:
    """Chooses the P rank for every head that every D rank wants, and adds the ranges of heads to `pieces`."""
    turns: dict[int, int] = {}
    for target in wanted:
        chosen: list[_Holder] = []
        for head in range(target.view.head_start, target.view.head_stop):
            candidates = [holder for holder in held if holder.view.head_start <= head < holder.view.head_stop]
            if not candidates:
                reason = f"nobody on P holds head {head} of layer {target.view.layer!r} {target.view.part!r}"
                raise _refusal(held[0].layout, target.layout, reason)
            turn = turns.get(head, 0)
            turns[head] = turn + 1
            chosen.append(candidates[turn % len(candidates)])
        first = 0
        for index in range(1, len(chosen) + 1):
            if index == len(chosen) or chosen[index].at != chosen[first].at:
                holder, start = chosen[first], target.view.head_start
                piece = _Piece(holder.view, target.view, start + first, start + index)
                pieces.setdefault((target.at, holder.at), []).append(piece)
                first = index


def _bundles(src: Layout, dst: Layout, pieces: Iterable[_Piece]) -> Iterable[Bundle]:
    """The pieces of one shard, grouped by shape: first rows that touch are fused, then units at equal distances
    become dims.
    """
    units: dict[tuple[_Shape, int, int], list[_Unit]] = {}
    ratios: dict[_Shape, tuple[int, int]] = {}
    for piece in pieces:
        s, d = piece.src, piece.dst
        shape = _Shape(
            s.group,
            d.group,
            piece.head_stop - piece.head_start,
            s.block_tokens,
            d.block_tokens,
            (s.block_stride, s.head_stride, s.token_stride),
            (d.block_stride, d.head_stride, d.token_stride),
        )
        ratios[shape] = (src.ratio(s), dst.ratio(d))
        src_base = s.offset_bytes + (piece.head_start - s.head_start) * s.head_stride
        dst_base = d.offset_bytes + (piece.head_start - d.head_start) * d.head_stride
        units.setdefault((shape, s.region, d.region), []).append(_Unit(dst_base, src_base, s.row_bytes))

    origins: dict[tuple[_Shape, int, tuple[Dim, ...]], list[tuple[int, int, int, int]]] = {}
    for (shape, src_region, dst_region), found in units.items():
        for row_bytes, src_bases, dst_bases in _fuse(found):
            dims, first = _factor(src_bases, dst_bases)
            places = [(src_region, int(src_bases[i]), dst_region, int(dst_bases[i])) for i in first]
            origins.setdefault((shape, row_bytes, dims), []).extend(places)

    for (shape, row_bytes, dims), places in origins.items():
        table = np.array(places, np.int64)
        group = dst.groups[shape.dst_group]
        if shape.heads > 1:
            dims += (Dim(shape.heads, shape.src_strides[1], shape.dst_strides[1]),)
        sides = []
        for column, number, ratio, block_tokens, strides in (
            (0, shape.src_group, ratios[shape][0], shape.src_block_tokens, shape.src_strides),
            (2, shape.dst_group, ratios[shape][1], shape.dst_block_tokens, shape.dst_strides),
        ):
            region, base = table[:, column].copy(), table[:, column + 1].copy()
            sides.append(Side(number, region, base, ratio, block_tokens, strides[0], strides[2]))
        yield Bundle(group.kind, group.window_tokens, sides[0], sides[1], dims, row_bytes)


def _fuse(units: list[_Unit]) -> Iterable[tuple[int, IntArray, IntArray]]:
    """Joins rows that follow each other on both sides (K|V side by side): (row_bytes, src bases, dst bases) per
    resulting length.
    """
    by_length: dict[int, list[tuple[int, int]]] = {}
    ordered = sorted(units)
    dst_base, src_base, row_bytes = ordered[0]
    for unit in [*ordered[1:], None]:
        if unit and unit.dst_base == dst_base + row_bytes and unit.src_base == src_base + row_bytes:
            row_bytes += unit.row_bytes
            continue
        by_length.setdefault(row_bytes, []).append((src_base, dst_base))
        if unit:
            dst_base, src_base, row_bytes = unit
    for length, bases in by_length.items():
        table = np.array(bases, np.int64)
        yield length, table[:, 0], table[:, 1]


def _factor(src: IntArray, dst: IntArray) -> tuple[tuple[Dim, ...], list[int]]:
    """Finds regular spacing, e.g. K and V within layers: (dims, outermost first; indices of the bases that remain as
    origins).
    """
    count = len(dst)
    if count == 1:
        return (), [0]
    steps = np.stack((np.diff(src), np.diff(dst)))
    same = (steps == steps[:, :1]).all(axis=0)
    inner = count if same.all() else int(np.argmin(same)) + 1
    if count % inner:
        return (), list(range(count))
    offsets = np.arange(inner)
    for bases, step in ((src, steps[0, 0]), (dst, steps[1, 0])):
        rows = bases.reshape(-1, inner)
        if not (rows == rows[:, :1] + offsets * step).all():
            return (), list(range(count))
    dims = (Dim(inner, int(steps[0, 0]), int(steps[1, 0])),)
    if inner == count:
        return dims, [0]
    outer, first = _factor(src[::inner], dst[::inner])
    return outer + dims, [index * inner for index in first]


def _names(keys: list[tuple[str, str]]) -> str:
    if not keys:
        return "nothing"
    few = ", ".join(f"{layer} {part}" for layer, part in keys[:_NAMES_IN_MESSAGE])
    return few + (f" and {len(keys) - _NAMES_IN_MESSAGE} more" if len(keys) > _NAMES_IN_MESSAGE else "")


def _refusal(src: Layout, dst: Layout, reason: str) -> PairingError:
    return PairingError(f"cannot pair: {reason}\n  P {src.describe()}\n  D {dst.describe()}")
