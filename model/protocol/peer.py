"""One link's other end: greeting, incarnation, beats, suspicion, proof of death.

Decides whether messages may flow, when a beat is due, when silence is suspicion and what proves that a process is gone.
Does not decide what becomes of transfers: the endpoint tells ``Sender`` and ``Receiver``. A word from another
incarnation is not proof by itself (it may be an old word that comes late): the peer is asked with a fresh number, and
only the answer to that number counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import NEVER
from pushkv.model.protocol.errors import LocalProtocolError
from pushkv.model.protocol.settings import Settings
from pushkv.model.protocol.states import LINKING, Linking

Out = list[ev.Record]

COLD, GREETING, CONNECTING, UP = Linking.COLD, Linking.GREETING, Linking.CONNECTING, Linking.UP
SUSPECT, REFUSED, DRAINING = Linking.SUSPECT, Linking.REFUSED, Linking.DRAINING


class Peer:
    """State of one link. What the endpoint must act on is returned: see each method.

    ``floor`` is what this side tells of its own floor; ``numbers`` counts greetings, over all links of the endpoint, so
    that no answer to an earlier one is taken for an answer to a later one.
    """

    def __init__(
        self,
        link: ev.Link,
        me: int,
        facts: bytes,
        settings: Settings,
        floor: Callable[[ev.Link], int],
        numbers: Iterator[int],
    ) -> None:
        self.link = link
        self.floor = 0
        self.due = NEVER
        self.state: Linking = COLD
        self.incarnation = 0
        self.refusal = ""
        self._me, self._facts, self._set, self._floor, self._numbers = me, facts, settings, floor, numbers
        self._heard = 0.0
        self._greet_s = settings.greet_s
        self._asked_from = self._asked = 0
        """The first and the last number asked of whoever is there now; 0: nothing was asked yet."""
        self._greeted: msg.Welcome | None = None
        self._answer = 0
        self._doubted = -NEVER
        self._beat = 0
        self.wake_at = NEVER

    def move(self, event: str) -> None:
        """One edge of ``LINKING``."""
        try:
            self.state = LINKING[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event} of link {self.link} in state {self.state}") from None

    @property
    def talking(self) -> bool:
        """Whether messages other than greetings are accepted."""
        return self.state is UP or self.state is SUSPECT

    @property
    def heard_at(self) -> float:
        """When the peer was last heard (s)."""
        return self._heard

    @property
    def idle(self) -> bool:
        """Whether nothing is known that would be missed: the link can be forgotten."""
        return self.state is COLD and self.wake_at == NEVER

    # ------------------------------------------------------------ greeting

    def want(self, now: float, out: Out) -> None:
        """Something is to be sent: greet a cold peer, keep an eye on a warm one."""
        if self.state is COLD or self.state is REFUSED:
            self._retry()
            self._heard = now
            self._greet_s = self._set.greet_s
            self._asked_from = 0
            self._greet(now, out)
        elif self.state is UP and self.wake_at == NEVER:
            self._heard = now
            self.wake_at = now + self._set.beat_s

    def _retry(self) -> None:
        if self.state is REFUSED:
            self.move("retry")
            self.refusal = ""

    def _greet(self, now: float, out: Out) -> None:
        self.move("greet")
        self._hello(out)
        self.wake_at = now + self._greet_s
        self._greet_s = min(2 * self._greet_s, self._set.suspect_after_s)

    def _hello(self, out: Out) -> None:
        self._asked = next(self._numbers)
        self._asked_from = self._asked_from or self._asked
        out.append(
            ev.Send(self.link, msg.Hello(self._me, self.incarnation, self._asked, self._floor(self.link), self._facts))
        )

    def on_hello(self, m: msg.Hello, now: float, out: Out) -> None:
        """The peer greets: connect, or answer again, or ask who is there when it claims to be another."""
        self._retry()  # nothing is open on a refused link: whoever is there may try again
        if self.state in (COLD, GREETING):
            self._heard = now
            self._connect(m.src, m.number, m.floor, m.facts, out)
        elif m.src == self.incarnation:
            self.floor = max(self.floor, m.floor)
            self._answer = max(self._answer, m.number)
            if self.state is not CONNECTING:
                self._welcome(out)
        else:
            self.doubt(now, out)

    def doubt(self, now: float, out: Out) -> None:
        """Somebody speaks who is not the process known here, or not to it: a successor, or an old word. Ask, once a
        beat at the most.
        """
        if self.state in (CONNECTING, UP, SUSPECT) and now >= self._doubted + self._set.beat_s:
            self._doubted = now
            self._hello(out)

    def on_welcome(self, m: msg.Welcome, now: float, out: Out) -> bool:
        """The peer answers a greeting. ``True``: the answer proves that the process known before is gone.

        It does when the question was put after that process was known: its endpoint is its own, so it is not there any
        more.
        """
        if m.src == self.incarnation:
            self.floor = max(self.floor, m.floor)
        if not 0 < self._asked_from <= m.echo <= self._asked:
            return False
        if self.state is GREETING:
            if m.refusal:
                self.incarnation, self.refusal = m.src, m.refusal
                self.move("refuse")
                self.wake_at = NEVER
            else:
                self._connect(m.src, 0, m.floor, m.facts, out)
            return False
        if m.src != self.incarnation and self.state in (CONNECTING, UP, SUSPECT):
            self._greeted = m
            return True
        return False

    def _connect(self, incarnation: int, answer: int, floor: int, facts: bytes, out: Out) -> None:
        self.move("greeted")
        self.incarnation, self._answer, self.floor = incarnation, answer, floor
        self._asked_from = 0
        self.wake_at = NEVER
        out.append(ev.Connect(self.link, incarnation, facts))

    def connected(self, e: ev.Connected, now: float, out: Out) -> bool:
        """The host has the transport. ``True``: the link is up."""
        if self.state is not CONNECTING or e.incarnation != self.incarnation:
            return False
        self.move("connect")
        self._heard = now
        self.wake_at = now + self._set.beat_s
        if self._answer:
            self._welcome(out)
        return True

    def unfit(self, e: ev.Unfit, out: Out) -> bool:
        """The host refuses the peer: it is told why. ``True``: the link is refused."""
        if self.state is not CONNECTING or e.incarnation != self.incarnation:
            return False
        self.refusal = e.reason
        self.move("refuse")
        if self._answer:
            self._welcome(out)
        return True

    def _welcome(self, out: Out) -> None:
        answer = msg.Welcome(
            self._me, self.incarnation, self._answer, self._floor(self.link), self._facts, self.refusal[:4096]
        )
        out.append(ev.Send(self.link, answer))

    # ------------------------------------------------------------ life and death

    def heard(self, now: float) -> bool:
        """A word of the present incarnation came. ``True``: it was suspected, and is not any more."""
        self._heard = now
        if self.wake_at == NEVER:
            self.wake_at = now + self._set.beat_s
        if self.state is SUSPECT:
            self.move("heard")
            return True
        return False

    def paused(self, jump_s: float, now: float) -> None:
        """This host was paused for ``jump_s``: silence in that time says nothing."""
        self._heard = min(now, self._heard + jump_s)

    def gone(self, now: float) -> bool:
        """The process is proven gone. ``True``: it was not known before."""
        if self.state in (COLD, GREETING, DRAINING):
            return False
        self.move("gone")
        self.wake_at = now + self._set.drain_s
        return True

    def fire(self, now: float, busy: bool, out: Out) -> str:
        """A deadline has come: ``"beat"``, ``"silence"``, ``"lapsed"``, ``"unreachable"``, ``"drained"`` or ``""`` is
        for the endpoint to act on.
        """
        self.wake_at = NEVER
        if self.state is DRAINING:
            self.move("drained")
            out.append(ev.Disconnect(self.link, self.incarnation))
            return "drained"
        if self.state is GREETING:
            if not busy:
                self.move("abandon")
                return ""
            self._greet(now, out)
            return "unreachable" if now - self._heard >= self._set.suspect_after_s else ""
        if not busy:
            if self.state is SUSPECT:
                self.move("lapse")
                return "lapsed"
            return ""
        self.wake_at = now + self._set.beat_s
        if self.state is UP and now - self._heard >= self._set.suspect_after_s:
            self.move("silence")
            self._hello(out)
            return "silence"
        if self.state is SUSPECT:
            self._hello(out)
        return "beat"

    def drained(self, now: float, busy: bool, out: Out) -> None:
        """After ``"drained"``: take up whoever has answered in the place of the dead, or greet again."""
        self.incarnation = 0
        self.refusal = ""
        greeted, self._greeted = self._greeted, None
        if greeted is not None:
            self._connect(greeted.src, 0, greeted.floor, greeted.facts, out)
        elif busy:
            self.want(now, out)

    def ask(self) -> int:
        """Number of the next beat that asks for an answer."""
        self._beat += 1
        return self._beat
