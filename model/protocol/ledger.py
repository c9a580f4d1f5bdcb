"""One engine's books, on the scheduler's side: who holds which memory, the verdict over all ranks, and what the host is
told, once.

Decides when landing memory is granted and to whom, when the host is asked to allocate, who gives way, and when memory
is its owner's again. It has no timer: memory comes back with evidence, verdicts come from the ranks. It does not decide
what is written, nor whether a peer lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.messages import GAVE_WAY
from pushkv.model.protocol.settings import Settings
from pushkv.model.protocol.states import INCOMING, OUTGOING, Incoming, Outgoing

Out = list[ev.Record]

WAITING, WANTING, HOLDING = Incoming.WAITING, Incoming.WANTING, Incoming.HOLDING
YIELDING, READY, ENDING, DONE = Incoming.YIELDING, Incoming.READY, Incoming.ENDING, Incoming.DONE


class _In:
    """A transfer that this engine's memory waits for."""

    __slots__ = (
        "asked",
        "e",
        "finished",
        "heir",
        "host_memory",
        "landed",
        "memory",
        "offered",
        "order",
        "segments",
        "settled",
        "starved",
        "state",
        "yields",
    )

    def __init__(self, e: ev.Arrived, order: int) -> None:
        self.e, self.order = e, order
        self.memory: Any = e.memory
        self.host_memory = e.memory is not None
        self.state: Incoming = WAITING
        self.segments: tuple[int, ...] = ()
        self.yields = 0
        self.offered: set[int] = set()
        self.finished: set[int] = set()
        self.landed: set[int] = set()
        self.settled: set[int] = set()
        self.asked = self.starved = False
        self.heir = ""

    def reset(self) -> None:
        """As a new attempt begins."""
        self.offered, self.finished, self.landed, self.settled = set(), set(), set(), set()
        self.asked = self.starved = False

    def move(self, event: str) -> None:
        try:
            self.state = INCOMING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of {self.e.transfer_id} in state {self.state}") from None


class _Out:
    """A transfer whose memory the host keeps for us."""

    __slots__ = ("released", "sent", "state")

    def __init__(self) -> None:
        self.state: Outgoing = Outgoing.ACTIVE
        self.sent: set[int] = set()
        self.released: set[int] = set()


class Ledger:
    """Custody and verdicts of one engine with ``ranks`` ranks (1 for a lockstep group).

    ``step`` takes events of the host and reports of the ranks and appends actions. Raises ``LocalProtocolError`` when
    the host breaks the contract.
    """

    def __init__(self, settings: Settings, ranks: int = 1) -> None:
        self._set = settings
        self._ranks = range(ranks)
        self._all = ranks
        self._in: dict[str, _In] = {}
        self._out: dict[str, _Out] = {}
        self._free = list(range(settings.landing_segments - 1, -1, -1))
        self._held_by: dict[str, int] = {}
        self._wanting: dict[str, _In] = {}
        self._quarantine: dict[str, int] = {}
        self._order = 0
        self.steps = 0
        self.counters: dict[str, int] = {}
        self._handlers: dict[type[ev.Record], Callable[[Any, Out], None]] = {
            ev.Arrived: self._arrived,
            ev.Allocated: self._allocated,
            ev.Starved: self._starved,
            ev.Loaded: self._loaded,
            ev.Aborted: self._aborted,
            ev.Hold: self._hold,
        }
        self._reports: dict[type[ev.Record], Callable[[int, Any, Out], None]] = {
            ev.Offered: self._offered,
            ev.Landed: self._has_landed,
            ev.Broken: self._broken,
            ev.Settled: self._has_settled,
            ev.Sent: self._sent,
            ev.Released: self._released,
        }

    def step(self, events: Iterable[ev.Record], now: float, out: Out) -> None:
        """Take ``events``; ``now`` is not looked at: the books know no time."""
        self.steps += 1
        for event in events:
            if isinstance(event, ev.FromRank):
                if event.rank not in self._ranks:
                    raise LocalProtocolError(f"rank {event.rank} of {self._all}")
                self._reports[type(event.report)](event.rank, event.report, out)
                continue
            try:
                handler = self._handlers[type(event)]
            except KeyError:
                raise LocalProtocolError(f"{type(event).__name__} is not an event of a ledger") from None
            handler(event, out)

    # ------------------------------------------------------------ what a host may look at

    @property
    def segments(self) -> int:
        """Segments of landing memory per rank."""
        return self._set.landing_segments

    @property
    def landing_free(self) -> int:
        """Segments of landing memory per rank that nobody holds."""
        return len(self._free)

    def fits(self, segments: int) -> bool:
        """Whether a transfer of ``segments`` can ever be granted landing memory."""
        return segments <= self._set.landing_segments

    def quarantined(self, peer: str | None = None) -> int:
        """Transfers with a verdict whose memory is not settled, of ``peer`` or of all."""
        return sum(self._quarantine.values()) if peer is None else self._quarantine.get(peer, 0)

    def expects(self, transfer_id: str) -> bool:
        """Whether the books hold an incoming ``transfer_id``: without a verdict, or its memory is not settled."""
        return transfer_id in self._in

    def open(self) -> tuple[int, int]:
        """How many incoming and outgoing transfers the books hold."""
        return len(self._in), len(self._out)

    # ------------------------------------------------------------ receiving: the host

    def _arrived(self, e: ev.Arrived, out: Out) -> None:
        if e.transfer_id in self._in:
            raise LocalProtocolError(f"{e.transfer_id} arrived before")
        if len(e.links) != self._all:
            raise LocalProtocolError(f"{e.transfer_id}: links for {len(e.links)} ranks, this engine has {self._all}")
        refusal = ""
        if e.packed and not self.fits(e.segments):
            refusal = "larger than the landing memory"
        elif not e.packed and self.quarantined(e.peer) >= self._set.quarantine_per_peer:
            refusal = "too much in quarantine with this peer"
        if refusal:
            out.append(ev.Fail(e.transfer_id, refusal, True))
            if e.memory is not None:
                out.append(ev.Free(e.transfer_id, e.memory))
            return
        self._order += 1
        entry = self._in[e.transfer_id] = _In(e, self._order)
        if entry.memory is not None:
            entry.move("expose")
        self._register(entry, self._ranks, out)

    def _register(self, entry: _In, ranks: Iterable[int], out: Out) -> None:
        e = entry.e
        for rank in ranks:
            command = ev.Expect(e.transfer_id, e.links[rank], e.tokens, e.packed, e.fanout, entry.memory)
            out.append(ev.ToRank(rank, command))

    def _allocated(self, e: ev.Allocated, out: Out) -> None:
        entry = self._in.get(e.transfer_id)
        if entry is None or entry.state not in (WAITING, WANTING):
            self._count("allocated_late")
            out.append(ev.Free(e.transfer_id, e.memory))
            return
        if entry.e.packed:
            raise LocalProtocolError(f"{e.transfer_id} is packed: it lands in landing memory")
        entry.memory, entry.host_memory = e.memory, True
        self._expose(entry, out)

    def _starved(self, e: ev.Starved, out: Out) -> None:
        entry = self._in.get(e.transfer_id)
        if entry is not None and entry.state is WANTING:
            entry.starved = True
            if len(entry.finished) == self._all:
                self._make_way(entry, out)

    def _make_way(self, heir: _In, out: Out, peer: str = "") -> None:
        """Rule 8: for a finished prefill without memory the youngest (of ``peer``, where its share is what lacks) gives
        way that has some, was not finished when it got it, and has landed on no rank; one at a time. Its sender knows
        whether it can.
        """
        victim: _In | None = None
        for other in self._in.values():
            if other.state is YIELDING and other.heir == heir.e.transfer_id:
                return
            started = other.landed or len(other.finished) == self._all or other.e.tokens == 0
            can = other.state is HOLDING and not started and other.yields < self._set.yields
            can = can and peer in ("", other.e.peer)
            if can and other.e.packed == heir.e.packed and (victim is None or other.order > victim.order):
                victim = other
        if victim is not None:
            self._yield(victim, heir.e.transfer_id, out)

    def _yield(self, entry: _In, heir: str, out: Out) -> None:
        entry.move("yield")
        entry.heir = heir
        entry.yields += 1
        self._count("gave_way")
        out.append(ev.ToRanks(ev.Withdraw(entry.e.transfer_id, GAVE_WAY, True)))

    def _loaded(self, e: ev.Loaded, out: Out) -> None:
        entry = self._in.get(e.transfer_id)
        if entry is None:
            raise LocalProtocolError(f"{e.transfer_id} is not known: it cannot have been loaded")
        entry.move("loaded")
        self._close(entry, out)

    def _aborted(self, e: ev.Aborted, out: Out) -> None:
        entry = self._in.get(e.transfer_id)
        if entry is None or entry.state is ENDING:
            return
        if entry.state is READY:
            entry.move("fail")
            self._close(entry, out)
        else:
            self._fail(entry, e.reason, out)

    # ------------------------------------------------------------ receiving: the ranks

    def _offered(self, rank: int, r: ev.Offered, out: Out) -> None:
        entry = self._in.get(r.transfer_id)
        if entry is None or entry.state not in (WAITING, WANTING):
            return
        entry.offered.add(rank)
        if r.finished:
            entry.finished.add(rank)
        if len(entry.offered) < self._all or (entry.yields and len(entry.finished) < self._all):
            return  # what has given way gets memory again when its prefill is finished: it does not give way for ever
        entry.move("offer")
        if entry.e.packed:
            self._wanting[r.transfer_id] = entry
            self._grant(out)
        elif not entry.asked:
            entry.asked = True
            out.append(ev.Admit(r.transfer_id))
        elif entry.starved and len(entry.finished) == self._all:
            self._make_way(entry, out)

    def _has_landed(self, rank: int, r: ev.Landed, out: Out) -> None:
        entry = self._in[r.transfer_id]
        entry.landed.add(rank)
        if entry.state is not ENDING and len(entry.landed) == self._all:
            entry.move("landed")
            self._wanting.pop(r.transfer_id, None)
            out.append(ev.Ready(r.transfer_id, entry.memory))
        else:
            self._judge(entry, out)

    def _broken(self, rank: int, r: ev.Broken, out: Out) -> None:
        entry = self._in[r.transfer_id]
        if entry.state is ENDING:
            return
        if r.reason != GAVE_WAY:
            self._fail(entry, r.reason, out)
        elif entry.state is HOLDING and entry.yields < self._set.yields:
            self._yield(entry, self._heir(entry.e.peer), out)
        elif entry.state is not YIELDING:
            self._fail(entry, "gave way too often", out)

    def _heir(self, peer: str) -> str:
        """Who gets what a sender of ``peer`` gave back: the first whose finished prefill waits there."""
        for entry in self._in.values():
            if entry.state is WANTING and entry.e.peer == peer and len(entry.finished) == self._all:
                return entry.e.transfer_id
        return ""

    def _has_settled(self, rank: int, r: ev.Settled, out: Out) -> None:
        entry = self._in[r.transfer_id]
        entry.settled.add(rank)
        self._judge(entry, out)

    def _judge(self, entry: _In, out: Out) -> None:
        """Every rank has settled or landed: what gave way is registered anew, what has failed is closed."""
        if len(entry.settled | entry.landed) < self._all:
            return
        if entry.state is YIELDING and entry.landed:
            self._resume(entry, out)
        elif entry.state is YIELDING:
            self._requeue(entry, out)
        else:
            entry.move("settle")
            self._close(entry, out, failed=True)

    # ------------------------------------------------------------ receiving: one transfer

    def _expose(self, entry: _In, out: Out) -> None:
        entry.move("expose")
        out.append(ev.ToRanks(ev.Expose(entry.e.transfer_id, entry.memory)))

    def _fail(self, entry: _In, reason: str, out: Out) -> None:
        """The verdict. Ranks that have not given theirs are told to stop; memory waits for every rank to settle."""
        entry.move("fail")
        self._wanting.pop(entry.e.transfer_id, None)
        peer = entry.e.peer
        self._quarantine[peer] = self._quarantine.get(peer, 0) + 1
        out.append(ev.Fail(entry.e.transfer_id, reason, False))
        out.append(ev.ToRanks(ev.Withdraw(entry.e.transfer_id, reason)))

    def _resume(self, entry: _In, out: Out) -> None:
        """It gave way too late: on some ranks it has landed, and its senders there do not send twice. The others go on
        in the same memory.
        """
        entry.move("resume")
        self._register(entry, sorted(entry.settled - entry.landed), out)
        entry.settled.clear()

    def _requeue(self, entry: _In, out: Out) -> None:
        """What gave way is registered anew: it keeps its place in time, and waits behind what is finished."""
        entry.move("requeue")
        memory, heir = entry.memory, entry.heir
        entry.reset()
        entry.memory = None
        if entry.host_memory:
            entry.host_memory = False
            out.append(ev.TakeBack(entry.e.transfer_id, memory, heir))
        self._register(entry, self._ranks, out)
        self._return(entry, out)

    def _close(self, entry: _In, out: Out, *, failed: bool = False) -> None:
        """The one place where an entry leaves the books and its memory goes back."""
        del self._in[entry.e.transfer_id]
        if failed:
            peer = entry.e.peer
            self._quarantine[peer] -= 1
            if not self._quarantine[peer]:
                del self._quarantine[peer]
            if entry.host_memory:
                out.append(ev.Free(entry.e.transfer_id, entry.memory))
        self._return(entry, out)

    # ------------------------------------------------------------ landing memory

    def _return(self, entry: _In, out: Out) -> None:
        if entry.segments:
            peer = entry.e.peer
            self._free.extend(entry.segments)
            left = self._held_by[peer] - len(entry.segments)
            if left:
                self._held_by[peer] = left
            else:
                del self._held_by[peer]
            entry.segments = ()
        if self._wanting:
            self._grant(out)

    def _grant(self, out: Out) -> None:
        """Landing memory in the order: finished prefills first, then as they arrived. Who waits for room is not
        overtaken.
        """
        cap = self._set.landing_share * self._set.landing_segments
        full: set[str] = set()
        queue = list(self._wanting.values())
        if len(queue) > 1:
            queue.sort(key=lambda entry: (len(entry.finished) < self._all, entry.order))
        for entry in queue:
            need, peer = entry.e.segments, entry.e.peer
            held = self._held_by.get(peer, 0)
            if peer in full:
                continue
            if held and held + need > cap < self._set.landing_segments:
                if len(entry.finished) == self._all:
                    self._make_way(entry, out, peer)
                full.add(peer)  # it waits for its own peer's memory: whoever waits for another's goes on
                continue
            if need > len(self._free):
                if len(entry.finished) == self._all:
                    self._make_way(entry, out)
                break
            if need:
                entry.segments = tuple(self._free[-need:])
                del self._free[-need:]
                self._held_by[peer] = held + need
            entry.memory = entry.segments
            del self._wanting[entry.e.transfer_id]
            self._expose(entry, out)

    # ------------------------------------------------------------ sending

    def _hold(self, e: ev.Hold, out: Out) -> None:
        if e.transfer_id in self._out:
            raise LocalProtocolError(f"{e.transfer_id} is held already")
        self._out[e.transfer_id] = _Out()
        begin = ev.Begin(e.transfer_id, e.tokens, e.bytes_per_token, e.chunked, self._all == 1)
        out.append(ev.ToRanks(begin))

    def _sent(self, rank: int, r: ev.Sent, out: Out) -> None:
        entry = self._out[r.transfer_id]
        entry.sent.add(rank)
        if entry.state is Outgoing.ACTIVE and (not r.ok or len(entry.sent) == self._all):
            entry.state = OUTGOING[entry.state]["verdict"]
            out.append(ev.Finished(r.transfer_id, r.ok, r.reason))
            if not r.ok and len(entry.sent) < self._all:
                out.append(ev.ToRanks(ev.Abort(r.transfer_id, r.reason)))
        self._finish(r.transfer_id, entry)

    def _released(self, rank: int, r: ev.Released, out: Out) -> None:
        entry = self._out[r.transfer_id]
        entry.released.add(rank)
        if len(entry.released) == self._all:
            out.append(ev.Release(r.transfer_id))
        self._finish(r.transfer_id, entry)

    def _finish(self, transfer_id: str, entry: _Out) -> None:
        if len(entry.sent) == self._all and len(entry.released) == self._all:
            entry.state = OUTGOING[entry.state]["release"]
            del self._out[transfer_id]

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
