"""Gather and scatter on a CUDA device: one kernel over all layers, on a stream of its own.

Decides how a plan's spans become rows of equal length, given to the kernel as two lists of addresses. Does not decide
what is copied, or when. The transfer thread makes the lists (all layers at once, no loop over layers or spans), the
device does the rest: what the host spends does not grow with the bytes. Same interface and same bytes as
``copies.Copier``, which serves hosts and devices without Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import Plan
from pushkv.reference.copies import Copier, Copy, CopyError, cut_at_segments, runs_of

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceCopier", "copier", "rows_of"]

Longs = npt.NDArray[np.int64]

_WORDS = (8, 4, 2, 1)


class Rows(NamedTuple):
    """``row_bytes`` bytes from each address of ``source`` to the same of ``target``; addresses and sizes are multiples
    of ``word_bytes``.
    """

    source: Longs
    target: Longs
    row_bytes: int
    word_bytes: int


def copier(regions: Sequence[torch.Tensor], pool: torch.Tensor, segment_bytes: int, stream: Any) -> Any:
    """The best copier for where ``pool`` lies."""
    if pool.is_cuda:
        try:
            return DeviceCopier(regions, pool, segment_bytes, stream)
        except ImportError:
            pass  # no Triton: slower, the same bytes
    return Copier(regions, pool, segment_bytes, stream)


class DeviceCopier:
    """Copies between cache regions and one pool. ``regions``, ``pool``: flat uint8 tensors. ``stream``: where to run.

    Raises ``ImportError`` without Triton.
    """

    def __init__(
        self, regions: Sequence[torch.Tensor], pool: torch.Tensor, segment_bytes: int, stream: Any = None
    ) -> None:
        from pushkv.reference import device_kernel

        for tensor in (*regions, pool):
            if tensor.dim() != 1 or tensor.element_size() != 1 or not tensor.is_contiguous():
                raise CopyError(f"a region or pool must be flat uint8, not {tuple(tensor.shape)} {tensor.dtype}")
        self._kernel = device_kernel
        self._keep = (*regions, pool)
        self._pool, self._segment_bytes, self._stream = pool, segment_bytes, stream
        self._bases = np.asarray([int(tensor.data_ptr()) for tensor in regions], np.int64)
        self._sizes = np.asarray([tensor.numel() for tensor in regions], np.int64)

    def gather(self, plan: Plan, segments: Sequence[int], offset: int = 0, after: Any = None) -> Copy:
        """Cache -> packed bytes, which begin at byte ``offset`` of the given segments laid end to end.

        ``after``: a CUDA event that the copy waits for on the device. Raises ``CopyError``; nothing was copied then.
        """
        return self._run(plan, segments, offset, after, gather=True)

    def scatter(self, plan: Plan, segments: Sequence[int], offset: int = 0, after: Any = None) -> Copy:
        """Packed bytes -> cache; as ``gather``."""
        return self._run(plan, segments, offset, after, gather=False)

    def _run(self, plan: Plan, segments: Sequence[int], offset: int, after: Any, gather: bool) -> Copy:
        pool = (int(self._pool.data_ptr()), self._pool.numel(), self._segment_bytes)
        batches = list(rows_of(plan, self._bases, self._sizes, pool, segments, offset, gather=gather))
        return Copy(*self._kernel.run(batches, self._pool.device, self._stream, after))


def rows_of(
    plan: Plan,
    bases: Longs,
    sizes: Longs,
    pool: tuple[int, int, int],
    segments: Sequence[int],
    offset: int,
    *,
    gather: bool,
) -> Iterator[Rows]:
    """The rows of ``plan``, a batch per row length. ``bases``, ``sizes``: address and bytes of each region; ``pool``:
    (address, bytes, bytes of a segment). Raises ``CopyError`` for a plan that leaves the regions or the segments.
    """
    base, total, segment_bytes = pool
    ids = np.asarray(segments, np.int64)
    if len(ids) and (int(ids.min()) < 0 or (int(ids.max()) + 1) * segment_bytes > total):
        raise CopyError(f"segments {int(ids.min())} to {int(ids.max())} of a pool of {total // segment_bytes}")
    for template in plan.templates:
        region, origin, packed_origin, cache, packed, length = runs_of(template, gather=gather)
        if not len(cache) or not len(region):
            continue
        _check(region, origin, cache, length, sizes)
        cache = ((bases[region] + origin)[:, None] + cache).ravel()
        packed = (packed_origin[:, None] + packed).ravel() + offset
        length = np.tile(length, len(region))
        if int(packed.min()) < 0 or int((packed + length).max()) > len(ids) * segment_bytes:
            raise CopyError(f"packed bytes outside {len(ids)} segments of {segment_bytes} bytes")
        cache, packed, length = cut_at_segments(cache, packed, length, segment_bytes)
        place = base + ids[packed // segment_bytes] * segment_bytes + packed % segment_bytes
        source, target = (cache, place) if gather else (place, cache)
        yield from _batches(source, target, length)


def _check(region: Longs, origin: Longs, cache: Longs, length: Longs, sizes: Longs) -> None:
    """Every span lies inside its region. All origins have the same runs, so the extremes of the runs are enough."""
    if int(region.min()) < 0 or int(region.max()) >= len(sizes):
        raise CopyError(f"the plan means region {int(region.max())} of {len(sizes)}")
    if int((origin + cache.min()).min()) < 0 or bool((origin + int((cache + length).max()) > sizes[region]).any()):
        raise CopyError("the plan leaves a region of the cache")


def _batches(source: Longs, target: Longs, length: Longs) -> Iterator[Rows]:
    """Rows of one length each."""
    if int(length.min()) == int(length.max()):
        yield _rows(source, target, int(length[0]))
        return
    for each in np.unique(length).tolist():
        mine = length == each
        yield _rows(source[mine], target[mine], int(each))


def _rows(source: Longs, target: Longs, row: int) -> Rows:
    bits = int(np.bitwise_or.reduce(source) | np.bitwise_or.reduce(target)) | row
    return Rows(source, target, row, next(word for word in _WORDS if not bits % word))
