"""The posting half of one rank: rendezvous, lease, staging, writes, and the one who says that a shard is settled (E1).

Decides when a part is packed and posted, when the source may go, and what the receiver is told. Does not decide where
bytes go (layout), which path is taken (host) or whether a peer lives (``Peer``). In pull the same machine runs on D and
its posts are reads.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import NEVER, Deadlines
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.seen import Seen
from pushkv.model.protocol.settings import Settings
from pushkv.model.protocol.states import SENDING, SENDING_CLOSED, Sending

Out = list[ev.Record]

REGISTERED, PROMISED, MET, GRANTED = Sending.REGISTERED, Sending.PROMISED, Sending.MET, Sending.GRANTED
WRITING, STOPPING = Sending.WRITING, Sending.STOPPING

TOO_MANY: Final = "too many open registrations"
TOO_LONG: Final = "more tokens than the prompt has"

PACKING: Final = 0
POSTABLE: Final = 1
CLAIMED: Final = 2
BROKEN: Final = 3


class _Write:
    """One part of one shard on its way: packing, postable, claimed (active), broken (perhaps active)."""

    __slots__ = ("bytes", "due", "handle", "last", "part", "shard", "stage", "start", "stop")

    def __init__(self, handle: int, shard: _Shard, part: int, start: int, stop: int, last: bool, size: int) -> None:
        self.handle, self.shard, self.part = handle, shard, part
        self.start, self.stop, self.last, self.bytes = start, stop, last, size
        self.stage = PACKING
        self.due = NEVER


class _Shard:
    """One attempt on one link."""

    __slots__ = (
        "attempt", "closing", "done", "link", "memory", "notices", "outgoing", "packed", "parts", "planned", "reason",
        "requeue", "state", "tokens", "waiting", "writes",
    )  # fmt: skip

    def __init__(self, link: _Link, outgoing: _Outgoing, register: msg.Register) -> None:
        self.link, self.outgoing = link, outgoing
        self.attempt, self.tokens, self.packed = register.attempt, register.tokens, register.packed
        self.memory = register.memory
        self.state = REGISTERED if register.memory is None else PROMISED
        self.planned = -1
        self.parts = 0
        self.done = 0
        self.writes: dict[int, _Write] = {}
        self.notices: list[msg.Message] = []
        self.waiting = False
        self.requeue = False
        self.closing = "fail"
        self.reason = ""

    def move(self, event: str) -> None:
        try:
            self.state = SENDING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of {self.outgoing.transfer_id} in state {self.state}") from None

    def active(self) -> int:
        count = 0
        for write in self.writes.values():
            if write.stage >= CLAIMED:
                count += 1
        return count


class _Outgoing:
    """One transfer at this rank: the prefill and the shards that read it."""

    __slots__ = (
        "begun", "bytes_per_token", "chunked", "closed", "computed", "due", "ended", "fanout", "final", "open",
        "overdue", "peer", "readers", "reason", "released", "shards", "started", "tokens", "told",
        "transfer_id",
    )  # fmt: skip

    def __init__(self, transfer_id: str) -> None:
        self.transfer_id = transfer_id
        self.begun = self.started = self.final = self.chunked = self.overdue = False
        self.tokens = self.computed = self.bytes_per_token = 0
        self.peer = ""
        self.fanout = 1
        self.shards: dict[ev.Link, _Shard] = {}
        self.open = 0
        self.closed = 0
        self.readers = 0
        self.ended = self.told = self.released = False
        self.reason = ""
        self.due = NEVER


class _Link:
    """What this sender knows of one receiving rank's incarnation."""

    __slots__ = ("base", "incarnation", "key", "live", "seen", "tombstones", "up")

    def __init__(self, key: ev.Link, incarnation: int, floor: int, open_per_link: int) -> None:
        self.key = key
        self.incarnation = incarnation
        self.up = True
        self.seen = Seen(open_per_link)
        self.base = floor
        self.seen.raise_floor(floor)
        self.live: dict[int, _Shard] = {}
        self.tombstones: OrderedDict[int, list[msg.Message]] = OrderedDict()


class Sender:
    """All shards that one rank sends. Driven by :class:`~pushkv.model.protocol.endpoint.Endpoint`.

    ``counters`` counts what was refused or survived, by name. ``wake_at`` is the soonest deadline in host seconds.
    """

    def __init__(self, incarnation: int, settings: Settings) -> None:
        self._me = incarnation
        self._set = settings
        self._links: dict[ev.Link, _Link] = {}
        self._transfers: dict[str, _Outgoing] = {}
        self._writes: dict[int, _Write] = {}
        self._leases: Deadlines[_Outgoing] = Deadlines()
        self._posted: Deadlines[_Write] = Deadlines()
        self.deadlines = (self._leases, self._posted)
        self._remembered: OrderedDict[str, str] = OrderedDict()
        self._forgotten = 0
        self._handles = 0
        self._staged = 0
        self._staged_by: dict[str, int] = {}
        self.short: deque[_Shard] = deque()
        """Shards of which a part waits for staging."""
        self.counters: dict[str, int] = {}

    # ------------------------------------------------------------ what a host may look at

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging in use."""
        return self._staged

    def sizes(self) -> dict[str, int]:
        """Entries per table: what must stay bounded by what is open."""
        return {
            "transfers": len(self._transfers),
            "writes": len(self._writes),
            "live": sum(len(link.live) for link in self._links.values()),
            "tombstones": sum(len(link.tombstones) for link in self._links.values()),
            "runs": sum(link.seen.runs for link in self._links.values()),
            "remembered": len(self._remembered),
            "short": len(self.short),
            "armed": self._leases.armed + self._posted.armed,
            "deadlines": len(self._leases) + len(self._posted),
        }

    def busy(self, link: ev.Link) -> bool:
        """Whether anything is open on ``link``."""
        state = self._links.get(link)
        return state is not None and bool(state.live)

    def claim(self, handle: int, now: float) -> bool:
        """The moment of posting: ``True`` means post now, ``False`` that the shard ended meanwhile and must not be
        posted.

        Raises ``LocalProtocolError`` for a handle that was claimed before.
        """
        write = self._writes.get(handle)
        if write is None:
            return False
        if write.stage != POSTABLE:
            raise LocalProtocolError(f"claim of handle {handle}, which is packing or was claimed before")
        shard = write.shard
        never_posted = shard.state is GRANTED
        if (
            (never_posted and shard.outgoing.due <= now)
            or not (never_posted or shard.state is WRITING)
            or not shard.link.up
        ):
            return False
        shard.move("claim")
        write.stage = CLAIMED
        if not shard.packed:
            shard.outgoing.readers += 1
        self._posted.arm(write, now + self._set.write_s)
        return True

    # ------------------------------------------------------------ links

    def link_up(self, link: ev.Link, incarnation: int) -> None:
        """``link`` is connected to ``incarnation``."""
        self._links[link] = _Link(link, incarnation, self._forgotten, self._set.open_per_link)

    def floor(self, link: ev.Link) -> int:
        """Up to it registrations count as seen on ``link``, and none is open: the highest on any link that was
        forgotten before.
        """
        state = self._links.get(link)
        return self._forgotten if state is None else state.base

    def link_forget(self, link: ev.Link) -> None:
        """Nothing is open on ``link`` and room is needed. That its registrations were seen is not forgotten."""
        state = self._links.pop(link, None)
        if state is not None:
            self._forgotten = max(self._forgotten, state.seen.highest)

    def link_gone(self, link: ev.Link, out: Out) -> None:
        """The process behind ``link`` is proven gone: nothing more is posted to it, what is active is waited for."""
        state = self._links.pop(link, None)
        if state is None:
            return
        state.up = False
        for shard in list(state.live.values()):
            self._end(shard.outgoing, "peer gone", "fail", out)

    # ------------------------------------------------------------ messages

    def on_register(self, link: ev.Link, m: msg.Register, now: float, out: Out) -> None:
        """Rendezvous, seen from the registration."""
        state = self._links[link]
        attempt = m.attempt
        if attempt in state.seen:
            self._count("register_again")
            self._repeat(state, attempt, out)
            return
        state.seen.add(attempt)
        if m.lowest > 1:
            self._trim(state, min(m.lowest, attempt) - 1)
        outgoing = self._transfers.get(m.transfer_id)
        refusal = ""
        if len(state.live) >= self._set.open_per_link:
            refusal = TOO_MANY
        elif outgoing is None:
            refusal = self._remembered.get(m.transfer_id, "")
        elif outgoing.ended:
            refusal = outgoing.reason or "ended"
        elif outgoing.peer not in ("", link[0]):
            refusal = "transfer is registered by another engine"
        elif outgoing.begun and m.tokens > outgoing.tokens:
            refusal = TOO_LONG
        elif link in outgoing.shards and outgoing.shards[link].attempt > attempt:
            refusal = "superseded"
        elif link in outgoing.shards and outgoing.shards[link].state is Sending.WRITTEN:
            refusal = "handed over before"
        if refusal:
            self._refuse(state, attempt, refusal, out)
            if refusal in (TOO_MANY, TOO_LONG) and outgoing is None:
                self._remember(m.transfer_id, refusal)
            elif refusal in (TOO_MANY, TOO_LONG) and outgoing is not None and outgoing.peer in ("", link[0]):
                self._end(outgoing, refusal, "fail", out)  # its receiver has given it up by this
            return
        if outgoing is None:
            outgoing = self._transfers[m.transfer_id] = _Outgoing(m.transfer_id)
            self._leases.arm(outgoing, now + self._set.orphan_s)
        outgoing.peer = link[0]
        outgoing.fanout = max(1, m.fanout)
        older = outgoing.shards.get(link)
        if older is not None and older.state not in SENDING_CLOSED:
            older.requeue = True
            self._stop(older, "cancel", "superseded", out)
        shard = _Shard(state, outgoing, m)
        outgoing.shards[link] = shard
        outgoing.open += 1
        state.live[attempt] = shard
        if outgoing.begun:
            self._meet(shard, out)

    def on_grant(self, link: ev.Link, m: msg.Grant, now: float, out: Out) -> None:
        """Memory for a registration that had none."""
        shard = self._links[link].live.get(m.attempt)
        if shard is None or shard.memory is not None or m.memory is None:
            self._count("grant_ignored")
            return
        shard.memory = m.memory
        shard.move("grant")
        self._pump(shard, out)

    def on_cancel(self, link: ev.Link, m: msg.Cancel, now: float, out: Out) -> None:
        """Stop and answer; a registration never seen is refused from now on (E4), and its prefill is not waited for."""
        state = self._links[link]
        shard = state.live.get(m.attempt)
        if shard is not None:
            self._cancel(shard, m.requeue, out)
            return
        known = m.attempt in state.seen
        state.seen.add(m.attempt)
        if not known:
            self._close_unseen(state, m.attempt, out)
            outgoing = self._transfers.get(m.transfer_id)
            if m.requeue:
                return
            if outgoing is None:
                self._remember(m.transfer_id, "cancelled")
            elif not outgoing.ended and link not in outgoing.shards and outgoing.peer in ("", link[0]):
                self._end(outgoing, "cancelled", "cancel", out)
        else:
            self._repeat(state, m.attempt, out)

    def on_beat(self, link: ev.Link, m: msg.Beat, now: float, out: Out) -> tuple[int, ...]:
        """Bring the receiver up to date on all that it has open; returns the attempts of which something is missing
        here.
        """
        state = self._links[link]
        missing: list[int] = []
        for ask in m.open:
            shard = state.live.get(ask.attempt)
            if shard is None:
                if ask.attempt in state.seen:
                    self._repeat(state, ask.attempt, out)
                else:
                    missing.append(ask.attempt)
                continue
            if ask.stage >= msg.ASK_CANCELLED:
                self._cancel(shard, ask.stage == msg.ASK_REQUEUE, out)
            elif ask.stage == msg.ASK_GRANTED and shard.memory is None:
                missing.append(ask.attempt)
            elif (
                shard.state is MET
                and shard.outgoing.started
                and (ask.stage == msg.ASK_REGISTERED or shard.outgoing.final)
            ):
                self._offer(shard, out)
            elif ask.parts < len(shard.notices):
                for notice in shard.notices:
                    out.append(ev.Send(link, notice))
        if m.lowest > 1:
            self._trim(state, m.lowest - 1)
        return tuple(missing)

    # ------------------------------------------------------------ the host

    def begin(self, e: ev.Begin, now: float, out: Out) -> None:
        """Rendezvous, seen from the prefill."""
        outgoing = self._transfers.get(e.transfer_id)
        if outgoing is None:
            outgoing = self._transfers[e.transfer_id] = _Outgoing(e.transfer_id)
        elif outgoing.begun:
            raise LocalProtocolError(f"{e.transfer_id} began before")
        self._leases.disarm(outgoing)
        outgoing.begun = True
        outgoing.tokens, outgoing.bytes_per_token, outgoing.chunked = e.tokens, e.bytes_per_token, e.chunked
        reason = self._remembered.get(e.transfer_id, "")
        if any(shard.tokens > e.tokens for shard in outgoing.shards.values()):
            reason = TOO_LONG
        if reason:
            self._end(outgoing, reason, "fail", out)
            return
        for shard in list(outgoing.shards.values()):
            self._meet(shard, out)
        self._settle(outgoing, out)

    def give_way(self, e: ev.GiveWay, now: float, out: Out) -> None:
        """Rule 8: for each peer that a finished prefill waits for, the youngest that has its memory and sends nothing
        yet returns it.
        """
        hungry: set[str] = set()
        youngest: dict[str, _Outgoing] = {}
        for outgoing in self._transfers.values():
            states = {shard.state for shard in outgoing.shards.values()}
            if outgoing.final and MET in states and not outgoing.ended:
                hungry.add(outgoing.peer)
            elif (
                not outgoing.final
                and states & {PROMISED, GRANTED}
                and all(s.parts == 0 and s.tokens for s in outgoing.shards.values())
            ):
                youngest[outgoing.peer] = outgoing
        for peer in sorted(hungry & youngest.keys()):
            self._count("gave_way")
            for shard in list(youngest[peer].shards.values()):
                if shard.memory is not None:
                    shard.requeue = True
                    self._stop(shard, "fail", msg.GAVE_WAY, out)

    def computed(self, e: ev.Computed, now: float, out: Out) -> None:
        """More of the prompt is in the cache."""
        outgoing = self._transfers.get(e.transfer_id)
        if outgoing is None or outgoing.ended or not outgoing.begun:
            return  # over; one that has not begun here is what a late registration of it has left
        if outgoing.final or e.tokens > outgoing.tokens or (e.final and e.tokens != outgoing.tokens):
            raise LocalProtocolError(f"{e.transfer_id}: computed {e.tokens} of {outgoing.tokens}, final {e.final}")
        first, outgoing.started = not outgoing.started, True
        outgoing.computed, outgoing.final = e.tokens, e.final
        if e.final:
            self._leases.arm(outgoing, now + self._set.lease_s)
        for shard in list(outgoing.shards.values()):
            if shard.state is MET and (first or e.final):
                self._offer(shard, out)
            self._pump(shard, out)

    def preempted(self, e: ev.Preempted, now: float, out: Out) -> None:
        """The engine took the cache back; parts already packed or landed stay."""
        outgoing = self._transfers.get(e.transfer_id)
        if outgoing is None or outgoing.ended or not outgoing.begun:
            return
        if outgoing.final:
            raise LocalProtocolError(f"{e.transfer_id} is finished: it is held, not preempted")
        outgoing.computed = 0
        outgoing.started = False  # it queues again: until it runs it asks for no memory over there

    def abort(self, e: ev.Abort, now: float, out: Out) -> None:
        """No more cache will come: the receiver is told, now or when it registers."""
        outgoing = self._transfers.get(e.transfer_id)
        if outgoing is None:
            self._remember(e.transfer_id, e.reason)
        elif not outgoing.ended:
            self._end(outgoing, e.reason, "fail", out)

    def packed(self, e: ev.Packed, now: float, out: Out) -> None:
        """A gather is complete: its source is not read any more."""
        write = self._writes.get(e.handle)
        if write is None or write.stage != PACKING:
            raise LocalProtocolError(f"packed: handle {e.handle} is not packing")
        shard = write.shard
        shard.outgoing.readers -= 1
        write.stage = POSTABLE
        if shard.state in (GRANTED, WRITING):
            self._post(write, out)
        else:
            self._drop(write)
        self._settle(shard.outgoing, out)

    def write_done(self, e: ev.WriteDone, now: float, out: Out) -> None:
        """A write is remotely complete."""
        write = self._writes.get(e.handle)
        if write is None or write.stage < CLAIMED:
            raise LocalProtocolError(f"done: handle {e.handle} was not claimed")
        shard = write.shard
        broken = write.stage == BROKEN
        self._drop(write)
        if shard.state is WRITING and not broken:
            shard.done += 1
            notice = msg.Written(
                self._me, shard.link.incarnation, shard.attempt, write.part, write.stop - write.start, write.last
            )
            shard.notices.append(notice)
            out.append(ev.Send(shard.link.key, notice))
            if shard.done == shard.parts and shard.planned == shard.outgoing.tokens:
                self._close(shard, "finish", out)
                self._settle(shard.outgoing, out)
                return
        self._quiet(shard, out)

    def write_broken(self, e: ev.WriteBroken, now: float, out: Out) -> None:
        """A write failed; it and its siblings are stopped and waited for before anybody is told."""
        write = self._writes.get(e.handle)
        if write is None or write.stage < CLAIMED:
            raise LocalProtocolError(f"broken: handle {e.handle} was not claimed")
        write.stage = BROKEN
        if write.shard.state is WRITING:
            self._end(write.shard.outgoing, "write failed", "fail", out)

    def write_quiet(self, e: ev.WriteQuiet, now: float, out: Out) -> None:
        """Nothing of a broken or abandoned write is active any more."""
        write = self._writes.get(e.handle)
        if write is None or write.stage < CLAIMED:
            raise LocalProtocolError(f"quiet: handle {e.handle} was not claimed")
        shard = write.shard
        if shard.state is WRITING:
            raise LocalProtocolError(f"quiet: handle {e.handle} was neither broken nor abandoned")
        self._drop(write)
        self._quiet(shard, out)

    def fire(self, now: float, out: Out) -> None:
        """Leases, orphans and writes that took too long."""
        while (outgoing := self._leases.pop_due(now)) is not None:
            if not outgoing.begun:
                self._end(outgoing, "no prefill here", "fail", out)
            elif outgoing.overdue:
                self._end(outgoing, "writes took too long", "fail", out)
                self._tell(outgoing, out)
            else:
                outgoing.overdue = True
                self._leases.arm(outgoing, now + self._set.write_s)
                waiting = [s for s in outgoing.shards.values() if s.state in (REGISTERED, PROMISED, MET, GRANTED)]
                if waiting or len(outgoing.shards) < outgoing.fanout:
                    self._end(outgoing, "lease", "fail", out, never_posted_only=True)
        while (write := self._posted.pop_due(now)) is not None:
            shard = write.shard
            if shard.state is WRITING:
                self._end(shard.outgoing, "write took too long", "fail", out)
            self._tell(shard.outgoing, out)

    # ------------------------------------------------------------ moving one shard

    def _meet(self, shard: _Shard, out: Out) -> None:
        shard.move("meet")
        if shard.state is MET and shard.outgoing.started:
            self._offer(shard, out)
        self._pump(shard, out)

    def _offer(self, shard: _Shard, out: Out) -> None:
        outgoing, link = shard.outgoing, shard.link
        out.append(
            ev.Send(link.key, msg.Offer(self._me, link.incarnation, shard.attempt, outgoing.tokens, outgoing.final))
        )

    def _pump(self, shard: _Shard, out: Out) -> None:
        """Plan the parts that can leave now."""
        state = shard.state
        if (state is not GRANTED and state is not WRITING) or not shard.link.up:
            return
        outgoing = shard.outgoing
        if shard.planned < 0:
            shard.planned = outgoing.tokens - shard.tokens
            if shard.tokens == 0:
                notice = msg.Written(self._me, shard.link.incarnation, shard.attempt, 0, 0, True)
                shard.notices.append(notice)
                out.append(ev.Send(shard.link.key, notice))
                self._close(shard, "finish", out)
                self._settle(outgoing, out)
                return
        whole = not (outgoing.chunked and shard.packed)
        if shard.waiting or (whole and not outgoing.final):
            return
        size = outgoing.bytes_per_token
        while shard.planned < outgoing.computed:
            start, stop = shard.planned, outgoing.computed
            if shard.packed:
                stop = min(stop, start + self._part_tokens(size))
                if not self._stage(shard, (stop - start) * size):
                    return
            self._handles += 1
            write = _Write(
                self._handles, shard, shard.parts, start, stop, stop == outgoing.tokens, (stop - start) * size
            )
            shard.planned = stop
            shard.parts += 1
            shard.writes[write.handle] = self._writes[write.handle] = write
            if shard.packed:
                outgoing.readers += 1
                out.append(ev.Pack(write.handle, outgoing.transfer_id, shard.link.key, start, stop))
            else:
                write.stage = POSTABLE
                self._post(write, out)

    def _post(self, write: _Write, out: Out) -> None:
        shard = write.shard
        out.append(
            ev.Post(
                write.handle,
                shard.outgoing.transfer_id,
                shard.link.key,
                write.start,
                write.stop,
                shard.packed,
                shard.memory,
            )
        )

    def _cancel(self, shard: _Shard, requeue: bool, out: Out) -> None:
        if shard.state is STOPPING:
            return
        if requeue:
            if shard.parts:
                return  # it is on its way: landing gives the memory back sooner than starting over
            shard.requeue = True
            self._stop(shard, "cancel", "gave way", out)
        else:
            self._end(shard.outgoing, "cancelled", "cancel", out)

    def _stop(self, shard: _Shard, closing: str, reason: str, out: Out) -> None:
        """Close at once when nothing is active; else stop the writes and wait."""
        if shard.state in SENDING_CLOSED or shard.state is STOPPING:
            return
        shard.reason, shard.closing = reason, closing
        active = [write for write in shard.writes.values() if write.stage >= CLAIMED]
        if not active:
            self._close(shard, closing, out)
            return
        shard.move("stop")
        for write in active:
            out.append(ev.Abandon(write.handle))

    def _quiet(self, shard: _Shard, out: Out) -> None:
        if shard.state is STOPPING and shard.active() == 0:
            self._close(shard, shard.closing, out)
        self._settle(shard.outgoing, out)

    def _close(self, shard: _Shard, event: str, out: Out) -> None:
        """The one place where a shard ends and its receiver is told."""
        shard.move(event)
        link, outgoing = shard.link, shard.outgoing
        outgoing.open -= 1
        for write in list(shard.writes.values()):
            if write.stage == POSTABLE:
                self._drop(write)
        if shard.state is Sending.WRITTEN:
            outgoing.closed += 1
        else:
            notice: msg.Message = (
                msg.Failed(self._me, link.incarnation, shard.attempt, shard.reason[:64])
                if shard.state is Sending.FAILED
                else msg.Cancelled(self._me, link.incarnation, shard.attempt)
            )
            shard.notices = [notice]
            if link.up:
                out.append(ev.Send(link.key, notice))
            if shard.requeue and outgoing.shards.get(link.key) is shard:
                del outgoing.shards[link.key]
        del link.live[shard.attempt]
        self._bury(link, shard.attempt, shard.notices)

    # ------------------------------------------------------------ moving one transfer

    def _end(
        self, outgoing: _Outgoing, reason: str, closing: str, out: Out, *, never_posted_only: bool = False
    ) -> None:
        """No shard of ``outgoing`` will be sent any more, but for those that are posted when a lease ends it."""
        if not outgoing.ended:
            outgoing.ended, outgoing.reason = True, reason
        for shard in list(outgoing.shards.values()):
            if not (never_posted_only and shard.state is WRITING):
                self._stop(shard, closing, reason, out)
        self._settle(outgoing, out)

    def _settle(self, outgoing: _Outgoing, out: Out) -> None:
        """Say what has become true of the whole transfer, each thing once."""
        if outgoing.begun:
            if not outgoing.ended and outgoing.closed >= outgoing.fanout:
                outgoing.ended = True
            if outgoing.ended and outgoing.open == 0:
                self._tell(outgoing, out)
            if not outgoing.released and outgoing.readers == 0 and not self._read_later(outgoing):
                outgoing.released = True
                out.append(ev.Released(outgoing.transfer_id))
        over = outgoing.ended and outgoing.open == 0 and (outgoing.released or not outgoing.begun)
        if over and self._transfers.get(outgoing.transfer_id) is outgoing:
            del self._transfers[outgoing.transfer_id]
            self._leases.disarm(outgoing)
            self._remember(outgoing.transfer_id, outgoing.reason or "handed over before")

    def _read_later(self, outgoing: _Outgoing) -> bool:
        """Whether a write that is not yet under way may still read the source."""
        if not outgoing.ended and len(outgoing.shards) < outgoing.fanout:
            return True
        for shard in outgoing.shards.values():
            if shard.state in (REGISTERED, PROMISED, MET, GRANTED, WRITING):
                under_way = shard.planned == outgoing.tokens and (shard.packed or shard.state is WRITING)
                if not under_way:
                    return True
        return False

    def _tell(self, outgoing: _Outgoing, out: Out) -> None:
        if outgoing.begun and not outgoing.told:
            outgoing.told = True
            ok = outgoing.closed >= outgoing.fanout
            out.append(ev.Sent(outgoing.transfer_id, ok, "" if ok else outgoing.reason))

    # ------------------------------------------------------------ staging

    def _part_tokens(self, bytes_per_token: int) -> int:
        """Tokens of the largest part: half of what a peer may stage, so that one is packed while another is written."""
        share = int(self._set.staging_bytes * self._set.staging_share) // 2
        return max(1, share // bytes_per_token) if bytes_per_token else 1 << 62

    def _stage(self, shard: _Shard, size: int) -> bool:
        """Take staging for one part, or queue the shard for it."""
        engine = shard.link.key[0]
        mine = self._staged_by.get(engine, 0)
        limit = self._set.staging_bytes * self._set.staging_share
        if (self._staged + size > self._set.staging_bytes and self._staged) or (mine and mine + size > limit):
            shard.waiting = True
            self.short.append(shard)
            return False
        self._staged += size
        self._staged_by[engine] = mine + size
        return True

    def _drop(self, write: _Write) -> None:
        """Forget a write that nothing reads or performs any more."""
        shard = write.shard
        self._posted.disarm(write)
        del self._writes[write.handle]
        del shard.writes[write.handle]
        if not shard.packed:
            if write.stage >= CLAIMED:
                shard.outgoing.readers -= 1
            return
        engine = shard.link.key[0]
        self._staged -= write.bytes
        left = self._staged_by[engine] - write.bytes
        if left:
            self._staged_by[engine] = left
        else:
            del self._staged_by[engine]

    def refill(self, out: Out) -> None:
        """Let those who wait for staging try again, in order. The endpoint calls it at the end of a step; cheap when
        nobody waits.
        """
        for _ in range(len(self.short)):
            shard = self.short.popleft()
            shard.waiting = False
            self._pump(shard, out)

    # ------------------------------------------------------------ what late and lost messages need

    def _refuse(self, link: _Link, attempt: int, reason: str, out: Out) -> None:
        self._count("refused")
        notice = msg.Failed(self._me, link.incarnation, attempt, reason[:64])
        out.append(ev.Send(link.key, notice))
        self._bury(link, attempt, [notice])

    def _close_unseen(self, link: _Link, attempt: int, out: Out) -> None:
        notice = msg.Cancelled(self._me, link.incarnation, attempt)
        out.append(ev.Send(link.key, notice))
        self._bury(link, attempt, [notice])

    def _repeat(self, link: _Link, attempt: int, out: Out) -> None:
        """Say the outcome of a closed registration again; one that is forgotten has failed: nothing of it is active."""
        if attempt in link.live:
            return
        notices = link.tombstones.get(attempt)
        if notices is None:
            notices = [msg.Failed(self._me, link.incarnation, attempt, msg.FORGOTTEN)]
        for notice in notices:
            out.append(ev.Send(link.key, notice))

    def _bury(self, link: _Link, attempt: int, notices: list[msg.Message]) -> None:
        link.tombstones[attempt] = notices
        if len(link.tombstones) > self._set.tombstones_per_link:
            link.tombstones.popitem(last=False)

    def _trim(self, link: _Link, floor: int) -> None:
        """The receiver has closed everything up to ``floor``."""
        if floor > link.seen.floor or link.tombstones:
            link.seen.raise_floor(floor)
            for attempt in [a for a in link.tombstones if a <= floor]:
                del link.tombstones[attempt]

    def _remember(self, transfer_id: str, reason: str) -> None:
        self._remembered[transfer_id] = reason
        if len(self._remembered) > self._set.remembered_ids:
            self._remembered.popitem(last=False)

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
