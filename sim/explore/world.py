"""Several engines in one world with one clock: a seed fixes everything.

The world routes requests, injects faults, heals, drains, and checks at the end what must hold then (I5, V1 to V6). I1
to I4 are checked on the way (``ghost``, ``host``). Chance comes in streams, one for each transfer, each pair of links
and each process, so that what is taken out of a run does not shuffle the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from pushkv.model.protocol import Settings
from pushkv.model.protocol import events as ev
from pushkv.sim.explore.bounds import check_legs
from pushkv.sim.explore.causes import Causes
from pushkv.sim.explore.fabric import Fabric
from pushkv.sim.explore.network import Network
from pushkv.sim.explore.process import Process
from pushkv.sim.explore.profiles import Config, Profile
from pushkv.sim.explore.text import text
from pushkv.sim.explore.violation import Violation

SETTINGS = Settings(
    beat_s=1.0,
    suspect_after_s=4.0,
    wait_s=40.0,
    lease_s=25.0,
    orphan_s=10.0,
    write_s=6.0,
    drain_s=1.0,
    greet_s=0.5,
    pause_s=1.5,
    tombstones_per_link=16,
    remembered_ids=16,
    links=64,
    open_per_link=32,
    staging_bytes=2400,
    landing_segments=8,
)


@dataclass(eq=False)
class Request:
    """One dispatch. ``spoiled`` names what may make it fail."""

    tid: str
    mode: str
    p: str
    d: str
    prompt: int
    tokens: int
    chunked: bool = False
    outcome: str = ""
    spoiled: str = ""
    spoiled_at: float = 0.0
    at: float = 0.0
    asks: str = ""
    """Engine that the receiving leg is told to ask, when that is wrong."""
    ended_at: float = float("inf")
    causes: set[str] = field(default_factory=set)
    """What the network and the fabric did to it."""
    sent: dict[str, int] = field(default_factory=dict)
    """Its messages by kind, resends included."""
    said_at: float = 0.0
    """When the last message that names it was sent."""
    profile: Profile | None = None
    random: Random | None = None

    def spoil(self, why: str, now: float) -> None:
        """``why`` may make it fail from ``now`` on; the first reason counts."""
        if why and not self.spoiled:
            self.spoiled, self.spoiled_at = why, now


class Steady(Random):
    """No surprises: for stories that people read."""

    def random(self) -> float:
        """Always the middle."""
        return 0.5

    def randint(self, a: int, b: int) -> int:
        """Always the middle."""
        return (a + b) // 2


MESSAGES_ONCE, MESSAGES_PER_BEAT = 32, 12
"""What one transfer may need on one link: all that there is to say, and what a beat makes both ends repeat (V4)."""

STREAMS = ("driver", "transfer", "lane", "process", "incarnation")
"""What has random numbers of its own. ``World.stream`` numbers them within each."""


class World:
    """See the module. ``faults``: labels of what chance may do; ``None``: whatever it likes."""

    def __init__(
        self,
        seed: int,
        profile: Profile,
        config: Config | None = None,
        settings: Settings = SETTINGS,
        faults: Collection[str] | None = None,
    ) -> None:
        self.seed, self.profile, self.settings = seed, profile, settings
        self._steady = Steady(seed) if profile.readable else None
        self.random = self.stream("driver", 0)
        self.config = config or Config()
        self.now = 0.0
        self.events = 0
        """What was done so far: messages delivered, descriptors landed, timers, steps of ranks and hosts."""
        self.queue: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        """What comes: when, in which order, of whom (nothing of a paused or dead process is done), and what."""
        self.order = 0
        numbers = self.stream("incarnation", 0)
        self.incarnation_numbers: Iterator[int] = (
            count(1001) if profile.readable else iter(lambda: numbers.getrandbits(62) | 1, 0)
        )
        self.by_incarnation: dict[int, Process] = {}
        self.causes = Causes(self, faults)
        self.network, self.fabric = Network(self), Fabric(self)
        self.ranks = {**self.config.prefill, **self.config.decode}
        self.processes: dict[str, Process] = {}
        self.requests: dict[str, Request] = {}
        self.faults = 0
        self.spoils: set[str] = set()
        """Kinds of what the driver did."""
        self._ill: dict[tuple[str, str], float] = {}
        """What was done to an engine, and until when it may make transfers fail."""
        self._looks = 0
        self._numbers = count(1)
        self._starts = count()
        self.log: Callable[[Any, str, Any], None] | None = None
        for name, ranks in self.ranks.items():
            self.processes[name] = Process(self, name, ranks, self.stream("process", next(self._starts)))

    def stream(self, what: str, ordinal: int) -> Random:
        """Random numbers for one thing. The same for the same seed, whatever else happens."""
        if self._steady is not None:
            return self._steady
        return Random((self.seed << 56) | (STREAMS.index(what) << 48) | ordinal)

    # ---------------------------------------------------------------- time

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do ``action`` after ``delay_s``."""
        self.order += 1
        heappush(self.queue, (self.now + delay_s, self.order, None, action, args))

    def run(self, seconds: float) -> None:
        """Let ``seconds`` go by."""
        until = self.now + seconds
        queue, pop, done = self.queue, heappop, 0
        try:
            while queue and queue[0][0] <= until:
                self.now, _, process, action, args = pop(queue)
                if process is not None:
                    if not process.alive:
                        continue
                    if process.paused:
                        process.backlog.append((action, args))
                        continue
                done += 1
                action(*args)
        finally:
            self.events += done
        self.now = until

    # ---------------------------------------------------------------- names and notes

    def links(self, mine: str, theirs: str) -> tuple[tuple[tuple[str, int], ...], ...]:
        """For each rank of ``mine`` the links of ``theirs`` that it exchanges bytes with."""
        a, b = self.ranks[mine], self.ranks[theirs]
        if a >= b:
            return tuple(((theirs, rank * b // a),) for rank in range(a))
        return tuple(tuple((theirs, rank * (b // a) + i) for i in range(b // a)) for rank in range(a))

    def link(self, link: Any) -> str:
        """A short name."""
        engine, rank = link
        if rank == "ledger" or self.ranks.get(engine, 1) > 1:
            return f"{engine}/{rank}"
        return str(engine)

    def text(self, record: Any) -> str:
        """One record, for people."""
        if self.log is None:
            return ""
        return text(record)

    def note(self, who: Any, text: str, record: Any = None) -> None:
        """One line of the transcript, when somebody listens."""
        if self.log is not None:
            self.log(who, text, record)

    # ---------------------------------------------------------------- requests

    def request(self, mode: str, p: str, d: str, prompt: int, tokens: int, **more: Any) -> Request:
        """A dispatch by a router: both legs, after their delays. ``number`` gives it a name and its chances."""
        delays = more.pop("delays", (0.0, 0.0))
        number = more.pop("number", 0) or next(self._numbers)
        more.setdefault("profile", self.profile)
        random = self.stream("transfer", number)
        request = Request(
            f"t{number}", mode, p, d, prompt, tokens, at=self.now, spoiled_at=self.now, random=random, **more
        )
        self.requests[request.tid] = request
        request.spoil(self._unwell(p, d), self.now)
        if delays[0] is not None:
            self.at(delays[0], self._leg, request, p, "prefill")
        if delays[1] is not None:
            self.at(delays[1], self._leg, request, d, "decode")
        return request

    def _leg(self, request: Request, engine: str, part: str) -> None:
        process = self.processes[engine]
        if process.alive:
            process.later(0.0, getattr(process.host, part), request)
        else:
            request.spoil("dead engine", self.now)

    def abort(self, request: Request, engine: str) -> None:
        """Abort one leg."""
        process = self.processes[engine]
        sends = (engine == request.p) != (request.mode == "pull")
        request.spoil("abort", self.now)
        self.spoils.add("abort")
        if process.alive:
            process.later(0.0, process.host.abort, request.tid, "send" if sends else "receive")

    def preempt(self, engine: str, pick: float) -> None:
        """Take the cache of one of the running prefills of ``engine`` back: ``pick`` from 0 (the oldest) to 1."""
        process = self.processes[engine]
        host = process.host
        if process.alive and not process.paused:
            legs = [leg for half in (host.sending, host.receiving) for leg in half.values() if leg.running]
            if legs:
                self.spoils.add("preemption")
                host.preempt(legs[int(pick * len(legs))])

    # ---------------------------------------------------------------- faults

    def _spoil(self, why: str, *engines: str) -> None:
        self.faults += 1
        self.spoils.add(why)
        for engine in engines:
            self._ill[engine, why] = float("inf")
        for request in self.requests.values():
            if not request.outcome and (request.p in engines or request.d in engines):
                request.spoil(why, self.now)

    def _recover(self, why: str, *engines: str) -> None:
        """``why`` ails ``engines`` no more, once whoever suspects them has looked; something else still may."""
        s = self.settings
        for engine in engines:
            if (engine, why) in self._ill:
                self._ill[engine, why] = self.now + s.suspect_after_s + s.beat_s + s.drain_s

    def _unwell(self, *engines: str) -> str:
        """What ails one of ``engines`` now, if anything does."""
        return next((why for (engine, why), until in self._ill.items() if engine in engines and self.now < until), "")

    def kill(self, engine: str) -> None:
        """SIGKILL."""
        process = self.processes[engine]
        if process.alive:
            self.causes.crash("killed", process)
            self._spoil("kill", engine)
            process.alive = False
            process.died_at = self.now
            self.fabric.on_kill(process)
            self.note((engine, "ledger"), "! killed")

    def start(self, engine: str) -> None:
        """The same engine id, a new process."""
        if not self.processes[engine].alive:
            stream = self.stream("process", next(self._starts))
            self.processes[engine] = Process(self, engine, self.ranks[engine], stream)
            self._recover("kill", engine)
            self._recover("pause", engine)  # it may have been paused when it was killed
            self.note((engine, "ledger"), "! started")

    def say_gone(self, engine: str) -> None:
        """The operating system tells every peer that the last process of ``engine`` is gone (E2)."""
        dead = self.processes[engine]
        if dead.alive:
            return
        for process in self.processes.values():
            for rank in range(process.ranks):
                for their, incarnation in enumerate(dead.incarnations):
                    process.receive(rank, ev.ProcessGone((engine, their), incarnation))

    def pause(self, engine: str) -> None:
        """SIGSTOP."""
        process = self.processes[engine]
        if process.alive and not process.paused:
            self.causes.crash("paused", process)
            self._spoil("pause", engine)
            process.pause()
            self.note((engine, "ledger"), "! paused")

    def wake(self, engine: str) -> None:
        """SIGCONT."""
        if self.processes[engine].paused:
            self._recover("pause", engine)
            self.note((engine, "ledger"), "! wakes")
        self.processes[engine].wake()

    def cut(self, a: str, b: str, both: bool = True) -> None:
        """No message goes from ``a`` to ``b``."""
        self.note((a, "ledger"), f"! cut off from {b}{', both ways' if both else ''}")
        self._spoil("partition", a, b)
        self.network.cut.add((a, b))
        if both:
            self.network.cut.add((b, a))

    def heal(self) -> None:
        """All messages pass again."""
        for pair in sorted(self.network.cut):
            self.note((pair[0], "ledger"), f"! reaches {pair[1]} again")
        for pair in self.network.cut:
            self._recover("partition", *pair)
        self.network.cut.clear()

    # ---------------------------------------------------------------- the end

    def calm_down(self) -> None:
        """No more faults: everybody lives, wakes and is reachable."""
        self.heal()
        for engine in self.ranks:
            self.wake(engine)
            self.start(engine)
        self.profile = self.profile.calm()
        for request in self.requests.values():
            request.profile = self.profile

    def drain(self) -> None:
        """Let every bound pass, then check that nothing is left (I5)."""
        s = self.settings
        self.calm_down()
        self.run((s.yields + 1) * 0.5 * s.wait_s + s.lease_s + s.orphan_s + 4 * s.write_s + 4 * s.suspect_after_s)
        self.check_empty()

    def check_bounds(self) -> None:
        """I5a, V3, V6: what has no verdict yet, and how much is kept. (The host looks at each verdict that comes.)"""
        self._looks += 1
        for process in self.processes.values():
            if process.alive and not process.paused:
                process.host.check_bounds()
                check_legs(process, self.now - 2.0 - process.paused_s)
                if not self._looks % 4:  # what grows here grows slowly
                    process.check_tables()

    def check_messages(self) -> None:
        """V4: a transfer says what it must on each link, and repeats it once a beat at the most while it is open; so do
        links.
        """
        beat_s = self.settings.beat_s
        for request in self.requests.values():
            links = max(self.ranks[request.p], self.ranks[request.d])
            beats = max(0.0, request.said_at - request.at) / beat_s
            if sum(request.sent.values()) > links * (MESSAGES_ONCE + MESSAGES_PER_BEAT * beats):
                raise Violation(f"V4: {request.tid} took {request.sent} on {links} links in {beats:.1f} beats")
        for lane in self.network.lanes():
            if sum(lane.sent.values()) > 8 + 2 * self.now / beat_s:
                raise Violation(f"V4: {lane.name} carried {lane.sent} in {self.now / beat_s:.1f} beats")

    def check_empty(self) -> None:
        """I5c, V3: all is healed and drained."""
        for process in self.processes.values():
            host, ledger, name = process.host, process.ledger, process.name
            left: dict[str, Any] = {
                "receiving": sorted(host.receiving),
                "sending": sorted(host.sending),
                "open": [n for n in ledger.open() if n],
                "quarantined": ledger.quarantined(),
                "segments": self.settings.landing_segments - ledger.landing_free,
                "blocks": host.total - len(host.free),
                "custody": sorted(process.ghost.custody),
            }
            for rank, endpoint in enumerate(process.endpoints):
                for half in (endpoint.sender, endpoint.receiver):
                    sizes = half.sizes()
                    for table in ("transfers", "writes", "live", "short", "armed"):
                        left[f"{table} of {type(half).__name__}/{rank}"] = sizes.get(table, 0)
                left[f"staged/{rank}"] = endpoint.sender.staged_bytes
            left = {key: value for key, value in left.items() if value}
            if left:
                raise Violation(f"I5c: left at {name}: {left}")
        if self.fabric.writes:
            raise Violation(f"I5c: writes left on the fabric: {self.fabric.writes}")
