"""Gather and scatter on a CUDA device: one kernel over all layers, on a stream of its own.

Decides how a plan's spans become rows of equal length. Does not decide what is copied, or when. The transfer thread
makes lists of layers and of blocks, and the device multiplies them out: what the host spends grows with neither bytes
nor spans. Same interface and same bytes as ``copies.Copier``, which serves hosts and devices without Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import Plan
from pushkv.reference.copies import Copier, Copy, CopyError, runs_of

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceCopier", "Rows", "copier", "rows_of"]

Longs = npt.NDArray[np.int64]

_WORDS = (8, 4, 2, 1)
_ROW_BYTES = 64 << 10
"""Rows are this long at the most where their lengths have no good common divisor."""
_FINE_BYTES = 4 << 10
"""A common divisor below it is no good, unless it is the only length."""


class Rows(NamedTuple):
    """Every origin x every run: ``row_bytes`` between a place in the cache and one in the packed bytes.

    ``origins``, ``runs``: (cache address, packed offset) of each, to be added up; shape (n, 2). All are multiples of
    ``word_bytes``.
    """

    origins: Longs
    runs: Longs
    row_bytes: int
    word_bytes: int

    @property
    def lists(self) -> tuple[Longs, ...]:
        """As the kernel reads them."""
        return self.origins[:, 0], self.origins[:, 1], self.runs[:, 0], self.runs[:, 1]


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
        self._device = pool.device
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
        size = self._segment_bytes
        ids = np.asarray(segments, np.int64)
        if len(ids) and (int(ids.min()) < 0 or (int(ids.max()) + 1) * size > self._pool.numel()):
            raise CopyError(f"segments {int(ids.min())} to {int(ids.max())} of a pool of {self._pool.numel() // size}")
        places = int(self._pool.data_ptr()) + ids * size
        alike = int(np.bitwise_or.reduce(places)) | size if len(ids) else size
        room = len(ids) * size
        batches = list(rows_of(plan, self._bases, self._sizes, size, room, alike, offset, gather=gather))
        return Copy(*self._kernel.run(batches, places, size, self._device, self._stream, after, gather=gather))

    def warm(self, *, gather: bool) -> None:
        """Compile what copies will most likely need."""
        empty = np.zeros((0, 2), np.int64)
        shapes = [Rows(empty, empty, row, 8) for row in (_ROW_BYTES, 64)]
        self._kernel.warm(self._device, self._segment_bytes, self._stream, shapes, gather=gather)


def rows_of(
    plan: Plan,
    bases: Longs,
    sizes: Longs,
    segment_bytes: int,
    room: int,
    alike: int,
    offset: int,
    *,
    gather: bool,
) -> Iterator[Rows]:
    """The rows of ``plan``, a batch per row length, none longer than a segment. ``bases``, ``sizes``: address and bytes
    of each region; ``room``: bytes of the segments; ``alike``: what all segments' addresses are multiples of, or more
    bits. Raises ``CopyError`` for a plan that leaves the regions or the segments.
    """
    for template in plan.templates:
        region, origin, packed_origin, cache, packed, length = runs_of(template, gather=gather)
        if not len(cache) or not len(region):
            continue
        _check(region, origin, cache, length, sizes)
        packed_origin = packed_origin + offset
        if int(packed_origin.min() + packed.min()) < 0 or int(packed_origin.max() + (packed + length).max()) > room:
            raise CopyError(f"packed bytes outside {room} bytes of segments")
        origins = np.stack((bases[region] + origin, packed_origin), 1)
        bits = int(np.bitwise_or.reduce(origins, axis=None)) | alike
        for row, places in _cut(np.stack((cache, packed), 1), length, segment_bytes):
            all_bits = bits | int(np.bitwise_or.reduce(places, axis=None)) | row
            yield Rows(origins, places, row, next(word for word in _WORDS if not all_bits % word))


def _check(region: Longs, origin: Longs, cache: Longs, length: Longs, sizes: Longs) -> None:
    """Every span lies inside its region. All origins have the same runs, so the extremes of the runs are enough."""
    if int(region.min()) < 0 or int(region.max()) >= len(sizes):
        raise CopyError(f"the plan means region {int(region.max())} of {len(sizes)}")
    if int((origin + cache.min()).min()) < 0 or bool((origin + int((cache + length).max()) > sizes[region]).any()):
        raise CopyError("the plan leaves a region of the cache")


def _cut(runs: Longs, length: Longs, segment_bytes: int) -> Iterator[tuple[int, Longs]]:
    """Runs cut into rows of one length each: (bytes of a row, where the rows begin)."""
    common = int(np.gcd.reduce(length))
    if common > segment_bytes:
        common = int(np.gcd(common, segment_bytes))
    if common >= _FINE_BYTES or (common <= segment_bytes and int(length.max()) == common):
        yield common, _split(runs, length // common, common)
        return
    most = min(_ROW_BYTES, segment_bytes)
    whole = length // most
    if whole.any():
        yield most, _split(runs, whole, most)
    rest = length - whole * most
    for each in np.unique(rest[rest > 0]).tolist():
        mine = rest == each
        yield int(each), runs[mine] + (whole[mine] * most)[:, None]


def _split(runs: Longs, pieces: Longs, row: int) -> Longs:
    """The first ``pieces[i]`` rows of each run."""
    if len(pieces) and int(pieces.min()) == int(pieces.max()) == 1:
        return runs
    of = np.repeat(np.arange(len(runs)), pieces)
    within = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * row
    return runs[of] + within[:, None]
