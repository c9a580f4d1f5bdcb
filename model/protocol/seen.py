"""Which registration numbers of a peer have been seen: a floor and the runs above it.

Numbers are seen nearly in order, so this is one integer almost always. A number counts as seen for ever: a late
duplicate of a closed registration must not be taken for a new one (it would be written into memory that has another
owner by then).
"""

from __future__ import annotations

from bisect import bisect_right


class Seen:
    """A set of positive integers that grows only. Memory is bounded by ``max_runs``: past it the lowest gap counts as
    seen.
    """

    __slots__ = ("_max_runs", "_runs", "floor")

    def __init__(self, max_runs: int) -> None:
        self.floor = 0
        self._runs: list[tuple[int, int]] = []
        self._max_runs = max_runs

    def __contains__(self, number: int) -> bool:
        if number <= self.floor:
            return True
        at = bisect_right(self._runs, (number, 1 << 63)) - 1
        return at >= 0 and self._runs[at][1] >= number

    @property
    def highest(self) -> int:
        """The highest number that was seen."""
        return self._runs[-1][1] if self._runs else self.floor

    @property
    def runs(self) -> int:
        """How many runs lie above the floor."""
        return len(self._runs)

    def add(self, number: int) -> None:
        """Mark ``number`` as seen."""
        if number in self:
            return
        at = bisect_right(self._runs, (number, 0))
        low = high = number
        if at < len(self._runs) and self._runs[at][0] == number + 1:
            high = self._runs.pop(at)[1]
        if at > 0 and self._runs[at - 1][1] == number - 1:
            at -= 1
            low = self._runs.pop(at)[0]
        self._runs.insert(at, (low, high))
        self.raise_floor(self._runs[0][1] if len(self._runs) > self._max_runs else self.floor)

    def raise_floor(self, floor: int) -> None:
        """All numbers up to ``floor`` count as seen."""
        self.floor = max(self.floor, floor)
        while self._runs and self._runs[0][0] <= self.floor + 1:
            self.floor = max(self.floor, self._runs.pop(0)[1])
