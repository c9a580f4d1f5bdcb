"""A pool of KV blocks that hands out real block numbers in the order in which vLLM would.

Decides which numbers a request gets, and thereby how many descriptors its transfer has. vLLM 0.26 puts freed blocks
without a prefix-cache hash at the front of its free list, the request's last block first, and takes from the front: a
stack. A prompt's blocks therefore come back in reverse at the next use, and descending neighbours cannot be merged
into one descriptor. With prefix caching it is a queue: a cached prompt stays in the blocks of its first prefill,
which lie in order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np


class BlockPool:
    """``blocks`` KV blocks, all free at first. Block numbers start at 1 (vLLM keeps 0 as the null block).

    ``free``: how many are free. ``cached``: freed blocks keep what is in them and are taken again last, in the order
    in which their prompt holds them.
    """

    __slots__ = ("_free", "blocks", "cached", "fewest_free", "free")

    def __init__(self, blocks: int, *, cached: bool = False) -> None:
        self.blocks = blocks
        self.cached = cached
        self.free = self.fewest_free = blocks
        # The first ``free`` of it are the stack, what lies above is stale: an array that shrinks and grows by hundreds
        # is moved in memory each time.
        self._free = array("i", np.arange(blocks, 0, -1, dtype=np.int32).tobytes())

    def __len__(self) -> int:
        """Free blocks, as ``free``."""
        return self.free

    def take(self, count: int) -> array[int]:
        """The next ``count`` blocks in the order of the free list; the caller has made sure that they are there."""
        if count <= 0:
            return array("i")
        top = self.free
        self.free = left = top - count
        if left < self.fewest_free:
            self.fewest_free = left
        taken = self._free[left:top]
        taken.reverse()
        return taken

    def grow(self, lists: Sequence[array[int]]) -> None:
        """One block more at the end of each of ``lists``, in their order, for one more stretch of decoded tokens."""
        free, top = self._free, self.free
        for blocks in lists:
            top -= 1
            blocks.append(free[top])
        self.free = top
        if top < self.fewest_free:
            self.fewest_free = top

    def give_back(self, blocks: array[int]) -> None:
        """Free a request's blocks; its last one will be taken first (``cached``: its first one, after all that is
        free)."""
        free, top = self._free, self.free
        self.free = after = top + len(blocks)
        if self.cached:
            free[len(blocks) : after] = free[:top]
            free[: len(blocks)] = blocks[::-1]
        else:
            free[top:after] = blocks

    @property
    def peak_fraction(self) -> float:
        """Largest part of the pool that was in use at once."""
        return 1.0 - self.fewest_free / self.blocks


def runs(source: array[int], destination: array[int], blocks: int) -> int:
    """How many runs of blocks ascend together on both sides, from the last ``blocks`` blocks of ``source`` to the first
    of ``destination``: descriptors per region."""
    if blocks <= 0:
        return 0
    a = np.frombuffer(source, dtype=np.int32)[-blocks:]
    b = np.frombuffer(destination, dtype=np.int32)[:blocks]
    broken = (a[1:] - a[:-1] != 1) | (b[1:] - b[:-1] != 1)
    return 1 + bytes(broken).count(1)
