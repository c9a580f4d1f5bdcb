"""The half of one rank whose memory a peer touches: registrations, arrivals, the verdict, and the evidence that nobody
writes any more.

Decides when a transfer has landed, when it will not come, and when its memory is settled. Does not decide who gets
memory (``Ledger``). In pull the same machine runs on P: what it exposes is the source, and ``Landed`` means that it has
been read.
"""

from __future__ import annotations

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.incoming import Expected, ReceiverLink, Shard
from pushkv.model.protocol.receiving import EXPOSED, OFFERED, REGISTERED, WITHDRAWN, Out, Registrations
from pushkv.model.protocol.states import RECEIVING_SETTLED

_ASKED = {REGISTERED: msg.ASK_REGISTERED, OFFERED: msg.ASK_OFFERED, EXPOSED: msg.ASK_GRANTED}


class Receiver(Registrations):
    """All transfers that one rank receives. Driven by :class:`~pushkv.model.protocol.endpoint.Endpoint`."""

    def sizes(self) -> dict[str, int]:
        """Entries per table: what must stay bounded by what is open."""
        return {
            "transfers": len(self._transfers),
            "live": sum(len(link.live) + len(link.unsent) for link in self._links.values()),
            "armed": self.deadlines.armed,
            "deadlines": len(self.deadlines),
        }

    def busy(self, link: ev.Link) -> bool:
        """Whether anything is open on ``link``."""
        state = self._links.get(link)
        return state is not None and (bool(state.live) or bool(state.unsent))

    def beat(self, link: ev.Link) -> tuple[int, int, tuple[msg.Ask, ...]]:
        """What goes into a beat on ``link``: last registration issued, lowest open, and all that are open."""
        state = self._link(link)
        asks = []
        for attempt, shard in state.live.items():
            now = shard.state
            if now is WITHDRAWN:
                stage = msg.ASK_REQUEUE if shard.transfer.requeue else msg.ASK_CANCELLED
            else:
                stage = _ASKED[now]
            asks.append(msg.Ask(attempt, stage, len(shard.parts)))
            if len(asks) == msg.MAX_OPEN:
                break  # the rest is told when these are closed
        return state.highest, state.lowest(), tuple(asks)

    # ------------------------------------------------------------ links

    def link_up(self, link: ev.Link, incarnation: int, floor: int, now: float, out: Out) -> None:
        """``link`` is connected: registrations that waited for it are sent, numbered above what counts as seen there.

        What is open and below ``floor`` was forgotten there: it is not written, and refused from now on (E4).
        """
        state = self._link(link)
        state.incarnation = incarnation
        state.highest = max(state.highest, floor)
        self._end_or_register_again(state, floor, "forgotten by the sender", out)
        state.up, state.silent = True, False
        self._send_unsent(state, now, out)

    def link_refused(self, link: ev.Link, reason: str, out: Out) -> None:
        """No transfer is possible with this peer, or it cannot be reached: what was never sent ends, and is settled."""
        state = self._links.get(link)
        if state is None:
            return
        unsent, state.unsent = state.unsent, []
        for shard in unsent:
            self._end(shard, reason, out)

    def link_silent(self, link: ev.Link, out: Out) -> None:
        """The peer is suspected: verdicts fall, memory stays."""
        state = self._link(link)
        state.silent = True
        for shard in list(state.live.values()):
            self._fail(shard.transfer, "peer silent", out)

    def link_gone(self, link: ev.Link, heard_at: float, out: Out) -> None:
        """The peer's process is proven gone (E2), last heard at ``heard_at``: verdicts fall at once, memory is settled
        later.

        What was registered with it after it was last heard was meant for its successor, who gets it when the link is
        drained.
        """
        state = self._links.get(link)
        if state is None:
            return
        state.up = state.silent = False
        for shard in list(state.live.values()):
            if shard.registered_at < heard_at or shard.state is WITHDRAWN:
                self._fail(shard.transfer, "peer gone", out)

    def link_drained(self, link: ev.Link, out: Out) -> None:
        """The fabric holds no write of the dead process any more (E2): all that it was told of is settled."""
        state = self._links.get(link)
        if state is None:
            return
        self._end_or_register_again(state, state.highest, "peer gone", out)
        if not state.unsent:
            self.link_forget(link)

    def _end_or_register_again(self, link: ReceiverLink, highest: int, reason: str, out: Out) -> None:
        """Attempts up to ``highest`` are settled: what nobody has answered becomes another attempt, the rest end."""
        for shard in list(link.live.values()):
            if shard.attempt > highest:
                break
            if shard.state in (REGISTERED, EXPOSED):
                self._again(shard)
            else:
                self._end(shard, reason, out)

    def _again(self, shard: Shard) -> None:
        """Nobody has this attempt: it will be another one when the link is up (again)."""
        shard.move("again")
        del shard.link.live[shard.attempt]
        shard.link.unsent.append(shard)
        shard.parts.clear()
        shard.tokens, shard.parts_in_all = 0, -1
        shard.registered_at = 0.0

    def waits(self, link: ev.Link) -> bool:
        """Whether something is still to be registered on ``link``."""
        state = self._links.get(link)
        return state is not None and bool(state.unsent)

    def link_forget(self, link: ev.Link) -> None:
        """Nothing is open on ``link``. Its numbers are not used again: whoever comes to know it anew counts on from the
        highest of all.
        """
        state = self._links.pop(link, None)
        if state is not None:
            self._issued = max(self._issued, state.highest)

    # ------------------------------------------------------------ messages

    def on_offer(self, link: ev.Link, m: msg.Offer, now: float, out: Out) -> None:
        """A sender is at work and wants memory; told upwards when all of them are."""
        shard = self._open(link, m.attempt)
        if shard is None or shard.state not in (REGISTERED, OFFERED):
            self._count("offer_ignored")
            return
        transfer = shard.transfer
        if m.tokens < transfer.tokens:
            self._fail(transfer, "the prompt is shorter than what is wanted", out)
            return
        shard.move("offer")
        shard.offered, shard.finished = True, shard.finished or m.finished
        offered = finished = True
        for each in transfer.shards:
            offered, finished = offered and each.offered, finished and each.finished
        if (finished and not transfer.offered_finished) or (offered and not transfer.offered):
            transfer.offered, transfer.offered_finished = True, finished
            out.append(ev.Offered(transfer.transfer_id, finished))

    def on_written(self, link: ev.Link, m: msg.Written, now: float, out: Out) -> None:
        """A part has landed. The same one again changes nothing."""
        shard = self._open(link, m.attempt)
        if shard is None:
            self._count("written_late")
            return
        if m.part in shard.parts:
            self._count("written_again")
            return
        wanted = shard.transfer.tokens
        empty = m.tokens == 0 and wanted > 0
        if (
            shard.transfer.memory is None
            or empty
            or shard.tokens + m.tokens > wanted
            or (m.last and shard.parts_in_all >= 0)
        ):
            self._count("written_refused")
            return
        shard.parts.add(m.part)
        shard.tokens += m.tokens
        if m.last:
            shard.parts_in_all = m.part + 1
        if len(shard.parts) == shard.parts_in_all:
            if shard.tokens == shard.transfer.tokens:
                self._land(shard, out)
            else:
                self._end(shard, "fewer tokens than wanted", out)

    def on_failed(self, link: ev.Link, m: msg.Failed, now: float, out: Out) -> None:
        """It will not come, and nothing of it is active (E1). One that gave way is no failure: the ledger has it
        registered anew.
        """
        shard = self._open(link, m.attempt)
        if shard is not None and m.reason == msg.GAVE_WAY and shard.transfer.exposed and not shard.transfer.verdict:
            transfer = shard.transfer
            shard.move("end")
            if not transfer.requeue:
                transfer.requeue = True
                out.append(ev.Broken(transfer.transfer_id, m.reason))
            self._retire(shard, out)  # and the others are asked to give way
        elif shard is not None and m.reason == msg.FORGOTTEN and shard.state in (REGISTERED, EXPOSED):
            self._again(shard)
        else:
            self._closed(link, m.attempt, m.reason, out)

    def on_cancelled(self, link: ev.Link, m: msg.Cancelled, now: float, out: Out) -> None:
        """Stopped, or never seen and refused from now on (E1, E4)."""
        self._closed(link, m.attempt, "cancelled by the sender", out)

    def on_beat(self, link: ev.Link, m: msg.Beat, out: Out) -> None:
        """The sender lacks registrations, grants or cancels that it should have: send them again."""
        for attempt in m.missing:
            shard = self._open(link, attempt)
            if shard is None:
                continue
            self._count("sent_again")
            if shard.state is WITHDRAWN:
                self._send_cancel(shard, out)
                continue
            self._send_register(shard, out)
            if shard.state is EXPOSED:
                out.append(ev.Send(link, msg.Grant(self._me, shard.link.incarnation, attempt, shard.transfer.memory)))

    # ------------------------------------------------------------ the ledger

    def expect(self, e: ev.Expect, now: float, out: Out) -> None:
        """Register with every link. Raises ``LocalProtocolError`` while an attempt of the same id is open here."""
        if e.transfer_id in self._transfers:
            raise LocalProtocolError(f"{e.transfer_id} is open: settle one attempt before the next")
        if not e.links or len(set(e.links)) != len(e.links):
            raise LocalProtocolError(f"{e.transfer_id}: links must be one or more, each once, got {e.links}")
        transfer = Expected(e.transfer_id, e.tokens, e.packed, e.fanout, e.memory, len(e.links))
        self._transfers[e.transfer_id] = transfer
        if e.tokens == 0:
            transfer.memory = ()  # none is written to
        self.deadlines.arm(transfer, now + self._set.wait_s)
        for key in e.links:
            link = self._link(key)
            shard = Shard(link, transfer)
            transfer.shards.append(shard)
            link.unsent.append(shard)
        for key in e.links:
            self.register(key, now, out)

    def register(self, link: ev.Link, now: float, out: Out) -> None:
        """What waits for ``link`` is registered there, if that can be done now."""
        self._send_unsent(self._links[link], now, out)

    def expose(self, e: ev.Expose, now: float, out: Out) -> None:
        """The destination is there: grant it. Ignored when the verdict fell meanwhile: the ledger gets ``Settled``
        then.
        """
        transfer = self._transfers.get(e.transfer_id)
        if transfer is None or transfer.verdict:
            self._count("expose_late")
            return
        if transfer.tokens == 0:
            return
        if transfer.memory is not None:
            raise LocalProtocolError(f"{e.transfer_id} has memory: it is granted once per attempt")
        transfer.memory = e.memory
        for shard in transfer.shards:
            if shard.state in (REGISTERED, OFFERED):
                shard.move("expose")
                transfer.exposed = True
                out.append(
                    ev.Send(shard.link.key, msg.Grant(self._me, shard.link.incarnation, shard.attempt, e.memory))
                )

    def withdraw(self, e: ev.Withdraw, now: float, out: Out) -> None:
        """The ledger gives the transfer up, or takes its memory back to grant it to another."""
        transfer = self._transfers.get(e.transfer_id)
        if transfer is None:
            self._count("withdraw_late")
            return
        if not transfer.verdict:
            transfer.verdict = not e.requeue
            transfer.requeue = e.requeue
            transfer.reason = e.reason
        self._withdraw_all(transfer, out)
        self._judge(transfer, out)

    def revoked(self, e: ev.Revoked, now: float, out: Out) -> None:
        """The fabric took every remote right away (E3)."""
        transfer = self._transfers.get(e.transfer_id)
        if transfer is not None:
            for shard in list(transfer.shards):
                if shard.state not in RECEIVING_SETTLED:
                    self._end(shard, "revoked", out)

    def fire(self, now: float, out: Out) -> None:
        """Verdicts whose time has come."""
        while (transfer := self.deadlines.pop_due(now)) is not None:
            self._fail(transfer, "deadline", out)
