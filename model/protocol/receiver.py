"""The half of one rank whose memory a peer touches: registrations, arrivals, the verdict, and the evidence that nobody
writes any more.

Decides when a transfer has landed, when it will not come, and when its memory is settled. Does not decide who gets
memory (``Ledger``). In pull the same machine runs on P: what it exposes is the source, and ``Landed`` means that it has
been read.
"""

from __future__ import annotations

from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import NEVER, Deadlines
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.settings import Settings
from pushkv.model.protocol.states import RECEIVING, RECEIVING_SETTLED, Receiving

Out = list[ev.Record]

UNSENT, REGISTERED, OFFERED = Receiving.UNSENT, Receiving.REGISTERED, Receiving.OFFERED
EXPOSED, WITHDRAWN, LANDED, ENDED = Receiving.EXPOSED, Receiving.WITHDRAWN, Receiving.LANDED, Receiving.ENDED

_ASKED = {REGISTERED: msg.ASK_REGISTERED, OFFERED: msg.ASK_OFFERED, EXPOSED: msg.ASK_GRANTED}


class _Shard:
    """One registration on one link."""

    __slots__ = (
        "asked",
        "attempt",
        "finished",
        "link",
        "offered",
        "parts",
        "parts_in_all",
        "registered_at",
        "state",
        "tokens",
        "transfer",
    )

    def __init__(self, link: _Link, transfer: _Expected) -> None:
        self.link, self.transfer = link, transfer
        self.attempt = 0
        self.registered_at = 0.0
        self.asked = ""
        self.state = UNSENT
        self.offered = self.finished = False
        self.parts: set[int] = set()
        self.parts_in_all = -1
        self.tokens = 0

    def move(self, event: str) -> None:
        try:
            self.state = RECEIVING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of {self.transfer.transfer_id} in state {self.state}") from None


class _Expected:
    """One transfer at this rank, over all the links that feed it."""

    __slots__ = (
        "due", "exposed", "fanout", "memory", "offered", "offered_finished", "open", "packed", "reason", "requeue",
        "settled", "shards", "tokens", "transfer_id", "verdict",
    )  # fmt: skip

    def __init__(self, e: ev.Expect) -> None:
        self.transfer_id, self.tokens, self.packed, self.fanout = e.transfer_id, e.tokens, e.packed, e.fanout
        self.memory: Any = e.memory
        self.exposed = False
        self.shards: list[_Shard] = []
        self.open = len(e.links)
        self.verdict = False
        self.settled = False
        self.requeue = False
        self.offered = self.offered_finished = False
        self.reason = ""
        self.due = NEVER


class _Link:
    """What this receiver has open at one sending rank."""

    __slots__ = ("highest", "incarnation", "key", "live", "silent", "unsent", "up")

    def __init__(self, key: ev.Link, highest: int) -> None:
        self.key = key
        self.incarnation = 0
        self.up = self.silent = False
        self.highest = highest
        self.live: dict[int, _Shard] = {}
        self.unsent: list[_Shard] = []

    def lowest(self) -> int:
        """Lowest attempt that is open; the next one when none is. Attempts open in order, so the first key is the
        lowest.
        """
        for attempt in self.live:
            return attempt
        return self.highest + 1


class Receiver:
    """All transfers that one rank receives. Driven by :class:`~pushkv.model.protocol.endpoint.Endpoint`."""

    def __init__(self, incarnation: int, settings: Settings) -> None:
        self._me = incarnation
        self._set = settings
        self._links: dict[ev.Link, _Link] = {}
        self._transfers: dict[str, _Expected] = {}
        self.deadlines: Deadlines[_Expected] = Deadlines()
        self._issued = 0
        self.counters: dict[str, int] = {}

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
        state = self._links.get(link)
        if state is None:
            return 0, 0, ()
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
        if floor and state.live:
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
        state = self._links.get(link)
        if state is not None:
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

    def _end_or_register_again(self, link: _Link, highest: int, reason: str, out: Out) -> None:
        """Attempts up to ``highest`` are settled: what nobody has answered becomes another attempt, the rest end."""
        for shard in list(link.live.values()):
            if shard.attempt > highest:
                break
            if shard.state in (REGISTERED, EXPOSED):
                self._again(shard)
            else:
                self._end(shard, reason, out)

    def _again(self, shard: _Shard) -> None:
        """Nobody has this attempt: it will be another one when the link is up (again)."""
        shard.move("again")
        del shard.link.live[shard.attempt]
        shard.link.unsent.append(shard)
        shard.parts.clear()
        shard.tokens, shard.parts_in_all = 0, -1

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
        if transfer.verdict:
            return
        finished = all(s.finished for s in transfer.shards)
        if (finished and not transfer.offered_finished) or (
            not transfer.offered and all(s.offered for s in transfer.shards)
        ):
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
                self._withdraw_all(transfer, out)
            self._retire(shard, out)
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
        transfer = self._transfers[e.transfer_id] = _Expected(e)
        if e.tokens == 0 and transfer.memory is None:
            transfer.memory = ()
        self.deadlines.arm(transfer, now + self._set.wait_s)
        for key in e.links:
            link = self._link(key)
            shard = _Shard(link, transfer)
            transfer.shards.append(shard)
            link.unsent.append(shard)
        for key in e.links:
            link = self._links[key]
            if link.up and not link.silent:
                self._send_unsent(link, now, out)
            if self._links[key].silent:
                self.link_refused(key, "peer silent", out)

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

    # ------------------------------------------------------------ one shard

    def _send_unsent(self, link: _Link, now: float, out: Out) -> None:
        unsent, link.unsent = link.unsent, []
        for shard in unsent:
            self._register(shard, now, out)

    def _register(self, shard: _Shard, now: float, out: Out) -> None:
        link, transfer = shard.link, shard.transfer
        link.highest += 1
        shard.attempt, shard.registered_at = link.highest, now
        link.live[shard.attempt] = shard
        shard.move("send" if transfer.memory is None else "send_exposed")
        transfer.exposed = transfer.exposed or (transfer.memory is not None and transfer.tokens > 0)
        self._send_register(shard, out)

    def _send_register(self, shard: _Shard, out: Out) -> None:
        link, t = shard.link, shard.transfer
        memory = t.memory if shard.state is EXPOSED else None
        register = msg.Register(
            self._me,
            link.incarnation,
            shard.attempt,
            t.transfer_id,
            t.tokens,
            t.fanout,
            t.packed,
            link.lowest(),
            memory,
        )
        out.append(ev.Send(link.key, register))

    def _land(self, shard: _Shard, out: Out) -> None:
        shard.move("landed")
        self._retire(shard, out)

    def _closed(self, link: ev.Link, attempt: int, reason: str, out: Out) -> None:
        shard = self._open(link, attempt)
        if shard is None:
            self._count("closing_late")
            return
        self._end(shard, reason, out)

    def _end(self, shard: _Shard, reason: str, out: Out) -> None:
        shard.move("end")
        shard.transfer.reason = shard.transfer.reason or reason
        self._retire(shard, out)

    def _retire(self, shard: _Shard, out: Out) -> None:
        """A shard is settled: it leaves the link, and its transfer is looked at."""
        shard.link.live.pop(shard.attempt, None)
        shard.transfer.open -= 1
        self._judge(shard.transfer, out)

    def _withdraw_all(self, transfer: _Expected, out: Out) -> None:
        """Ask every sender to stop; one that was asked to give way is asked again when it must stop for good."""
        asked = "requeue" if transfer.requeue else "stop"
        for shard in transfer.shards:
            if shard.state is UNSENT:
                shard.move("end")
                shard.link.unsent.remove(shard)
                transfer.open -= 1
            elif shard.state not in RECEIVING_SETTLED and shard.asked not in ("stop", asked):
                if shard.state is not WITHDRAWN:
                    shard.move("withdraw")
                shard.asked = asked
                self._send_cancel(shard, out)

    def _send_cancel(self, shard: _Shard, out: Out) -> None:
        link, transfer = shard.link, shard.transfer
        cancel = msg.Cancel(self._me, link.incarnation, shard.attempt, transfer.transfer_id, transfer.requeue)
        out.append(ev.Send(link.key, cancel))

    # ------------------------------------------------------------ one transfer

    def _fail(self, transfer: _Expected, reason: str, out: Out) -> None:
        """The verdict falls before all is settled, because a bound says so."""
        if not transfer.verdict:
            transfer.verdict = True
            transfer.reason = reason
            transfer.requeue = False
            self.deadlines.disarm(transfer)
            out.append(ev.Broken(transfer.transfer_id, transfer.reason))
            self._withdraw_all(transfer, out)
            self._judge(transfer, out)

    def _judge(self, transfer: _Expected, out: Out) -> None:
        """Say what the shards' states add up to, each thing once."""
        landed = sum(shard.state is LANDED for shard in transfer.shards)
        if not transfer.verdict and len(transfer.shards) - transfer.open > landed:
            self._withdraw_all(transfer, out)  # one has failed: the others need not go on, the verdict waits for them
        if transfer.open == 0 and not transfer.verdict:
            if landed == len(transfer.shards):
                transfer.verdict = transfer.settled = True
                out.append(ev.Landed(transfer.transfer_id))
            elif transfer.requeue and landed:
                self._resume(transfer, out)
                return
            elif not transfer.requeue:
                transfer.verdict = True
                out.append(ev.Broken(transfer.transfer_id, transfer.reason))
        if transfer.open == 0 or (transfer.verdict and not transfer.exposed):
            self._settled(transfer, out)

    def _resume(self, transfer: _Expected, out: Out) -> None:
        """It gave way too late: some of it has landed, and is not sent twice. The rest is registered again, in the same
        memory.
        """
        transfer.requeue, transfer.reason = False, ""
        for index, old in enumerate(transfer.shards):
            if old.state is ENDED:
                transfer.shards[index] = shard = _Shard(old.link, transfer)
                transfer.open += 1
                self._register(shard, old.registered_at, out)

    def _settled(self, transfer: _Expected, out: Out) -> None:
        """Forget the transfer here. Shards that are still open, and were never given anything, are closed by their
        links.
        """
        if not transfer.settled:
            transfer.settled = True
            out.append(ev.Settled(transfer.transfer_id))
        if self._transfers.get(transfer.transfer_id) is transfer:
            del self._transfers[transfer.transfer_id]
            self.deadlines.disarm(transfer)

    def _open(self, link: ev.Link, attempt: int) -> _Shard | None:
        state = self._links.get(link)
        return None if state is None else state.live.get(attempt)

    def _link(self, key: ev.Link) -> _Link:
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = _Link(key, self._issued)
        return link

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
