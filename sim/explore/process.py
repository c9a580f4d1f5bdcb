"""One engine process: its ranks' endpoints, its ledger, its host, and the wiring between them, in order but not at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import Endpoint, Ledger
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.ghost import Ghost
from pushkv.sim.explore.host import Host

if TYPE_CHECKING:
    from pushkv.sim.explore.world import World

REPORTS = (ev.Offered, ev.Landed, ev.Broken, ev.Settled, ev.Sent, ev.Released)


class Process:
    """Alive from its making to ``kill``. Nothing of it runs while it is ``paused``; what comes meanwhile waits in
    order.
    """

    def __init__(self, world: World, name: str, ranks: int) -> None:
        self.world, self.name, self.ranks = world, name, ranks
        self.incarnations = [next(world.incarnation_numbers) for _ in range(ranks)]
        self.alive, self.paused = True, False
        self.died_at = float("-inf")
        self.paused_s = 0.0
        self.endpoints = [Endpoint(number, world.settings, name.encode()) for number in self.incarnations]
        self.ledger = Ledger(world.settings, ranks)
        self.ghost = Ghost(f"{name}#{self.incarnations[0]}")
        self.transport: list[dict[ev.Link, int]] = [{} for _ in range(ranks)]
        self.host = Host(self)
        self._inbox: list[list[ev.Record]] = [[] for _ in range(ranks)]
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timer = [float("inf")] * ranks
        self._lane: dict[Any, float] = {}
        for number in self.incarnations:
            world.by_incarnation[number] = self

    # ---------------------------------------------------------------- time

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do ``action`` then, if this process still lives; when it is paused then, at its waking."""
        self.world.at(delay_s, self._run, action, args)

    def _run(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((action, args))
        else:
            action(*args)

    def pause(self) -> None:
        """SIGSTOP. The fabric goes on with what was posted."""
        self.paused = True
        self.paused_at = self.world.now

    def wake(self) -> None:
        """SIGCONT: the inbox is read before timers fire."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        self.paused_s += self.world.now - self.paused_at
        for rank in range(self.ranks):
            self._step_rank(rank)
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self._run(action, args)

    def _ordered(self, lane: Any, action: Callable[..., None], *args: Any) -> None:
        """As ``later`` after a random delay, but never before an earlier one of the same lane."""
        at = max(self._lane.get(lane, 0.0), self.world.now + self.world.random.random() * self.world.profile.inside_s)
        self._lane[lane] = at
        self.later(at - self.world.now, action, *args)

    # ---------------------------------------------------------------- ranks

    def receive(self, rank: int, event: ev.Record) -> None:
        """``event`` is in the inbox of ``rank``."""
        if not self.alive:
            return
        self._inbox[rank].append(event)
        if not self.paused and len(self._inbox[rank]) == 1:
            self.later(0.0, self._step_rank, rank)

    def _step_rank(self, rank: int) -> None:
        endpoint, now = self.endpoints[rank], self.world.now
        events, self._inbox[rank] = self._inbox[rank], []
        out: list[ev.Record] = []
        for event in events:
            if not isinstance(event, ev.Received):
                self.world.note((self.name, rank), f"* {self.world.text(event)}", event)
        endpoint.step(events, now, out)
        for action in out:
            self._rank_action(rank, action)
        if endpoint.wake_at < self._timer[rank]:
            self._timer[rank] = endpoint.wake_at
            late = self.world.random.random() * self.world.profile.timer_late_s
            self.later(max(0.0, endpoint.wake_at - now) + late, self._timed, rank, endpoint.wake_at)
        if endpoint.wake_at <= now:
            raise AssertionError(f"{self.name}/{rank} wants to be woken in the past: {endpoint.wake_at} at {now}")

    def _timed(self, rank: int, at: float) -> None:
        if self._timer[rank] == at:
            self._timer[rank] = float("inf")
        self._step_rank(rank)

    def _rank_action(self, rank: int, action: Any) -> None:
        world, me = self.world, (self.name, rank)
        if isinstance(action, ev.Send):
            if isinstance(action.message, (msg.Register, msg.Grant)):
                self.ghost.sent(me, action.link, action.message)
            world.network.send(me, action.link, action.message)
            return
        if not isinstance(action, REPORTS):
            world.note(me, f"  {world.text(action)}", action)
        if isinstance(action, ev.Connect):
            delay = world.profile.connect_s * (0.5 + world.random.random())
            self.later(delay, self._connect, rank, action)
        elif isinstance(action, ev.Disconnect):
            if self.transport[rank].get(action.link) == action.incarnation:
                del self.transport[rank][action.link]
        elif isinstance(action, ev.Pack):
            world.fabric.pack(self, rank, action)
        elif isinstance(action, ev.Post):
            world.fabric.post(self, rank, action)
        elif isinstance(action, ev.Abandon):
            world.fabric.abandon(self, rank, action.handle)
        elif isinstance(action, REPORTS):
            self._ordered(("up", rank), self.tell_ledger, ev.FromRank(rank, action))
        else:
            raise AssertionError(f"{action} is no action of a rank")

    def _connect(self, rank: int, action: ev.Connect) -> None:
        target = self.world.by_incarnation.get(action.incarnation)
        if target is None or not target.alive or self.world.random.random() < self.world.profile.unfit:
            self.receive(rank, ev.Unfit(action.link, action.incarnation, "cannot connect"))
            return
        self.transport[rank][action.link] = action.incarnation
        self.receive(rank, ev.Connected(action.link, action.incarnation))

    # ---------------------------------------------------------------- the ledger

    def command(self, command: ev.Record) -> None:
        """The host's own command to every rank, in order with what it tells the ledger."""
        self._ordered("host", self._command, command)

    def _command(self, command: ev.Record) -> None:
        for rank in range(self.ranks):
            self._ordered(("down", rank), self.receive, rank, command)

    def fence(self, action: Callable[..., None], *args: Any) -> None:
        """Do ``action`` when every rank has taken all commands given so far."""
        self._ordered("host", self._fence, action, args)

    def _fence(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        left = [self.ranks]

        def passed(rank: int) -> None:
            self._step_rank(rank)
            left[0] -= 1
            if not left[0]:
                action(*args)

        for rank in range(self.ranks):
            self._ordered(("down", rank), passed, rank)

    def say(self, event: ev.Record) -> None:
        """The host tells the ledger."""
        self._ordered("host", self.tell_ledger, event)

    def tell_ledger(self, event: ev.Record) -> None:
        """One step of the ledger."""
        out: list[ev.Record] = []
        self.world.note((self.name, "ledger"), f"* {self.world.text(event)}", event)
        self.ledger.step([event], self.world.now, out)
        for action in out:
            if isinstance(action, (ev.ToRanks, ev.ToRank)):
                command = action.command
                if isinstance(command, ev.Expose):
                    self.host.exposed(command)
                elif isinstance(command, ev.Withdraw) and command.requeue:
                    self.host.receiving[command.transfer_id].yields += 1
                ranks = [action.rank] if isinstance(action, ev.ToRank) else range(self.ranks)
                for rank in ranks:
                    self._ordered(("down", rank), self.receive, rank, command)
            else:
                self.world.note((self.name, "ledger"), f"  {self.world.text(action)}", action)
                self.host.told(action)
        self.host.after_ledger()
