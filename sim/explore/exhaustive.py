"""Every interleaving of a small world, breadth first, until nothing new is left: ``explore_all``.

In every state I1 is asked of all that may land, and what the books check is checked at every step (I2, I3, I5a, V5,
V6). From every state a fair world without further faults must come to rest with nothing held (I5b, I5c): a state that
does not is a deadlock, or goes round for ever. Where nothing but delays has struck (a lost or doubled message, a
preemption) every transfer has loaded (V1).

``pushkv explore --exhaustive [--deep] [--only NAME] [--limit STATES]`` prints one line per world.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pushkv.sim.explore.coverage import CELLS, UNREACHABLE, watched
from pushkv.sim.explore.moves import Moves
from pushkv.sim.explore.retell import BREACHES, Retelling
from pushkv.sim.explore.rows import State
from pushkv.sim.explore.scope import Scope
from pushkv.sim.explore.violation import Violation
from pushkv.sim.explore.worlds import DEEP, STANDARD


@dataclass
class Result:
    """What the search of one scope came to. ``path`` leads to ``violation``."""

    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    seconds: float = 0.0
    local_states: int = 0
    local_steps: int = 0
    empty: bool = False
    violation: str = ""
    transcript: str = ""

    def __str__(self) -> str:
        end = "frontier empty" if self.empty else self.violation or "cut off"
        return (
            f"{self.scope.name:<28} {self.states:>9,} states {self.transitions:>10,} transitions  depth {self.depth:>3}"
            f" {self.ends:>6,} ends {self.seconds:6.1f} s  {end}  [{self.scope.budget}]"
        )


class Search:
    """One scope's search."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.moves = Moves(scope)
        self.result = Result(scope)
        self._came_from: dict[State, State | None] = {}
        self._fair: dict[State, State] = {}
        self._last: State = ()
        self._tail: list[State] = []

    def run(self, limit: int | None = None) -> Result:
        """Search it all, or up to ``limit`` states."""
        began = time.process_time()
        result = self.result
        try:
            self._search(limit)
            self._settles()
        except BREACHES as breach:
            result.violation = f"{type(breach).__name__}: {breach}"
            result.empty = False
            result.transcript = Retelling(self.moves).tell(self._path(self._last) + self._tail)
        result.states = len(self._came_from)
        result.seconds = time.process_time() - began
        result.local_states, result.local_steps = len(self.moves.parts), self.moves.parts.misses
        return result

    def _path(self, last: State) -> list[State]:
        """Keys of the states from the first to ``last``."""
        keys, at = [], self.moves.key(last)
        while True:
            keys.append(at)
            before = self._came_from[at]
            if before is None:
                return keys[::-1]
            at = self.moves.key(before)

    def _search(self, limit: int | None) -> None:
        result, moves, came_from, fair = self.result, self.moves, self._came_from, self._fair
        first = moves.start()
        frontier = [(first, moves.key(first))]
        came_from[frontier[0][1]] = None
        while frontier:
            new: list[tuple[State, State]] = []
            for state, here in frontier:
                self._last = state
                next_fair = None
                for _, after, free in moves.all(state):
                    result.transitions += 1
                    key = moves.key(after)
                    if key not in came_from:
                        came_from[key] = state
                        new.append((after, key))
                        moves.check(after)
                    if free and next_fair is None:
                        next_fair = fair[here] = key
                if next_fair is None:
                    self._at_rest(state)
                if limit is not None and len(came_from) > limit:
                    return
            frontier = new
            result.depth += bool(new)
        result.empty = True

    def _at_rest(self, state: State) -> None:
        self.result.ends += 1
        left = self.moves.left(state)
        if left:
            raise Violation(f"I5c: at rest, and held: {left}")
        harmed = not self.scope.calm or not self.moves.unharmed(state)
        if not harmed and self.moves.failures(state):
            raise Violation("V1: a transfer failed, and no more was done to it than a delay")

    def _settles(self) -> None:
        """From every state a fair world comes to rest: the fair moves, one from each state, have no ring."""
        fair, settled = self._fair, set[State]()
        for first in self._came_from:
            state, walked = first, dict[State, None]()
            while state in fair and state not in settled:
                if state in walked:
                    self._last, self._tail = first, list(walked)[1:]
                    raise Violation(f"I5c: goes round for ever, and held: {self.moves.left(state)}")
                walked[state] = None
                state = fair[state]
            settled.update(walked)


def explore_all(scope: Scope, limit: int | None = None) -> Result:
    """Search ``scope``; past ``limit`` states it is cut off."""
    return Search(scope).run(limit)


def chosen(only: str = "", *, deep: bool = False) -> list[Scope]:
    """Worlds of the standard or the deep set with ``only`` in their name."""
    return [scope for scope in (DEEP if deep else STANDARD) if only in scope.name]


def main(scopes: Sequence[Scope], limit: int | None = None, *, whole: bool = True) -> int:
    """Search ``scopes`` one after the other and print what each came to. Returns 1 when something does not hold.
    ``whole``: they are a whole set, so that cells of the transition tables that nothing took are named.
    """
    bad = False
    with watched() as taken:
        for scope in scopes:
            result = explore_all(scope, limit)
            print(result, flush=True)
            if result.violation:
                bad = True
                print(result.transcript)
    missed = CELLS - taken - UNREACHABLE.keys()
    print(f"{len(taken)} of {len(CELLS)} cells of the transition tables taken, {len(UNREACHABLE)} cannot be")
    if missed and whole:
        print("not taken:", ", ".join(" ".join(cell) for cell in sorted(missed)))
    return int(bad)
