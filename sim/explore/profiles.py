"""How unkind a world is, and the random driver that plays one seed of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pushkv.sim.explore import plan
from pushkv.sim.explore.violation import Violation

if TYPE_CHECKING:
    from pushkv.sim.explore.world import Request, World


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
    rank_late_s: float = 0.0
    """How much later than its neighbour each rank sees its timer: so what falls due at one instant has an order."""
    connect_s: float = 0.1
    unfit: float = 0.0
    pack_s: float = 0.02
    crowded: float = 0.1
    crowded_s: float = 2.0
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
LOSSY = Profile("lossy", loss=0.15, duplicate=0.2, straggle=0.1, preempts=0.2, aborts=0.4)
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
    "both-parts": Config({"A": 1, "B": 1}, {"A": 1, "B": 1}),
}


class Driver:
    """Plays a plan against ``world``: requests and faults at their times, then peace, then checks.

    ``plan`` is that of the world's seed and profile when it is not given, with ``transfers`` requests, or as many as
    come in the profile's seconds.
    """

    def __init__(
        self, world: World, transfers: int | None = None, actions: Sequence[plan.AnyAction] | None = None
    ) -> None:
        self.world = world
        self._planner = plan.Planner(world.random, world.profile, world.config)
        self._transfers, self._actions = transfers, actions
        self.requests: dict[int, Request] = {}

    @property
    def actions(self) -> list[plan.AnyAction]:
        """What is played, in the order of time."""
        if self._actions is None:
            self._actions = self._planner.make(self._transfers)
        return sorted(self._actions, key=lambda action: action.at)

    def play(self) -> None:
        """All of it."""
        world = self.world
        self.act()
        for _ in range(int((world.settings.wait_s + world.settings.lease_s) / 5)):
            world.run(5.0)
            world.check_bounds()
        world.drain()
        self.check_outcomes()
        self.afterwards()

    def act(self) -> None:
        """The plan alone."""
        world = self.world
        for action in self.actions:
            while action.at > world.now + LOOK_S:
                world.run(LOOK_S)
                world.check_bounds()
            if action.at > world.now:
                world.run(action.at - world.now)
            self.do(action)
        world.check_bounds()

    def request(self) -> None:
        """A request of a random kind, now, besides the plan."""
        dispatch = self._planner.dispatch()
        if dispatch is not None:
            self.do(dispatch)

    def do(self, action: plan.AnyAction) -> None:
        """One action, now."""
        world = self.world
        if world.log is not None:
            world.note(("router", 0), plan.text(action))
        match action:
            case plan.Dispatch():
                self.requests[action.number] = world.request(
                    action.mode, action.p, action.d, action.prompt, action.tokens, chunked=action.chunked,
                    delays=action.delays, spoiled=action.spoiled, asks=action.asks, number=action.number,
                )  # fmt: skip
            case plan.Abort():
                request = self.requests.get(action.number)
                if request is not None and not request.outcome:
                    world.abort(request, action.engine)
            case plan.Preempt():
                world.preempt(action.engine, action.pick)
            case plan.Kill():
                world.kill(action.engine)
                world.at(action.down_s, world.start, action.engine)
                if action.told_s is not None:
                    world.at(action.told_s, world.say_gone, action.engine)
            case plan.Pause():
                world.pause(action.engine)
                world.at(action.for_s, world.wake, action.engine)
            case plan.Cut():
                world.cut(action.a, action.b, action.both)
                world.at(action.for_s, world.heal)

    # ---------------------------------------------------------------- outcomes

    def check_outcomes(self) -> None:
        """V1: whatever was not spoiled has loaded. V4: no transfer needed more messages than it may."""
        for request in self.world.requests.values():
            self.world.causes.check_outcome(request)
        self.world.check_messages()

    def afterwards(self) -> None:
        """V2: once faults stop, every pair loads new transfers."""
        world = self.world
        fresh = []
        number = FRESH
        for p in world.config.prefill:
            for d in world.config.decode:
                if p != d:
                    both = d in world.config.prefill
                    for mode in ("packed", "early", "late") + (() if both else ("pull",)):
                        number += 1
                        fresh.append(world.request(mode, p, d, 8, 8, number=number))
                        world.run(1.5)
        world.run(world.settings.wait_s)
        for request in fresh:
            if request.outcome != "loaded":
                raise Violation(
                    f"V2: after all faults {request.tid} ({request.mode}) has not loaded: {request.outcome}"
                )
        world.check_empty()


LOOK_S = 0.5
"""Bounds are looked at this often while requests come (s)."""
FRESH = 1000
"""Transfers that are sent after all faults are numbered from here."""


def play(seed: int, profile: Profile, config: Config | None = None, transfers: int | None = None) -> World:
    """One seed. Raises ``Violation`` when a property does not hold."""
    from pushkv.sim.explore.world import World

    world = World(seed, profile, config)
    Driver(world, transfers).play()
    return world
