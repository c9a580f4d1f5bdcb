"""Several engines in one world with one clock and one random generator: a seed fixes everything.

The world routes requests, injects faults, heals, drains, and checks at the end what must hold then (I5, V1 to V6). I1
to I4 are checked on the way (``ghost``, ``host``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from pushkv.model.protocol import Settings
from pushkv.model.protocol import events as ev
from pushkv.sim.explore.bounds import check_legs
from pushkv.sim.explore.fabric import Fabric, Network
from pushkv.sim.explore.ghost import Violation
from pushkv.sim.explore.process import Process
from pushkv.sim.explore.profiles import Config, Profile
from pushkv.sim.explore.text import text

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
    at: float = 0.0
    asks: str = ""
    """Engine that the receiving leg is told to ask, when that is wrong."""


class Steady(Random):
    """No surprises: for stories that people read."""

    def random(self) -> float:
        """Always the middle."""
        return 0.5

    def randint(self, a: int, b: int) -> int:
        """Always the middle."""
        return (a + b) // 2

    def shuffle(self, x: Any) -> None:
        """Highest first, so that blocks are handed out from 0."""
        x.sort(reverse=True)


class World:
    """See the module."""

    def __init__(
        self, seed: int, profile: Profile, config: Config | None = None, settings: Settings = SETTINGS
    ) -> None:
        self.random = Steady(seed) if profile.readable else Random(seed)
        self.seed, self.profile, self.settings = seed, profile, settings
        self.config = config or Config()
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self.incarnation_numbers = count(1001) if profile.readable else iter(lambda: self.random.getrandbits(62) | 1, 0)
        self.by_incarnation: dict[int, Process] = {}
        self.network, self.fabric = Network(self), Fabric(self)
        self.ranks = {**self.config.prefill, **self.config.decode}
        self.processes: dict[str, Process] = {}
        self.requests: dict[str, Request] = {}
        self.faults = 0
        self._numbers = count(1)
        self.log: Callable[[Any, str, Any], None] | None = None
        for name, ranks in self.ranks.items():
            self.processes[name] = Process(self, name, ranks)

    # ---------------------------------------------------------------- time

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do ``action`` after ``delay_s``."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action, args))

    def run(self, seconds: float) -> None:
        """Let ``seconds`` go by."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action, args = heapq.heappop(self._queue)
            action(*args)
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
        """A dispatch by a router: both legs, after their delays."""
        delays = more.pop("delays", (0.0, 0.0))
        request = Request(f"t{next(self._numbers)}", mode, p, d, prompt, tokens, at=self.now, **more)
        self.requests[request.tid] = request
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
            request.spoiled = request.spoiled or "dead engine"

    def abort(self, request: Request, engine: str) -> None:
        """Abort one leg."""
        process = self.processes[engine]
        sends = (engine == request.p) != (request.mode == "pull")
        request.spoiled = request.spoiled or "abort"
        if process.alive:
            process.later(0.0, process.host.abort, request.tid, "send" if sends else "receive")

    # ---------------------------------------------------------------- faults

    def _spoil(self, why: str, *engines: str) -> None:
        self.faults += 1
        for request in self.requests.values():
            if not request.outcome and (request.p in engines or request.d in engines):
                request.spoiled = request.spoiled or why

    def kill(self, engine: str) -> None:
        """SIGKILL."""
        process = self.processes[engine]
        if process.alive:
            self._spoil("kill", engine)
            process.alive = False
            process.died_at = self.now
            self.fabric.on_kill(process)
            self.note((engine, "ledger"), "! killed")

    def start(self, engine: str) -> None:
        """The same engine id, a new process."""
        if not self.processes[engine].alive:
            self.processes[engine] = Process(self, engine, self.ranks[engine])
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
            self._spoil("pause", engine)
            process.pause()
            self.note((engine, "ledger"), "! paused")

    def wake(self, engine: str) -> None:
        """SIGCONT."""
        if self.processes[engine].paused:
            self.note((engine, "ledger"), "! wakes")
        self.processes[engine].wake()

    def cut(self, a: str, b: str, both: bool = True) -> None:
        """No message goes from ``a`` to ``b``."""
        self._spoil("partition", a, b)
        self.network.cut.add((a, b))
        if both:
            self.network.cut.add((b, a))

    def heal(self) -> None:
        """All messages pass again."""
        self.network.cut.clear()

    # ---------------------------------------------------------------- the end

    def calm_down(self) -> None:
        """No more faults: everybody lives, wakes and is reachable."""
        self.heal()
        for engine in self.ranks:
            self.wake(engine)
            self.start(engine)
        self.profile = self.profile.calm()

    def drain(self) -> None:
        """Let every bound pass, then check that nothing is left (I5)."""
        s = self.settings
        self.calm_down()
        self.run((s.yields + 1) * 0.5 * s.wait_s + s.lease_s + s.orphan_s + 4 * s.write_s + 4 * s.suspect_after_s)
        self.check_empty()

    def check_bounds(self) -> None:
        """I5a, V3: cheap enough to be looked at all the time."""
        s, slack = self.settings, 2.0
        for process in self.processes.values():
            if not process.alive or process.paused:
                continue
            late = self.now - slack - process.paused_s
            for leg in process.host.receiving.values():
                bound = s.wait_s * (1 + leg.yields)
                if leg.held and not leg.verdict and leg.begun_at + bound + self.profile.queue_s < late:
                    raise Violation(
                        f"I5a: {leg.tid} has no verdict at {process.name} {self.now - leg.begun_at:.1f} s after arrival"
                    )
            for leg in process.host.sending.values():
                if leg.final_at >= 0 and not leg.verdict and leg.final_at + s.sender_verdict_s < late:
                    raise Violation(
                        f"I5a: {leg.tid} has no verdict at {process.name} {self.now - leg.final_at:.1f} s after its end"
                    )
            check_legs(process, late)
            for endpoint in process.endpoints:
                sizes = endpoint.sender.sizes()
                links = len(endpoint.peers)
                if sizes["tombstones"] > links * s.tombstones_per_link or sizes["remembered"] > s.remembered_ids:
                    raise Violation(f"V3: {process.name}: {sizes}")
            if process.ledger.quarantined() > process.host.unsettled:
                raise Violation(f"V6: {process.ledger.quarantined()} in quarantine at {process.name}: more than failed")

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
