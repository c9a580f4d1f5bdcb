"""From block lists and a token range to spans: which bytes of which region go where.

Decides: the exact set of (source, destination, length) and how few of them it takes. Does not decide: when, in what
order of importance, or by which path; nor that the tokens have been computed (the host knows).

How. The token range is cut at every block boundary of either side into *runs*, each within one block on both sides.
One run of one bundle is a box (dims x tokens x row); the inner axes that are contiguous on both sides melt into one
length, and runs that follow each other in memory on both sides melt across blocks. This is done once per bundle; a
`Plan` keeps the result as small templates and multiplies them out by layers, heads and K/V only when asked, in chunks
of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._errors import BlockError, RangeError, TooManySpans
from ._pair import Bundle, Dim, Shard, Side
from ._records import BlockTable, Group, GroupKind, IntArray, Part, block_table

DEFAULT_SPAN_LIMIT = 1 << 19  # 21 MB of arrays


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Parallel int64 arrays, one entry per span: `length` bytes from (src_region, src_offset) to (dst_region,
    dst_offset).

    Regions are indices into the two layouts' `regions`, offsets are bytes in the region. Spans never overlap in the
    destination.
    """

    src_region: IntArray
    src_offset: IntArray
    dst_region: IntArray
    dst_offset: IntArray
    length: IntArray

    def __len__(self) -> int:
        return len(self.length)


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Spans of one bundle, not yet multiplied out: every (origin x loops) x every run.

    src_run, dst_run: offsets of the runs relative to an origin; length: bytes of each.
    """

    src_region: IntArray
    src_base: IntArray
    dst_region: IntArray
    dst_base: IntArray
    loops: tuple[Dim, ...]
    src_run: IntArray
    dst_run: IntArray
    length: IntArray

    @property
    def repeats(self) -> int:
        count = len(self.src_base)
        for loop in self.loops:
            count *= loop.extent
        return count


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All spans of one part of one shard, held compactly (memory: layers + tokens, not their product)."""

    templates: tuple[Template, ...]

    @property
    def count(self) -> int:
        """Exact number of spans, without making them."""
        return sum(template.repeats * len(template.length) for template in self.templates)

    @property
    def total_bytes(self) -> int:
        return sum(template.repeats * int(template.length.sum()) for template in self.templates)

    def spans(self, limit: int = DEFAULT_SPAN_LIMIT) -> Spans:
        """All spans at once. Raises `TooManySpans` beyond `limit`; then use `chunks`, or the packed path."""
        if self.count > limit:
            raise TooManySpans(
                f"{self.count} spans for {self.total_bytes} bytes, more than {limit}: the two caches interleave finely "
                "(heads split within a token?); take the packed path, or go through Plan.chunks"
            )
        found = list(self.chunks(max(1, self.count)))
        if len(found) == 1:
            return found[0]
        empty = np.empty(0, np.int64)
        columns = ("src_region", "src_offset", "dst_region", "dst_offset", "length")
        return Spans(*(np.concatenate([empty, *(getattr(spans, name) for spans in found)]) for name in columns))

    def chunks(self, max_spans: int = 1 << 16) -> Iterator[Spans]:
        """The spans in pieces of at most `max_spans`, which bounds the memory; layers outermost, tokens ascending
        within.
        """
        if max_spans < 1:
            raise ValueError(f"chunks of {max_spans} spans")
        for template in self.templates:
            yield from _multiply(template, max_spans)


def plan(shard: Shard, src: Sequence[BlockTable], dst: Sequence[BlockTable], part: Part) -> Plan:
    """Maps `part` from P's blocks to D's blocks.

    src, dst: one table per group of the side's layout, in its order. A table may have more blocks than the part needs
    (a spare look-ahead block). Raises `BlockError` for ids that are out of range, repeated, too many or too few,
    `RangeError` for tokens that lie before a table. An empty part gives an empty plan.
    """
    check_tables("P", shard.src_groups, src)
    check_tables("D", shard.dst_groups, dst)
    templates: list[Template] = []
    for bundle in shard.bundles:
        start, stop = bundle.tokens(part)
        if start < stop:
            source = place("P", bundle, bundle.src, shard.src_groups, src, start, stop)
            target = place("D", bundle, bundle.dst, shard.dst_groups, dst, start, stop)
            templates += build(source, target, bundle.dims, bundle.row_bytes, start, stop)
    return Plan(tuple(templates))


def plan_tail(
    shard: Shard,
    src_ids: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    src_tokens: int,
    dst_ids: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    wanted: int,
) -> Plan:
    """D's last `wanted` tokens, where D's lists begin with the first of them and P's with token 0 (a prefix hit on D).

    src_ids, dst_ids: one list per group. Raises as `plan`, and `RangeError` if P holds fewer than `wanted` tokens.
    """
    part = Part.tail(src_tokens, wanted)
    return plan(shard, [block_table(ids) for ids in src_ids], [block_table(ids, part.start) for ids in dst_ids], part)


def count_spans(shard: Shard, part: Part, *, src_first_token: int = 0, dst_first_token: int | None = None) -> int:
    """Spans of `part` if no two blocks are neighbours in memory: the worst case, from token counts alone, without
    block lists.

    *_first_token: where the sides' tables begin (D: at the part's transfer, if not given). `Plan.count` is exact.
    """
    if dst_first_token is None:
        dst_first_token = part.first
    total = 0
    for bundle in shard.bundles:
        start, stop = bundle.tokens(part)
        if start >= stop:
            continue
        state = bundle.kind is GroupKind.STATE
        starts = _cuts(
            start,
            stop,
            (0 if state else src_first_token, bundle.src.block_tokens),
            (0 if state else dst_first_token, bundle.dst.block_tokens),
        )
        lengths, counts = np.unique(np.diff(np.append(starts, stop)), return_counts=True)
        for tokens, runs in zip(lengths.tolist(), counts.tolist(), strict=True):
            _, by_token, loops = _melt(
                bundle.row_bytes, bundle.dims, bundle.src.token_stride, bundle.dst.token_stride, tokens
            )
            spans = runs * len(bundle.src.base) * (tokens if by_token else 1)
            for loop in loops:
                spans *= loop.extent
            total += spans
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """One side of a bundle with one request's blocks: what `build` needs to turn tokens into offsets."""

    region: IntArray
    base: IntArray
    blocks: IntArray  # logical block numbers, of `ratio` kernel blocks each; the first begins with `first_token`
    ratio: int
    first_token: int
    block_tokens: int
    block_stride: int
    token_stride: int

    def offsets(self, tokens: IntArray) -> IntArray:
        index, slot = np.divmod(tokens - self.first_token, self.block_tokens)
        if self.ratio == 1:
            block = self.blocks[index]
        else:
            logical, within = np.divmod(index, self.ratio)
            block = self.blocks[logical] * self.ratio + within
        offsets: IntArray = block * self.block_stride + slot * self.token_stride
        return offsets


def check_tables(who: str, groups: Sequence[Group], tables: Sequence[BlockTable]) -> None:
    """Refuses ids that no honest pool hands out: they may come from the network."""
    if len(tables) != len(groups):
        raise BlockError(f"{who}: {len(tables)} block lists for {len(groups)} cache groups")
    pools: dict[int, list[IntArray]] = {}
    for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
        ids = table.ids
        if group.null_block is not None:
            ids = ids[ids != group.null_block]
        if len(ids) > group.num_blocks:
            raise BlockError(f"{who} group {number}: {len(ids)} blocks listed, the pool has {group.num_blocks}")
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= group.num_blocks:
                bad = low if low < 0 else high
                raise BlockError(f"{who} group {number}: block {bad} is out of range, the pool has {group.num_blocks}")
            pools.setdefault(group.pool, []).append(ids)
    for number, lists in pools.items():
        ordered = np.sort(np.concatenate(lists))
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise BlockError(f"{who} pool {number}: block {int(twice[0])} is listed twice")


def place(
    who: str, bundle: Bundle, side: Side, groups: Sequence[Group], tables: Sequence[BlockTable], start: int, stop: int
) -> Placed:
    """Looks up the blocks that hold [start, stop); raises if the table lacks some."""
    table, group = tables[side.group], groups[side.group]
    ids = table.ids
    if bundle.kind is GroupKind.STATE:
        if len(ids) != 1:
            raise BlockError(f"{who} group {side.group}: a state has one block, {len(ids)} listed")
        first, used = 0, ids
    else:
        if start < table.first_token:
            raise RangeError(
                f"{who} group {side.group}: token {start} is before the first block (token {table.first_token})"
            )
        held = table.first_token + len(ids) * group.block_tokens
        if stop > held:
            raise BlockError(
                f"{who} group {side.group}: {len(ids)} blocks of {group.block_tokens} from token {table.first_token} "
                f"end at {held}, tokens to {stop} are needed"
            )
        low = (start - table.first_token) // group.block_tokens
        high = (stop - 1 - table.first_token) // group.block_tokens + 1
        first, used = table.first_token + low * group.block_tokens, ids[low:high]
    if group.null_block is not None and (used == group.null_block).any():
        raise BlockError(f"{who} group {side.group}: tokens {start} to {stop} need a block that is null")
    return Placed(
        side.region, side.base, used, side.ratio, first, side.block_tokens, side.block_stride, side.token_stride
    )


def build(src: Placed, dst: Placed, dims: tuple[Dim, ...], row_bytes: int, start: int, stop: int) -> list[Template]:
    """The templates of tokens [start, stop) of one bundle, one per distinct set of loops."""
    starts = _cuts(start, stop, (src.first_token, src.block_tokens), (dst.first_token, dst.block_tokens))
    tokens = np.diff(np.append(starts, stop))
    src_run, dst_run = src.offsets(starts), dst.offsets(starts)
    sizes, size_of = np.unique(tokens, return_inverse=True)
    lengths = np.empty(len(sizes), np.int64)
    steps = np.ones(len(sizes), np.int64)  # spans per run
    by_loops: dict[tuple[Dim, ...], list[int]] = {}
    for index, size in enumerate(sizes.tolist()):
        lengths[index], by_token, loops = _melt(row_bytes, dims, src.token_stride, dst.token_stride, size)
        if by_token:
            steps[index] = size
        by_loops.setdefault(loops, []).append(index)

    templates = []
    for loops, members in by_loops.items():
        chosen = np.arange(len(starts)) if len(by_loops) == 1 else np.flatnonzero(np.isin(size_of, members))
        count = steps[size_of[chosen]]
        runs = np.repeat(chosen, count)
        length = lengths[size_of[runs]]
        src_offset, dst_offset = src_run[runs], dst_run[runs]
        if len(runs) > len(chosen):
            within = np.arange(len(runs)) - np.repeat(np.cumsum(count) - count, count)
            src_offset = src_offset + within * src.token_stride
            dst_offset = dst_offset + within * dst.token_stride
        joined = _join(src_offset, dst_offset, length)
        templates.append(Template(src.region, src.base, dst.region, dst.base, loops, *joined))
    return templates


def _cuts(start: int, stop: int, src: tuple[int, int], dst: tuple[int, int]) -> IntArray:
    """First tokens of the runs of [start, stop): start, and every block boundary of either (first token, block
    tokens).
    """
    one, other = (
        np.arange(start + (first - start) % block_tokens, stop, block_tokens, dtype=np.int64)
        for first, block_tokens in (src, dst)
    )
    cuts = one if np.array_equal(one, other) else np.union1d(one, other)
    return cuts if len(cuts) and cuts[0] == start else np.insert(cuts, 0, start)


def _melt(
    row_bytes: int, dims: tuple[Dim, ...], src_token_stride: int, dst_token_stride: int, tokens: int
) -> tuple[int, bool, tuple[Dim, ...]]:
    """Melts what is contiguous on both sides: (length in bytes, whether tokens remain apart, the loops that remain)."""
    token = Dim(tokens, src_token_stride, dst_token_stride)
    rest = list(dims) + ([token] if tokens > 1 else [])
    length = row_bytes
    while touching := [dim for dim in rest if dim.src_stride == dim.dst_stride == length]:
        rest.remove(touching[0])
        length *= touching[0].extent
    by_token = token in rest
    if by_token:
        rest.remove(token)
    return length, by_token, tuple(rest)


def _join(src: IntArray, dst: IntArray, length: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Joins neighbouring runs that follow each other in memory on both sides."""
    follows = (src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1])
    if not follows.any():
        return src, dst, length
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return src[first], dst[first], np.add.reduceat(length, first)


def _multiply(template: Template, max_spans: int) -> Iterator[Spans]:
    """Origins x loops x runs, cut into chunks."""
    src_outer, dst_outer = template.src_base, template.dst_base
    for loop in template.loops:
        step = np.arange(loop.extent)
        src_outer = (src_outer[:, None] + step * loop.src_stride).ravel()
        dst_outer = (dst_outer[:, None] + step * loop.dst_stride).ravel()
    each = len(src_outer) // len(template.src_base)
    src_region, dst_region = np.repeat(template.src_region, each), np.repeat(template.dst_region, each)
    runs = len(template.length)
    rows, columns = (max_spans // runs, runs) if runs <= max_spans else (1, max_spans)
    for i in range(0, len(src_outer), rows):
        outer = slice(i, i + rows)
        for j in range(0, runs, columns):
            inner = slice(j, j + columns)
            length = template.length[inner]
            shape = (len(src_outer[outer]), len(length))
            yield Spans(
                np.broadcast_to(src_region[outer, None], shape).ravel(),
                (src_outer[outer, None] + template.src_run[inner]).ravel(),
                np.broadcast_to(dst_region[outer, None], shape).ravel(),
                (dst_outer[outer, None] + template.dst_run[inner]).ravel(),
                np.broadcast_to(length, shape).ravel(),
            )
