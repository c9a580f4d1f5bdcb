"""Making a move in an exhaustive world: one method for each kind. Which moves there are is decided in ``moves``."""

from __future__ import annotations

from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.sim.explore.books import Books
from pushkv.sim.explore.rows import Draft, Rows
from pushkv.sim.explore.scope import ENGINES

NEVER = float("inf")
Move = tuple[Any, ...]


class Deeds(Rows):
    """``make`` makes a move; a draft is changed in place."""

    def make(self, draft: Draft, move: Move) -> bool:
        """Make ``move``; ``False`` when it cannot be made."""
        return bool(getattr(self, "_do_" + move[0])(draft, *move[1:]))

    def _do_timer(self, draft: Draft, slot: int) -> bool:
        self._happen(draft, slot, self._timer)
        return True

    def _do_lane(self, draft: Draft, lane: int) -> bool:
        lanes = list(draft.lanes)
        event, *rest = lanes[lane]
        lanes[lane] = tuple(rest)
        draft.lanes = tuple(lanes)
        slot = lane - self.width if lane >= self.width else self.where[(self.slots[lane][0], "ledger")]
        self._happen(draft, slot, event)
        return True

    def _do_hear(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        _, source, target, message, _ = self.items.values[number]
        self.happen(draft, self.where[target], ("hears", source, message))
        return True

    def _do_twice(self, draft: Draft, number: int) -> bool:
        item = self.items.values[number]
        if not self._do_hear(draft, number):
            return False
        draft.soup.append(self.items.of((*item[:4], True)))
        return True

    def _do_vanish(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        return True

    def _do_drop(self, draft: Draft, number: int) -> bool:
        self._note(self.items.values[number][2], f"! lost: {type(self.items.values[number][3]).__name__}")
        draft.soup.remove(number)
        return True

    def _do_pack(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        _, engine, rank, handle, tid = self.items.values[number]
        self.happen(draft, self.where[(engine, "ledger")], ("gathered", rank, tid, handle))
        self.happen(draft, self.where[(engine, rank)], ("takes", ev.Packed(handle)))
        return True

    def _do_unpack(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        _, engine, rank, handle, tid = self.items.values[number]
        self.happen(draft, self.where[(engine, "ledger")], ("gathered", rank, tid, handle))
        self.happen(draft, self.where[(engine, rank)], ("takes", ev.Unpacked(handle)))
        return True

    def _do_post(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        _, engine, rank, post = self.items.values[number]
        self.happen(draft, self.where[(engine, rank)], ("claims", post))
        return True

    def _do_connect(self, draft: Draft, number: int) -> bool:
        _, engine, rank, link, incarnation = self.items.values[number]
        i = ENGINES.index(link[0])
        if not draft.fate[1][i] or self.incarnation(link[0], draft.fate[0][i], link[1]) != incarnation:
            return self._do_unfit(draft, number)
        draft.soup.remove(number)
        self.happen(draft, self.where[(engine, rank)], ("connects", link, incarnation))
        return True

    def _do_unfit(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        _, engine, rank, link, incarnation = self.items.values[number]
        unfit = ev.Unfit(link, incarnation, "cannot connect")
        self.happen(draft, self.where[(engine, rank)], ("takes", unfit))
        return True

    def _do_done(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        _, engine, rank, post, key, _, _ = self.items.values[number]
        self.happen(draft, self.where[(post.link[0], "ledger")], ("filled", rank, post, key))
        self.happen(draft, self.where[(engine, "ledger")], ("quiet", rank, post, True))
        self.happen(draft, self.where[(engine, rank)], ("takes", ev.WriteDone(post.handle)))
        return True

    def _do_quiet(self, draft: Draft, number: int) -> bool:
        draft.soup.remove(number)
        _, engine, rank, post, _, _, _ = self.items.values[number]
        self.happen(draft, self.where[(engine, "ledger")], ("quiet", rank, post, False))
        self.happen(draft, self.where[(engine, rank)], ("takes", ev.WriteQuiet(post.handle)))
        return True

    def _do_break(self, draft: Draft, number: int) -> bool:
        item = self.items.values[number]
        draft.soup[draft.soup.index(number)] = self.items.of((*item[:5], "broken", item[6]))
        self.happen(draft, self.where[(item[1], item[2])], ("takes", ev.WriteBroken(item[3].handle)))
        return True

    def _do_host(self, draft: Draft, slot: int, event: int) -> bool:
        self._happen(draft, slot, event)
        return True

    def _do_time(self, draft: Draft) -> bool:
        """To the next deadline of anybody who runs; of a stopped one when nobody runs who has one."""
        _, alive, paused, _, _ = draft.fate
        spans = {True: [NEVER], False: [NEVER]}
        for i, engine in enumerate(ENGINES):
            if alive[i]:
                for slot in self.rank_slots[engine]:
                    spans[paused[i]].append(self.parts.wake_s(draft.parts[slot]))
        span = min(spans[False])
        if span == NEVER:
            span = min([s for s in spans[True] if s > 0] or [NEVER])
        if span == NEVER or span <= 0:
            return False
        self.now += span
        self._note(("D", "ledger"), f"! {span:g} s go by")
        log, self.log = self.log, None
        passes = self.parts.events.of(("passes", span))
        for i, engine in enumerate(ENGINES):
            if alive[i]:
                for slot in self.rank_slots[engine] + ([] if paused[i] else [self.where[(engine, "ledger")]]):
                    draft.parts[slot] = self.parts.step(draft.parts[slot], passes)[0]
        self.log = log
        self._drain(draft, span)
        for i, engine in enumerate(ENGINES):
            if alive[i] and not paused[i]:
                for slot in self.rank_slots[engine]:
                    if self.parts.wake_s(draft.parts[slot]) <= 0:
                        self._happen(draft, slot, self._timer)
        return True

    def _drain(self, draft: Draft, span: float) -> None:
        """What dead processes have posted lands until the drain time is over, and then no more."""
        soup = []
        for number in draft.soup:
            item = self.items.values[number]
            if item[0] == "write" and item[6] >= 0:
                if item[6] <= span:
                    continue
                number = self.items.of((*item[:6], item[6] - span))
            soup.append(number)
        draft.soup = soup

    def _do_kill(self, draft: Draft, i: int) -> bool:
        engine = ENGINES[i]
        self._note((engine, "ledger"), "! killed")
        generations, alive, paused, told, budgets = draft.fate
        generations = tuple(g + (j == i) for j, g in enumerate(generations))
        ledger = self.where[(engine, "ledger")]
        old = self.parts.master(draft.parts[ledger])
        assert isinstance(old, Books)
        fresh = self.fresh(engine, generations[i], old.coming)
        draft.parts[ledger : ledger + len(fresh)] = fresh
        soup = []
        for number in draft.soup:
            item = self.items.values[number]
            if item[0] != "msg" and item[1] == engine:
                if item[0] != "write":
                    continue
                if item[6] < 0:
                    number = self.items.of((*item[:6], self.scope.settings.drain_s))
            soup.append(number)
        draft.soup = soup
        draft.lanes = tuple(
            () if self.slots[lane % self.width][0] == engine else queue for lane, queue in enumerate(draft.lanes)
        )
        alive = tuple(a and j != i for j, a in enumerate(alive))
        paused = tuple(p and j != i for j, p in enumerate(paused))
        draft.fate = (generations, alive, paused, tuple(t and j != i for j, t in enumerate(told)), budgets)
        return True

    def _do_start(self, draft: Draft, i: int) -> bool:
        self._note((ENGINES[i], "ledger"), "! started")
        g, alive, paused, told, budgets = draft.fate
        draft.fate = (g, tuple(a or j == i for j, a in enumerate(alive)), paused, told, budgets)
        return True

    def _do_pause(self, draft: Draft, i: int) -> bool:
        self._note((ENGINES[i], "ledger"), "! paused")
        g, alive, paused, told, budgets = draft.fate
        draft.fate = (g, alive, tuple(p or j == i for j, p in enumerate(paused)), told, budgets)
        return True

    def _do_wake(self, draft: Draft, i: int) -> bool:
        self._note((ENGINES[i], "ledger"), "! wakes")
        g, alive, paused, told, budgets = draft.fate
        draft.fate = (g, alive, tuple(p and j != i for j, p in enumerate(paused)), told, budgets)
        return True

    def _do_tell(self, draft: Draft, i: int) -> bool:
        generations, alive, paused, told, budgets = draft.fate
        engine, other = ENGINES[i], ENGINES[1 - i]
        draft.fate = (generations, alive, paused, tuple(t or j == i for j, t in enumerate(told)), budgets)
        if not alive[1 - i] or paused[1 - i]:
            return False
        for slot in self.rank_slots[other]:
            for rank in range(self.scope.ranks[engine]):
                gone = ev.ProcessGone((engine, rank), self.incarnation(engine, generations[i] - 1, rank))
                self.happen(draft, slot, ("takes", gone))
        return True
