"""The two processes of `pushkv bench-transfer`: P writes its cache into D's, D checks every byte.

Decides what one measurement is. Does not decide which cases are measured, nor how they are shown (`bench_transfer`).

Both sides hold the same layout and make P's contents from the same seed, so that D knows what must arrive. D builds
that from the block lists alone, with neither planner nor copier. Times are P's, but for the scatter, which is D's, and
include planning, but for that of a scatter on a device, which is done as the parts land. A packed prompt goes in parts,
as the connector sends it: a part is written as soon as it is gathered, and D scatters when all have landed. Its
`gather` is the time until the first part is gathered, its `wire` what is left until the last one has landed, without
what P spent on posting; the total has no words between the processes in it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import (
    BlockTable,
    Layout,
    Part,
    Plan,
    block_table,
    dense_layout,
    pair,
    plan,
    plan_gather,
    plan_scatter,
    scatter_ahead,
)

from .copies import Copy
from .device_copies import Ahead, DeviceCopier, copier
from .grants import part_offset
from .pools import SegmentPool, cross, spread
from .transport import Transport, Write

__all__ = ["Case", "Sizes", "layout_of", "side"]

Longs = npt.NDArray[np.int64]

_LARGE_BYTES = 64 << 20  # of a packed descriptor
_PART_BYTES = 512 << 20  # of a part of a packed prompt


@dataclass(frozen=True, slots=True)
class Sizes:
    """What both processes hold. The cache has twice the blocks of the largest case, so that runs can have gaps."""

    backend: str
    device: str
    axes: str  # of `dense_layout`: "nhd_apart" or "interleaved"
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    segment_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. path: direct, each (direct, but a descriptor per block), packed, or copy (from P's cache to P's
    pool, as it lies).
    """

    path: str
    tokens: int
    run: int  # blocks that follow each other in memory; 0: all
    seed: int


def layout_of(sizes: Sizes, who: str) -> Layout:
    """The cache of either side."""
    return dense_layout(
        who,
        sizes.axes,
        [f"layers.{index}" for index in range(sizes.layers)],
        num_blocks=2 * -(-sizes.tokens // sizes.block_tokens) + 2,
        block_tokens=sizes.block_tokens,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )


def blocks_of(case: Case, sizes: Sizes, who: int) -> Longs:
    """A prompt's blocks: runs of `case.run` with a gap behind each, in random order."""
    count = -(-case.tokens // sizes.block_tokens)
    run = min(case.run or count, count)
    runs = -(-count // run)
    starts = np.random.default_rng(2 * case.seed + who).permutation(runs) * (run + 1 if runs > 1 else run)
    return np.asarray((starts[:, None] + np.arange(run)).ravel()[:count], np.int64)


def side(rank: int, sizes: Sizes, pipe: Any, other: Any) -> None:
    """Runs one process. `pipe`: to the command; `other`: to the other side. An exception is sent as ("error", text)."""
    try:
        if sizes.device == "cuda":  # each sees one device, and calls it 0
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank % len(visible)] if visible[0] else str(rank)
        (_Prefill if rank == 0 else _Decode)(rank, sizes, other).serve(pipe)
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


class _Side:
    def __init__(self, rank: int, sizes: Sizes, other: Any) -> None:
        import torch

        self.torch, self.sizes, self.other = torch, sizes, other
        torch.set_num_threads(
            1
        )  # two processes share the machine, as two engines do; more threads would wait for a core
        self.device = torch.device("cuda", 0) if sizes.device == "cuda" else torch.device("cpu")
        self.layout = layout_of(sizes, "PD"[rank])
        (self.shard,) = pair([layout_of(sizes, "P")], [layout_of(sizes, "D")])
        part = self.shard.part_bytes(Part.whole(0, sizes.tokens))
        self.pool = SegmentPool(-(-part // sizes.segment_bytes), sizes.segment_bytes, self.device)
        self.regions = [self._region(size) for size in self.layout.regions]
        self.copier = copier(self.regions, self.pool.tensor, sizes.segment_bytes, None)
        if isinstance(self.copier, DeviceCopier):
            self.copier.warm(gather=rank == 0)
        self.transport = Transport(f"bench.{rank}.{os.getpid()}", sizes.backend)
        self.transport.register([*self.regions, self.pool.tensor])
        bases = [int(region.data_ptr()) for region in self.regions]
        other.send((self.transport.metadata, bases, self.pool.base))
        metadata, self.their_bases, self.their_pool = self.hear()
        self.agent = self.transport.connect(metadata)

    def _region(self, size: int) -> Any:
        return self.torch.zeros(size, dtype=self.torch.uint8, device=self.device)

    def hear(self) -> Any:
        """The other side's next word; the agent is driven meanwhile."""
        while not self.other.poll(0.0001):
            self.transport.progress()
        return self.other.recv()

    def contents(self) -> list[Any]:
        """P's cache."""
        generator = self.torch.Generator().manual_seed(1)
        found = []
        for size in self.layout.regions:
            words = self.torch.randint(-(1 << 63), (1 << 63) - 1, (-(-size // 8),), generator=generator)
            found.append(words.view(self.torch.uint8)[:size].to(self.device))
        return found

    def segments(self, case: Case) -> list[int]:
        size = self.shard.part_bytes(Part.whole(0, case.tokens))
        return list(range(-(-size // self.sizes.segment_bytes)))

    def tables(self, case: Case) -> tuple[list[BlockTable], list[BlockTable]]:
        """P's blocks and D's."""
        src, dst = ([block_table(blocks_of(case, self.sizes, who))] for who in (0, 1))
        return src, dst

    def parts(self, case: Case) -> list[tuple[Part, int]]:
        """In which a packed prompt goes, and where in its segments each begins."""
        block = self.sizes.block_tokens
        each = _PART_BYTES * case.tokens // self.shard.part_bytes(Part.whole(0, case.tokens)) // block * block
        starts = range(0, case.tokens, max(block, each))
        stops = [*starts[1:], case.tokens]
        found = [Part(start, stop, 0, stop == case.tokens) for start, stop in zip(starts, stops, strict=True)]
        return [(part, part_offset(self.shard, part)) for part in found]

    def settle(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)


class _Prefill(_Side):
    def __init__(self, rank: int, sizes: Sizes, other: Any) -> None:
        super().__init__(rank, sizes, other)
        for region, data in zip(self.regions, self.contents(), strict=True):
            region.copy_(data)

    def serve(self, pipe: Any) -> None:
        """Measures case by case until None comes."""
        pipe.send(("ready", None))
        while (case := pipe.recv()) is not None:
            if case.path == "copy":
                pipe.send(("row", self.copied(case)))
                continue
            self.other.send(case)
            self.hear()
            pipe.send(("row", self.measure(case)))
        self.other.send(None)

    def measure(self, case: Case) -> dict[str, Any]:
        src, dst = self.tables(case)
        self.settle()
        begun = time.perf_counter()
        if case.path == "packed":
            writes, gathered = self.packed(case, src)
        else:
            whole = plan(self.shard, src, dst, Part.whole(0, case.tokens))
            spans = self.addresses(whole, case.path == "each")
            gathered = time.perf_counter()
            writes = [self.transport.post(self.agent, *spans, notice=b"landed")]
        for write in writes:
            self.finish(write)
        if self.transport.arrival == "notification":
            self.hear()
        ended = time.perf_counter()
        self.other.send("written")
        scatter_s, equal = self.hear()
        make_s, post_s = sum(write.make_s for write in writes), sum(write.post_s for write in writes)
        return {
            "descriptors": sum(write.descriptors for write in writes),
            "bytes": sum(write.size_bytes for write in writes),
            "gather_s": gathered - begun,
            "make_s": make_s,
            "post_s": post_s,
            "wire_s": max(0.0, ended - gathered - make_s - post_s),
            "scatter_s": scatter_s,
            "total_s": ended - begun + scatter_s,
            "equal": equal,
        }

    def copied(self, case: Case) -> dict[str, Any]:
        """A prompt's bytes, which lie in one stretch of each region, to the pool."""
        each = self.shard.part_bytes(Part.whole(0, case.tokens)) // len(self.regions)
        pool = self.pool.tensor[: each * len(self.regions)].view(len(self.regions), each)
        self.settle()
        begun = time.perf_counter()
        for region, target in zip(self.regions, pool, strict=True):
            target.copy_(region[:each])
        self.settle()
        took_s = time.perf_counter() - begun
        row = dict.fromkeys(("gather_s", "make_s", "post_s", "wire_s", "scatter_s"), 0.0)
        equal = all(self.torch.equal(a[:each], b) for a, b in zip(self.regions, pool, strict=True))
        return {"descriptors": len(pool), "bytes": pool.numel(), "total_s": took_s, "equal": equal, **row}

    def packed(self, case: Case, src: list[BlockTable]) -> tuple[list[Write], float]:
        """Gathers and posts part by part: the writes, and when the first part was gathered. That one is on its way
        before the second is planned; from then on planning is ahead.
        """
        segments = self.segments(case)
        copies: deque[tuple[Copy, int, int]] = deque()
        writes: list[Write] = []
        first = 0.0
        for part, offset in self.parts(case):
            copy = self.copier.gather(plan_gather(self.shard, src, part), segments, offset)
            copies.append((copy, offset, self.shard.part_bytes(part)))
            at = self.gathered(copies, writes, segments)
            while not writes:
                at = self.gathered(copies, writes, segments)
            first = first or at
        while copies:
            self.gathered(copies, writes, segments)
        return writes, first

    def gathered(self, copies: deque[tuple[Copy, int, int]], writes: list[Write], segments: list[int]) -> float:
        """Posts what is gathered; when, if it was something."""
        at = 0.0
        while copies and copies[0][0].done():
            at = at or time.perf_counter()
            _, offset, size = copies.popleft()
            ours = self.pool.spread(segments, offset, size)
            theirs = spread(self.their_pool, self.pool.count, self.sizes.segment_bytes, segments, offset, size)
            writes.append(self.transport.post(self.agent, *cross(ours, theirs, _LARGE_BYTES), notice=b"landed"))
        for write in writes:
            self.transport.poll(write)
        return at

    def addresses(self, direct: Plan, each_block: bool) -> tuple[Longs, Longs, Longs]:
        spans = direct.spans(1 << 24)
        local = np.asarray([int(region.data_ptr()) for region in self.regions])[spans.src_region] + spans.src_offset
        remote = np.asarray(self.their_bases)[spans.dst_region] + spans.dst_offset
        length = spans.length
        if each_block:
            row = int(self.layout.views[0].block_stride)
            parts = -(-length // row)
            of = np.repeat(np.arange(len(length)), parts)
            within = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * row
            local, remote, length = local[of] + within, remote[of] + within, np.minimum(row, length[of] - within)
        return local, remote, length

    def finish(self, write: Write) -> None:
        while self.transport.poll(write) == "active":
            pass
        if write.state != "done":
            raise RuntimeError(f"the write broke: {write.reason}")
        self.transport.release(write)


class _Decode(_Side):
    def serve(self, pipe: Any) -> None:
        """Answers P until it sends None."""
        self.wanted_of: tuple[int, int, int] | None = None
        while (case := self.hear()) is not None:
            self.expect(case)
            for memory in (*self.regions, self.pool.tensor):
                memory.zero_()
            dst = self.tables(case)[1]
            ahead = self.ahead(case)
            self.settle()
            self.other.send("go")
            if self.transport.arrival == "notification":
                missing = len(self.parts(case)) if case.path == "packed" else 1
                while missing:
                    missing -= len(self.transport.progress())
                self.other.send("arrived")
            self.hear()
            begun = time.perf_counter()
            if case.path == "packed":
                self.scatter(case, dst, ahead)
            took_s = time.perf_counter() - begun if case.path == "packed" else 0.0
            equal = all(self.torch.equal(a, b) for a, b in zip(self.regions, self.wanted, strict=True))
            self.other.send((took_s, equal))

    def ahead(self, case: Case) -> list[Ahead]:
        """What is planned as the parts land, before D's blocks are known; on a device only."""
        if case.path != "packed" or not isinstance(self.copier, DeviceCopier):
            return []
        return [
            one
            for part, offset in self.parts(case)
            for one in self.copier.prepare(scatter_ahead(self.shard, part), offset)
        ]

    def scatter(self, case: Case, dst: list[BlockTable], ahead: list[Ahead]) -> None:
        segments = self.segments(case)
        if ahead:
            self.copier.scatter_ahead(ahead, dst, segments).wait()
            return
        copies = [
            self.copier.scatter(plan_scatter(self.shard, dst, part), segments, offset)
            for part, offset in self.parts(case)
        ]
        copies[-1].wait()

    def expect(self, case: Case) -> None:
        """What D's cache must hold afterwards: P's tokens in D's blocks, and zeros everywhere else."""
        if self.wanted_of == (case.tokens, case.run, case.seed):
            return
        self.wanted_of = (case.tokens, case.run, case.seed)
        self.wanted = []
        blocks = self.layout.groups[0].num_blocks
        rows = [self.torch.from_numpy(blocks_of(case, self.sizes, who)).to(self.device) for who in (0, 1)]
        for region, data in zip(self.regions, self.contents(), strict=True):
            wanted = self.torch.zeros_like(region)
            wanted.view(blocks, -1)[rows[1]] = data.view(blocks, -1)[rows[0]]
            self.wanted.append(wanted)
