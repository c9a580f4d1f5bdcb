"""Rows of numbers: the states of an exhaustive world, and how something happens in one.

Decides what follows from an event, not which event comes: that is ``moves``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.books import Books
from pushkv.sim.explore.local import ABANDON, LANE, NEXT, SOUP, Numbers, Parts
from pushkv.sim.explore.rank import Rank
from pushkv.sim.explore.scope import ENGINES, TRANSFERS, Scope

State = tuple[int, ...]
"""Numbers of: each part's state, the soup, the lanes, the fate. A fate is ``(generations, alive, paused, told,
budgets)``, the first four by engine.
"""


class Draft:
    """A state being made."""

    __slots__ = ("fate", "lanes", "parts", "soup")

    def __init__(self, parts: list[int], soup: list[int], lanes: tuple[Any, ...], fate: Any) -> None:
        self.parts, self.soup, self.lanes, self.fate = parts, soup, lanes, fate


class Rows:
    """One scope's states and moves. ``log``, when set, hears every event and effect: ``(who, text or record)``."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.parts = Parts(scope)
        self.items = self.parts.items
        self.soups, self.lanes, self.fates = Numbers(), Numbers(), Numbers()
        self.log: Callable[[Any, str, Any], None] | None = None
        self.now = 0.0
        self.slots, self.where = self.parts.slots, self.parts.where
        self.width = len(self.slots)
        self.alike = bool(scope.alike)
        self.rank_slots = {e: [self.where[(e, r)] for r in range(scope.ranks[e])] for e in ENGINES}
        self._swapped_soups: dict[int, int] = {}
        self._swapped_items: dict[int, int] = {}
        self._swapped_lanes: dict[int, int] = {}
        self._timer = self.parts.events.of(("timer",))
        self._lane_of: dict[int, tuple[Any, ...]] = {}
        self._writes: dict[int, tuple[int, ...]] = {}

    # ---------------------------------------------------------------- states

    def pack(self, draft: Draft) -> State:
        """The state as it is kept."""
        soup = draft.soup
        soup.sort()
        return (*draft.parts, self.soups.of(tuple(soup)), self.lanes.of(draft.lanes), self.fates.of(draft.fate))

    def draft(self, state: State) -> Draft:
        """A state to change."""
        soup, lanes, fate = state[-3:]
        return Draft(list(state[:-3]), list(self.soups.values[soup]), self.lanes.values[lanes], self.fates.values[fate])

    def key(self, state: State) -> State:
        """The same for states that differ in the names of like transfers only."""
        if not self.alike:
            return state
        swap, (soup, lanes, fate) = self.parts.swap, state[-3:]
        other = (*[swap[part] for part in state[:-3]], self._swap_soup(soup), self._swap_lanes(lanes), fate)
        return min(state, other)

    def _swap_soup(self, soup: int) -> int:
        found = self._swapped_soups.get(soup)
        if found is None:
            other = []
            for item in self.soups.values[soup]:
                if item not in self._swapped_items:
                    self._swapped_items[item] = self.items.of(_renamed(self.items.values[item]))
                other.append(self._swapped_items[item])
            found = self._swapped_soups[soup] = self.soups.of(tuple(sorted(other)))
        return found

    def _swap_lanes(self, lanes: int) -> int:
        found = self._swapped_lanes.get(lanes)
        if found is None:
            value = self.lanes.values[lanes]
            other = tuple(
                tuple(self.parts.events.of(_renamed(self.parts.events.values[event])) for event in lane)
                for lane in value
            )
            found = self._swapped_lanes[lanes] = self.lanes.of(other)
        return found

    def incarnation(self, engine: str, generation: int, rank: int) -> int:
        """Of one rank's process."""
        return 1000 * (1 + ENGINES.index(engine)) + 10 * generation + rank + 1

    def fresh(self, engine: str, generation: int, coming: frozenset[str]) -> list[int]:
        """A process that has just started: its books and its ranks."""
        number = self.parts.number
        books = Books(self.scope, engine, self.incarnation(engine, generation, 0), coming)
        return [number(books)] + [
            number(Rank(engine, rank, self.incarnation(engine, generation, rank), self.scope.settings))
            for rank in range(self.scope.ranks[engine])
        ]

    # ---------------------------------------------------------------- something happens to a part

    def happen(self, draft: Draft, slot: int, event: tuple[Any, ...]) -> None:
        """``event`` comes to the part at ``slot``; what follows at once follows."""
        self._happen(draft, slot, self.parts.events.of(event))

    def _happen(self, draft: Draft, slot: int, event: int) -> None:
        work: deque[tuple[int, int]] | None = None
        parts, step, inside, log = draft.parts, self.parts.step, self.scope.inside, self.log
        while True:
            if log is not None:
                self._say(slot, self.parts.events.values[event])
            parts[slot], effects = step(parts[slot], event)
            for effect in effects:
                kind = effect[0]
                if log is not None:
                    self._say_effect(slot, effect)
                if kind == SOUP:
                    self._under_way(draft.soup, effect[1])
                elif kind == NEXT or (kind == LANE and not inside):
                    if work is None:
                        work = deque()
                    work.append((effect[1], effect[2]))
                elif kind == LANE:
                    self._enqueue(draft, effect[3], effect[2])
                elif kind == ABANDON:
                    self._abandon(draft, effect[1], effect[2])
            if not work:
                return
            slot, event = work.popleft()

    def _under_way(self, soup: list[int], number: int) -> None:
        """One more item. A beat or a greeting takes the place of an earlier one, a message that of its like: see the
        module.
        """
        lane = self._lane_of.get(number)
        if lane is None:
            lane = self._lane_of[number] = _lane(self.items.values[number])
        if lane:
            for at, other in enumerate(soup):
                if other == number or self._lane_of.get(other) == lane:
                    soup[at] = number
                    return
        soup.append(number)

    def _enqueue(self, draft: Draft, lane: int, event: int) -> None:
        lanes = list(draft.lanes)
        lanes[lane] = (*lanes[lane], event)
        draft.lanes = tuple(lanes)

    def _abandon(self, draft: Draft, slot: int, handle: int) -> None:
        for at, number in enumerate(draft.soup):
            item = self.items.values[number]
            if item[0] == "write" and item[1:3] == self.slots[slot] and item[3].handle == handle and item[6] < 0:
                if not item[5]:
                    draft.soup[at] = self.items.of((*item[:5], "abandoned", item[6]))
                return

    # ---------------------------------------------------------------- for people

    def _note(self, who: Any, text: str) -> None:
        if self.log is not None:
            self.log(who, text, None)

    def _say_effect(self, slot: int, effect: Any) -> None:
        assert self.log is not None
        self.log(self.slots[slot], "", effect)

    def _say(self, slot: int, event: tuple[Any, ...]) -> None:
        assert self.log is not None
        self.log(self.slots[slot], "", event)


GREETINGS = (msg.Hello, msg.Welcome)


def _lane(item: tuple[Any, ...]) -> tuple[Any, ...]:
    """Items of one lane take each other's place; empty: none does."""
    if item[0] != "msg" or item[4]:
        return ()
    message = item[3]
    if isinstance(message, msg.Beat):
        return (*item[1:3], "beat", message.echo)
    return (*item[1:3], type(message)) if isinstance(message, GREETINGS) else item


def _renamed(value: Any) -> Any:
    """``value`` with the two transfers' names interchanged."""
    if isinstance(value, str):
        return TRANSFERS[1 - TRANSFERS.index(value)] if value in TRANSFERS else value
    if isinstance(value, tuple):
        return tuple([_renamed(part) for part in value])
    if isinstance(value, msgspec.Struct):
        return type(value)(*[_renamed(getattr(value, name)) for name in value.__struct_fields__])
    return value
