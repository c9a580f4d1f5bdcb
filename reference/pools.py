"""Staging and landing memory: a tensor cut into segments of one size.

Decides which segments are free and where a byte range over some of them lies. Does not decide who gets segments, how
many, or when they come back (the protocol core does), nor how the memory is opened to peers (`transport`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["PAGE_BYTES", "PoolError", "SegmentPool", "cross", "flat_bytes", "segments_within", "spread"]

Longs = npt.NDArray[np.int64]

PAGE_BYTES = 4096


class PoolError(ValueError):
    """Sizes that make no pool, or segments and ranges that are not of this pool."""


class SegmentPool:
    """`count` segments of `segment_bytes` in one tensor of bytes on `device`; page-aligned on a CPU.

    One thread uses it. Raises `PoolError`; out of memory comes as torch's own error.
    """

    def __init__(self, count: int, segment_bytes: int, device: torch.device | str = "cpu") -> None:
        if count < 1 or segment_bytes < 1:
            raise PoolError(f"a pool of {count} segments of {segment_bytes} bytes")
        self.count = count
        self.segment_bytes = segment_bytes
        self.tensor = flat_bytes(count * segment_bytes, device)
        self.base = int(self.tensor.data_ptr())
        self._free = list(range(count - 1, -1, -1))  # the lowest is taken first, so that neighbours stay together
        self._taken = bytearray(count)

    @property
    def free(self) -> int:
        """Segments that can be taken."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` segments, or None if there are fewer."""
        if count < 0:
            raise PoolError(f"{count} segments wanted")
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        found = tuple(reversed(self._free[cut:]))
        del self._free[cut:]
        for segment in found:
            self._taken[segment] = 1
        return found

    def give(self, segments: Iterable[int]) -> None:
        """Gives segments back: all, or none if one of them was not taken."""
        back = list(segments)
        for segment in back:
            if not 0 <= segment < self.count or not self._taken[segment]:
                raise PoolError(f"segment {segment} was not taken")
        if len(set(back)) < len(back):
            raise PoolError(f"a segment is given back twice in {back}")
        for segment in back:
            self._taken[segment] = 0
        self._free = sorted([*self._free, *back], reverse=True)

    def address(self, segment: int) -> int:
        """Where a segment begins."""
        if not 0 <= segment < self.count:
            raise PoolError(f"segment {segment} of {self.count}")
        return self.base + segment * self.segment_bytes

    def spread(self, segments: Sequence[int] | Longs, offset: int, size: int) -> tuple[Longs, Longs]:
        """Addresses and sizes of bytes [offset, offset + size) of the given segments, laid end to end.

        Segments that are neighbours in memory make one range.
        """
        return spread(self.base, self.count, self.segment_bytes, segments, offset, size)


def spread(
    base: int, count: int, segment_bytes: int, segments: Sequence[int] | Longs, offset: int, size: int
) -> tuple[Longs, Longs]:
    """`SegmentPool.spread` for any pool, a peer's included: its `base`, number and size of segments."""
    ids = np.asarray(segments, np.int64)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise PoolError(f"segments {int(ids.min())} to {int(ids.max())} of a pool of {count}")
    if offset < 0 or size < 0 or offset + size > len(ids) * segment_bytes:
        raise PoolError(f"bytes {offset} to {offset + size} of {len(ids)} segments of {segment_bytes} bytes")
    if not size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first, last = offset // segment_bytes, (offset + size - 1) // segment_bytes
    starts = ids[first : last + 1] * segment_bytes
    sizes = np.full(len(starts), segment_bytes, np.int64)
    within = offset - first * segment_bytes
    starts[0] += within
    sizes[0] -= within
    sizes[-1] -= (last + 1) * segment_bytes - (offset + size)
    heads = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + sizes[:-1]))
    return base + starts[heads], np.add.reduceat(sizes, heads)


def cross(
    local: tuple[Longs, Longs], remote: tuple[Longs, Longs], most_bytes: int | None = None
) -> tuple[Longs, Longs, Longs]:
    """Two ways to cut the same bytes -> (local addresses, remote addresses, sizes), contiguous on both sides.

    most_bytes: cut larger pieces further.
    """
    total = int(local[1].sum())
    if total != int(remote[1].sum()):
        raise PoolError(f"{total} bytes here, {int(remote[1].sum())} there")
    if not total:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    begins = [np.concatenate(([0], np.cumsum(side[1])[:-1])) for side in (local, remote)]
    extra = np.arange(0, total, most_bytes, dtype=np.int64) if most_bytes else np.empty(0, np.int64)
    cuts = np.unique(np.concatenate([*begins, extra]))
    found = []
    for (addresses, _), begin in zip((local, remote), begins, strict=True):
        piece = np.searchsorted(begin, cuts, side="right") - 1
        found.append(addresses[piece] + cuts - begin[piece])
    return found[0], found[1], np.diff(np.append(cuts, total))


def segments_within(size_bytes: int, segment_bytes: int, prompt_bytes: int, what: str, setting: str) -> int:
    """How many segments fit into `size_bytes`. Raises `PoolError` with a sentence if not even one prompt fits.

    prompt_bytes: the largest prompt that must fit. what: the pool's name; setting: what would have to be larger.
    """
    if segment_bytes < 1:
        raise PoolError(f"segments of {segment_bytes} bytes")
    needed = -(-prompt_bytes // segment_bytes)
    count = max(0, size_bytes) // segment_bytes
    if count < max(1, needed):
        raise PoolError(
            f"the {what} memory of {size_bytes} bytes does not hold one prompt of {prompt_bytes} bytes in segments of"
            f" {segment_bytes}: set {setting} to {max(1, needed) * segment_bytes} or more"
        )
    return count


def flat_bytes(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor of `size` bytes, not initialised; page-aligned on a CPU."""
    import torch

    if torch.device(device).type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    room = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
    return room[(skip := -room.data_ptr() % PAGE_BYTES) : skip + size]
