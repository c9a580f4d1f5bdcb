"""The fabric between processes, as unkind as the profile allows.

A posted part is several descriptors. Each lands on its own at any time between claim and quiet, also after an error was
reported, while its writer is paused, and after its writer's death until the drain time. All of it is the transfer's
chance.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import events as ev
from pushkv.sim.explore.ghost import UNIT_TOKENS, Custody, units_of
from pushkv.sim.explore.violation import Violation

if TYPE_CHECKING:
    from random import Random

    from pushkv.sim.explore.process import Process
    from pushkv.sim.explore.profiles import Profile
    from pushkv.sim.explore.world import Request, World


class Write:
    """One handle on the fabric."""

    def __init__(
        self, process: Process, rank: int, post: ev.Post, target: Process | None, custody: Custody | None
    ) -> None:
        self.process, self.rank, self.post = process, rank, post
        self.target, self.custody = target, custody
        self.request = process.world.requests[post.transfer_id]
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
        self.rooms: deque[float] = deque()
        """Scripted: how long the next gathers wait for room in staging (s)."""
        self._waiting: dict[tuple[int, int], dict[int, ev.Pack]] = {}
        """By process and rank: gathers that have not begun."""
        self._begins: dict[tuple[Any, ...], float] = {}
        """By process, rank and shard: when the last gather begins."""

    def _chance(self, process: Process, request: Request) -> tuple[Profile, Random]:
        return request.profile or self.world.profile, request.random or process.random

    # ---------------------------------------------------------------- staging

    def pack(self, process: Process, rank: int, pack: ev.Pack) -> None:
        """Gather into staging: at once, or when there is room; those of a shard in order. What is lost waits for the
        end of this step.
        """
        source, now = process.ghost.source(pack.transfer_id), self.world.now
        me, shard = (id(process), rank), (id(process), rank, pack.transfer_id, pack.link)
        if source.freed:
            raise Violation(f"I2: {process.name} packs {pack.transfer_id}, whose source is free")
        source.packing.add((rank, pack.handle))
        profile, random = self._chance(process, self.world.requests[pack.transfer_id])
        begins = max(now, self._begins.get(shard, now))
        if self.rooms:
            begins += self.rooms.popleft()
        elif profile.crowded and random.random() < profile.crowded:
            begins += profile.crowded_s * random.random()
        self._waiting.setdefault(me, {})[pack.handle] = pack
        if process.endpoints[rank].sender.lost(pack.handle):
            return
        self._begins[shard] = begins
        if begins > now:
            process.later(begins - now, self._gather, process, rank, pack)
        else:
            self._gather(process, rank, pack)

    def _gather(self, process: Process, rank: int, pack: ev.Pack) -> None:
        """It is enqueued: before whatever is written into these blocks next."""
        if self._waiting[id(process), rank].pop(pack.handle, None) is None:
            return
        if pack.stop > process.host.computed(pack.transfer_id):
            raise Violation(f"I2: {process.name} packs tokens of {pack.transfer_id} that are not computed")
        profile, random = self._chance(process, self.world.requests[pack.transfer_id])
        delay = profile.pack_s * (0.2 + random.random())
        process.later(delay, self._packed, process, rank, pack)

    def preempted(self, process: Process, rank: int) -> None:
        """The rank has taken a ``Preempted``: what has not begun and is lost will not begin."""
        waiting, sender = self._waiting.get((id(process), rank), {}), process.endpoints[rank].sender
        for handle, pack in reversed(list(waiting.items())):
            if sender.lost(handle):
                del waiting[handle]
                self._begins.pop((id(process), rank, pack.transfer_id, pack.link), None)
                process.ghost.source(pack.transfer_id).packing.discard((rank, handle))
                self.world.spoils.add("preempted before its gather")
                process.receive(rank, ev.Unpacked(handle))

    def _packed(self, process: Process, rank: int, pack: ev.Pack) -> None:
        process.ghost.source(pack.transfer_id).packing.discard((rank, pack.handle))
        process.receive(rank, ev.Packed(pack.handle))

    # ---------------------------------------------------------------- posting

    def post(self, process: Process, rank: int, post: ev.Post) -> None:
        """The transfer thread gets to it some time from now."""
        request = self.world.requests[post.transfer_id]
        profile, random = self._chance(process, request)
        delay = profile.post_s * random.random()
        if profile.parked and random.random() < profile.parked:
            parked_s = profile.parked_s * random.random()
            if self.world.causes.hit("parked", "write", post.handle, request, None):
                delay += parked_s
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
        world, request, post = self.world, write.request, write.post
        profile, random = self._chance(write.process, request)
        draw, start, stop = random.random, post.start, post.stop
        span, broken = profile.wire_s, False
        fate = draw()
        if fate < profile.slow:
            if world.causes.hit("slow", "write", post.handle, request, None):
                span = profile.slow_s
        elif fate < profile.slow + profile.broken:
            broken = world.causes.hit("broken", "write", post.handle, request, None)
        if self.fates:
            span, broken = self.fates.popleft()
            request.causes.update(("slow", "broken"))
        width = stop - start + 1
        cuts = sorted({start, stop, *[start + int(draw() * width) for _ in range(profile.cuts)]})
        last = 0.0
        for piece in pairwise(cuts):
            delay = span * (0.1 + draw())
            if broken and draw() < 0.4:
                continue
            last = max(last, delay)
            write.pieces.add(piece)
            world.at(delay, self._land, write, piece)
        if broken:
            world.at(draw() * (last + 0.01), self._break, write)
            world.at(last + draw() * profile.quiet_s + 0.02, self._quiet, write)
        else:
            world.at(last + 0.001 + draw() * profile.wire_s, self._done, write)

    def _land(self, write: Write, piece: tuple[int, int]) -> None:
        world, process, target, post, request = self.world, write.process, write.target, write.post, write.request
        if write.over or piece not in write.pieces:
            return
        if not process.alive and world.now > process.died_at + world.settings.drain_s:
            return
        write.pieces.remove(piece)
        custody, source = write.custody, write.source
        if target is None or not target.alive or custody is None:
            return
        if not post.packed and process.alive and (source.generation != write.generation or source.freed):
            raise Violation(
                f"I2: the source of {post.transfer_id} at {process.name} changed under handle {post.handle}"
            )
        first, units, rank, link_rank = request.prompt - request.tokens, custody.units, write.rank, post.link[1]
        start, stop = piece
        if not first <= start < stop <= first + len(units) * UNIT_TOKENS:
            raise Violation(
                f"I1: {post.transfer_id} writes tokens {start - first} to {stop - first} of {request.tokens}"
            )
        ghost, pull, touched = target.ghost, request.mode == "pull", None
        for position in range(start, stop):
            unit = units[(position - first) // UNIT_TOKENS]
            if unit is not touched:
                ghost.land(custody, unit)
                touched = unit
            if pull:
                source.read[rank, link_rank, position] = (post.transfer_id, link_rank, position)
            else:
                ghost.cells[link_rank, unit, (position - first) % UNIT_TOKENS, rank] = (
                    post.transfer_id,
                    rank,
                    position,
                )

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
            profile, random = self._chance(process, write.request)
            self.world.at(random.random() * profile.quiet_s + 0.01, self._quiet, write)

    def on_kill(self, process: Process) -> None:
        """What a dead process had posted lands until the drain time, or never."""
        for write in [w for w in self.writes.values() if w.process is process]:
            del self.writes[(id(process), *write.key)]
            draw = self._chance(process, write.request)[1].random
            if draw() < 0.3:
                write.over = True
            for piece in write.pieces:
                self.world.at(draw() * self.world.settings.drain_s, self._land, write, piece)
