"""A host that behaves like vLLM, and checks what it is told: each thing once and allowed in that state (V5), in time
(I5a), and nothing forgotten in quarantine (V6).

It plays both parts. Sending part (P in push, D in pull): ``Hold``, ``Computed``, until ``Release``. Receiving part (D
in push, P in pull): ``Arrived``, memory when asked, until ``Ready`` or ``Fail``, and ``Free`` when that said that the
memory is not settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol.states import Incoming
from pushkv.sim.explore.scheduling import Leg, Scheduling
from pushkv.sim.explore.violation import Violation

if TYPE_CHECKING:
    from pushkv.sim.explore.world import Request


class Host(Scheduling):
    """The scheduler of one engine."""

    # ---------------------------------------------------------------- what the ledger tells

    def exposed(self, command: ev.Expose) -> None:
        """The ledger hands landing memory to a packed transfer: it has taken it back from whoever had it."""
        ghost = self.process.ghost
        if command.transfer_id in self.packed and command.memory:
            for unit in command.memory:
                owner = ghost.owner.get(("segment", unit))
                if owner is not None:
                    ghost.take(owner.transfer_id)
            ghost.give(command.transfer_id, command.memory, True)

    def after_ledger(self) -> None:
        """Landing segments that are free belong to nobody."""
        ghost = self.process.ghost
        if ghost.landing:
            free = self.process.ledger._free
            for tid, segment in list(ghost.landing.items()):
                if segment in free:
                    ghost.take(tid)
                    self.unsettled.discard(tid)

    def told(self, action: Any) -> None:
        """Carry out one action of the ledger."""
        self.history.append((self.world.now, action))
        HANDLERS[type(action)](self, action)
        self._tick()

    def _leg(self, action: Any, legs: dict[str, Leg]) -> Leg:
        leg = legs.get(action.transfer_id)
        if leg is None:
            raise Violation(f"V5: {self.process.name} is told {action} of a transfer that it does not have")
        return leg

    def _on_admit(self, action: ev.Admit) -> None:
        leg = self._leg(action, self.receiving)
        if leg.request.mode != "pull" and not leg.aborted:
            leg.wants = True
            self.asking.append(leg)

    def _on_ready(self, action: ev.Ready) -> None:
        leg = self._leg(action, self.receiving)
        self._verdict(leg, "ready")
        request, ghost = leg.request, self.process.ghost
        if request.mode != "pull":
            feeders = [tuple(link[1] for link in row) for row in self.world.links(self.process.name, request.p)]
            ghost.check_loaded(leg.tid, request.prompt, request.tokens, feeders)
            self._outcome(request, "loaded")
        if leg.tid in ghost.custody and leg.tid in self.packed:
            ghost.take(leg.tid)
            ghost.give(leg.tid, action.memory, True)
        else:
            ghost.take(leg.tid)
        if not leg.aborted:
            self.process.later(self.world.profile.load_s * leg.random.random(), self._load, leg)
        else:
            self._end_receiving(leg)

    def _load(self, leg: Leg) -> None:
        leg.loaded = True
        if not leg.aborted:
            self.process.say(ev.Loaded(leg.tid))
        self.process.later(self.world.profile.run_s * leg.random.random(), self._end_receiving, leg)

    def _on_fail(self, action: ev.Fail) -> None:
        leg = self._leg(action, self.receiving)
        self._verdict(leg, action.reason or "(no reason)")
        if not action.settled:
            self.unsettled.add(leg.tid)
        if leg.request.mode != "pull":
            self._outcome(leg.request, f"failed: {action.reason}")
        if leg.request.mode == "pull" and not leg.given:
            if leg.running:
                return
            if leg in self.queue:
                self.queue.remove(leg)
            self._end_receiving(leg)
        elif not leg.given or leg.tid in self.packed:
            self._end_receiving(leg)

    def _on_free(self, action: ev.Free) -> None:
        leg = self._leg(action, self.receiving)
        if not leg.given or tuple(action.memory) != tuple(leg.blocks):
            raise Violation(f"V5: {self.process.name} is given back {action}, which it did not give")
        leg.given = False
        self.unsettled.discard(leg.tid)
        self.process.ghost.take(leg.tid)
        if leg.verdict:
            self._end_receiving(leg)
        else:
            self._give_back(leg)

    def _on_takeback(self, action: ev.TakeBack) -> None:
        leg = self._leg(action, self.receiving)
        if leg.verdict or not leg.given or tuple(action.memory) != tuple(leg.blocks):
            raise Violation(f"V5: {self.process.name} is told {action}")
        if leg.request.mode == "pull":
            raise Violation("V5: a source in pull cannot give way")
        leg.given = False
        self.process.ghost.take(leg.tid)
        self._give_back(leg)
        self.asking.sort(key=lambda other: other.tid != action.heir)
        for other in list(self.asking):
            if other.tid == action.heir:
                self._try_admit(other)

    def _on_finished(self, action: ev.Finished) -> None:
        leg = self._leg(action, self.sending)
        self._verdict(leg, "ok" if action.ok else action.reason or "(no reason)")
        if leg.request.mode == "pull":
            if action.ok:
                request = leg.request
                readers = [tuple(link[1] for link in row) for row in self.world.links(self.process.name, request.p)]
                self.process.ghost.check_read(leg.tid, request.prompt, request.tokens, readers)
            self._outcome(leg.request, "loaded" if action.ok else f"failed: {action.reason}")
        self._forget_sending(leg)

    def _on_release(self, action: ev.Release) -> None:
        leg = self._leg(action, self.sending)
        if leg.released:
            raise Violation(f"V5: {self.process.name} is told {action} twice")
        leg.released = True
        self.process.ghost.release(leg.tid)
        self._forget_sending(leg)

    def _verdict(self, leg: Leg, verdict: str) -> None:
        if leg.verdict:
            raise Violation(f"V5: {self.process.name} is told {verdict} of {leg.tid} after {leg.verdict}")
        self._check_bound(leg)
        leg.verdict, leg.verdict_at = verdict, self.world.now

    def _outcome(self, request: Request, outcome: str) -> None:
        request.outcome, request.ended_at = outcome, self.world.now

    # ---------------------------------------------------------------- bounds

    def _check_bound(self, leg: Leg) -> None:
        """I5a: by now ``leg`` may still be without a verdict."""
        s, now, slack = self.world.settings, self.world.now, 2.0 + self.process.paused_s
        if leg.tid in self.receiving and self.receiving[leg.tid] is leg:
            bound = s.wait_s * (1 + leg.yields) + self.world.profile.queue_s
            if leg.held and leg.begun_at + bound < now - slack:
                raise Violation(
                    f"I5a: {leg.tid} has no verdict at {self.process.name} {now - leg.begun_at:.1f} s after arrival"
                )
        elif leg.final_at >= 0 and leg.final_at + s.sender_verdict_s < now - slack:
            raise Violation(
                f"I5a: {leg.tid} has no verdict at {self.process.name} {now - leg.final_at:.1f} s after its end"
            )

    def check_bounds(self) -> None:
        """I5a: no leg waits too long. V6: in quarantine is what failed unsettled, and nothing that was given back."""
        for half in (self.receiving, self.sending):
            for leg in half.values():
                if not leg.verdict:
                    self._check_bound(leg)
        ledger, custody = self.process.ledger, self.process.ghost.custody
        ending = {tid for tid, entry in ledger._in.items() if entry.state is Incoming.ENDING}
        lost = [tid for tid in self.unsettled if tid in custody and tid not in ending]
        if len(ending) != ledger.quarantined() or not ending <= self.unsettled or lost:
            raise Violation(
                f"V6: {ledger.quarantined()} in quarantine at {self.process.name}: {sorted(ending)}, while"
                f" {sorted(tid for tid in self.unsettled if tid in custody)} failed unsettled and did not come back"
            )
        self.unsettled &= ending


HANDLERS: dict[type[ev.Record], Any] = {
    ev.Admit: Host._on_admit,
    ev.Ready: Host._on_ready,
    ev.Fail: Host._on_fail,
    ev.Free: Host._on_free,
    ev.TakeBack: Host._on_takeback,
    ev.Finished: Host._on_finished,
    ev.Release: Host._on_release,
}
