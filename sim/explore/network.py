"""The network between processes, as unkind as the profile allows.

Every frame is encoded, may be lost, doubled, delayed past later ones, and is decoded at the far end, whoever lives
there by then. What happens to a message that names a transfer is that transfer's chance; greetings and beats have that
of their lane.
"""

from __future__ import annotations

from heapq import heappush
from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import decode, encode
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg

if TYPE_CHECKING:
    from pushkv.sim.explore.world import Request, World

KINDS = tuple(kind.__name__ for kind in msg.KINDS)
OF_THE_LINK = frozenset({msg.Hello, msg.Welcome, msg.Beat})
OF_THE_RECEIVER = frozenset({msg.Register, msg.Grant, msg.Cancel})


class Lane:
    """One direction between two links."""

    __slots__ = ("connects", "engines", "last", "name", "random", "sent", "sequence", "source", "target")

    def __init__(self, world: World, source: ev.Link, target: ev.Link) -> None:
        self.source, self.target = source, target
        self.engines = (source[0], target[0])
        self.name = f"{world.link(source)}>{world.link(target)}"
        names = list(world.ranks)
        ordinal = 0
        for engine, rank in (source, target):
            ordinal = (ordinal << 16) | (names.index(engine) << 8) | rank
        self.random = world.stream("lane", ordinal)
        self.sequence = self.last = self.connects = 0
        self.sent: dict[str, int] = {}


class Network:
    """Frames between links. The sets name the kinds of message that it happened to at least once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut: set[tuple[str, str]] = set()
        self.sent: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.lose_next: list[Any] = []
        self.dropped: set[str] = set()
        self.duplicated: set[str] = set()
        self.reordered: set[str] = set()
        self._lanes: dict[tuple[ev.Link, ev.Link], Lane] = {}
        self._attempts: dict[tuple[int, ev.Link, int], Request] = {}

    def lane(self, source: ev.Link, target: ev.Link) -> Lane:
        """The one direction from ``source`` to ``target``."""
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = Lane(self.world, source, target)
        return lane

    def lanes(self) -> list[Lane]:
        """All that were used."""
        return list(self._lanes.values())

    def _request(self, source: ev.Link, target: ev.Link, message: Any) -> Request | None:
        """The transfer that ``message`` speaks of: its attempt is numbered by the receiver, per link."""
        kind = type(message)
        if kind in OF_THE_LINK:
            return None
        if kind not in OF_THE_RECEIVER:
            return self._attempts.get((message.dst, source, message.attempt))
        key = (message.src, target, message.attempt)
        if kind is msg.Register and key not in self._attempts:
            request = self.world.requests.get(message.transfer_id)
            if request is not None:
                self._attempts[key] = request
        return self._attempts.get(key)

    def send(self, source: ev.Link, target: ev.Link, message: Any) -> None:
        """Put one message on the wire."""
        world = self.world
        lane = self._lanes.get((source, target)) or self.lane(source, target)
        kind = type(message).__name__
        self.sent[kind] += 1
        frame = encode(message)
        if self.lose_next and self._lost_by_script(source, target, message):
            return
        request = self._request(source, target, message)
        if request is None:
            profile, random, sent = world.profile, lane.random.random, lane.sent
        else:
            profile, random, sent = (
                request.profile or world.profile,
                (request.random or lane.random).random,
                request.sent,
            )
        number = sent[kind] = sent.get(kind, 0) + 1
        if request is not None:
            request.said_at = world.now
        lane.sequence += 1
        delay = profile.latency_s + random() * profile.jitter_s
        fate = ""
        if profile.straggle and random() < profile.straggle:
            more = random() * profile.straggle_s
            if world.causes.hit("late", kind, number, request, lane):
                delay += more
                fate += f"   LATE by {more:.1f} s"
        if profile.duplicate and random() < profile.duplicate:
            again = profile.latency_s + random() * profile.jitter_s
            if profile.straggle and random() < profile.straggle:
                again += random() * profile.straggle_s
            if world.causes.hit("doubled", kind, number, request, lane):
                self.duplicated.add(kind)
                fate += "   TWICE"
                world.at(again, self._deliver, lane, frame, kind, 0)
        if self.cut and lane.engines in self.cut:
            self.dropped.add(kind)
            fate = "   CUT OFF"
        elif profile.loss and random() < profile.loss and world.causes.hit("lost", kind, number, request, lane):
            self.dropped.add(kind)
            fate = "   LOST"
        else:
            world.order += 1
            arrival = (lane, frame, kind, lane.sequence)
            heappush(world.queue, (world.now + delay, world.order, None, self._deliver, arrival))
        if world.log is not None:
            world.note(source, f"-> {world.link(target)} {world.text(message)}{fate}")

    def _lost_by_script(self, source: ev.Link, target: ev.Link, message: Any) -> bool:
        for lose in self.lose_next:
            if lose(source, target, message):
                self.lose_next.remove(lose)
                self.world.note(source, f"-> {self.world.link(target)} {self.world.text(message)}   LOST")
                return True
        return False

    def _deliver(self, lane: Lane, frame: bytes, kind: str, sequence: int) -> None:
        if self.cut and lane.engines in self.cut:
            self.dropped.add(kind)
            return
        process = self.world.processes.get(lane.target[0])
        if process is None or not process.alive:
            return
        if sequence > lane.last:
            lane.last = sequence
        elif sequence:
            self.reordered.add(kind)
        process.receive(lane.target[1], ev.Received(lane.source, decode(frame)))
