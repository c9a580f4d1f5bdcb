"""Legs of transfers at one engine of an exhaustive world, and what becomes of them when the ledger speaks (V5, V6).

The real ``Ledger`` and ghost state of one process. The lower half of ``books``: the host does nothing here by itself.
"""

from __future__ import annotations

from typing import Any

from pushkv.model.protocol import Ledger
from pushkv.model.protocol import events as ev
from pushkv.sim.explore.ghost import Custody, Ghost
from pushkv.sim.explore.scope import Plan, Scope
from pushkv.sim.explore.violation import Violation

Effect = tuple[Any, ...]


class Leg:
    """One transfer at this engine, in one part."""

    __slots__ = (
        "aborted", "age_s", "blocks", "computed", "fences", "final_s", "given", "plan", "released", "running", "sends",
        "tid", "verdict", "wants", "yields",
    )  # fmt: skip

    def __init__(self, tid: str, plan: Plan, sends: bool) -> None:
        self.tid, self.plan, self.sends = tid, plan, sends
        self.blocks: tuple[int, ...] = ()
        self.computed = self.yields = self.fences = 0
        self.age_s, self.final_s = 0, -1
        self.running = self.aborted = self.released = self.given = self.wants = False
        self.verdict = ""

    @property
    def computes(self) -> bool:
        """Whether the prefill runs here."""
        return self.sends != (self.plan.mode == "pull")


class Legs:
    """What the host keeps, and how it takes what the ledger tells it."""

    def __init__(self, scope: Scope, engine: str, incarnation: int, coming: frozenset[str]) -> None:
        self.engine, self.incarnation = engine, incarnation
        self.ledger = Ledger(scope.settings, scope.ranks[engine])
        self.ghost = Ghost(engine)
        self.scope, self.coming = scope, coming
        self.legs: dict[str, Leg] = {}
        self.free = list(range(scope.p_blocks if engine == "P" else scope.d_blocks))
        self.asking: list[str] = []
        self.heir = ""
        self.failures = 0
        self.revoked: list[Custody] = []

    # ---------------------------------------------------------------- the ledger

    def _command(self, command: ev.Record, out: list[Effect]) -> None:
        out += [("down", rank, ("takes", command)) for rank in self.ledger._ranks]

    def _tell(self, event: ev.Record, out: list[Effect]) -> None:
        actions: list[Any] = []
        self.ledger.step((event,), 0.0, actions)
        for action in actions:
            if isinstance(action, (ev.ToRanks, ev.ToRank)):
                command = action.command
                if isinstance(command, ev.Expose):
                    self._exposed(command)
                elif isinstance(command, ev.Withdraw) and command.requeue:
                    self.legs[command.transfer_id].yields += 1
                ranks = (action.rank,) if isinstance(action, ev.ToRank) else tuple(self.ledger._ranks)
                out += [("down", rank, ("takes", command)) for rank in ranks]
            else:
                out.append(("told", action))
                getattr(self, "_on_" + type(action).__name__.lower())(action, out)
        unowned = set(self.ledger._free)
        for tid, custody in list(self.ghost.custody.items()):
            if custody.units and custody.units[0][0] == "segment" and custody.units[0][1] in unowned:
                self._take(tid)
        if self.ledger.quarantined() > self.failures:
            raise Violation(f"V6: {self.ledger.quarantined()} in quarantine at {self.engine}, {self.failures} failed")

    def _exposed(self, command: ev.Expose) -> None:
        leg = self.legs[command.transfer_id]
        if leg.plan.mode != "packed" or not command.memory:
            return
        for unit in command.memory:
            owner = self.ghost.owner.get(("segment", unit))
            if owner is not None:
                self._take(owner.transfer_id)
        self.ghost.give(command.transfer_id, command.memory, True)

    def _take(self, tid: str) -> None:
        """What ``tid`` had is its owner's again; what is in it does not matter any more."""
        custody = self.ghost.custody.get(tid)
        self.ghost.take(tid)
        if custody is not None:
            for cell in [cell for cell in self.ghost.cells if cell[1] in custody.units]:
                del self.ghost.cells[cell]

    # ---------------------------------------------------------------- what the ledger says

    def _leg(self, action: Any, *, sends: bool) -> Leg:
        leg = self.legs.get(action.transfer_id)
        if leg is None or leg.sends != sends:
            raise Violation(f"V5: {self.engine} is told {action} of a transfer that it does not have")
        return leg

    def _verdict(self, leg: Leg, verdict: str) -> None:
        if leg.verdict:
            raise Violation(f"V5: {self.engine} is told {verdict} of {leg.tid} after {leg.verdict}")
        leg.verdict = verdict
        leg.age_s = 0
        leg.final_s = min(leg.final_s, 0)

    def _on_admit(self, action: ev.Admit, out: list[Effect]) -> None:
        leg = self._leg(action, sends=False)
        if not leg.computes and not leg.aborted:
            self.asking.append(leg.tid)

    def _on_ready(self, action: ev.Ready, out: list[Effect]) -> None:
        leg = self._leg(action, sends=False)
        self._verdict(leg, "ready")
        leg.given = False
        if leg.plan.mode == "pull":
            self._take(leg.tid)
            leg.verdict = "over"
            self._tell(ev.Loaded(leg.tid), out)
            self._forget(leg)
            return
        self._check_loaded(leg)
        if leg.plan.mode == "packed" and leg.tid in self.ghost.custody:
            units = self.ghost.custody[leg.tid].units
            self._take(leg.tid)
            self.ghost.give(leg.tid, tuple(unit for _, unit in units), True)
        else:
            self._take(leg.tid)

    def _check_loaded(self, leg: Leg) -> None:
        feeders = [tuple(link[1] for link in row) for row in self.scope.links(self.engine)]
        if leg.plan.wanted:
            self.ghost.check_loaded(leg.tid, leg.plan.parts, leg.plan.wanted, feeders)

    def _on_fail(self, action: ev.Fail, out: list[Effect]) -> None:
        leg = self._leg(action, sends=False)
        self._verdict(leg, "failed")
        self.failures += 1
        if leg.tid in self.asking:
            self.asking.remove(leg.tid)
        self._forget(leg)

    def _on_free(self, action: ev.Free, out: list[Effect]) -> None:
        leg = self._leg(action, sends=False)
        if not leg.given or tuple(action.memory) != leg.blocks:
            raise Violation(f"V5: {self.engine} is given back {action}, which it did not give")
        leg.given = False
        self._take(leg.tid)
        self._forget(leg)

    def _on_takeback(self, action: ev.TakeBack, out: list[Effect]) -> None:
        leg = self._leg(action, sends=False)
        if leg.verdict or not leg.given or tuple(action.memory) != leg.blocks or leg.computes:
            raise Violation(f"V5: {self.engine} is told {action}")
        leg.given = False
        self._take(leg.tid)
        self._give_back(leg)
        self.heir = action.heir

    def _on_finished(self, action: ev.Finished, out: list[Effect]) -> None:
        leg = self._leg(action, sends=True)
        self._verdict(leg, "ok" if action.ok else "failed")
        if leg.plan.mode == "pull":
            if action.ok:
                readers = [tuple(link[1] for link in row) for row in self.scope.links(self.engine)]
                self.ghost.check_read(leg.tid, leg.plan.parts, leg.plan.wanted, readers)
            self.failures += not action.ok
        self._forget(leg)

    def _on_release(self, action: ev.Release, out: list[Effect]) -> None:
        leg = self._leg(action, sends=True)
        if leg.released:
            raise Violation(f"V5: {self.engine} is told {action} twice")
        leg.released = True
        self.ghost.release(leg.tid)
        self._forget(leg)

    # ---------------------------------------------------------------- blocks and the end of a leg

    def _allocate(self, leg: Leg) -> None:
        leg.blocks = (self.free.pop(0),)

    def _give_back(self, leg: Leg) -> None:
        self.free = sorted([*self.free, *leg.blocks])
        leg.blocks = ()

    def _forget(self, leg: Leg) -> None:
        """Let go of what is not needed any more, and of the leg when nothing is."""
        if leg.sends:
            if not leg.released or leg.running or leg.fences:
                return
            over = bool(leg.verdict)
        else:
            if leg.given or not leg.verdict or (leg.verdict == "ready" and not leg.aborted):
                return
            if leg.running:
                return
            over = True
        self._give_back(leg)
        if over and self.legs.get(leg.tid) is leg:
            del self.legs[leg.tid]
            self.ghost.sources.pop(leg.tid, None)

    def left(self, blocks: int, segments: int) -> dict[str, Any]:
        """What is still held here."""
        found: dict[str, Any] = {
            "legs": sorted(self.legs),
            "coming": sorted(self.coming),
            "open": [number for number in self.ledger.open() if number],
            "quarantined": self.ledger.quarantined(),
            "segments": segments - self.ledger.landing_free,
            "blocks": blocks - len(self.free),
            "custody": sorted(self.ghost.custody),
        }
        return {key: value for key, value in found.items() if value}
