"""The least that still breaks the same property: first what the driver does, then what chance does.

Delta debugging (Zeller): parts of a list are left out, ever smaller ones, as long as the property still breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from pushkv.sim.explore import plan
from pushkv.sim.explore.case import Case, play_case

T = TypeVar("T")

MAX_PLAYS = 600
"""Runs that one case may cost: a minute at the most."""


def shrink(case: Case, *, max_plays: int = MAX_PLAYS) -> Case:
    """A smaller case that breaks the property of ``case.violation``; ``case`` itself when it breaks nothing."""
    return _Shrinker(case, max_plays).shrink()


class _Shrinker:
    def __init__(self, case: Case, plays: int) -> None:
        self.case, self.plays = case, plays
        self.broken = ""

    def shrink(self) -> Case:
        played = play_case(self.case)
        if not played.violation:
            return self.case
        self.broken = played.broken
        self.best = replace(self.case, actions=tuple(self.case.plan()), violation=played.violation)
        self._actions()
        labels = list(dict.fromkeys(label for world in play_case(self.best).worlds for label in world.causes.labels))
        if self._try(replace(self.best, faults=tuple(labels))):
            least = ddmin(labels, lambda kept: self._try(replace(self.best, faults=tuple(kept))))
            self._try(replace(self.best, faults=tuple(least)))
        self._actions()
        self._simpler()
        return self.best

    def _try(self, case: Case) -> bool:
        """Whether ``case`` breaks the same property; if so it is the best so far."""
        if self.plays <= 0:
            return False
        self.plays -= 1
        played = play_case(case)
        if played.broken != self.broken:
            return False
        self.best = replace(case, violation=played.violation)
        return True

    def _actions(self) -> None:
        ddmin(list(self.best.actions or ()), lambda kept: self._try(replace(self.best, actions=tuple(kept))))

    def _simpler(self) -> None:
        """Requests without chunks, prefix hits and delays, and short ones, where that makes no difference."""
        for changes in ({"chunked": False}, {"tokens": None}, {"delays": (0.0, 0.0)}, {"prompt": 4, "tokens": 4}):
            for index, action in enumerate(self.best.actions or ()):
                if isinstance(action, plan.Dispatch):
                    wanted: dict[str, Any] = dict(changes)
                    if wanted.get("tokens", 0) is None:
                        wanted["tokens"] = action.prompt
                    if None in action.delays:
                        wanted.pop("delays", None)
                    simpler = replace(action, **wanted)
                    if simpler != action:
                        actions = list(self.best.actions or ())
                        actions[index] = simpler
                        self._try(replace(self.best, actions=tuple(actions)))


def ddmin(items: Sequence[T], breaks: Callable[[Sequence[T]], bool]) -> list[T]:
    """The least part of ``items`` found for which ``breaks`` holds; it is taken to hold for all of them."""
    left, parts = list(items), 2
    if left and breaks([]):
        return []
    while len(left) > 1:
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            fewer = left[:start] + left[start + size :]
            if fewer and breaks(fewer):
                left, parts = fewer, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(left))
    return left
