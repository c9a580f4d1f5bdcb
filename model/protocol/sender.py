"""The posting half of one rank: rendezvous, lease, staging, writes, and the one who says that a shard is settled (E1).

Decides when a part is packed and posted, when the source may go, and what the receiver is told. Does not decide where
bytes go (layout), which path is taken (host) or whether a peer lives (``Peer``). In pull the same machine runs on D and
its posts are reads.
"""

from __future__ import annotations

from typing import Final

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.outgoing import CLAIMED, PACKING, POSTABLE, SenderLink, Shard, Transfer
from pushkv.model.protocol.sending import GRANTED, MET, PROMISED, REGISTERED, WRITING, Out, Shards
from pushkv.model.protocol.states import SENDING_CLOSED, Sending

TOO_MANY: Final = "too many open registrations"
TOO_LONG: Final = "more tokens than the prompt has"


class Sender(Shards):
    """All shards that one rank sends. Driven by :class:`~pushkv.model.protocol.endpoint.Endpoint`.

    ``counters`` counts what was refused or survived, by name.
    """

    # ------------------------------------------------------------ what a host may look at

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging in use."""
        return self._staging.used

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
        if (never_posted and shard.outgoing.due <= now) or not (never_posted or shard.state is WRITING):
            return False
        shard.move("claim")
        write.stage = CLAIMED
        if not shard.packed:
            shard.outgoing.readers += 1
        self._posted.arm(write, now + self._set.write_s)
        return True

    def about(self, handle: int) -> tuple[int, int, int]:
        """(attempt, part, first) of an open ``handle``: its registration, its number among the parts, and the first
        token that the receiver asked for, counted from the prompt's first. Raises ``LocalProtocolError``.
        """
        write = self._writes.get(handle)
        if write is None:
            raise LocalProtocolError(f"handle {handle} is not open")
        shard = write.shard
        return shard.attempt, write.part, shard.outgoing.tokens - shard.tokens

    def lost(self, handle: int) -> bool:
        """Whether the tokens of a part that is to be packed are not in the cache any more: the host asks after a step
        that took a ``Preempted``, and answers ``Unpacked`` where its gather has not begun.
        """
        write = self._writes.get(handle)
        return write is not None and write.stop > write.shard.outgoing.computed

    # ------------------------------------------------------------ links

    def link_up(self, link: ev.Link, incarnation: int) -> None:
        """``link`` is connected to ``incarnation``."""
        self._links[link] = SenderLink(link, incarnation, self._forgotten, self._set.open_per_link)

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
            waits = state.live.get(attempt)
            if waits is None:
                self._repeat(state, attempt, out)
            elif waits.memory is None and m.memory is not None:
                self._granted(waits, m.memory, out)  # its grant came before it, or not at all
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
            if outgoing is None:
                self._remember(m.transfer_id, refusal)  # if it was not: it keeps its place
            elif refusal in (TOO_MANY, TOO_LONG) and outgoing.peer in ("", link[0]):
                self._end(outgoing, refusal, "fail", out)  # its receiver has given it up by this
            return
        if outgoing is None:
            outgoing = self._transfers[m.transfer_id] = Transfer(m.transfer_id)
            self._leases.arm(outgoing, now + self._set.orphan_s)
        outgoing.peer = link[0]
        outgoing.fanout = max(1, m.fanout)
        older = outgoing.shards.get(link)
        if older is not None and older.state not in SENDING_CLOSED:
            self._stop(older, "cancel", "superseded", out)
        shard = Shard(state, outgoing, m)
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
        self._granted(shard, m.memory, out)

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
            elif link not in outgoing.shards and outgoing.peer in ("", link[0]):
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
            outgoing = self._transfers[e.transfer_id] = Transfer(e.transfer_id)
        elif outgoing.begun:
            raise LocalProtocolError(f"{e.transfer_id} began before")
        self._leases.disarm(outgoing)
        outgoing.begun = True
        outgoing.tokens, outgoing.bytes_per_token = e.tokens, e.bytes_per_token
        outgoing.chunked, outgoing.alone = e.chunked, e.alone
        reason = self._remembered.get(e.transfer_id, "")
        if outgoing.shards and max([shard.tokens for shard in outgoing.shards.values()]) > e.tokens:
            reason = TOO_LONG
        if reason:
            self._end(outgoing, reason, "fail", out)
        elif outgoing.shards:
            for shard in list(outgoing.shards.values()):
                self._meet(shard, out)
            self._settle(outgoing, out)

    def give_way(self, e: ev.GiveWay, now: float, out: Out) -> None:
        """Rule 8: for each peer that a finished prefill waits for, the youngest that has its memory and sends nothing
        yet, or no more as its prefill was preempted, returns it.
        """
        hungry: set[str] = set()
        patient: set[str] = set()  # their memory is on its way back
        youngest: dict[str, Transfer] = {}
        for outgoing in self._transfers.values():
            shards = outgoing.shards.values()
            states = {shard.state for shard in shards}
            if any(shard.requeue for shard in shards):
                patient.add(outgoing.peer)
            elif outgoing.final and MET in states:
                hungry.add(outgoing.peer)
            elif (
                not outgoing.final
                and states & {PROMISED, GRANTED, WRITING}
                and all(shard.tokens and shard.idle for shard in shards)
            ):
                youngest[outgoing.peer] = outgoing
        for peer in sorted((hungry & youngest.keys()) - patient):
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
            if shard.state is WRITING:
                self._finish(shard, out)
        if e.final:
            self._settle(outgoing, out)

    def preempted(self, e: ev.Preempted, now: float, out: Out) -> None:
        """The engine took the cache back; parts already packed or landed stay, as do gathers that have begun. Those
        that have not are ``lost``, also of what has ended.
        """
        outgoing = self._transfers.get(e.transfer_id)
        if outgoing is None:
            return
        if outgoing.final and not outgoing.ended:
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

    def unpacked(self, e: ev.Unpacked, now: float, out: Out) -> None:
        """A gather will not be: its part gives its staging back, and is planned anew when it is computed again."""
        write = self._writes.get(e.handle)
        if write is None or write.stage != PACKING or write.part != write.shard.parts - 1:
            raise LocalProtocolError(f"unpacked: handle {e.handle} is not packing, or not the last part of its shard")
        shard = write.shard
        shard.outgoing.readers -= 1
        shard.parts, shard.planned = write.part, write.start
        self._drop(write)
        self._pump(shard, out)
        self._settle(shard.outgoing, out)

    def write_done(self, e: ev.WriteDone, now: float, out: Out) -> None:
        """A write is remotely complete."""
        write = self._writes.get(e.handle)
        if write is None or write.stage < CLAIMED:
            raise LocalProtocolError(f"done: handle {e.handle} was not claimed")
        shard = write.shard
        self._drop(write)
        if shard.state is WRITING:
            shard.done += 1
            part = msg.Written(
                self._me, shard.link.incarnation, shard.attempt, write.part, write.stop - write.start, write.last
            )
            if write.last and not shard.outgoing.sure:
                shard.kept = part
            else:
                self._tell_part(shard, part, out)
            self._finish(shard, out)
        self._quiet(shard, out)

    def write_broken(self, e: ev.WriteBroken, now: float, out: Out) -> None:
        """A write failed; it and its siblings are stopped and waited for before anybody is told."""
        write = self._writes.get(e.handle)
        if write is None or write.stage < CLAIMED:
            raise LocalProtocolError(f"broken: handle {e.handle} was not claimed")
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
            if shard.state is WRITING or shard.requeue:
                self._end(shard.outgoing, "write took too long", "fail", out)
            self._tell(shard.outgoing, out)
