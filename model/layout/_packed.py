"""The packed path: one part of one shard as one contiguous row of bytes, on the wire and in staging and landing
memory.

Decides: the order of the packed bytes, which both sides derive from the `Shard` and the `Part` alone, and the spans
of the gather on P and of the scatter on D. Does not decide: how staging and landing memory are cut into segments; the
host adds its addresses.

Order: bundle by bundle, origin by origin (layers, K before V, as D's layout lists them), and within an origin as D's
memory would lie if its blocks stood side by side in token order: D's axes outside a block, then blocks, then D's axes
within a block. Blocks are cut on the grid of D's kernel block size from token 0 of the prompt, so that D scatters
whole blocks and P gathers whole blocks where both sides agree. There are no gaps: a part is exactly
`Shard.part_bytes` long.

Hence gather and scatter are plans like any other: the packed bytes are one more side, whose blocks are numbered 0, 1,
2, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ._errors import LayoutError, RangeError
from ._pair import Bundle, Dim, Shard
from ._plan import Placed, Plan, Template, build, check_tables, place
from ._records import BlockTable, GroupKind, IntArray, Part


def plan_gather(shard: Shard, src: Sequence[BlockTable], part: Part) -> Plan:
    """P's blocks -> packed bytes. Destination region 0, offsets from 0 to `shard.part_bytes(part)`. Raises as
    `plan`.
    """
    check_tables("P", shard.src_groups, src)
    templates: list[Template] = []
    for bundle, tile in _tiles(shard, part):
        source = place("P", bundle, bundle.src, shard.src_groups, src, tile.start, tile.stop)
        dims = tuple(
            Dim(dim.extent, dim.src_stride, stride) for dim, stride in zip(bundle.dims, tile.strides, strict=True)
        )
        templates += build(source, tile.placed, dims, bundle.row_bytes, tile.start, tile.stop)
    return Plan(tuple(templates))


def plan_scatter(shard: Shard, dst: Sequence[BlockTable], part: Part, start: int | None = None) -> Plan:
    """Packed bytes -> D's blocks. Source region 0, offsets from 0. Raises as `plan`.

    start: scatter only the tokens from here on, when D's own prefix has grown since the part was asked for;
    `RangeError` if it has shrunk, as the part does not hold what is missing.
    """
    if start is not None and not part.first <= start <= part.stop:
        raise RangeError(f"tokens from {start} wanted, the transfer holds {part.first} to {part.stop}")
    check_tables("D", shard.dst_groups, dst)
    templates: list[Template] = []
    for bundle, tile in _tiles(shard, part):
        first = tile.start
        if start is not None and bundle.kind is not GroupKind.STATE:
            first = max(first, start)
        if first < tile.stop:
            target = place("D", bundle, bundle.dst, shard.dst_groups, dst, first, tile.stop)
            dims = tuple(
                Dim(dim.extent, stride, dim.dst_stride) for dim, stride in zip(bundle.dims, tile.strides, strict=True)
            )
            templates += build(tile.placed, target, dims, bundle.row_bytes, first, tile.stop)
    return Plan(tuple(templates))


@dataclass(frozen=True, slots=True, eq=False)
class Slotted:
    """A template of a scatter whose blocks are not known yet: ``template.dst_run`` lies within a block, and run i goes
    to the block at ``slot[i]`` of the table of ``group``, whose blocks are ``stride`` bytes apart.
    """

    template: Template
    group: int
    slot: IntArray
    stride: int

    def onto(self, tables: Sequence[BlockTable]) -> Template:
        """The template, for tables that begin with the prompt's first token."""
        return replace(self.template, dst_run=self.template.dst_run + tables[self.group].ids[self.slot] * self.stride)


def scatter_ahead(shard: Shard, part: Part) -> tuple[Slotted, ...]:
    """``plan_scatter`` for block lists that come later and begin with the prompt's first token: what is left to do then
    does not grow with the bundles. Raises ``LayoutError`` where a group keeps less than all tokens.
    """
    found: list[Slotted] = []
    for bundle, tile in _tiles(shard, part):
        side = bundle.dst
        stride = side.ratio * side.block_stride
        apart_in_memory = side.block_tokens > 1 and side.token_stride >= side.block_stride  # a block is in many places
        if bundle.kind is not GroupKind.FULL or apart_in_memory:
            raise LayoutError("blocks of this kind are planned when they are known")
        tokens = shard.dst_groups[side.group].block_tokens
        low, high = tile.start // tokens, -(-tile.stop // tokens)
        apart = 2 * np.arange(low, high, dtype=np.int64)  # no two are neighbours: no run goes on in another block
        target = Placed(
            side.region, side.base, apart, side.ratio, low * tokens, side.block_tokens, side.block_stride,
            side.token_stride,
        )  # fmt: skip
        dims = tuple(
            Dim(dim.extent, packed, dim.dst_stride) for dim, packed in zip(bundle.dims, tile.strides, strict=True)
        )
        for template in build(tile.placed, target, dims, bundle.row_bytes, tile.start, tile.stop):
            slot, within = np.divmod(template.dst_run, 2 * stride)
            found.append(Slotted(replace(template, dst_run=within), side.group, slot, stride))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Tokens [start, stop) of one bundle in packed memory, in equal tiles. strides: packed stride of each of the
    bundle's dims.
    """

    start: int
    stop: int
    placed: Placed
    strides: tuple[int, ...]


def _tiles(shard: Shard, part: Part) -> Iterator[tuple[Bundle, _Tiles]]:
    """Every bundle's tokens in up to three stretches: the rest of a block, whole blocks, the beginning of a block."""
    bundle_base = 0
    for bundle in shard.bundles:
        start, stop = bundle.tokens(part)
        if start >= stop:
            continue
        side, token = bundle.dst, len(bundle.dims)  # the token axis comes after the dims
        axes = sorted(range(token + 1), key=lambda axis: _dst_stride(bundle, axis), reverse=True)
        inside = [axis for axis in axes if axis == token or _dst_stride(bundle, axis) < side.block_stride]
        outside = [axis for axis in axes if axis not in inside]
        slice_bytes = bundle.row_bytes  # one token of everything inside a block
        for axis in inside:
            slice_bytes *= 1 if axis == token else bundle.dims[axis].extent
        strides = [0] * (token + 1)
        size = slice_bytes * (stop - start)
        for axis in reversed(outside):
            strides[axis] = size
            size *= bundle.dims[axis].extent
        origins = len(side.base)
        # With tokens outermost in a block, their distance does not depend on the block: the whole range is one tile.
        whole = inside[0] == token
        for first, last, tile in [(start, stop, stop - start)] if whole else _stretches(start, stop, side.block_tokens):
            step = bundle.row_bytes
            for axis in reversed(inside):
                strides[axis] = step
                step *= tile if axis == token else bundle.dims[axis].extent
            placed = Placed(
                region=np.zeros(origins, np.int64),
                base=bundle_base + (first - start) * slice_bytes + np.arange(origins, dtype=np.int64) * size,
                blocks=np.arange((last - first) // tile, dtype=np.int64),
                ratio=1,
                first_token=first,
                block_tokens=tile,
                block_stride=step,
                token_stride=strides[token],
            )
            yield bundle, _Tiles(first, last, placed, tuple(strides[:token]))
        bundle_base += size * origins


def _stretches(start: int, stop: int, block_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(first, last, tokens per tile) of [start, stop) cut at the first and the last block boundary."""
    low, high = start + -start % block_tokens, stop - stop % block_tokens
    if low > high:  # within one block
        yield start, stop, stop - start
        return
    for first, last, tile in ((start, low, low - start), (low, high, block_tokens), (high, stop, stop - high)):
        if first < last:
            yield first, last, tile


def _dst_stride(bundle: Bundle, axis: int) -> int:
    return bundle.dims[axis].dst_stride if axis < len(bundle.dims) else bundle.dst.token_stride
