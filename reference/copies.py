"""Gather and scatter: between the KV cache's regions and segments of staging or landing memory, on their device.

Decides how the spans of a packed plan become few tensor operations. Does not decide what is copied (`model.layout`'s
`plan_gather` and `plan_scatter`), or when.

How. Per template of the plan and per cache region, the spans become rows of one length: each span is cut where its
packed bytes leave a segment, and all pieces are cut again into rows of their common divisor, or grouped by length
where that would be too small. Rows are gathered with `index_select` and scattered with `index_copy_` over strided views
whose rows may overlap, so that they can begin at any offset, and in the widest integer type that all offsets allow.
The number of operations depends on regions and shapes, not on spans. All indices go to the device in one transfer.

On a CPU a copy is over when the call returns; torch releases the GIL meanwhile. On CUDA it runs on the copier's stream,
after the caller's event, and the caller asks `done`. A copy must not overlap with a writer of the same memory; the
order is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import Plan, Template

if TYPE_CHECKING:
    import torch

__all__ = ["Copier", "Copy", "CopyError"]

Longs = npt.NDArray[np.int64]

_FINE_BYTES = 256  # rows below this cost more in indices than in bytes
_FEW_ROWS = 4096  # but that does not matter for so few
_FEW_RANGES = 4  # so many contiguous stretches of a pool are copied without an index
_ROUND_BYTES = 64 << 20  # temporary memory of one operation


class CopyError(ValueError):
    """A plan that does not fit the regions or the segments; nothing was copied."""


NOWHERE = -1
"""The lane of what has nothing to copy."""


def marked(stream: Any) -> Any:
    """An event behind all that is enqueued on `stream` by now; None for None."""
    if stream is None:
        return None
    import torch

    event = torch.cuda.Event()
    event.record(stream)
    return event


class Copy:
    """A copy under way. lane: the copies of one copier in one lane end in the order in which they were asked for."""

    def __init__(self, event: Any = None, keep: object = None, lane: int = 0) -> None:
        self._event = event
        self._keep = keep  # indices must live until the device has read them
        self.lane = lane

    def done(self) -> bool:
        """Whether all bytes are in place; does not block."""
        return self._event is None or bool(self._event.query())

    def join(self) -> None:
        """Has the calling thread's current stream wait: what is enqueued from now on sees the bytes."""
        if self._event is not None:
            import torch

            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Blocks the calling thread until `done`."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True, slots=True)
class _Step:
    """Rows of `row_bytes` of one region <-> rows of the pool; offsets in bytes."""

    region: int
    row_bytes: int
    cache: Longs
    pool: Longs


class Copier:
    """Copies between cache regions and one pool.

    regions: flat uint8 views of the cache, as `Layout.regions` counts them. pool: flat uint8. stream: the CUDA stream
    to run on (the current one if not given).
    """

    def __init__(
        self, regions: Sequence[torch.Tensor], pool: torch.Tensor, segment_bytes: int, stream: Any = None
    ) -> None:
        import torch

        for tensor in (*regions, pool):
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise CopyError(f"a region or pool must be flat uint8, not {tuple(tensor.shape)} {tensor.dtype}")
        self._torch = torch
        self._regions = list(regions)
        self._pool = pool
        self._segment_bytes = segment_bytes
        self._stream = stream
        self._types = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

    def gather(self, plan: Plan, segments: Sequence[int] | Longs, offset: int = 0, after: Any = None) -> Copy:
        """Cache -> packed bytes, which begin at byte `offset` of the given segments laid end to end.

        after: a CUDA event that the copy waits for on the device. Raises `CopyError`.
        """
        return self._run(plan, segments, offset, after, gather=True)

    def scatter(self, plan: Plan, segments: Sequence[int] | Longs, offset: int = 0, after: Any = None) -> Copy:
        """Packed bytes -> cache; as `gather`."""
        return self._run(plan, segments, offset, after, gather=False)

    def _run(self, plan: Plan, segments: Sequence[int] | Longs, offset: int, after: Any, gather: bool) -> Copy:
        steps = list(self._steps(plan, np.asarray(segments, np.int64), offset, gather))
        if not self._pool.is_cuda:
            self._work(steps, gather)
            return Copy()
        cuda = self._torch.cuda
        stream = self._stream or cuda.current_stream(self._pool.device)
        with cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            keep = self._work(steps, gather)
            event = cuda.Event(blocking=True)
            event.record(stream)
        return Copy(event, keep)

    # ---- from spans to rows ----------------------------------------------------------------------------------------

    def _steps(self, plan: Plan, segments: Longs, offset: int, gather: bool) -> Iterator[_Step]:
        most = len(self._pool) // self._segment_bytes
        if len(segments) and (int(segments.min()) < 0 or int(segments.max()) >= most):
            raise CopyError(f"segments {int(segments.min())} to {int(segments.max())} of a pool of {most}")
        for template in plan.templates:
            region, base, packed_base, cache, packed, length = runs_of(template, gather=gather)
            for each in np.unique(region).tolist():
                mine = np.flatnonzero(region == each)
                yield from self._cut(
                    int(each),
                    (base[mine][:, None] + cache).ravel(),
                    (packed_base[mine][:, None] + packed).ravel() + offset,
                    np.tile(length, len(mine)),
                    segments,
                )

    def _cut(self, region: int, cache: Longs, packed: Longs, length: Longs, segments: Longs) -> Iterator[_Step]:
        """Checks the spans of one region, cuts them at the segments' ends, and makes rows of them."""
        if not len(length):
            return
        size = self._segment_bytes
        if not 0 <= region < len(self._regions) or int(cache.min()) < 0 or int(packed.min()) < 0:
            raise CopyError(f"the plan means region {region} of {len(self._regions)}, or bytes before one")
        if int((cache + length).max()) > len(self._regions[region]):
            raise CopyError(f"the plan ends at byte {int((cache + length).max())} of region {region}")
        if int((packed + length).max()) > len(segments) * size:
            raise CopyError(f"{int((packed + length).max())} packed bytes in {len(segments)} segments of {size} bytes")
        cache, packed, length = cut_at_segments(cache, packed, length, size)
        pool = segments[packed // size] * size + packed % size
        common = int(np.gcd.reduce(length))
        if common >= _FINE_BYTES or int(length.sum()) // common <= _FEW_ROWS:
            yield _rows(region, common, cache, pool, length)
            return
        for each in np.unique(length).tolist():
            mine = np.flatnonzero(length == each)
            yield _rows(region, int(each), cache[mine], pool[mine], length[mine])

    # ---- from rows to tensor operations ----------------------------------------------------------------------------

    def _work(self, steps: list[_Step], gather: bool) -> object:
        torch = self._torch
        units: list[tuple[int, int, list[tuple[int, int]] | None]] = []
        indices: list[Longs] = []
        for step in steps:
            cache_unit = int(np.gcd.reduce(np.append(step.cache, step.row_bytes)))
            pool_unit = int(np.gcd.reduce(np.append(step.pool, step.row_bytes)))
            ranges = _ranges(step.pool, step.row_bytes)
            units.append((cache_unit, pool_unit, ranges))
            indices.append(step.cache // cache_unit)
            if ranges is None:
                indices.append(step.pool // pool_unit)
        if not steps:
            return None
        index = torch.from_numpy(np.concatenate(indices))
        if self._pool.is_cuda:
            index = index.pin_memory().to(self._pool.device, non_blocking=True)
        used = 0
        for step, (cache_unit, pool_unit, ranges) in zip(steps, units, strict=True):
            count, row = len(step.cache), step.row_bytes
            kind = self._type((cache_unit, pool_unit), self._regions[step.region])
            cache = self._view(self._regions[step.region], kind, cache_unit, row)
            cache_index = index[used : used + count]
            used += count
            if ranges is not None:
                done = 0
                for begin, rows in ranges:
                    pool = self._pool[begin : begin + rows * row].view(kind[1]).view(rows, row // kind[0])
                    part = cache_index[done : done + rows]
                    if gather:
                        torch.index_select(cache, 0, part, out=pool)
                    else:
                        cache.index_copy_(0, part, pool)
                    done += rows
                continue
            pool = self._view(self._pool, kind, pool_unit, row)
            pool_index = index[used : used + count]
            used += count
            most = max(1, _ROUND_BYTES // row)
            for start in range(0, count, most):
                from_cache, from_pool = cache_index[start : start + most], pool_index[start : start + most]
                if gather:
                    pool.index_copy_(0, from_pool, torch.index_select(cache, 0, from_cache))
                else:
                    cache.index_copy_(0, from_cache, torch.index_select(pool, 0, from_pool))
        return index

    def _type(self, units: tuple[int, int], region: torch.Tensor) -> tuple[int, Any]:
        """(bytes, dtype) of the widest integers that divide every offset, in memory too."""
        offsets = (*units, region.storage_offset(), self._pool.storage_offset())
        return next(kind for kind in self._types if not any(offset % kind[0] for offset in offsets))

    def _view(self, flat: torch.Tensor, kind: tuple[int, Any], unit: int, row: int) -> torch.Tensor:
        """Rows of `row` bytes beginning at every multiple of `unit` bytes; they overlap where `unit` is smaller."""
        width, dtype = kind
        whole = flat[: len(flat) - len(flat) % width].view(dtype)
        count = (len(whole) * width - row) // unit + 1
        return whole.as_strided((count, row // width), (unit // width, 1), whole.storage_offset())


def runs_of(template: Template, *, gather: bool) -> tuple[Longs, Longs, Longs, Longs, Longs, Longs]:
    """(region, cache origin, packed origin) of each origin of ``template``, and the runs that all of them have, loops
    multiplied out: (cache offset, packed offset, length).
    """
    sides = (template.src_region, template.src_base), (template.dst_region, template.dst_base)
    (region, origin), (_, packed_origin) = sides if gather else sides[::-1]
    cache, packed = (template.src_run, template.dst_run)[:: 1 if gather else -1]
    for loop in template.loops:
        step = np.arange(loop.extent, dtype=np.int64)[:, None]
        strides = (loop.src_stride, loop.dst_stride)[:: 1 if gather else -1]
        cache, packed = (step * strides[0] + cache).ravel(), (step * strides[1] + packed).ravel()
    return (
        region,
        origin,
        packed_origin,
        cache,
        packed,
        np.tile(template.length, len(cache) // max(1, len(template.length))),
    )


def cut_at_segments(cache: Longs, packed: Longs, length: Longs, segment_bytes: int) -> tuple[Longs, Longs, Longs]:
    """The same spans, cut where their packed bytes pass from one segment to the next."""
    first = packed // segment_bytes
    pieces = (packed + length - 1) // segment_bytes - first + 1
    if int(pieces.max()) == 1:
        return cache, packed, length
    of = np.repeat(np.arange(len(length)), pieces)
    number = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(packed[of], number * segment_bytes)
    end = np.minimum(packed[of] + length[of], (number + 1) * segment_bytes)
    return cache[of] + begin - packed[of], begin, end - begin


def _rows(region: int, row: int, cache: Longs, pool: Longs, length: Longs) -> _Step:
    """Cuts pieces into rows of `row` bytes, which divides every length; in the order of the pool."""
    if (np.diff(pool) < 0).any():
        order = np.argsort(pool)
        cache, pool, length = cache[order], pool[order], length[order]
    parts = length // row
    if int(parts.max()) > 1:
        of = np.repeat(np.arange(len(length)), parts)
        within = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * row
        cache, pool = cache[of] + within, pool[of] + within
    return _Step(region, row, cache, pool)


def _ranges(pool: Longs, row: int) -> list[tuple[int, int]] | None:
    """The rows as (first byte, rows) of contiguous stretches, if there are few."""
    heads = np.flatnonzero(np.append(True, np.diff(pool) != row))
    if len(heads) > _FEW_RANGES:
        return None
    counts = np.diff(np.append(heads, len(pool)))
    return [(int(pool[head]), int(count)) for head, count in zip(heads, counts, strict=True)]
