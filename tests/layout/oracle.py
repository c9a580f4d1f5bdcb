"""The mapping, one element at a time: what the planner must equal, written without strides, spans or anything of the
planner's.

A `Cache` is one rank's memory of one cache group as numpy arrays of bytes, indexed by axis names. An `Engine` is
several ranks. The test writes known rows into P's cells, the oracle writes the same rows into D's cells, one (layer,
part, head, token) at a time, and the planner's bytes must leave D's memory equal, to the last byte of padding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import BlockTable, GroupKind, Layout, Part, Plan, block_table, combine, dense_layout

Bytes = npt.NDArray[np.uint8]
Rows = Mapping[tuple[str, str], Bytes]  # (layer, part) -> [token, head, byte]


@dataclass(frozen=True)
class Model:
    """One group of layers, the same on both sides."""

    layers: tuple[str, ...]
    kv_heads: int = 1
    head_dim: int = 2
    element_bytes: int = 1
    parts: tuple[str, ...] = ("k", "v")
    kind: GroupKind = GroupKind.FULL
    window_tokens: int = 0
    rows: int = 0  # of a state


@dataclass(frozen=True)
class Store:
    """How one engine stores it."""

    axes: str
    block_tokens: int
    num_blocks: int
    kernel_tokens: int = 0  # 0: as block_tokens
    pad: Mapping[str, int] = field(default_factory=dict)
    null_block: int | None = None


class Cache:
    """One rank's memory of one group."""

    def __init__(self, name: str, model: Model, store: Store, layers: Sequence[str], tp: int, tp_rank: int) -> None:
        self.model, self.store, self.layers = model, store, list(layers)
        per_rank = max(1, model.kv_heads // tp)
        first = tp_rank * per_rank if tp <= model.kv_heads else tp_rank // (tp // model.kv_heads)
        self.heads = range(first, first + per_rank)
        self.slots = model.rows or store.kernel_tokens or store.block_tokens
        self.ratio = 1 if model.rows else store.block_tokens // self.slots
        self.extents = {
            "B": store.num_blocks * self.ratio,
            "H": per_rank,
            "N": self.slots,
            "T": len(model.parts),
            "L": len(self.layers),
        }
        size = model.head_dim * model.element_bytes + store.pad.get("C", 0)
        for axis in reversed(store.axes):
            size = (size + store.pad.get(axis, 0)) * self.extents[axis]
        count = 1
        for axis, extent in (("L", len(self.layers)), ("T", len(model.parts))):
            count *= 1 if axis in store.axes else extent
        self.buffers: list[Bytes] = [np.zeros(size, np.uint8) for _ in range(count)]
        self.layout = dense_layout(
            name,
            store.axes,
            self.layers,
            num_blocks=store.num_blocks,
            block_tokens=store.block_tokens,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=f"bits{8 * model.element_bytes}",
            element_bytes=model.element_bytes,
            tp_size=tp,
            tp_rank=tp_rank,
            parts=model.parts,
            kernel_block_tokens=self.slots,
            kind=model.kind,
            window_tokens=model.window_tokens,
            null_block=store.null_block,
            pad_bytes=store.pad,
        )

    def cell(self, layer: str, part: str, head: int, token: int, table: BlockTable) -> Bytes:
        """The bytes of one row, as a view into the buffer."""
        if self.model.rows:
            block, slot = int(table.ids[0]), token
        else:
            index, slot = divmod(token - table.first_token, self.store.block_tokens)
            block = int(table.ids[index]) * self.ratio + slot // self.slots
            slot %= self.slots
        at = {"B": block, "N": slot, "H": head - self.heads.start}
        at |= {"L": self.layers.index(layer), "T": self.model.parts.index(part)}
        region = 0
        for axis in "LT":
            if axis not in self.store.axes:
                region = region * self.extents[axis] + at[axis]
        array = self.buffers[region]
        for axis in self.store.axes:
            array = array.reshape(self.extents[axis], -1)[at[axis]]
            array = array[: len(array) - self.store.pad.get(axis, 0)]
        assert np.shares_memory(array, self.buffers[region])
        return array[: self.model.head_dim * self.model.element_bytes]


class Rank:
    """The caches of all groups on one rank, and its layout."""

    def __init__(self, caches: list[Cache], rank: int, stage: int, share: bool) -> None:
        self.caches = caches
        joined = combine([cache.layout for cache in caches], share_regions=share)
        self.layout = Layout(joined.name, rank, joined.regions, joined.groups, joined.views, stage)
        if share:
            self.buffers = [np.zeros(size, np.uint8) for size in joined.regions]
            for cache in caches:
                cache.buffers = [self.buffers[i][: len(own)] for i, own in enumerate(cache.buffers)]
        else:
            self.buffers = [buffer for cache in caches for buffer in cache.buffers]
        assert [len(buffer) for buffer in self.buffers] == list(joined.regions)


class Engine:
    """All ranks of P or of D."""

    def __init__(
        self,
        name: str,
        models: Sequence[Model],
        stores: Sequence[Store],
        *,
        tp: int = 1,
        stages: int = 1,
        share: bool = False,
    ) -> None:
        if share:
            stores = _equal_pages(models, stores, tp)
        self.models, self.stores, self.ranks = models, stores, list[Rank]()
        for stage in range(stages):
            for tp_rank in range(tp):
                caches = []
                for model, store in zip(models, stores, strict=True):
                    per_stage = -(-len(model.layers) // stages)
                    layers = model.layers[stage * per_stage : (stage + 1) * per_stage]
                    caches.append(Cache(f"{name}{stage}.{tp_rank}", model, store, layers, tp, tp_rank))
                self.ranks.append(Rank(caches, stage * tp + tp_rank, stage, share))

    @property
    def layouts(self) -> list[Layout]:
        return [rank.layout for rank in self.ranks]

    def randomize(self, rng: np.random.Generator) -> None:
        for rank in self.ranks:
            for buffer in rank.buffers:
                buffer[:] = rng.integers(0, 256, len(buffer), np.uint8)

    def snapshot(self) -> list[list[Bytes]]:
        return [[buffer.copy() for buffer in rank.buffers] for rank in self.ranks]

    def restore(self, snapshot: list[list[Bytes]]) -> None:
        for rank, buffers in zip(self.ranks, snapshot, strict=True):
            for buffer, saved in zip(rank.buffers, buffers, strict=True):
                buffer[:] = saved

    def write(self, contents: Sequence[Rows], tables: Sequence[BlockTable], spans: Sequence[tuple[int, int]]) -> None:
        """Puts the rows of tokens [start, stop) of every group into every rank that holds them."""
        for rank in self.ranks:
            for cache, rows, table, (start, stop) in zip(rank.caches, contents, tables, spans, strict=True):
                for layer in cache.layers:
                    for part in cache.model.parts:
                        for head in cache.heads:
                            for token in range(start, stop):
                                cache.cell(layer, part, head, token, table)[:] = rows[layer, part][token, head]


def _equal_pages(models: Sequence[Model], stores: Sequence[Store], tp: int) -> list[Store]:
    """Blocks outermost, and padded so that all groups' logical blocks have the same size, as vLLM does for one shared
    pool.
    """
    stores = [replace(store, axes="B" + store.axes.replace("B", "")) for store in stores]
    stores = [replace(store, pad={axis: pad for axis, pad in store.pad.items() if axis != "B"}) for store in stores]
    caches = [Cache("", model, store, model.layers, tp, 0) for model, store in zip(models, stores, strict=True)]
    pages = [len(cache.buffers[0]) // cache.store.num_blocks for cache in caches]
    page = -(-max(pages) // 6) * 6  # 6: any ratio of kernel blocks in use divides it
    return [
        replace(store, pad={**store.pad, "B": (page - own) // cache.ratio})
        for store, own, cache in zip(stores, pages, caches, strict=True)
    ]


def contents(models: Sequence[Model], tokens: int, rng: np.random.Generator) -> list[Rows]:
    """Random rows for every token of every layer."""
    return [
        {
            (layer, part): rng.integers(
                0, 256, (model.rows or tokens, model.kv_heads, model.head_dim * model.element_bytes), np.uint8
            )
            for layer in model.layers
            for part in model.parts
        }
        for model in models
    ]


def alive(model: Model, src: Store, dst: Store, part: Part) -> tuple[int, int]:
    """The tokens (rows of a state) that D must have afterwards."""
    if model.kind is GroupKind.FULL:
        return part.start, part.stop
    if not part.last or part.stop == part.first:
        return 0, 0
    if model.kind is GroupKind.STATE:
        return 0, model.rows
    # The token at `stop` attends to itself and to window - 1 tokens before it. A token moves if its block holds one of
    # these on both sides: then P has it, and D needs it to have a block without holes.
    oldest = part.stop - model.window_tokens + 1
    seen = [
        token
        for token in range(part.first, part.stop)
        if all((token // side.block_tokens + 1) * side.block_tokens > oldest for side in (src, dst))
    ]
    return (seen[0], seen[-1] + 1) if seen else (0, 0)


def tables(
    models: Sequence[Model],
    stores: Sequence[Store],
    first: int,
    stop: int,
    live: int,
    rng: random.Random,
    spare: int = 0,
) -> list[BlockTable]:
    """Block lists out of one pool, in random, rising or falling order, in which slot 0 of the first block is token
    `first`.

    They reach to token `stop`; window groups have null blocks where nothing is alive for a request that goes on at
    token `live`.
    """
    free = list(range(1, min(store.num_blocks for store in stores)))  # 0 is the null block
    order = rng.choice(("random", "rising", "falling"))
    if order == "random":
        rng.shuffle(free)
    elif order == "falling":
        free.reverse()
    found = []
    for model, store in zip(models, stores, strict=True):
        blocks = 1 if model.rows else -(-(stop - first) // store.block_tokens) + spare
        ids, free = free[:blocks], free[blocks:]
        assert len(ids) == blocks, "the test's pool is too small"
        if model.kind is GroupKind.WINDOW and store.null_block is not None:
            oldest = max(0, live - model.window_tokens + 1)
            dead = max(0, oldest - oldest % store.block_tokens - first) // store.block_tokens
            ids[:dead] = [store.null_block] * dead
        found.append(block_table(ids, 0 if model.rows else first))
    return found


def move(plan: Plan, src: Sequence[Bytes], dst: Sequence[Bytes], max_spans: int = 7) -> int:
    """Carries out a plan, one span at a time; returns the bytes moved."""
    moved = 0
    for spans in plan.chunks(max_spans):
        assert 0 < len(spans) <= max_spans
        rows = (spans.src_region, spans.src_offset, spans.dst_region, spans.dst_offset, spans.length)
        for src_region, src_at, dst_region, dst_at, length in zip(*(row.tolist() for row in rows), strict=True):
            assert length > 0 and src_at >= 0 and dst_at >= 0
            source, target = src[src_region][src_at : src_at + length], dst[dst_region][dst_at : dst_at + length]
            assert len(source) == len(target) == length, "a span leaves its region"
            target[:] = source
            moved += length
    assert moved == plan.total_bytes
    return moved
