"""The two processes of `pushkv bench-transfer`: P writes its cache into D's, D checks every byte.

Decides what one measurement is. Does not decide which cases are measured, nor how they are shown (`bench_transfer`).

Both sides hold the same layout and make P's contents from the same seed, so that D knows what must arrive. D builds
that from the block lists alone, with neither planner nor copier. Times are P's, but for the scatter, which is D's: a
packed total is the sum of gather, write and scatter, one after the other, without the words between the processes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import Layout, Part, Plan, block_table, dense_layout, pair, plan, plan_gather, plan_scatter

from .device_copies import copier
from .pools import SegmentPool, cross, spread
from .transport import Transport, Write

__all__ = ["Case", "Sizes", "layout_of", "side"]

Longs = npt.NDArray[np.int64]

_LARGE_BYTES = 32 << 20  # of a packed descriptor


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
    """One measurement. path: direct, each (direct, but a descriptor per block) or packed."""

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

    def plans(self, case: Case) -> tuple[Plan, Plan, Plan]:
        part = Part.whole(0, case.tokens)
        src, dst = ([block_table(blocks_of(case, self.sizes, who))] for who in (0, 1))
        return plan(self.shard, src, dst, part), plan_gather(self.shard, src, part), plan_scatter(self.shard, dst, part)

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
            self.other.send(case)
            self.hear()
            pipe.send(("row", self.measure(case)))
        self.other.send(None)

    def measure(self, case: Case) -> dict[str, Any]:
        direct, gather, _ = self.plans(case)
        if case.path == "packed":
            segments = self.segments(case)
            size = gather.total_bytes
            ours = self.pool.spread(segments, 0, size)
            theirs = spread(self.their_pool, self.pool.count, self.sizes.segment_bytes, segments, 0, size)
            local, remote, length = cross(ours, theirs, _LARGE_BYTES)
        else:
            local, remote, length = self.addresses(direct, case.path == "each")
        self.settle()
        begun = time.perf_counter()
        if case.path == "packed":
            self.copier.gather(gather, segments).wait()
        gathered = time.perf_counter()
        write = self.transport.post(self.agent, local, remote, length, notice=b"landed")
        self.finish(write)
        ended = time.perf_counter()
        self.other.send("written")
        scatter_s, equal = self.hear()
        busy_s = write.make_s + write.post_s
        return {
            "descriptors": len(length),
            "bytes": int(length.sum()),
            "gather_s": gathered - begun,
            "make_s": write.make_s,
            "post_s": write.post_s,
            "wire_s": max(0.0, ended - gathered - busy_s),
            "scatter_s": scatter_s,
            "total_s": ended - begun + scatter_s,
            "equal": equal,
        }

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
        if self.transport.arrival == "notification":
            self.hear()
        self.transport.release(write)


class _Decode(_Side):
    def serve(self, pipe: Any) -> None:
        """Answers P until it sends None."""
        self.wanted_of: tuple[int, int, int] | None = None
        while (case := self.hear()) is not None:
            self.expect(case)
            for memory in (*self.regions, self.pool.tensor):
                memory.zero_()
            scatter = self.plans(case)[2]
            self.settle()
            self.other.send("go")
            if self.transport.arrival == "notification":
                while not self.transport.progress():
                    pass
                self.other.send("arrived")
            self.hear()
            begun = time.perf_counter()
            if case.path == "packed":
                self.copier.scatter(scatter, self.segments(case)).wait()
            took_s = time.perf_counter() - begun if case.path == "packed" else 0.0
            equal = all(self.torch.equal(a, b) for a, b in zip(self.regions, self.wanted, strict=True))
            self.other.send((took_s, equal))

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
