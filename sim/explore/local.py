"""Local steps of an exhaustive world, each taken once.

A world's state is a row of numbers: one for the state of each part (a rank, or the books of an engine), one for what is
under way between them. A part's step depends on nothing but its own state and the event, so its result is kept: the
machines run once per (state, event), and the rest of the search is looking up. A number stands for a canonical form
(``canon``); the first object that had it is copied whenever a new event comes to it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from pushkv.sim.explore.books import Books
from pushkv.sim.explore.canon import clone, swapped, written
from pushkv.sim.explore.rank import Rank
from pushkv.sim.explore.scope import ENGINES, KINDS, Scope

SOUP, NEXT, LANE, ABANDON, TOLD = range(5)
"""What a step is followed by: an item under way, an event at once, an event in a lane (or at once), a write that is
given up, word to the host.
"""

Part = Rank | Books
Event = tuple[Any, ...]
Effects = tuple[tuple[Any, ...], ...]


class Numbers:
    """Values numbered in the order of their first coming."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        """The number of ``value``."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class Parts:
    """States of parts, and the steps between them."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.events, self.items = Numbers(), Numbers()
        self.slots: list[tuple[str, Any]] = [
            (engine, rank) for engine in ENGINES for rank in ("ledger", *range(scope.ranks[engine]))
        ]
        self.where: dict[Any, int] = {slot: number for number, slot in enumerate(self.slots)}
        self.misses = 0
        self.swap: list[int] = []
        self._digests: dict[bytes, int] = {}
        self._masters: dict[int, Part] = {}
        self._steps: dict[int, tuple[int, Effects]] = {}
        self._wake: dict[int, float] = {}
        self._choices: dict[int, tuple[tuple[int, int], ...]] = {}
        self._left: dict[int, str] = {}
        self._touch: dict[tuple[int, int], bool] = {}
        self._lost: dict[tuple[int, int], bool] = {}

    def __len__(self) -> int:
        return len(self._masters)

    def number(self, part: Part) -> int:
        """The number of the state that ``part`` is in."""
        form = written(part, part.now if isinstance(part, Rank) else 0.0)
        number = self._number(form)
        if number not in self._masters:
            self._masters[number] = part
            other = self._number(swapped(form, self.scope.alike))
            self.swap[number] = other
        return number

    def _number(self, form: bytes) -> int:
        digest = blake2b(form, digest_size=16).digest()
        number = self._digests.get(digest)
        if number is None:
            number = self._digests[digest] = len(self.swap)
            self.swap.append(number)
        return number

    def step(self, state: int, event: int) -> tuple[int, Effects]:
        """What event number ``event`` does to a part in ``state``: its next state, and what follows."""
        key = state << 32 | event
        found = self._steps.get(key)
        if found is None:
            self.misses += 1
            part = clone(self._masters[state], {})
            method, *args = self.events.values[event]
            out: list[tuple[Any, ...]] = []
            getattr(part, method)(*args, out)
            found = self._steps[key] = (self.number(part), self._effects(part, out))
        return found

    def _effects(self, part: Part, out: list[tuple[Any, ...]]) -> Effects:
        """What follows, with numbers for what has one: the explored world looks up and does not hash."""
        engine = part.engine if isinstance(part, Books) else part.me[0]
        slot = self.where[(engine, "ledger")] if isinstance(part, Books) else self.where[part.me]
        done: list[tuple[Any, ...]] = []
        for effect in out:
            kind = effect[0]
            if kind == "send":
                done.append((SOUP, self.items.of(("msg", self.slots[slot], effect[1], effect[2], False))))
            elif kind == "books":
                done.append((NEXT, self.where[(engine, "ledger")], self.events.of(effect[1])))
            elif kind == "up":
                done.append((LANE, self.where[(engine, "ledger")], self.events.of(effect[1]), slot))
            elif kind == "down":
                target = self.where[(engine, effect[1])]
                done.append((LANE, target, self.events.of(effect[2]), len(self.slots) + target))
            elif kind == "abandon":
                done.append((ABANDON, slot, effect[1]))
            elif kind == "told":
                done.append((TOLD, effect[1]))
            elif kind == "write":
                done.append((SOUP, self.items.of(("write", *self.slots[slot], effect[1], effect[2], "", -1.0))))
            else:
                done.append((SOUP, self.items.of((kind, *self.slots[slot], *effect[1:]))))
        return tuple(done)

    def wake_s(self, state: int) -> float:
        """Time to the next deadline of a rank."""
        found = self._wake.get(state)
        if found is None:
            part = self._masters[state]
            assert isinstance(part, Rank)
            found = self._wake[state] = part.wake_s
        return found

    def choices(self, state: int) -> tuple[tuple[int, int], ...]:
        """What a host may do next: (number of the budget or -1, number of the event)."""
        found = self._choices.get(state)
        if found is None:
            part = self._masters[state]
            assert isinstance(part, Books)
            found = self._choices[state] = tuple(
                (KINDS.index(budget) if budget else -1, self.events.of(event)) for budget, event in part.choices()
            )
        return found

    def touchable(self, state: int, item: int, write: tuple[Any, ...]) -> bool:
        """Whether a write may land in the memory of books in ``state``; see ``Books.touchable``."""
        found = self._touch.get((state, item))
        if found is None:
            part = self._masters[state]
            assert isinstance(part, Books)
            found = self._touch[(state, item)] = part.touchable(write[3], write[4])
        return found

    def lost(self, state: int, handle: int) -> bool:
        """Whether a rank in ``state`` may be told that the gather for ``handle`` has not begun: its tokens are gone,
        and it is the last part of its shard.
        """
        found = self._lost.get((state, handle))
        if found is None:
            part = self._masters[state]
            assert isinstance(part, Rank)
            found = self._lost[(state, handle)] = part.lost(handle)
        return found

    def left(self, state: int) -> str:
        """What a part still holds; empty: nothing."""
        found = self._left.get(state)
        if found is None:
            part, scope = self._masters[state], self.scope
            if isinstance(part, Rank):
                held = part.left()
            else:
                blocks = scope.p_blocks if part.engine == "P" else scope.d_blocks
                held = part.left(blocks, scope.settings.landing_segments)
            found = self._left[state] = f"{held}" if held else ""
        return found

    def master(self, state: int) -> Part:
        """An object in ``state``, to look at."""
        return self._masters[state]
