"""The scheduler's side of one engine in an exhaustive world: a small host on top of the real ledger.

The host behaves as vLLM may and checks what it is told (V5, in ``legs``); it decides nothing: whatever it might do next
is a choice, listed by ``choices``. It keeps what the properties need and no more, since all that it keeps is part of
the state.
"""

from __future__ import annotations

from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.sim.explore.ghost import Custody
from pushkv.sim.explore.legs import Effect, Leg, Legs
from pushkv.sim.explore.violation import Violation

BYTES_PER_TOKEN = 100


class Books(Legs):
    """Every method but the looks is one event; what follows is appended to ``out``."""

    # ---------------------------------------------------------------- what may be done next

    def choices(self) -> list[tuple[str, tuple[Any, ...]]]:
        """``(budget, event)``: what the host and its clients may do now; budget "" is what they will do sooner or
        later.
        """
        found: list[tuple[str, tuple[Any, ...]]] = [("", ("arrives", tid)) for tid in sorted(self.coming)]
        for tid, leg in self.legs.items():
            if leg.computes and not leg.running and not leg.blocks and not leg.aborted and not leg.released:
                if not leg.fences and not (leg.verdict and not leg.sends):
                    found.append(("", ("starts", tid)))
            elif leg.running:
                found.append(("", ("computes", tid)))
                found.append(("preempt", ("preempts", tid)))
            if tid in self.asking:
                found.append(("", ("admits", tid)))
            if leg.verdict == "ready" and not leg.aborted:
                found.append(("", ("loads", tid)))
            if not leg.aborted and leg.verdict in ("", "ready"):
                found.append(("abort", ("aborts", tid)))
        found += [("abort", ("rejects", tid)) for tid in sorted(self.coming)]
        for tid, custody in self.ghost.custody.items():
            settled = tid in self.legs and self.legs[tid].verdict in ("", "ready")
            if not settled and not any(dead is custody for dead in self.revoked):
                found.append(("revoke", ("revokes", tid)))
        if self._stuck():
            found.append(("", ("stuck",)))
        return found

    def _stuck(self) -> bool:
        """Rule 8 at the prefill: nothing runs, one waits for room, finished ones hold it."""
        waits = finished = False
        for leg in self.legs.values():
            if leg.running:
                return False
            if leg.computes and leg.sends:
                waits = waits or (not leg.blocks and not leg.aborted and not leg.released and not leg.fences)
                finished = finished or (leg.final_s >= 0 and bool(leg.blocks))
        return waits and finished and not self.free

    # ---------------------------------------------------------------- the host's doings

    def router(self, coming: frozenset[str], out: list[Effect]) -> None:
        """These legs will come."""
        self.coming = coming

    def arrives(self, tid: str, out: list[Effect]) -> None:
        """A leg comes in from the router."""
        plan = self.scope.transfers[tid]
        sends = (self.engine == "P") != (plan.mode == "pull")
        early = plan.mode == "early" and not sends
        pulls = plan.mode == "pull" and sends
        if (early or pulls) and not self.free:
            return
        self.coming -= {tid}
        leg = self.legs[tid] = Leg(tid, plan, sends)
        if early or pulls:
            self._allocate(leg)
        if sends:
            self._hold(leg, out)
            if pulls:
                leg.computed, leg.final_s = plan.parts, 0
                self._command(ev.Computed(tid, plan.parts, True), out)
            return
        if early:
            self.ghost.give(tid, leg.blocks, False)
            leg.given = True
        packed = plan.mode == "packed"
        peer = "D" if self.engine == "P" else "P"
        self._tell(
            ev.Arrived(
                tid, peer, self.scope.links(self.engine), leg.plan.wanted, packed, int(packed and leg.plan.wanted > 0),
                self.scope.fanout(self.engine), leg.blocks if early else None,
            ),
            out,
        )  # fmt: skip

    def _hold(self, leg: Leg, out: list[Effect]) -> None:
        self.ghost.source(leg.tid)
        chunked = leg.plan.parts > 1 and leg.plan.mode != "pull"
        self._tell(ev.Hold(leg.tid, leg.plan.parts, BYTES_PER_TOKEN, chunked), out)

    def rejects(self, tid: str, out: list[Effect]) -> None:
        """The router's leg fails before it is here."""
        self.coming -= {tid}
        if (self.engine == "P") != (self.scope.transfers[tid].mode == "pull"):
            self._command(ev.Abort(tid, "rejected"), out)

    def starts(self, tid: str, out: list[Effect]) -> None:
        """The prefill is scheduled, when there is room."""
        leg = self.legs[tid]
        if self.free:
            self._allocate(leg)
            leg.running = True
            if leg.sends:
                self._command(ev.Computed(tid, 0, False), out)

    def computes(self, tid: str, out: list[Effect]) -> None:
        """One chunk more, or the end."""
        leg = self.legs[tid]
        last = leg.computed == leg.plan.parts
        leg.computed += not last
        final = last or (leg.computed == leg.plan.parts and not leg.plan.apart)
        if final:
            leg.running, leg.final_s = False, 0
        if leg.sends:
            self._command(ev.Computed(tid, leg.computed, final), out)
            self._forget(leg)
        elif final and not leg.verdict:
            leg.given = True
            self.ghost.give(tid, leg.blocks, False)
            self._tell(ev.Allocated(tid, leg.blocks), out)
        elif final:
            self._forget(leg)

    def preempts(self, tid: str, out: list[Effect]) -> None:
        """The blocks of a running prefill are taken; they are overwritten when every rank knows of it."""
        leg = self.legs[tid]
        leg.running = False
        if leg.sends:
            leg.fences = self.scope.ranks[self.engine]
            self._command(ev.Preempted(tid), out)
            out += [("down", rank, ("fence", tid)) for rank in range(leg.fences)]
        else:
            leg.computed = 0
            self._give_back(leg)
            self._forget(leg)

    def passed(self, rank: int, tid: str, out: list[Effect]) -> None:
        """A rank has taken the commands before the fence."""
        leg = self.legs[tid]
        leg.fences -= 1
        if not leg.fences:
            leg.computed = 0
            self.ghost.rewrite(tid)
            self._give_back(leg)
            self._forget(leg)

    def admits(self, tid: str, out: list[Effect]) -> None:
        """The scheduler comes to a request that may have memory now. The heir of what was taken back is first."""
        leg = self.legs[tid]
        if self.heir in self.asking and self.heir != tid:
            return
        if not self.free:
            self._tell(ev.Starved(tid), out)
            return
        self.asking.remove(tid)
        self.heir = ""
        self._allocate(leg)
        leg.given = True
        self.ghost.give(tid, leg.blocks, False)
        self._tell(ev.Allocated(tid, leg.blocks), out)

    def loads(self, tid: str, out: list[Effect]) -> None:
        """What is ready is read, and the request runs to its end."""
        leg = self.legs[tid]
        leg.verdict = "over"
        self._tell(ev.Loaded(tid), out)
        self._forget(leg)

    def aborts(self, tid: str, out: list[Effect]) -> None:
        """The client gives this leg up."""
        leg = self.legs[tid]
        leg.aborted = True
        if tid in self.asking:
            self.asking.remove(tid)
        running, leg.running = leg.running, False
        if leg.sends:
            leg.final_s = max(leg.final_s, 0)
            self._command(ev.Abort(tid, "aborted"), out)
        else:
            if running:
                self._give_back(leg)
            self._tell(ev.Aborted(tid), out)
        self._forget(leg)

    def stuck(self, out: list[Effect]) -> None:
        """See ``_stuck``."""
        self._command(ev.GiveWay(), out)

    def revokes(self, tid: str, out: list[Effect]) -> None:
        """The fabric takes every remote right to the memory of ``tid`` away (E3)."""
        custody = self.ghost.custody[tid]
        self.revoked.append(custody)
        self._command(ev.Revoked(tid), out)

    # ---------------------------------------------------------------- ranks and fabric

    def hears(self, report: ev.FromRank, out: list[Effect]) -> None:
        """A report comes up."""
        self._tell(report, out)

    def tells(self, me: Any, peer: Any, message: Any, out: list[Effect]) -> None:
        """A rank names memory to a peer (I1)."""
        self.ghost.sent(me, peer, message)

    def gathers(self, rank: int, pack: ev.Pack, out: list[Effect]) -> None:
        """A gather is enqueued (I2)."""
        source, leg = self.ghost.source(pack.transfer_id), self.legs.get(pack.transfer_id)
        if source.freed or leg is None or pack.stop > leg.computed:
            raise Violation(f"I2: {self.engine} packs tokens of {pack.transfer_id} that it does not have")
        source.packing.add((rank, pack.handle))

    def gathered(self, rank: int, tid: str, handle: int, out: list[Effect]) -> None:
        """The gather has read its source."""
        self.ghost.source(tid).packing.discard((rank, handle))

    def reads(self, rank: int, post: ev.Post, out: list[Effect]) -> None:
        """A direct write starts to read (in pull: to fill) its source (I2)."""
        source = self.ghost.source(post.transfer_id)
        if source.freed:
            raise Violation(f"I2: {self.engine} posts {post.transfer_id}, whose source is free")
        source.active.add((rank, post.handle))

    def quiet(self, rank: int, post: ev.Post, done: bool, out: list[Effect]) -> None:
        """Nothing of a write is active any more."""
        source = self.ghost.sources.get(post.transfer_id)
        if source is None:
            return
        source.active.discard((rank, post.handle))
        if done and self.scope.transfers[post.transfer_id].mode == "pull":
            for position in range(post.start, post.stop):
                source.read[(rank, post.link[1], position)] = (post.transfer_id, post.link[1], position)

    def filled(self, writer: int, post: ev.Post, key: Any, out: list[Effect]) -> None:
        """All bytes of a write are in our memory (I1, at the moment of landing)."""
        custody = self._touched(post, key)
        if custody is None or self.scope.transfers[post.transfer_id].mode == "pull":
            return
        plan = self.scope.transfers[post.transfer_id]
        wanted = plan.wanted
        for position in range(post.start, post.stop):
            index = position - (plan.parts - wanted)
            if not 0 <= index < wanted:
                raise Violation(f"I1: {post.transfer_id} writes token {index} of {wanted}")
            cell = (post.link[1], custody.units[0], index, writer)
            self.ghost.cells[cell] = (post.transfer_id, writer, position)

    def touchable(self, post: ev.Post, key: Any) -> bool:
        """I1 for a write that may land now: ``True`` when it can, ``False`` when its rights are revoked. Raises
        ``Violation`` when it would hit what is another's.
        """
        return self._touched(post, key) is not None

    def _touched(self, post: ev.Post, key: Any) -> Custody | None:
        custody = self.ghost.granted.get(key)
        if custody is None:
            raise Violation(f"I1: attempt {key[3]} of {post.transfer_id} is written, which {self.engine} never granted")
        if tuple(unit for _, unit in custody.units) != tuple(post.memory):
            raise Violation(f"I1: attempt {key[3]} of {post.transfer_id} is written to what is not its grant")
        if any(dead is custody for dead in self.revoked):
            return None
        for unit in custody.units:
            self.ghost.land(custody, unit)
        return custody

    # ---------------------------------------------------------------- time

    def passes(self, span_s: float, out: list[Effect]) -> None:
        """Time goes by (I5a)."""
        s, span = self.scope.settings, int(span_s)
        for leg in self.legs.values():
            if leg.verdict:
                continue
            leg.age_s += span
            leg.final_s += span if leg.final_s >= 0 else 0
            if self.scope.inside:
                continue
            if not leg.sends and leg.age_s > s.wait_s * (1 + leg.yields):
                raise Violation(f"I5a: {leg.tid} has no verdict at {self.engine} {leg.age_s} s after its arrival")
            if leg.sends and leg.final_s > s.sender_verdict_s:
                raise Violation(f"I5a: {leg.tid} has no verdict at {self.engine} {leg.final_s} s after its end")
