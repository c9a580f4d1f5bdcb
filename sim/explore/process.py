"""One engine process: its ranks' endpoints, its ledger, its host, and the wiring between them, in order but not at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import Endpoint, Ledger
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.states import Receiving
from pushkv.sim.explore.ghost import Ghost
from pushkv.sim.explore.host import Host
from pushkv.sim.explore.violation import Violation

if TYPE_CHECKING:
    from random import Random

    from pushkv.sim.explore.world import World

REPORTS = frozenset({ev.Offered, ev.Landed, ev.Broken, ev.Settled, ev.Sent, ev.Released})
EXPOSING = frozenset({msg.Register, msg.Grant})


class Process:
    """Alive from its making to ``kill``. Nothing of it runs while it is ``paused``; what comes meanwhile waits in
    order.
    """

    def __init__(self, world: World, name: str, ranks: int, random: Random) -> None:
        self.world, self.name, self.ranks, self.random = world, name, ranks, random
        self._draw = random.random
        self._me = [(name, rank) for rank in range(ranks)]
        self._up = [("up", rank) for rank in range(ranks)]
        self._down = [("down", rank) for rank in range(ranks)]
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
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What came due while it was paused."""
        self._timer = [float("inf")] * ranks
        self._lane: dict[Any, float] = {}
        for number in self.incarnations:
            world.by_incarnation[number] = self

    # ---------------------------------------------------------------- time

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do ``action`` then, if this process still lives; when it is paused then, at its waking."""
        world = self.world
        world.order += 1
        heappush(world.queue, (world.now + delay_s, world.order, self, action, args))

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
        backlog, self.backlog = self.backlog, []
        for action, args in backlog:
            self.world.events += 1
            action(*args)

    def _ordered(self, lane: Any, action: Callable[..., None], *args: Any) -> None:
        """As ``later`` after a random delay, but never before an earlier one of the same lane."""
        world, lanes = self.world, self._lane
        at = world.now + self._draw() * world.profile.inside_s
        if lane in lanes and lanes[lane] > at:
            at = lanes[lane]
        lanes[lane] = at
        world.order += 1
        heappush(world.queue, (at, world.order, self, action, args))

    def unheard(self, tid: str) -> bool:
        """Whether some peer may not have been told that ``tid``, which has no verdict, is wanted here."""
        found = [endpoint.receiver._transfers.get(tid) for endpoint in self.endpoints]
        return any(each is None or any(shard.state is Receiving.UNSENT for shard in each.shards) for each in found)

    # ---------------------------------------------------------------- ranks

    def receive(self, rank: int, event: ev.Record) -> None:
        """``event`` is in the inbox of ``rank``."""
        if not self.alive:
            return
        inbox = self._inbox[rank]
        inbox.append(event)
        if len(inbox) == 1 and not self.paused:
            world = self.world
            world.order += 1
            heappush(world.queue, (world.now, world.order, self, self._step_rank, (rank,)))

    def _step_rank(self, rank: int) -> None:
        world, endpoint = self.world, self.endpoints[rank]
        now = world.now
        events, self._inbox[rank] = self._inbox[rank], []
        out: list[ev.Record] = []
        if world.log is not None:
            for event in events:
                if not isinstance(event, ev.Received):
                    world.note((self.name, rank), f"* {world.text(event)}", event)
        endpoint.step(events, now, out)
        for action in out:
            self._rank_action(rank, action)
        if ev.Preempted in map(type, events):
            world.fabric.preempted(self, rank)
        wake_at = endpoint.wake_at
        if wake_at < self._timer[rank]:
            self._timer[rank] = wake_at
            late = self._draw() * world.profile.timer_late_s + rank * world.profile.rank_late_s
            self.later((wake_at - now if wake_at > now else 0.0) + late, self._timed, rank, wake_at)
        if wake_at <= now:
            raise AssertionError(f"{self.name}/{rank} wants to be woken in the past: {wake_at} at {now}")

    def _timed(self, rank: int, at: float) -> None:
        if self._timer[rank] == at:
            self._timer[rank] = float("inf")
        self._step_rank(rank)

    def _rank_action(self, rank: int, action: Any) -> None:
        world, me, kind = self.world, self._me[rank], type(action)
        if kind is ev.Send:
            if type(action.message) in EXPOSING:
                self.ghost.sent(me, action.link, action.message)
            world.network.send(me, action.link, action.message)
            return
        if kind in REPORTS:
            self._ordered(self._up[rank], self.tell_ledger, ev.FromRank(rank, action))
            return
        if world.log is not None:
            world.note(me, f"  {world.text(action)}", action)
        if kind is ev.Connect:
            lane = world.network.lane(me, action.link)
            self.later(world.profile.connect_s * (0.5 + lane.random.random()), self._connect, rank, action)
        elif kind is ev.Disconnect:
            if self.transport[rank].get(action.link) == action.incarnation:
                del self.transport[rank][action.link]
        elif kind is ev.Pack:
            world.fabric.pack(self, rank, action)
        elif kind is ev.Post:
            world.fabric.post(self, rank, action)
        elif kind is ev.Abandon:
            world.fabric.abandon(self, rank, action.handle)
        else:
            raise AssertionError(f"{action} is no action of a rank")

    def _connect(self, rank: int, action: ev.Connect) -> None:
        world, target = self.world, self.world.by_incarnation.get(action.incarnation)
        lane, unfit = world.network.lane((self.name, rank), action.link), world.profile.unfit
        lane.connects += 1
        misfit = bool(unfit) and lane.random.random() < unfit
        if misfit:
            misfit = world.causes.hit("unfit", "connection", lane.connects, None, lane)
        if target is None or not target.alive or misfit:
            self.receive(rank, ev.Unfit(action.link, action.incarnation, "cannot connect"))
            return
        self.transport[rank][action.link] = action.incarnation
        self.receive(rank, ev.Connected(action.link, action.incarnation))

    def check_tables(self) -> None:
        """V3: what is kept of things past is bounded by settings and peers."""
        s = self.world.settings
        for endpoint in self.endpoints:
            sizes = endpoint.sender.sizes()
            if (
                sizes["tombstones"] > len(endpoint.peers) * s.tombstones_per_link
                or sizes["remembered"] > s.remembered_ids
                or sizes["deadlines"] > 2 * sizes["armed"] + 128
            ):
                raise Violation(f"V3: {self.name}: {sizes}")

    # ---------------------------------------------------------------- the ledger

    def command(self, command: ev.Record) -> None:
        """The host's own command to every rank, in order with what it tells the ledger."""
        self._ordered("host", self._command, command)

    def _command(self, command: ev.Record) -> None:
        for rank in range(self.ranks):
            self._ordered(self._down[rank], self.receive, rank, command)

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
            self._ordered(self._down[rank], passed, rank)

    def say(self, event: ev.Record) -> None:
        """The host tells the ledger."""
        self._ordered("host", self.tell_ledger, event)

    def tell_ledger(self, event: ev.Record) -> None:
        """One step of the ledger."""
        out: list[ev.Record] = []
        world = self.world
        if world.log is not None:
            world.note((self.name, "ledger"), f"* {world.text(event)}", event)
        self.ledger.step((event,), world.now, out)
        for action in out:
            if isinstance(action, (ev.ToRanks, ev.ToRank)):
                command = action.command
                if isinstance(command, ev.Expose):
                    self.host.exposed(command)
                elif isinstance(command, ev.Withdraw) and command.requeue:
                    self.host.receiving[command.transfer_id].yields += 1
                ranks = [action.rank] if isinstance(action, ev.ToRank) else range(self.ranks)
                for rank in ranks:
                    self._ordered(self._down[rank], self.receive, rank, command)
            else:
                if world.log is not None:
                    world.note((self.name, "ledger"), f"  {world.text(action)}", action)
                self.host.told(action)
        self.host.after_ledger()
