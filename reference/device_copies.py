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

from pushkv.model.layout import BlockTable, Plan, Slotted
from pushkv.reference.copies import NOWHERE, Copier, Copy, CopyError, runs_of
from pushkv.reference.lists import Lists

if TYPE_CHECKING:
    import torch

__all__ = ["Ahead", "DeviceCopier", "Rows", "copier", "rows_of"]

Longs = npt.NDArray[np.int64]

_WORDS = (8, 4, 2, 1)
_ROW_BYTES = 64 << 10
"""Rows are this long at the most where their lengths have no good common divisor."""
_FINE_BYTES = 4 << 10
"""A common divisor below it is no good, unless it is the only length."""


class Rows(NamedTuple):
    """Every origin x every run: ``row_bytes`` between a place in the cache and one in the packed bytes.

    ``origins``: cache addresses. ``runs``, shape (n, 3): what is added to that address, the packed offset of the first
    origin, and how far the packed offsets are apart from origin to origin. All are multiples of ``word_bytes``.
    """

    origins: Longs
    runs: Longs
    row_bytes: int
    word_bytes: int

    @property
    def lists(self) -> tuple[Longs, ...]:
        """As the kernel reads them."""
        return self.origins, self.runs[:, 0], self.runs[:, 1], self.runs[:, 2]


class Ahead(NamedTuple):
    """Rows of one length whose blocks are not known yet: ``runs`` are as in ``Rows``, but begin within a block;
    ``slots``, ``group``, ``stride`` as in ``Slotted``. ``room``: the least size of each origin's region behind it.
    """

    origins: Longs
    runs: Longs
    slots: Longs
    row_bytes: int
    group: int
    stride: int
    room: int
    bits: int

    @property
    def key(self) -> tuple[object, ...]:
        """What can be copied together has it in common."""
        return self.row_bytes, self.group, self.stride, self.room, self.origins.tobytes()


def copier(
    regions: Sequence[torch.Tensor], pool: torch.Tensor, segment_bytes: int, stream: Any, waiting: Any = None
) -> Any:
    """The best copier for where ``pool`` lies. ``stream``, ``waiting``: as for ``DeviceCopier``."""
    if pool.is_cuda:
        try:
            return DeviceCopier(regions, pool, segment_bytes, stream, waiting)
        except ImportError:
            pass  # no Triton: slower, the same bytes
    return Copier(regions, pool, segment_bytes, stream)


class DeviceCopier:
    """Copies between cache regions and one pool. ``regions``, ``pool``: flat uint8 tensors. ``stream``: where to run.
    ``waiting``: where copies run that wait for an event, if not there, so that those that need not are not behind them.

    Raises ``ImportError`` without Triton.
    """

    def __init__(
        self,
        regions: Sequence[torch.Tensor],
        pool: torch.Tensor,
        segment_bytes: int,
        stream: Any = None,
        waiting: Any = None,
    ) -> None:
        from pushkv.reference import device_kernel

        for tensor in (*regions, pool):
            if tensor.dim() != 1 or tensor.element_size() != 1 or not tensor.is_contiguous():
                raise CopyError(f"a region or pool must be flat uint8, not {tuple(tensor.shape)} {tensor.dtype}")
        self._kernel = device_kernel
        self._keep = (*regions, pool)
        self._pool, self._segment_bytes = pool, segment_bytes
        self._device = pool.device
        streams = (stream,) if waiting is None else (stream, waiting)
        lanes = [(each, Lists(pool.device) if pool.is_cuda else None) for each in streams]
        self._lanes = lanes[0], lanes[-1]
        self._bases = np.asarray([int(tensor.data_ptr()) for tensor in regions], np.int64)
        self._sizes = np.asarray([tensor.numel() for tensor in regions], np.int64)

    def gather(self, plan: Plan, segments: Sequence[int] | Longs, offset: int = 0, after: Any = None) -> Copy:
        """Cache -> packed bytes, which begin at byte ``offset`` of the given segments laid end to end.

        ``after``: a CUDA event that the copy waits for on the device. Raises ``CopyError``; nothing was copied then.
        """
        return self._run(plan, segments, offset, after, gather=True)

    def scatter(self, plan: Plan, segments: Sequence[int] | Longs, offset: int = 0, after: Any = None) -> Copy:
        """Packed bytes -> cache; as ``gather``."""
        return self._run(plan, segments, offset, after, gather=False)

    def _run(self, plan: Plan, segments: Sequence[int] | Longs, offset: int, after: Any, gather: bool) -> Copy:
        places, alike = self._places(segments)
        room = len(places) * self._segment_bytes
        batches = list(rows_of(plan, self._bases, self._sizes, self._segment_bytes, room, alike, offset, gather=gather))
        return self._copy(batches, places, after, gather)

    def _places(self, segments: Sequence[int] | Longs) -> tuple[Longs, int]:
        """Addresses of the segments, and all bits that are set in one of them or in their size."""
        size = self._segment_bytes
        ids = np.asarray(segments, np.int64)
        if len(ids) and (int(ids.min()) < 0 or (int(ids.max()) + 1) * size > self._pool.numel()):
            raise CopyError(f"segments {int(ids.min())} to {int(ids.max())} of a pool of {self._pool.numel() // size}")
        places = int(self._pool.data_ptr()) + ids * size
        return places, int(np.bitwise_or.reduce(places)) | size if len(ids) else size

    def _copy(self, batches: list[Rows], places: Longs, after: Any, gather: bool) -> Copy:
        size = self._segment_bytes
        run = self._kernel.run
        lane = int(after is not None)
        stream, lists = self._lanes[lane]
        event, keep = run(batches, places, size, self._device, stream, after, lists, gather=gather)
        return Copy(event, keep, lane if batches else NOWHERE)

    def prepare(self, slotted: Sequence[Slotted], offset: int) -> list[Ahead]:
        """What of a scatter can be worked out before its blocks are known; the part's packed bytes begin at ``offset``.

        Raises ``CopyError`` for a part that leaves the regions.
        """
        found = []
        for one in slotted:
            region, origin, packed_origin, cache, packed, length = runs_of(one.template, gather=False)
            if not len(cache) or not len(region):
                continue
            if int(region.min()) < 0 or int(region.max()) >= len(self._sizes):
                raise CopyError(f"the plan means region {int(region.max())} of {len(self._sizes)}")
            slots = np.tile(one.slot, len(cache) // len(one.slot))
            room = int((self._sizes[region] - origin).min())
            for origins, first, step in _affine(self._bases[region] + origin, packed_origin + offset):
                runs = np.stack((cache, packed + first, np.full(len(cache), step), slots), 1)
                for row, places in _cut(runs, length, self._segment_bytes):
                    bits = int(np.bitwise_or.reduce(origins)) | row | one.stride
                    bits |= int(np.bitwise_or.reduce(places[:, :3], axis=None))
                    ahead = Ahead(origins, places[:, :3], places[:, 3], row, one.group, one.stride, room, bits)
                    found.append(ahead)
        return found

    def scatter_ahead(
        self, parts: Sequence[Ahead], tables: Sequence[BlockTable], segments: Sequence[int] | Longs, after: Any = None
    ) -> Copy:
        """The scatter of what was prepared, into blocks that are known now. Raises ``CopyError``; nothing was copied
        then.
        """
        places, alike = self._places(segments)
        alike_parts: dict[tuple[object, ...], list[Ahead]] = {}
        for part in parts:
            alike_parts.setdefault(part.key, []).append(part)
        batches = []
        for same in alike_parts.values():
            one = same[0]
            runs = np.concatenate([part.runs for part in same])
            slots = np.concatenate([part.slots for part in same])
            ids = tables[one.group].ids
            if int(slots.max()) >= len(ids) or int(ids.min()) < 0:
                raise CopyError(f"{len(ids)} blocks, of which number {int(slots.max())} is needed")
            runs[:, 0] += ids[slots] * one.stride
            if int(runs[:, 0].max()) + one.row_bytes > one.room:
                raise CopyError("a block leaves its region of the cache")
            last = runs[:, 1] + runs[:, 2] * (len(one.origins) - 1)
            if int(np.maximum(runs[:, 1], last).max()) + one.row_bytes > len(places) * self._segment_bytes:
                raise CopyError(f"packed bytes outside {len(places)} segments of {self._segment_bytes} bytes")
            bits = alike
            for part in same:
                bits |= part.bits
            batches.append(Rows(one.origins, runs, one.row_bytes, next(word for word in _WORDS if not bits % word)))
        return self._copy(batches, places, after, False)

    def warm(self, *, gather: bool) -> None:
        """Compile what copies will most likely need."""
        shapes = [Rows(np.zeros(0, np.int64), np.zeros((0, 3), np.int64), row, 8) for row in (_ROW_BYTES, 64)]
        self._kernel.warm(self._device, self._segment_bytes, self._lanes[0][0], shapes, gather=gather)


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
        for origins, first, step in _affine(bases[region] + origin, packed_origin):
            bits = int(np.bitwise_or.reduce(origins)) | alike
            runs = np.stack((cache, packed + first, np.full(len(cache), step), np.zeros(len(cache), np.int64)), 1)
            for row, places in _cut(runs, length, segment_bytes):
                all_bits = bits | int(np.bitwise_or.reduce(places, axis=None)) | row
                yield Rows(origins, places[:, :3], row, next(word for word in _WORDS if not all_bits % word))


def _affine(origins: Longs, packed: Longs) -> Iterator[tuple[Longs, int, int]]:
    """(origins, packed offset of the first, distance of the others): all of them, as packed origins are evenly spaced,
    or else one by one.
    """
    step = int(packed[1] - packed[0]) if len(packed) > 1 else 0
    if len(packed) < 3 or bool((np.diff(packed) == step).all()):
        yield origins, int(packed[0]), step
        return
    for number in range(len(packed)):
        yield origins[number : number + 1], int(packed[number]), 0


def _check(region: Longs, origin: Longs, cache: Longs, length: Longs, sizes: Longs) -> None:
    """Every span lies inside its region. All origins have the same runs, so the extremes of the runs are enough."""
    if int(region.min()) < 0 or int(region.max()) >= len(sizes):
        raise CopyError(f"the plan means region {int(region.max())} of {len(sizes)}")
    if int((origin + cache.min()).min()) < 0 or bool((origin + int((cache + length).max()) > sizes[region]).any()):
        raise CopyError("the plan leaves a region of the cache")


def _cut(runs: Longs, length: Longs, segment_bytes: int) -> Iterator[tuple[int, Longs]]:
    """Runs cut into rows of one length each: (bytes of a row, the rows). Columns 0 and 1 are places that grow along a
    run; what is in the others is the same for all of it.
    """
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
        yield int(each), _moved(runs[mine], whole[mine] * most)


def _split(runs: Longs, pieces: Longs, row: int) -> Longs:
    """The first ``pieces[i]`` rows of each run."""
    if len(pieces) and int(pieces.min()) == int(pieces.max()) == 1:
        return runs
    of = np.repeat(np.arange(len(runs)), pieces)
    within = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * row
    return _moved(runs[of], within)


def _moved(runs: Longs, by: Longs) -> Longs:
    """A copy of ``runs`` whose places are ``by`` further."""
    moved = runs.copy()
    moved[:, :2] += by[:, None]
    return moved
