"""Hypothesis drives the world: any order of requests and faults, shrunk to the shortest that breaks a property."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pushkv.sim.explore.profiles import CONFIGS, HOSTILE, Driver
from pushkv.sim.explore.world import World

moments = st.sampled_from((0.01, 0.05, 0.2, 1.0, 5.0, 12.0))
picks = st.integers(0, 7)


class Worlds(RuleBasedStateMachine):
    """Rules of play are the world's; properties are checked inside it, and at the end."""

    @initialize(seed=st.integers(0, 2**16), shape=st.sampled_from(sorted(CONFIGS)), kind=st.booleans())
    def begin(self, seed: int, shape: str, kind: bool) -> None:
        self.world = World(seed, HOSTILE if kind else HOSTILE.calm(), CONFIGS[shape])
        self.driver = Driver(self.world)

    def _engine(self, pick: int) -> str:
        return list(self.world.ranks)[pick % len(self.world.ranks)]

    @rule(wait=moments)
    def time_goes_by(self, wait: float) -> None:
        self.world.run(wait)

    @rule()
    def a_request(self) -> None:
        self.driver.request()

    @rule(pick=picks, at_p=st.booleans())
    def an_abort(self, pick: int, at_p: bool) -> None:
        open_ones = [request for request in self.world.requests.values() if not request.outcome]
        if open_ones:
            request = open_ones[pick % len(open_ones)]
            self.world.abort(request, request.p if at_p else request.d)

    @rule(pick=picks)
    def a_preemption(self, pick: int) -> None:
        for engine in self.world.config.prefill:
            self.world.preempt(engine, pick / 8)

    @rule(pick=picks)
    def a_kill(self, pick: int) -> None:
        self.world.kill(self._engine(pick))

    @rule(pick=picks, told=st.booleans())
    def a_start(self, pick: int, told: bool) -> None:
        if told:
            self.world.say_gone(self._engine(pick))
        self.world.start(self._engine(pick))

    @rule(pick=picks)
    def a_pause(self, pick: int) -> None:
        self.world.pause(self._engine(pick))

    @rule(pick=picks)
    def a_waking(self, pick: int) -> None:
        self.world.wake(self._engine(pick))

    @rule(one=picks, other=picks, both=st.booleans())
    def a_partition(self, one: int, other: int, both: bool) -> None:
        self.world.cut(self._engine(one), self._engine(other), both)

    @rule()
    def a_healing(self) -> None:
        self.world.heal()

    @invariant()
    def bounds_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check_bounds()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.driver.afterwards()


Worlds.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWorlds = Worlds.TestCase
