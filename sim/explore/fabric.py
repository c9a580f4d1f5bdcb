"""The network and the fabric between processes, as unkind as the profile allows.

Network: every frame is encoded, may be lost, doubled, delayed past later ones, and is decoded at the far end, whoever
lives there by then. Fabric: a posted part is several descriptors. Each lands on its own at any time between claim and
quiet, also after an error was reported, while its writer is paused, and after its writer's death until the drain time.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import decode, encode
from pushkv.model.protocol import events as ev
from pushkv.sim.explore.ghost import UNIT_TOKENS, Custody, Violation, units_of

if TYPE_CHECKING:
    from pushkv.sim.explore.process import Process
    from pushkv.sim.explore.world import World


class Network:
    """Frames between links."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut: set[tuple[str, str]] = set()
        self.sent: dict[str, int] = {}
        self.lose_next: list[Any] = []

    def send(self, source: ev.Link, target: ev.Link, message: Any) -> None:
        """Put one message on the wire."""
        kind = type(message).__name__
        self.sent[kind] = self.sent.get(kind, 0) + 1
        world, profile = self.world, self.world.profile
        frame = encode(message)
        for lose in self.lose_next:
            if lose(source, target, message):
                self.lose_next.remove(lose)
                world.note(source, f"-> {world.link(target)} {world.text(message)}   LOST")
                return
        world.note(source, f"-> {world.link(target)} {world.text(message)}")
        if (source[0], target[0]) in self.cut or world.random.random() < profile.loss:
            return
        for _ in range(2 if world.random.random() < profile.duplicate else 1):
            delay = profile.latency_s + world.random.random() * profile.jitter_s
            if world.random.random() < profile.straggle:
                delay += world.random.random() * profile.straggle_s
            world.at(delay, self._deliver, source, target, frame)

    def _deliver(self, source: ev.Link, target: ev.Link, frame: bytes) -> None:
        process = self.world.processes.get(target[0])
        if process is not None and process.alive and (source[0], target[0]) not in self.cut:
            process.receive(target[1], ev.Received(source, decode(frame)))


class Write:
    """One handle on the fabric."""

    def __init__(
        self, process: Process, rank: int, post: ev.Post, target: Process | None, custody: Custody | None
    ) -> None:
        self.process, self.rank, self.post = process, rank, post
        self.target, self.custody = target, custody
        self.source = process.ghost.source(post.transfer_id)
        self.generation = self.source.generation
        self.pieces: set[tuple[int, int]] = set()
        self.broken = self.over = False

    @property
    def key(self) -> tuple[int, int]:
        """Rank and handle: unique in the process."""
        return (self.rank, self.post.handle)


class Fabric:
    """Gathers and writes of all processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.writes: dict[tuple[Any, ...], Write] = {}
        self.fates: deque[tuple[float, bool]] = deque()
        """Scripted: how long the next writes take (s), and whether they break."""

    # ---------------------------------------------------------------- staging

    def pack(self, process: Process, rank: int, pack: ev.Pack) -> None:
        """Gather into staging some time from now."""
        source = process.ghost.source(pack.transfer_id)
        if source.freed:
            raise Violation(f"I2: {process.name} packs {pack.transfer_id}, whose source is free")
        if pack.stop > process.host.computed(pack.transfer_id):
            raise Violation(f"I2: {process.name} packs tokens of {pack.transfer_id} that are not computed")
        source.packing.add((rank, pack.handle))
        delay = self.world.profile.pack_s * (0.2 + self.world.random.random())
        process.later(delay, self._packed, process, rank, pack)

    def _packed(self, process: Process, rank: int, pack: ev.Pack) -> None:
        process.ghost.source(pack.transfer_id).packing.discard((rank, pack.handle))
        process.receive(rank, ev.Packed(pack.handle))

    # ---------------------------------------------------------------- posting

    def post(self, process: Process, rank: int, post: ev.Post) -> None:
        """The transfer thread gets to it some time from now."""
        profile, random = self.world.profile, self.world.random
        delay = profile.post_s * random.random()
        if random.random() < profile.parked:
            delay += profile.parked_s * random.random()
        process.later(delay, self.claim, process, rank, post)

    def claim(self, process: Process, rank: int, post: ev.Post) -> None:
        """The moment of posting."""
        world, sender = self.world, process.endpoints[rank].sender
        write = sender._writes.get(post.handle)
        attempt = write.shard.attempt if write is not None else 0
        if not sender.claim(post.handle, world.now):
            world.note((process.name, rank), f"claim of handle {post.handle}: refused")
            return
        incarnation = process.transport[rank].get(post.link)
        if incarnation is None:
            raise Violation(f"I1: {process.name} posts to {post.link} without a transport")
        target = world.by_incarnation[incarnation]
        custody = target.ghost.granted.get((post.link, (process.name, rank), incarnation, attempt))
        if custody is None:
            raise Violation(
                f"I1: {process.name} posts attempt {attempt} to {post.link}, which {target.ghost.name} never granted"
            )
        if units_of(post.memory, custody.units[0][0] == "segment") != custody.units:
            raise Violation(f"I1: {process.name} posts attempt {attempt} to memory that is not its grant")
        flying = Write(process, rank, post, target, custody)
        if not post.packed:
            if flying.source.freed:
                raise Violation(f"I2: {process.name} posts {post.transfer_id}, whose source is free")
            if post.stop > process.host.computed(post.transfer_id):
                raise Violation(f"I2: {process.name} posts tokens of {post.transfer_id} that are not computed")
            flying.source.active.add(flying.key)
        self.writes[(id(process), *flying.key)] = flying
        self._fly(flying)

    def _fly(self, write: Write) -> None:
        world, profile, random = self.world, self.world.profile, self.world.random
        post = write.post
        cuts = sorted({post.start, post.stop, *(random.randint(post.start, post.stop) for _ in range(profile.cuts))})
        pieces = list(pairwise(cuts))
        fate = random.random()
        span = profile.wire_s
        if fate < profile.slow:
            span = profile.slow_s
        broken = profile.slow <= fate < profile.slow + profile.broken
        if self.fates:
            span, broken = self.fates.popleft()
        last = 0.0
        for start, stop in pieces:
            delay = span * (0.1 + random.random())
            if broken and random.random() < 0.4:
                continue
            last = max(last, delay)
            write.pieces.add((start, stop))
            world.at(delay, self._land, write, start, stop)
        if broken:
            world.at(random.random() * (last + 0.01), self._break, write)
            world.at(last + random.random() * profile.quiet_s + 0.02, self._quiet, write)
        else:
            world.at(last + 0.001 + random.random() * profile.wire_s, self._done, write)

    def _land(self, write: Write, start: int, stop: int) -> None:
        world, process, target, post = self.world, write.process, write.target, write.post
        if write.over or (start, stop) not in write.pieces:
            return
        if not process.alive and world.now > process.died_at + world.settings.drain_s:
            return
        write.pieces.remove((start, stop))
        if target is None or not target.alive:
            return
        assert write.custody is not None
        tokens = len(write.custody.units) * UNIT_TOKENS
        wanted = world.requests[post.transfer_id].tokens
        prompt = world.requests[post.transfer_id].prompt
        pull = world.requests[post.transfer_id].mode == "pull"
        if not post.packed and process.alive and (write.source.generation != write.generation or write.source.freed):
            raise Violation(
                f"I2: the source of {post.transfer_id} at {process.name} changed under handle {post.handle}"
            )
        for position in range(start, stop):
            index = position - (prompt - wanted)
            if not 0 <= index < tokens:
                raise Violation(f"I1: {post.transfer_id} writes token {index} of {tokens}")
            unit = write.custody.units[index // UNIT_TOKENS]
            target.ghost.land(write.custody, unit)
            if pull:
                tag = (post.transfer_id, post.link[1], position)
                write.source.read[(write.rank, post.link[1], position)] = tag
            else:
                tag = (post.transfer_id, write.rank, position)
                target.ghost.cells[(post.link[1], unit, index % UNIT_TOKENS, write.rank)] = tag

    # ---------------------------------------------------------------- the end of a write

    def _done(self, write: Write) -> None:
        if write.over or write.broken:
            return
        if write.target is None or not write.target.alive:
            self._break(write)
            self.world.at(0.05, self._quiet, write)
            return
        self._over(write, ev.WriteDone(write.post.handle))

    def _break(self, write: Write) -> None:
        if not write.over and not write.broken:
            write.broken = True
            write.process.receive(write.rank, ev.WriteBroken(write.post.handle))

    def _quiet(self, write: Write) -> None:
        if not write.over:
            self._over(write, ev.WriteQuiet(write.post.handle))

    def _over(self, write: Write, event: ev.Record) -> None:
        write.over = True
        write.source.active.discard(write.key)
        self.writes.pop((id(write.process), *write.key), None)
        write.process.receive(write.rank, event)

    def abandon(self, process: Process, rank: int, handle: int) -> None:
        """Stop it, if it can be stopped: what is in flight may still land before it is quiet."""
        write = self.writes.get((id(process), rank, handle))
        if write is not None:
            self.world.at(self.world.random.random() * self.world.profile.quiet_s + 0.01, self._quiet, write)

    def on_kill(self, process: Process) -> None:
        """What a dead process had posted lands until the drain time, or never."""
        for write in [w for w in self.writes.values() if w.process is process]:
            del self.writes[(id(process), *write.key)]
            if self.world.random.random() < 0.3:
                write.over = True
            for start, stop in write.pieces:
                self.world.at(self.world.random.random() * self.world.settings.drain_s, self._land, write, start, stop)
