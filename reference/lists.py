"""Pinned lists on their way to a device: memory that a copy's rows are sent in, set aside before anything is busy.

Decides which piece is used again, and when. To get pinned or device memory from the driver can wait for all that the
device has to do, which on a busy prefill engine is hundreds of milliseconds; what is set aside here is used in turn.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIZES = ((96, 1 << 13), (8, 1 << 17))
"""(pieces, words of each): most copies need a few words per block, and a step of a busy prefill engine has many."""


class Lists:
    """Pieces of pinned memory with as much beside them on ``device``. Used from one thread, by copies on one stream:
    the piece that was taken first is free first.
    """

    def __init__(self, device: torch.device, sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
        import torch

        self.device = device
        self.missed = 0
        on_device = device.type == "cuda"
        self._rings: list[tuple[int, deque[tuple[torch.Tensor, torch.Tensor, Any]]]] = []
        for count, words in sizes:
            here = torch.empty((count, words), dtype=torch.int64, pin_memory=on_device)
            there = torch.empty((count, words), dtype=torch.int64, device=device)
            self._rings.append((words, deque((here[n], there[n], None) for n in range(count))))

    def take(self, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(pinned, on the device), of at least ``words`` int64 each; new ones where all are in use, which is counted.
        ``give`` follows, before anything else is taken.
        """
        import torch

        for most, ring in self._rings:
            if words <= most and ring and (ring[0][2] is None or ring[0][2].query()):
                here, there, _ = ring.popleft()
                return here, there
        self.missed += 1
        here = torch.empty(words, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return here, torch.empty(words, dtype=torch.int64, device=self.device)

    def give(self, here: torch.Tensor, there: torch.Tensor, event: Any) -> None:
        """They may be used again when ``event`` is over; what was made for one copy goes with that copy."""
        for most, ring in self._rings:
            if len(here) == most:
                ring.append((here, there, event))
