"""One engine's side of the protocol: its endpoint and its ledger, fed with what happened, and their actions carried
out.

Translates and no more: every rule is in ``pushkv.model.protocol``. Ranks of an engine move in lockstep here, so one
endpoint stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import Endpoint, Ledger, Settings
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.clock import Clock
from pushkv.sim.ticks import S_PER_TICK, ticks

if TYPE_CHECKING:
    from pushkv.sim.connector import Connector
    from pushkv.sim.network import Network

NEVER = float("inf")
_LATE = 1000  # ticks: more than a rounding of seconds, so that a deadline is past when its timer goes off
_AHEAD_S = 10.0
"""How far ahead a timer is set at the most: one that was set for a deadline in minutes and is overtaken by a nearer one
would lie in the clock's queue until then, and make every other event's way through it longer."""


class Host:
    """``connector`` does what only an engine can do: pack, post, allocate, free."""

    def __init__(
        self,
        env: Clock,
        name: str,
        incarnation: int,
        settings: Settings,
        network: Network,
        connector: Connector,
    ) -> None:
        self.env, self.name, self.network, self.connector = env, name, network, connector
        self.settings = settings
        self.endpoint = Endpoint(incarnation, settings)
        self.ledger = Ledger(settings)
        self._alarm = self.endpoint.alarm
        self.dead = False
        self._kept = connector.kept
        self._paused_until = 0
        self._armed = NEVER
        carry: dict[type[ev.Record], Callable[[Any], None]] = {
            ev.Send: self._send,
            ev.Connect: self._connect,
            ev.Disconnect: self._nothing,
            ev.ToRank: self._command,
            ev.ToRanks: self._command,
            ev.Pack: connector.pack,
            ev.Post: connector.post,
            ev.Abandon: connector.abandon,
            ev.Admit: connector.admitted,
            ev.Ready: connector.ready_to_load,
            ev.Fail: connector.failed,
            ev.Free: connector.free,
            ev.TakeBack: connector.take_back,
            ev.Finished: connector.sent,
            ev.Release: connector.release,
        }
        for report in (ev.Offered, ev.Landed, ev.Broken, ev.Settled, ev.Sent, ev.Released):
            carry[report] = self._report
        self._carry = carry

    @property
    def machine_steps(self) -> int:
        """Steps that the machines have made."""
        return self.endpoint.steps + self.ledger.steps

    def feed(self, *events: ev.Record) -> None:
        """Events for the rank's machines; with none, they look at the time."""
        out: list[ev.Record] = []
        self.endpoint.step(events, self.env.ticks * S_PER_TICK, out)
        carry = self._carry
        for action in out:
            carry[type(action)](action)
        if self._alarm.at < self._armed:
            self._arm()

    def book(self, *events: ev.Record) -> None:
        """Events for the books."""
        out: list[ev.Record] = []
        self.ledger.step(events, self.env.ticks * S_PER_TICK, out)
        carry = self._carry
        for action in out:
            carry[type(action)](action)

    def claim(self, handle: int) -> bool:
        """The moment of posting."""
        return self.endpoint.sender.claim(handle, self.env.ticks * S_PER_TICK)

    def _arm(self) -> None:
        self._armed = min(self._alarm.at, self.env.ticks * S_PER_TICK + _AHEAD_S)
        self.env.call(max(self.env.ticks, ticks(self._armed) + _LATE), self._wake, self._armed)

    def _wake(self, armed: float) -> None:
        if armed != self._armed or self.dead:
            return
        if self.env.ticks < self._paused_until:
            self.env.call(self._paused_until + 1, self._wake, armed)  # what has come meanwhile is heard first
            return
        self._armed = NEVER
        if self._alarm.at <= self.env.ticks * S_PER_TICK:
            self.feed()
        elif self._alarm.at < NEVER:
            self._arm()

    def _send(self, action: ev.Send) -> None:
        message = action.message
        if type(message) is not msg.Register or not self.connector.carries(message):
            self.network.send(self.name, action.link[0], message)

    def receive(self, engine: str, message: msg.Message) -> None:
        """``message`` has come from ``engine``."""
        if self.dead or self.env.ticks < self._paused_until:
            self.stopped(self._hear, (engine, message))
        elif type(message) in self._kept:
            self.connector.keep(ev.Received((engine, 0), message))
        else:
            self.feed(ev.Received((engine, 0), message))

    def _hear(self, what: tuple[str, msg.Message]) -> None:
        self.receive(*what)

    def pause(self, until: int) -> None:
        """The process is stopped until ``until``: messages wait, timers go off late."""
        self._paused_until = max(self._paused_until, until)

    def kill(self) -> None:
        """The process is gone for good: one that comes back is another host."""
        self.dead = True

    def stopped(self, then: Callable[[Any], None], what: Any) -> bool:
        """Whether no thread of the process runs now. A paused one calls ``then(what)`` when it goes on; a dead one
        never does."""
        if self.dead:
            return True
        if self.env.ticks < self._paused_until:
            self.env.call(self._paused_until, then, what)
            return True
        return False

    def _connect(self, action: ev.Connect) -> None:
        self.feed(ev.Connected(action.link, action.incarnation))

    def _command(self, action: Any) -> None:
        self.feed(action.command)

    def _report(self, action: ev.Record) -> None:
        self.book(ev.FromRank(0, action))

    def _nothing(self, action: ev.Record) -> None:
        """Nothing to do for a simulated transport."""
