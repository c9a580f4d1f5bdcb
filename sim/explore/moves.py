"""All that can happen next in an exhaustive world: every move from every state, and no other.

A state is a row of numbers: the parts' states, the soup, the lanes, and the fate (who lives, who is stopped, what is
left of each budget). The soup is the multiset of everything under way: messages, gathers, posts, writes, connections.
Any item may be next, so every order is there, and a copy that is left behind is a duplicate.

Reductions, and why nothing is lost:

* A descriptor lands at no move of its own. I1 is asked of every write at every state between its claim and its quiet:
  whether it might land now. That covers each landing at each moment; bytes that have not landed when a write ends well
  do not exist, and those of a write that ends badly are never counted (I3 finds them missing if they are).
* A step of time leads to the next deadline of anybody: between deadlines no machine looks at the clock. Steps that
  come while something else could happen are paid from a budget; when all is quiet they are free.
* The network may lose and double what it likes, so a beat or greeting that is overtaken by the next one of its sender
  before it has arrived is lost for free, and of equal messages under way one is lost for free. What comes after a later
  one, or twice, is paid from ``duplicate``: the copy that stays behind is apart from these.
* Reports and commands inside an engine arrive at once unless the scope says ``inside``; messages between engines never.
* Two transfers of one kind may be interchanged: of two states that differ in their names alone one is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.sim.explore.books import Books
from pushkv.sim.explore.deeds import Deeds, Move
from pushkv.sim.explore.rows import Draft, State
from pushkv.sim.explore.scope import ENGINES, KINDS

SPEND = {kind: index for index, kind in enumerate(KINDS)}
AWAITS = ("start", "wake", "vanish")
DELAYS = ("drop", "duplicate", "preempt")


class Moves(Deeds):
    """One scope's states and moves."""

    def start(self) -> State:
        """The first state."""
        scope = self.scope
        budgets = tuple(getattr(scope.budget, kind) for kind in KINDS)
        none = (0,) * len(KINDS)
        lanes = tuple(() for _ in range(2 * self.width))
        parts = [part for engine in ENGINES for part in self.fresh(engine, 0, frozenset())]
        draft = Draft(parts, [], lanes, ((0, 0), (True, True), (False, False), (False, False), none))
        if scope.warm:
            for engine in ENGINES:
                for slot, row in zip(self.rank_slots[engine], scope.links(engine), strict=True):
                    for link in row:
                        self.happen(draft, slot, ("takes", ev.Greet(link)))
            state = self.pack(draft)
            while (step := next(self.free(state), None)) is not None:
                state = step[1]
            draft = self.draft(state)
        for engine in ENGINES:
            coming = frozenset(tid for tid, plan in scope.transfers.items() if plan.missing != engine)
            self.happen(draft, self.where[(engine, "ledger")], ("router", coming))
        for words in scope.prelude:
            engine, *event = words.split()
            self.happen(draft, self.where[(engine, "ledger")], tuple(event))
            draft = self._delivered(draft)
        draft.fate = (*draft.fate[:4], budgets)
        self.now = 0.0
        return self.pack(draft)

    def _delivered(self, draft: Draft) -> Draft:
        """After all that is under way has arrived; no host does anything, and no time goes by."""
        while True:
            move = next((move for move in self._free(self.pack(draft)) if move[0] != "host"), None)
            if move is None:
                return draft
            self.make(draft, move)

    # ---------------------------------------------------------------- moves

    def all(self, state: State) -> Iterator[tuple[Move, State, bool]]:
        """Every move, the state that it leads to, and whether it is free; the free ones first."""
        for move, after in self.free(state):
            yield move, after, True
        for move, after in self._paid(state):
            yield move, after, False

    def free(self, state: State) -> Iterator[tuple[Move, State]]:
        """What happens sooner or later without any fault. The first is what a fair world does next; a step of time is
        among them only when there is nothing else.
        """
        found = False
        for move in self._free(state):
            draft = self.draft(state)
            if self.make(draft, move):
                after = self.pack(draft)
                if after != state:
                    found = True
                    yield move, after
        if not found:
            draft = self.draft(state)
            if self.make(draft, ("time",)):
                yield ("time",), self.pack(draft)

    def candidates(self, state: State) -> Iterator[Move]:
        """Every move that may be tried."""
        yield from self._free(state)
        yield ("time",)
        for _, move in self._faults(state, self.fates.values[state[-1]][4]):
            yield move

    def _paid(self, state: State) -> Iterator[tuple[Move, State]]:
        budgets = self.fates.values[state[-1]][4]
        if not any(budgets):
            return
        for kind, move in self._faults(state, budgets):
            draft = self.draft(state)
            if self.make(draft, move):
                g, alive, paused, told, _ = draft.fate
                left = list(budgets)
                left[kind] -= 1
                draft.fate = (g, alive, paused, told, tuple(left))
                after = self.pack(draft)
                if after != state:
                    yield move, after

    def _free(self, state: State) -> Iterator[Move]:
        """Moves that cost nothing, most pressing first."""
        width = self.width
        _, alive, paused, _, _ = fate = self.fates.values[state[-1]]
        running = [alive[i] and not paused[i] for i in (0, 1)]
        for i, engine in enumerate(ENGINES):
            if running[i]:
                for slot in self.rank_slots[engine]:
                    if self.parts.wake_s(state[slot]) <= 0:
                        yield ("timer", slot)
        for lane, queue in enumerate(self.lanes.values[state[-2]]):
            if queue and running[ENGINES.index(self.slots[lane % width][0])]:
                yield ("lane", lane)
        last = -1
        for number in self.soups.values[state[-3]]:
            if number != last:
                last = number
                yield from self._item(number, self.items.values[number], running, state, fate)
        for i, engine in enumerate(ENGINES):
            if running[i]:
                slot = self.where[(engine, "ledger")]
                for budget, event in self.parts.choices(state[slot]):
                    if budget < 0:
                        yield ("host", slot, event)
            elif not alive[i]:
                yield ("start", i)
            else:
                yield ("wake", i)

    def _item(self, number: int, item: Any, running: list[bool], state: State, fate: Any) -> Iterator[Move]:
        kind = item[0]
        if kind == "msg":
            i = ENGINES.index(item[2][0])
            if running[i]:
                yield ("hear", number)
            elif not fate[1][i]:
                yield ("vanish", number)
        elif running[ENGINES.index(item[1])]:
            if kind == "write":
                if item[6] < 0:
                    reach = not item[5] or item[5] == "abandoned"
                    target = self._target(item, state)
                    hit = target >= 0 and self.parts.touchable(state[target], number, item)
                    if reach and hit:
                        yield ("done", number)
                    if item[5]:
                        yield ("quiet", number)
                    elif not hit:
                        yield ("break", number)
            else:
                yield (kind, number)
                if kind == "pack" and self.parts.lost(state[self.where[(item[1], item[2])]], item[3]):
                    yield ("unpack", number)

    def _target(self, write: Any, state: State) -> int:
        """The slot of the books whose memory a write touches; -1 when that process is no more."""
        engine, rank = write[3].link
        i = ENGINES.index(engine)
        generations, alive = self.fates.values[state[-1]][:2]
        if not alive[i] or self.incarnation(engine, generations[i], rank) != write[4][2]:
            return -1
        return self.where[(engine, "ledger")]

    def _faults(self, state: State, budgets: Any) -> Iterator[tuple[int, Move]]:
        generations, alive, paused, told, _ = self.fates.values[state[-1]]
        running = [alive[i] and not paused[i] for i in (0, 1)]
        may = {kind: budgets[index] > 0 for kind, index in SPEND.items()}
        last = -1
        for number in self.soups.values[state[-3]]:
            if number == last:
                continue
            last, item = number, self.items.values[number]
            if item[0] == "msg":
                if may["drop"]:
                    yield SPEND["drop"], ("drop", number)
                if may["duplicate"] and not item[4] and running[ENGINES.index(item[2][0])]:
                    yield SPEND["duplicate"], ("twice", number)
            elif item[0] == "write":
                if may["broken"] and not item[5] and item[6] < 0 and running[ENGINES.index(item[1])]:
                    yield SPEND["broken"], ("break", number)
            elif item[0] == "connect" and may["unfit"] and running[ENGINES.index(item[1])]:
                yield SPEND["unfit"], ("unfit", number)
        for i, engine in enumerate(ENGINES):
            slot = self.where[(engine, "ledger")]
            if running[i]:
                for budget, event in self.parts.choices(state[slot]):
                    if budget >= 0 and budgets[budget] > 0:
                        yield budget, ("host", slot, event)
                if may["pause"]:
                    yield SPEND["pause"], ("pause", i)
            if alive[i] and may["kill"]:
                yield SPEND["kill"], ("kill", i)
            if generations[i] and not told[i] and may["tell"]:
                yield SPEND["tell"], ("tell", i)
        if may["dark"] and not all(running) and all(move[0] in AWAITS for move, _ in self.free(state)):
            yield SPEND["dark"], ("time",)
        elif may["early"]:
            yield SPEND["early"], ("time",)

    # ---------------------------------------------------------------- what holds in every state

    def check(self, state: State) -> None:
        """I1: every write that is active might land now. Raises ``Violation``."""
        soup = state[-3]
        writes = self._writes.get(soup)
        if writes is None:
            items = self.items.values
            writes = tuple(number for number in self.soups.values[soup] if items[number][0] == "write")
            self._writes[soup] = writes
        if writes:
            for number in writes:
                item = self.items.values[number]
                target = self._target(item, state)
                if target >= 0:
                    self.parts.touchable(state[target], number, item)

    def left(self, state: State) -> str:
        """What is held by anybody; empty: nothing (I5c)."""
        found = []
        for slot, part in enumerate(state[:-3]):
            held = self.parts.left(part)
            if held:
                engine, rank = self.slots[slot]
                found.append(f"{engine}/{rank}: {held}")
        return "; ".join(found)

    def failures(self, state: State) -> int:
        """Verdicts that were not good."""
        count = 0
        for engine in ENGINES:
            books = self.parts.master(state[self.where[(engine, "ledger")]])
            assert isinstance(books, Books)
            count += books.failures
        return count

    def unharmed(self, state: State) -> bool:
        """Whether nothing has struck that may make a transfer fail: what is lost or doubled is a delay."""
        budget, left = self.scope.budget, self.fates.values[state[-1]][4]
        return all(left[SPEND[kind]] == getattr(budget, kind) for kind in KINDS if kind not in DELAYS)
