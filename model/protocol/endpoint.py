"""One rank's protocol: its ``Sender``, its ``Receiver`` and a ``Peer`` per link, behind one ``step``.

Decides who hears what: messages of strangers are not heard, evidence reaches both halves, beats carry both halves'
state. It has no rule of its own about transfers. One endpoint may stand for a group of ranks in lockstep: they see the
same events, so they would take the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import NEVER, Alarm, Deadlines
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.peer import Peer
from pushkv.model.protocol.receiver import Receiver
from pushkv.model.protocol.sender import Sender
from pushkv.model.protocol.settings import Settings
from pushkv.model.protocol.states import Linking

Out = list[ev.Record]

UP, SUSPECT, REFUSED, DRAINING = Linking.UP, Linking.SUSPECT, Linking.REFUSED, Linking.DRAINING


class Endpoint:
    """Events in, actions out. The host carries out what ``step`` appends to ``out`` and calls again by ``wake_at`` (s,
    monotonic).

    ``incarnation``: a random non-zero 64-bit number of this process; ``facts``: what ``Connect`` shows to the peer's
    host (layouts, names, abilities). Raises ``LocalProtocolError`` when the host breaks the contract; a peer cannot
    make it raise.
    """

    def __init__(self, incarnation: int, settings: Settings, facts: bytes = b"") -> None:
        if incarnation <= 0:
            raise LocalProtocolError("an incarnation is a positive random number")
        self.incarnation = incarnation
        self.settings = settings
        self.alarm = Alarm()
        self.sender = Sender(incarnation, settings, self.alarm)
        self.receiver = Receiver(incarnation, settings, self.alarm)
        self.peers: dict[ev.Link, Peer] = {}
        self.steps = 0
        self.counters: dict[str, int] = {}
        self._facts = facts
        self._watch: Deadlines[Peer] = Deadlines(self.alarm)
        self._dropped: Out = []
        self._greetings_sent = count(1)
        sender, receiver = self.sender, self.receiver
        self._deadlines: tuple[Deadlines[Any], ...] = (*sender.deadlines, receiver.deadlines, self._watch)
        self._handlers: dict[type[ev.Record], Callable[[Any, float, Out], None]] = {
            ev.Received: self._received,
            ev.Greet: self._greet,
            ev.Connected: self._connected,
            ev.Unfit: self._unfit,
            ev.ProcessGone: self._process_gone,
            ev.Packed: sender.packed,
            ev.Unpacked: sender.unpacked,
            ev.WriteDone: sender.write_done,
            ev.WriteBroken: sender.write_broken,
            ev.WriteQuiet: sender.write_quiet,
            ev.Begin: sender.begin,
            ev.Computed: sender.computed,
            ev.Preempted: sender.preempted,
            ev.GiveWay: sender.give_way,
            ev.Abort: sender.abort,
            ev.Expect: self._expect,
            ev.Expose: receiver.expose,
            ev.Withdraw: receiver.withdraw,
            ev.Revoked: receiver.revoked,
        }
        self._heard: dict[type[msg.Message], Callable[[ev.Link, Any, float, Out], None]] = {
            msg.Register: sender.on_register,
            msg.Grant: sender.on_grant,
            msg.Cancel: sender.on_cancel,
            msg.Offer: receiver.on_offer,
            msg.Written: receiver.on_written,
            msg.Failed: self._on_failed,
            msg.Cancelled: receiver.on_cancelled,
            msg.Beat: self._on_beat,
        }

    def step(self, events: Iterable[ev.Record], now: float, out: Out) -> None:
        """Take ``events`` at time ``now``, then fire what is due. After a pause the events come first, and silence is
        excused (rule 9).
        """
        self.steps += 1
        for event in events:
            try:
                handler = self._handlers[type(event)]
            except KeyError:
                raise LocalProtocolError(f"{type(event).__name__} is not an event of a rank") from None
            handler(event, now, out)
        if now >= self.alarm.at:
            self._ring(now, out)
        if self.receiver.wanted:
            self._register_again(now, out)
        if self._dropped:
            out.extend(self._dropped)
            self._dropped.clear()
        if self.sender.short:
            self.sender.refill(out)

    def _ring(self, now: float, out: Out) -> None:
        pause_s = self.settings.pause_s
        if now - self.alarm.at > pause_s:
            for peer in self.peers.values():  # each by its own deadline: another's says nothing of it (rule 6)
                if now - peer.due > pause_s:
                    peer.paused(now - peer.due, now)
        self._fire(now, out)
        self.alarm.at = min([deadlines.next_at() for deadlines in self._deadlines])

    @property
    def wake_at(self) -> float:
        """When to call ``step`` again at the latest (s); ``inf``: not before there is an event."""
        return self.alarm.at

    def busy(self, link: ev.Link) -> bool:
        """Whether anything is open on ``link``, in either direction."""
        return self.receiver.busy(link) or self.sender.busy(link)

    # ------------------------------------------------------------ messages

    def _received(self, e: ev.Received, now: float, out: Out) -> None:
        message, link = e.message, e.link
        peer = self.peers.get(link)
        hear = self._heard.get(type(message))
        if (
            hear is None
            or peer is None
            or (peer.state is not UP and peer.state is not SUSPECT)
            or message.src != peer.incarnation
            or message.dst != self.incarnation
        ):
            self._introduced(link, peer, message, now, out)
            return
        if peer.heard(now):
            self.receiver.link_up(link, peer.incarnation, peer.floor, now, out)
        if peer.due != peer.wake_at:
            self._rearm(peer)
        hear(link, message, now, out)

    def _introduced(self, link: ev.Link, peer: Peer | None, message: msg.Message, now: float, out: Out) -> None:
        """Greetings, and words that are not between two who know each other: those are not heard, but lead to one."""
        if isinstance(message, msg.Hello):
            self._greetings(self._peer(link), message, now, out)
            return
        if isinstance(message, msg.Welcome):
            if peer is not None:
                self._greetings(peer, message, now, out)
            else:
                self._count("stranger")
            return
        if peer is None or peer.state is REFUSED:
            # It knows us and we have forgotten or refused it, or it knew our predecessor: greet, and it will tell what
            # it has open.
            self._count("stranger")
            self._want(self._peer(link), now, out)
            return
        if not peer.talking or message.src != peer.incarnation:
            self._count("stranger")
            peer.doubt(now, out)
            return
        self._count("misdirected")
        peer.doubt(now, out)  # it believes our predecessor to be here: that we ask tells it

    def _greetings(self, peer: Peer, message: msg.Hello | msg.Welcome, now: float, out: Out) -> None:
        if peer.talking and message.src == peer.incarnation:
            peer.heard(now)
        if isinstance(message, msg.Hello):
            peer.on_hello(message, now, out)
        elif message.dst != self.incarnation:
            self._count("misdirected")
        elif peer.on_welcome(message, now, out):
            self._gone(peer, now, out)
        elif peer.refusal:
            self.receiver.link_refused(peer.link, peer.refusal, out)
        if peer.talking and message.src == peer.incarnation:
            self.receiver.link_up(peer.link, peer.incarnation, peer.floor, now, out)
        self._rearm(peer)

    def _on_beat(self, link: ev.Link, m: msg.Beat, now: float, out: Out) -> None:
        missing = self.sender.on_beat(link, m, now, out)
        self.receiver.on_beat(link, m, out)
        if m.number:  # an answer is not answered, whatever it lacks: two who lack something would never stop
            self._send_beat(self.peers[link], 0, m.number, missing, out)

    def _on_failed(self, link: ev.Link, m: msg.Failed, now: float, out: Out) -> None:
        self.receiver.on_failed(link, m, now, out)
        if m.reason == msg.FORGOTTEN:
            self.peers[link].doubt(now, out)  # the answer says from where to number

    def _send_beat(self, peer: Peer, number: int, echo: int, missing: tuple[int, ...], out: Out) -> None:
        highest, lowest, asks = self.receiver.beat(peer.link)
        beat = msg.Beat(self.incarnation, peer.incarnation, number, echo, highest, lowest, asks, missing)
        out.append(ev.Send(peer.link, beat))

    # ------------------------------------------------------------ links

    def _peer(self, link: ev.Link) -> Peer:
        peer = self.peers.get(link)
        if peer is None:
            if len(self.peers) >= self.settings.links:
                self._make_room()
            peer = self.peers[link] = Peer(
                link, self.incarnation, self._facts, self.settings, self.sender.floor, self._greetings_sent
            )
        return peer

    def _make_room(self) -> None:
        """Forget the idle link that was heard least recently; live ones stay, however many."""
        idle = [peer for peer in self.peers.values() if not self.busy(peer.link) and peer.state is not DRAINING]
        if idle:
            self._forget(min(idle, key=lambda peer: peer.heard_at))

    def _forget(self, peer: Peer) -> None:
        del self.peers[peer.link]
        self._watch.disarm(peer)
        self.sender.link_forget(peer.link)
        self.receiver.link_forget(peer.link)
        if peer.incarnation:
            self._dropped.append(ev.Disconnect(peer.link, peer.incarnation))

    def _rearm(self, peer: Peer) -> None:
        if peer.wake_at == NEVER:
            self._watch.disarm(peer)
        elif peer.wake_at != peer.due:
            self._watch.arm(peer, peer.wake_at)

    def _want(self, peer: Peer, now: float, out: Out) -> None:
        peer.want(now, out)
        self._rearm(peer)

    def _expect(self, e: ev.Expect, now: float, out: Out) -> None:
        self.receiver.expect(e, now, out)
        for link in e.links:
            self._want(self._peer(link), now, out)

    def _register_again(self, now: float, out: Out) -> None:
        wanted, self.receiver.wanted = self.receiver.wanted, []
        for link in wanted:
            if self.receiver.waits(link):
                self._want(self._peer(link), now, out)
                self.receiver.register(link, now, out)

    def _greet(self, e: ev.Greet, now: float, out: Out) -> None:
        self._want(self._peer(e.link), now, out)

    def _connected(self, e: ev.Connected, now: float, out: Out) -> None:
        peer = self.peers.get(e.link)
        if peer is not None and peer.connected(e, now, out):
            self.sender.link_up(e.link, peer.incarnation)
            self.receiver.link_up(e.link, peer.incarnation, peer.floor, now, out)
            self._rearm(peer)

    def _unfit(self, e: ev.Unfit, now: float, out: Out) -> None:
        peer = self.peers.get(e.link)
        if peer is not None and peer.unfit(e, out):
            self.receiver.link_refused(e.link, e.reason, out)

    def _process_gone(self, e: ev.ProcessGone, now: float, out: Out) -> None:
        peer = self.peers.get(e.link)
        if peer is not None and peer.incarnation == e.incarnation:
            self._gone(peer, now, out)

    def _gone(self, peer: Peer, now: float, out: Out) -> None:
        if peer.gone(now):
            self.sender.link_gone(peer.link, out)
            self.receiver.link_gone(peer.link, peer.heard_at, out)
            self._rearm(peer)

    def _fire(self, now: float, out: Out) -> None:
        self.sender.fire(now, out)
        self.receiver.fire(now, out)
        while (peer := self._watch.pop_due(now)) is not None:
            link = peer.link
            word = peer.fire(now, self.busy(link), out)
            if word == "beat":
                self._send_beat(peer, peer.ask(), 0, (), out)
                if self.receiver.waits(link):
                    peer.doubt(now, out)
            elif word == "silence":
                self.receiver.link_silent(link, out)
            elif word == "lapsed":
                self.receiver.link_up(link, peer.incarnation, peer.floor, now, out)
            elif word == "unreachable":
                self.receiver.link_refused(link, "peer unreachable", out)
            elif word == "drained":
                self.receiver.link_drained(link, out)
                peer.drained(now, self.busy(link), out)
            self._rearm(peer)
            if peer.idle and not self.busy(link):
                self._forget(peer)

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
