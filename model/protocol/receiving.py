"""How a receiver's shards and transfers move: what is registered, withdrawn, landed and ended, and what it adds up to.

The lower half of ``receiver``: no event arrives here. Every transfer gets its verdict in ``_judge`` or ``_fail``.
"""

from __future__ import annotations

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import Alarm, Deadlines
from pushkv.model.protocol.incoming import Expected, ReceiverLink, Shard
from pushkv.model.protocol.settings import Settings
from pushkv.model.protocol.states import RECEIVING_SETTLED, Receiving

Out = list[ev.Record]

UNSENT, REGISTERED, OFFERED = Receiving.UNSENT, Receiving.REGISTERED, Receiving.OFFERED
EXPOSED, WITHDRAWN, LANDED, ENDED = Receiving.EXPOSED, Receiving.WITHDRAWN, Receiving.LANDED, Receiving.ENDED


class Registrations:
    """The state of one rank's receiver, and the moves that its events have in common."""

    def __init__(self, incarnation: int, settings: Settings, alarm: Alarm | None = None) -> None:
        self._me = incarnation
        self._set = settings
        self._links: dict[ev.Link, ReceiverLink] = {}
        self._transfers: dict[str, Expected] = {}
        self.deadlines: Deadlines[Expected] = Deadlines(alarm)
        self._issued = 0
        self.wanted: list[ev.Link] = []
        """Links on which something is registered anew that was withdrawn: the endpoint must look after them again."""
        self.counters: dict[str, int] = {}

    # ------------------------------------------------------------ one shard

    def _send_unsent(self, link: ReceiverLink, now: float, out: Out) -> None:
        """Register what waits for ``link``, where it is up; what is meant for a silent peer ends."""
        if not link.up:
            return
        unsent, link.unsent = link.unsent, []
        for shard in unsent:
            if link.silent:
                self._end(shard, "peer silent", out)
            else:
                self._register(shard, now, out)

    def _register(self, shard: Shard, now: float, out: Out) -> None:
        link, transfer = shard.link, shard.transfer
        link.highest += 1
        shard.attempt, shard.registered_at = link.highest, shard.registered_at or now
        link.live[shard.attempt] = shard
        shard.move("send" if transfer.memory is None else "send_exposed")
        transfer.exposed = transfer.exposed or (transfer.memory is not None and transfer.tokens > 0)
        self._send_register(shard, out)

    def _send_register(self, shard: Shard, out: Out) -> None:
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

    def _land(self, shard: Shard, out: Out) -> None:
        shard.move("landed")
        self._retire(shard, out)

    def _closed(self, link: ev.Link, attempt: int, reason: str, out: Out) -> None:
        shard = self._open(link, attempt)
        if shard is None:
            self._count("closing_late")
            return
        self._end(shard, reason, out)

    def _end(self, shard: Shard, reason: str, out: Out) -> None:
        shard.move("end")
        shard.transfer.reason = shard.transfer.reason or reason
        self._retire(shard, out)

    def _retire(self, shard: Shard, out: Out) -> None:
        """A shard is settled: it leaves the link, and its transfer is looked at."""
        shard.link.live.pop(shard.attempt, None)
        shard.transfer.open -= 1
        self._judge(shard.transfer, out)

    def _withdraw_all(self, transfer: Expected, out: Out) -> None:
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

    def _send_cancel(self, shard: Shard, out: Out) -> None:
        link, transfer = shard.link, shard.transfer
        cancel = msg.Cancel(self._me, link.incarnation, shard.attempt, transfer.transfer_id, transfer.requeue)
        out.append(ev.Send(link.key, cancel))

    # ------------------------------------------------------------ one transfer

    def _fail(self, transfer: Expected, reason: str, out: Out) -> None:
        """The verdict falls before all is settled, because a bound says so."""
        if not transfer.verdict:
            transfer.verdict = True
            transfer.reason = reason
            transfer.requeue = False
            self.deadlines.disarm(transfer)
            out.append(ev.Broken(transfer.transfer_id, transfer.reason))
            self._withdraw_all(transfer, out)
            self._judge(transfer, out)

    def _judge(self, transfer: Expected, out: Out) -> None:
        """Say what the shards' states add up to, each thing once."""
        landed = sum([shard.state is LANDED for shard in transfer.shards])
        if not transfer.verdict and len(transfer.shards) - transfer.open > landed:
            self._withdraw_all(transfer, out)  # one has failed: the others need not go on, the verdict waits for them
        if transfer.open == 0 and not transfer.verdict:
            if landed == len(transfer.shards):
                transfer.verdict = transfer.settled = True
                out.append(ev.Landed(transfer.transfer_id))
            elif transfer.requeue and landed:
                self._resume(transfer)
            elif not transfer.requeue:
                transfer.verdict = True
                out.append(ev.Broken(transfer.transfer_id, transfer.reason))
        if transfer.open == 0 or (transfer.verdict and not transfer.exposed):
            self._settled(transfer, out)

    def _resume(self, transfer: Expected) -> None:
        """It gave way too late: some of it has landed, and is not sent twice. The rest is registered again, in the same
        memory; nothing was open on those links meanwhile, so they may have gone to sleep or be forgotten.
        """
        transfer.requeue, transfer.reason = False, ""
        for index, old in enumerate(transfer.shards):
            if old.state is ENDED:
                link = self._link(old.link.key)
                transfer.shards[index] = shard = Shard(link, transfer)
                shard.registered_at = old.registered_at
                transfer.open += 1
                link.unsent.append(shard)
                self.wanted.append(link.key)

    def _settled(self, transfer: Expected, out: Out) -> None:
        """Forget the transfer here. Shards that are still open, and were never given anything, are closed by their
        links.
        """
        if not transfer.settled:
            transfer.settled = True
            out.append(ev.Settled(transfer.transfer_id))
        if self._transfers.get(transfer.transfer_id) is transfer:
            del self._transfers[transfer.transfer_id]
            self.deadlines.disarm(transfer)
        if transfer.open == 0:
            transfer.shards = []  # they name each other: so that they are freed at once

    def _open(self, link: ev.Link, attempt: int) -> Shard | None:
        state = self._links.get(link)
        return None if state is None else state.live.get(attempt)

    def _link(self, key: ev.Link) -> ReceiverLink:
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = ReceiverLink(key, self._issued)
        return link

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
