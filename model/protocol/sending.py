"""How a sender's shards and transfers move: what is planned, posted, stopped and closed, and what is then said, once.

The lower half of ``sender``: no event arrives here. Every shard ends in ``_close``, every transfer in ``_settle``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import Alarm, Deadlines
from pushkv.model.protocol.outgoing import CLAIMED, PACKING, POSTABLE, SenderLink, Shard, Transfer, Write
from pushkv.model.protocol.settings import Settings
from pushkv.model.protocol.staging import Staging
from pushkv.model.protocol.states import SENDING_CLOSED, Sending

Out = list[ev.Record]

REGISTERED, PROMISED, MET, GRANTED = Sending.REGISTERED, Sending.PROMISED, Sending.MET, Sending.GRANTED
WRITING, STOPPING = Sending.WRITING, Sending.STOPPING


class Shards:
    """The state of one rank's sender, and the moves that its events have in common."""

    def __init__(self, incarnation: int, settings: Settings, alarm: Alarm | None = None) -> None:
        self._me = incarnation
        self._set = settings
        self._links: dict[ev.Link, SenderLink] = {}
        self._transfers: dict[str, Transfer] = {}
        self._writes: dict[int, Write] = {}
        self._leases: Deadlines[Transfer] = Deadlines(alarm)
        self._posted: Deadlines[Write] = Deadlines(alarm)
        self.deadlines = (self._leases, self._posted)
        self._remembered: OrderedDict[str, str] = OrderedDict()
        self._forgotten = 0
        self._handles = 0
        self._staging = Staging(settings)
        self.short: deque[Shard] = deque()
        """Shards of which a part waits for staging."""
        self.counters: dict[str, int] = {}

    # ------------------------------------------------------------ moving one shard

    def _meet(self, shard: Shard, out: Out) -> None:
        shard.move("meet")
        if shard.state is MET and shard.outgoing.started:
            self._offer(shard, out)
        self._pump(shard, out)

    def _granted(self, shard: Shard, memory: Any, out: Out) -> None:
        shard.memory = memory
        shard.move("grant")
        self._pump(shard, out)

    def _offer(self, shard: Shard, out: Out) -> None:
        outgoing, link = shard.outgoing, shard.link
        out.append(
            ev.Send(link.key, msg.Offer(self._me, link.incarnation, shard.attempt, outgoing.tokens, outgoing.final))
        )

    def _pump(self, shard: Shard, out: Out) -> None:
        """Plan the parts that can leave now. (Where a link is down no shard is in a state to send.)"""
        state = shard.state
        if state is not GRANTED and state is not WRITING:
            return
        outgoing = shard.outgoing
        if shard.planned < 0:
            shard.planned = outgoing.tokens - shard.tokens
            if shard.tokens == 0:
                self._tell_part(shard, msg.Written(self._me, shard.link.incarnation, shard.attempt, 0, 0, True), out)
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
                stop = min(stop, start + self._staging.part_tokens(size))
                if not self._staging.take(shard.link.key[0], (stop - start) * size):
                    shard.waiting = True
                    self.short.append(shard)
                    return
            self._handles += 1
            last, stage = stop == outgoing.tokens, PACKING if shard.packed else POSTABLE
            write = Write(self._handles, shard, shard.parts, start, stop, last, (stop - start) * size, stage)
            shard.planned = stop
            shard.parts += 1
            shard.writes[write.handle] = self._writes[write.handle] = write
            if shard.packed:
                outgoing.readers += 1
                out.append(ev.Pack(write.handle, outgoing.transfer_id, shard.link.key, start, stop))
            else:
                self._post(write, out)

    def _post(self, write: Write, out: Out) -> None:
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

    def _cancel(self, shard: Shard, requeue: bool, out: Out) -> None:
        if shard.state is STOPPING and not shard.requeue:
            return
        if requeue:
            if not shard.idle:
                return  # it is on its way: landing gives the memory back sooner than starting over
            shard.requeue = True
            self._stop(shard, "cancel", "gave way", out)
        else:
            self._end(shard.outgoing, "cancelled", "cancel", out)

    def _stop(self, shard: Shard, closing: str, reason: str, out: Out) -> None:
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

    def _finish(self, shard: Shard, out: Out) -> None:
        """All parts are there, and no other shard can have lost what this one was made of: only then it is over. Until
        then all of them can be sent again from the first token.
        """
        if shard.done == shard.parts and shard.planned == shard.outgoing.tokens and shard.outgoing.sure:
            if shard.kept is not None:
                self._tell_part(shard, shard.kept, out)
            self._close(shard, "finish", out)

    def _tell_part(self, shard: Shard, part: msg.Written, out: Out) -> None:
        shard.notices.append(part)
        out.append(ev.Send(shard.link.key, part))

    def _quiet(self, shard: Shard, out: Out) -> None:
        if shard.state is STOPPING and shard.active() == 0:
            self._close(shard, shard.closing, out)
        self._settle(shard.outgoing, out)

    def _close(self, shard: Shard, event: str, out: Out) -> None:
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

    def _end(self, outgoing: Transfer, reason: str, closing: str, out: Out, *, never_posted_only: bool = False) -> None:
        """No shard of ``outgoing`` will be sent any more, but for those that are posted when a lease ends it."""
        if not outgoing.ended:
            outgoing.ended, outgoing.reason = True, reason
        for shard in list(outgoing.shards.values()):
            if not (never_posted_only and shard.state is WRITING):
                self._stop(shard, closing, reason, out)
        self._settle(outgoing, out)

    def _settle(self, outgoing: Transfer, out: Out) -> None:
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
            outgoing.shards = {}  # they name each other: so that they are freed at once
            self._remember(outgoing.transfer_id, outgoing.reason or "handed over before")

    def _read_later(self, outgoing: Transfer) -> bool:
        """Whether a write that is not yet under way may still read the source."""
        if not outgoing.ended and (not outgoing.sure or len(outgoing.shards) < outgoing.fanout):
            return True
        for shard in outgoing.shards.values():
            if shard.requeue and not outgoing.ended:
                return True  # it is registered again
            if shard.state in (REGISTERED, PROMISED, MET, GRANTED, WRITING):
                under_way = shard.planned == outgoing.tokens and (shard.packed or shard.state is WRITING)
                if not under_way:
                    return True
        return False

    def _tell(self, outgoing: Transfer, out: Out) -> None:
        if outgoing.begun and not outgoing.told:
            outgoing.told = True
            ok = outgoing.closed >= outgoing.fanout
            out.append(ev.Sent(outgoing.transfer_id, ok, "" if ok else outgoing.reason))

    # ------------------------------------------------------------ staging

    def _drop(self, write: Write) -> None:
        """Forget a write that nothing reads or performs any more."""
        shard = write.shard
        self._posted.disarm(write)
        del self._writes[write.handle]
        del shard.writes[write.handle]
        if not shard.packed:
            if write.stage >= CLAIMED:
                shard.outgoing.readers -= 1
            return
        self._staging.give_back(shard.link.key[0], write.bytes)

    def refill(self, out: Out) -> None:
        """Let those who wait for staging try again, in order. The endpoint calls it at the end of a step; cheap when
        nobody waits.
        """
        for _ in range(len(self.short)):
            shard = self.short.popleft()
            shard.waiting = False
            self._pump(shard, out)

    # ------------------------------------------------------------ what late and lost messages need

    def _refuse(self, link: SenderLink, attempt: int, reason: str, out: Out) -> None:
        self._count("refused")
        notice = msg.Failed(self._me, link.incarnation, attempt, reason[:64])
        out.append(ev.Send(link.key, notice))
        self._bury(link, attempt, [notice])

    def _close_unseen(self, link: SenderLink, attempt: int, out: Out) -> None:
        notice = msg.Cancelled(self._me, link.incarnation, attempt)
        out.append(ev.Send(link.key, notice))
        self._bury(link, attempt, [notice])

    def _repeat(self, link: SenderLink, attempt: int, out: Out) -> None:
        """Say the outcome of a closed registration again; one that is forgotten has failed: nothing of it is active."""
        notices = link.tombstones.get(attempt)
        if notices is None:
            notices = [msg.Failed(self._me, link.incarnation, attempt, msg.FORGOTTEN)]
        for notice in notices:
            out.append(ev.Send(link.key, notice))

    def _bury(self, link: SenderLink, attempt: int, notices: list[msg.Message]) -> None:
        link.tombstones[attempt] = notices
        if len(link.tombstones) > self._set.tombstones_per_link:
            link.tombstones.popitem(last=False)

    def _trim(self, link: SenderLink, floor: int) -> None:
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
