"""How a host schedules, like vLLM: block pool, queues, chunked prefill, preemption, aborts.

The lower half of ``host``, which hears what the ledger says. A leg is one request at one engine, in one part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import events as ev
from pushkv.sim.explore.ghost import UNIT_TOKENS

if TYPE_CHECKING:
    from pushkv.sim.explore.process import Process
    from pushkv.sim.explore.world import Request


def units(tokens: int) -> int:
    """Blocks or segments for ``tokens``."""
    return -(-tokens // UNIT_TOKENS)


class Leg:
    """One request at one engine, in one part."""

    def __init__(self, request: Request, process: Process) -> None:
        self.request = request
        self.tid = request.tid
        self.random = request.random or process.random
        now = process.world.now
        self.blocks: list[int] = []
        self.begun_at = now
        self.final_at = -1.0
        self.verdict = ""
        self.computed = 0
        self.run = 0
        self.running = self.aborted = self.released = self.held = False
        self.given = self.wants = self.loaded = self.fenced = False
        self.yields = 0
        self.verdict_at = self.aborted_at = 0.0


class Scheduling:
    """Legs and blocks of one engine."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self.free = list(range(process.world.profile.blocks))
        self.total = len(self.free)
        self.sending: dict[str, Leg] = {}
        self.receiving: dict[str, Leg] = {}
        self.queue: list[Leg] = []
        self.asking: list[Leg] = []
        self.history: list[tuple[float, ev.Record]] = []
        self.packed: set[str] = set()
        self.ticking = False
        self.unsettled: set[str] = set()
        """Failed, told that its memory is not settled, and not given back since."""

    # ---------------------------------------------------------------- blocks

    def _allocate(self, leg: Leg, count: int) -> bool:
        if leg.blocks or len(self.free) < count:
            return False
        free = self.free
        if self.world.profile.readable:
            free.sort(reverse=True)
        else:
            random = self.process.random.random
            for last in range(len(free) - 1, len(free) - 1 - count, -1):
                other = int(random() * (last + 1))
                free[other], free[last] = free[last], free[other]
        leg.blocks = [free.pop() for _ in range(count)]
        return True

    def _give_back(self, leg: Leg) -> None:
        self.free.extend(leg.blocks)
        leg.blocks = []

    def computed(self, tid: str) -> int:
        """Tokens of ``tid`` in the cache."""
        return self.sending[tid].computed if tid in self.sending else 0

    # ---------------------------------------------------------------- a leg arrives

    def prefill(self, request: Request) -> None:
        """P's leg."""
        if request.mode == "pull":
            leg = self.receiving[request.tid] = Leg(request, self.process)
            links = self.world.links(self.process.name, request.asks or request.d)
            fanout = max(1, self.process.ranks // self.world.ranks[request.asks or request.d])
            self._arrive(leg, request.asks or request.d, links, fanout)
            self.queue.append(leg)
        else:
            leg = self.sending[request.tid] = Leg(request, self.process)
            self._hold(leg)
            self.queue.append(leg)
        self._tick()

    def decode(self, request: Request) -> None:
        """D's leg."""
        if request.mode == "pull":
            leg = self.sending[request.tid] = Leg(request, self.process)
            self.queue.append(leg)
        else:
            leg = self.receiving[request.tid] = Leg(request, self.process)
            if request.mode == "early":
                self.queue.append(leg)
            else:
                self._receive(leg)
        self._tick()

    def _receive(self, leg: Leg) -> None:
        p = leg.request.asks or leg.request.p
        links = self.world.links(self.process.name, p)
        self._arrive(leg, p, links, max(1, self.process.ranks // self.world.ranks[p]))

    def _arrive(self, leg: Leg, peer: str, links: Any, fanout: int) -> None:
        request = leg.request
        packed = request.mode == "packed"
        memory = tuple(leg.blocks) if request.mode == "early" else None
        if memory is not None:
            self.process.ghost.give(leg.tid, memory, False)
            leg.given = True
        if packed:
            self.packed.add(leg.tid)
        leg.held = True
        segments = units(request.tokens) if packed else 0
        leg.begun_at = self.world.now
        self.process.say(ev.Arrived(leg.tid, peer, links, request.tokens, packed, segments, fanout, memory))

    def _hold(self, leg: Leg) -> None:
        leg.held = True
        request = leg.request
        self.process.ghost.source(leg.tid)
        self.process.say(ev.Hold(leg.tid, request.prompt, 100, request.chunked and request.mode != "pull"))

    # ---------------------------------------------------------------- scheduling

    def _tick(self) -> None:
        if not self.ticking and (self.queue or self.asking):
            self.ticking = True
            self.process.later(0.0, self._schedule)

    def _schedule(self) -> None:
        self.ticking = False
        for leg in list(self.queue):
            request = leg.request
            pull_read = request.mode == "pull" and leg.tid in self.sending
            prefill = not pull_read and self.process.name == request.p
            if not self._allocate(leg, units(request.prompt if prefill else request.tokens)):
                break
            self.queue.remove(leg)
            if prefill:
                leg.running = True
                if request.mode != "pull":
                    self.process.command(ev.Computed(leg.tid, 0, False))
                self.process.later(self.world.profile.chunk_s * leg.random.random(), self._chunk, leg, leg.run)
            elif pull_read:
                self._hold(leg)
                leg.computed, leg.final_at = request.prompt, self.world.now
                self.process.command(ev.Computed(leg.tid, request.prompt, True))
            else:
                self._receive(leg)
        for leg in list(self.asking):
            self._try_admit(leg)
        self._stuck()
        if (self.queue or self.asking) and not self.ticking:
            self.ticking = True
            self.process.later(0.5, self._schedule)

    def _stuck(self) -> None:
        """Rule 8 at P: nothing runs, the head of the queue does not fit, finished prefills hold the cache."""
        finished = [leg for leg in self.sending.values() if leg.final_at >= 0 and leg.blocks and not leg.released]
        waits = (
            self.queue
            and self.process.name == self.queue[0].request.p
            and not any(x.running for x in self.sending.values())
        )
        if waits and finished and hasattr(ev, "GiveWay"):
            self.process.command(ev.GiveWay())

    def _chunk(self, leg: Leg, run: int) -> None:
        request = leg.request
        if leg.run != run or not leg.running:
            return
        if leg.computed < request.prompt:
            step = request.prompt if not request.chunked else leg.random.randint(1, request.prompt)
            leg.computed = min(request.prompt, leg.computed + step)
        final = leg.computed == request.prompt and leg.random.random() < 0.8
        if final:
            leg.running = False
            leg.final_at = self.world.now
        if request.mode == "pull":
            if final and not leg.verdict and not leg.aborted:
                leg.given = True
                self.process.ghost.give(leg.tid, tuple(leg.blocks), False)
                self.process.say(ev.Allocated(leg.tid, tuple(leg.blocks)))
            elif final:
                self._give_back(leg)
                self._forget_receiving(leg)
        else:
            self.process.command(ev.Computed(leg.tid, leg.computed, final))
            self._forget_sending(leg)
        if leg.running:
            self.process.later(self.world.profile.chunk_s * leg.random.random(), self._chunk, leg, leg.run)

    def preempt(self, leg: Leg) -> None:
        """Take a running prefill's blocks back; it starts over when there is room."""
        if not leg.running:
            return
        leg.running = False
        leg.run += 1
        if leg.tid in self.sending:
            leg.fenced = True
            self.process.command(ev.Preempted(leg.tid))
        self.process.fence(self._rewrite, leg)

    def _rewrite(self, leg: Leg) -> None:
        """Every rank knows of the preemption: what it gathers now is ordered before whatever overwrites the blocks."""
        leg.fenced = False
        leg.computed = 0
        if leg.tid in self.sending:
            self.process.ghost.rewrite(leg.tid)
        if leg.aborted or (leg.tid not in self.sending and leg.verdict):
            if leg.tid in self.sending:
                self._forget_sending(leg)
            elif leg.verdict:
                self._end_receiving(leg)
            else:
                self._give_back(leg)
            return
        self._give_back(leg)
        self.queue.append(leg)
        self._tick()

    def abort(self, tid: str, part: str) -> None:
        """The client (or router) gives up this leg."""
        leg = (self.sending if part == "send" else self.receiving).get(tid)
        if leg is None:
            if part == "send":
                self.process.command(ev.Abort(tid, "rejected"))
            return
        if leg.aborted or leg.loaded:
            return
        leg.aborted, leg.aborted_at = True, self.world.now
        if part == "receive" and not leg.verdict and self.process.unheard(tid):
            self.world.causes.kinds.add("unheard")
        if part == "send":
            if not leg.held:
                self.process.command(ev.Abort(tid, "aborted"))
                self.queue.remove(leg)
                del self.sending[tid]
                return
            self.process.command(ev.Abort(tid, "aborted"))
        elif leg.held:
            if leg.verdict in ("", "ready"):
                self.process.say(ev.Aborted(tid))
        else:
            self.queue.remove(leg)
            del self.receiving[tid]
            return
        if leg in self.queue:
            self.queue.remove(leg)
        if leg.running:
            leg.running = False
            leg.run += 1
            if leg.request.mode == "pull" and not leg.given:
                self._give_back(leg)
                if leg.verdict:  # it had failed meanwhile: the books are closed, and no other word comes
                    self._forget_receiving(leg)
        if part == "send":
            leg.final_at = self.world.now if leg.final_at < 0 else leg.final_at
            self._forget_sending(leg)

    def _try_admit(self, leg: Leg) -> None:
        if leg.aborted or leg.verdict or not leg.wants:
            self.asking.remove(leg)
        elif self._allocate(leg, units(leg.request.tokens)):
            self.asking.remove(leg)
            leg.wants = False
            leg.given = True
            self.process.ghost.give(leg.tid, tuple(leg.blocks), False)
            self.process.say(ev.Allocated(leg.tid, tuple(leg.blocks)))
        else:
            self.process.say(ev.Starved(leg.tid))

    # ---------------------------------------------------------------- the end of a leg

    def _end_receiving(self, leg: Leg) -> None:
        self._give_back(leg)
        self._forget_receiving(leg)

    def _forget_receiving(self, leg: Leg) -> None:
        self.receiving.pop(leg.tid, None)
        self.packed.discard(leg.tid)
        self._tick()

    def _forget_sending(self, leg: Leg) -> None:
        if leg.released and not leg.running and not leg.fenced and leg not in self.queue:
            self._give_back(leg)
            if leg.verdict:
                self.sending.pop(leg.tid, None)
        self._tick()
