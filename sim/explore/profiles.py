"""How unkind a world is, and the random driver that plays one seed of a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pushkv.sim.explore.ghost import Violation

if TYPE_CHECKING:
    from pushkv.sim.explore.world import World


@dataclass(frozen=True)
class Profile:
    """Times are seconds, the rest are probabilities, or rates per second of the driver."""

    name: str = "calm"
    readable: bool = False
    latency_s: float = 0.002
    jitter_s: float = 0.02
    straggle: float = 0.0
    straggle_s: float = 5.0
    loss: float = 0.0
    duplicate: float = 0.0
    inside_s: float = 0.01
    timer_late_s: float = 0.02
    connect_s: float = 0.1
    unfit: float = 0.0
    pack_s: float = 0.02
    post_s: float = 0.02
    parked: float = 0.0
    parked_s: float = 40.0
    wire_s: float = 0.2
    slow: float = 0.0
    slow_s: float = 15.0
    broken: float = 0.0
    quiet_s: float = 4.0
    cuts: int = 3
    chunk_s: float = 0.4
    load_s: float = 0.2
    run_s: float = 0.5
    blocks: int = 16
    queue_s: float = 0.0
    # the driver
    modes: tuple[str, ...] = ("packed", "packed", "early", "late", "pull")
    seconds: float = 20.0
    requests: float = 1.5
    aborts: float = 0.0
    preempts: float = 0.0
    kills: float = 0.0
    os_tells: float = 0.3
    os_tells_s: float = 4.0
    pauses: float = 0.0
    partitions: float = 0.0
    wrong_p: float = 0.0
    missing_leg: float = 0.0
    late_leg_s: float = 0.5

    def calm(self) -> Profile:
        """The same without faults."""
        return replace(
            self, straggle=0.0, loss=0.0, duplicate=0.0, unfit=0.0, parked=0.0, slow=0.0, broken=0.0, wrong_p=0.0,
            missing_leg=0.0,
            aborts=0.0, preempts=0.0, kills=0.0, pauses=0.0, partitions=0.0,
        )  # fmt: skip


CALM = Profile(preempts=0.2)
LOSSY = Profile("lossy", loss=0.15, duplicate=0.2, straggle=0.1, preempts=0.2, aborts=0.1)
CRASHY = Profile("crashy", kills=0.15, loss=0.02, straggle=0.05, broken=0.05, slow=0.05, aborts=0.1)
HOSTILE = Profile(
    "hostile", loss=0.1, duplicate=0.15, straggle=0.1, straggle_s=15.0, kills=0.06, pauses=0.06, partitions=0.06,
    broken=0.1, slow=0.1,
    parked=0.1, aborts=0.3, preempts=0.3, wrong_p=0.05, missing_leg=0.1, late_leg_s=5.0, unfit=0.05,
)  # fmt: skip
CHURN = Profile(
    "churn", requests=6.0, aborts=1.5, preempts=0.5, broken=0.1, slow=0.05, parked=0.02, blocks=12, run_s=0.1
)
PARTITION = Profile("partition", partitions=0.3, straggle=0.05, straggle_s=10.0, aborts=0.2, slow=0.05)
PAUSED = Profile("paused", pauses=0.3, slow=0.2, parked=0.1, aborts=0.2, duplicate=0.1)

PROFILES = {profile.name: profile for profile in (CALM, LOSSY, CRASHY, HOSTILE, CHURN, PARTITION, PAUSED)}


@dataclass(frozen=True)
class Config:
    """Engines and their ranks."""

    prefill: dict[str, int] = field(default_factory=lambda: {"P0": 1, "P1": 1})
    decode: dict[str, int] = field(default_factory=lambda: {"D0": 1, "D1": 1})


CONFIGS = {
    "plain": Config(),
    "tp2": Config({"P0": 2}, {"D0": 2, "D1": 2}),
    "fan-in": Config({"P0": 2, "P1": 2}, {"D0": 1}),
    "fan-out": Config({"P0": 1}, {"D0": 2, "D1": 2}),
    "both parts": Config({"A": 1, "B": 1}, {"A": 1, "B": 1}),
}


class Driver:
    """Plays ``world.profile`` against ``world``: requests and faults at random times, then peace, then checks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random

    def play(self) -> None:
        """All of it."""
        world, profile = self.world, self.world.profile
        step = 0.1
        for _ in range(int(profile.seconds / step)):
            self._maybe(profile.requests * step, self.request)
            self._maybe(profile.aborts * step, self._abort)
            self._maybe(profile.preempts * step, self._preempt)
            self._maybe(profile.kills * step, self._kill)
            self._maybe(profile.pauses * step, self._pause)
            self._maybe(profile.partitions * step, self._cut)
            world.run(step)
            world.check_bounds()
        for _ in range(int((world.settings.wait_s + world.settings.lease_s) / 5)):
            world.run(5.0)
            world.check_bounds()
        world.drain()
        self.check_outcomes()
        self.afterwards()

    def _maybe(self, probability: float, action: Callable[[], None]) -> None:
        while probability > 0:
            if self.random.random() < probability:
                action()
            probability -= 1

    def request(self) -> None:
        """One dispatch of a random kind."""
        world, random, profile = self.world, self.random, self.world.profile
        p, d = random.choice(list(world.config.prefill)), random.choice(list(world.config.decode))
        if p == d:
            return
        both = set(world.config.prefill) & set(world.config.decode)
        mode = random.choice([mode for mode in profile.modes if not (both and mode == "pull")])
        prompt = random.randint(1, 24)
        tokens = random.choice((prompt, prompt, random.randint(0, prompt)))
        delays: list[float | None] = [random.random() * profile.late_leg_s, random.random() * profile.late_leg_s]
        spoiled = ""
        if random.random() < profile.missing_leg:
            delays[random.randrange(2)] = None
            spoiled = "a leg is missing"
        if random.random() < profile.wrong_p:
            spoiled = "sent to the wrong P"
        request = world.request(
            mode, p, d, prompt, tokens, chunked=random.random() < 0.5, delays=tuple(delays), spoiled=spoiled
        )
        if spoiled == "sent to the wrong P":
            others = world.config.decode if mode == "pull" else world.config.prefill
            request.asks = random.choice(list(others))
            if request.asks == (request.p if mode == "pull" else request.d):
                request.asks = ""

    def _abort(self) -> None:
        request = self.random.choice(list(self.world.requests.values())) if self.world.requests else None
        if request is not None and not request.outcome:
            self.world.abort(request, self.random.choice((request.p, request.d)))

    def _preempt(self) -> None:
        for name in self.world.config.prefill:
            process = self.world.processes[name]
            legs = [
                leg for half in (process.host.sending, process.host.receiving) for leg in half.values() if leg.running
            ]
            if legs and process.alive and not process.paused:
                process.host.preempt(self.random.choice(legs))

    def _kill(self) -> None:
        world = self.world
        engine = self.random.choice(list(world.ranks))
        world.kill(engine)
        world.at(self.random.random() * 8.0, world.start, engine)
        if self.random.random() < world.profile.os_tells:
            world.at(self.random.random() * world.profile.os_tells_s, world.say_gone, engine)

    def _pause(self) -> None:
        world = self.world
        engine = self.random.choice(list(world.ranks))
        world.pause(engine)
        world.at(self.random.random() * self.random.choice((3.0, 30.0)), world.wake, engine)

    def _cut(self) -> None:
        world = self.world
        a, b = self.random.choice(list(world.config.prefill)), self.random.choice(list(world.config.decode))
        if self.random.random() < 0.5:
            a, b = b, a
        world.cut(a, b, self.random.random() < 0.5)
        world.at(self.random.random() * self.random.choice((3.0, 20.0)), world.heal)

    # ---------------------------------------------------------------- outcomes

    def check_outcomes(self) -> None:
        """V1: whatever was not spoiled has loaded."""
        world = self.world
        excused = world.profile.loss or self.noisy
        for request in world.requests.values():
            if request.outcome != "loaded" and not request.spoiled and not excused:
                raise Violation(f"V1: {request} failed and nothing was done to it")

    @property
    def noisy(self) -> bool:
        """Whether the profile may spoil any request without naming it."""
        p = PROFILES.get(self.world.profile.name, self.world.profile)
        return bool(p.loss or p.slow or p.broken or p.parked or p.straggle or p.unfit)

    def afterwards(self) -> None:
        """V2: once faults stop, every pair loads new transfers."""
        world = self.world
        fresh = []
        for p in world.config.prefill:
            for d in world.config.decode:
                if p != d:
                    both = d in world.config.prefill
                    for mode in ("packed", "early", "late") + (() if both else ("pull",)):
                        fresh.append(world.request(mode, p, d, 8, 8))
                        world.run(1.5)
        world.run(world.settings.wait_s)
        for request in fresh:
            if request.outcome != "loaded":
                raise Violation(f"V2: after all faults {request} has not loaded")
        world.check_empty()


def play(seed: int, profile: Profile, config: Config | None = None) -> World:
    """One seed. Raises ``Violation`` when a property does not hold."""
    from pushkv.sim.explore.world import World

    world = World(seed, profile, config)
    Driver(world).play()
    return world
