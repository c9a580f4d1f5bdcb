"""What a driver does to a world, decided before it begins: requests, and faults at their times.

A plan is a list, so that a run can be played with a part of it, and written down.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pushkv.sim.explore.profiles import Config, Profile

STEP_S = 0.1
AFTER_S = 3.0
"""How long faults go on after the last request."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """At ``at`` seconds."""

    at: float


class Dispatch(Action, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    """Transfer ``number``: its legs come after ``delays`` (s), or never."""

    number: int
    mode: str
    p: str
    d: str
    prompt: int
    tokens: int
    chunked: bool = False
    delays: tuple[float | None, float | None] = (0.0, 0.0)
    spoiled: str = ""
    asks: str = ""


class Abort(Action, frozen=True, kw_only=True, tag="abort"):
    """Transfer ``number`` is aborted at ``engine``, if it has no outcome yet."""

    number: int
    engine: str


class Preempt(Action, frozen=True, kw_only=True, tag="preempt"):
    """One of the running prefills of ``engine``: ``pick`` from 0 (the oldest) to 1."""

    engine: str
    pick: float


class Kill(Action, frozen=True, kw_only=True, tag="kill"):
    """``engine`` is killed, and started again after ``down_s``. The OS tells its peers after ``told_s``, if at all."""

    engine: str
    down_s: float
    told_s: float | None


class Pause(Action, frozen=True, kw_only=True, tag="pause"):
    """``engine`` is paused for ``for_s``."""

    engine: str
    for_s: float


class Cut(Action, frozen=True, kw_only=True, tag="cut"):
    """No message goes from ``a`` to ``b``, nor back when ``both``; after ``for_s`` all messages pass again."""

    a: str
    b: str
    both: bool
    for_s: float


AnyAction = Dispatch | Abort | Preempt | Kill | Pause | Cut


def text(action: AnyAction) -> str:
    """One action, for people."""
    match action:
        case Dispatch():
            chunked, asks = " chunked" if action.chunked else "", f" (asks {action.asks})" if action.asks else ""
            legs = " and ".join(
                "no leg" if delay is None else f"after {delay:.3f} s" for delay in action.delays if delay != 0.0
            )
            what = f"t{action.number} {action.mode}{chunked} {action.p} to {action.d}{asks}"
            return f"dispatches {what}, {action.tokens} of {action.prompt} tokens, legs {legs or 'now'}"
        case Abort():
            return f"aborts t{action.number} at {action.engine}"
        case Preempt():
            return f"{action.engine} preempts"
        case Kill():
            return f"{action.engine} is killed for {action.down_s:.1f} s"
        case Pause():
            return f"{action.engine} is paused for {action.for_s:.1f} s"
        case Cut():
            return f"{action.a} and {action.b} are cut off for {action.for_s:.1f} s"


def make(random: Random, profile: Profile, config: Config, transfers: int | None) -> list[AnyAction]:
    """The plan of one seed. ``transfers``: how many requests; ``None``: for ``profile.seconds``."""
    return Planner(random, profile, config).make(transfers)


class Planner:
    """Makes a plan, or one request after the other."""

    def __init__(self, random: Random, profile: Profile, config: Config) -> None:
        self.random, self.profile, self.config = random, profile, config
        self.prefill, self.decode = list(config.prefill), list(config.decode)
        self.engines = list({**config.prefill, **config.decode})
        self.now = 0.0
        self.plan: list[AnyAction] = []
        self.dispatched: list[Dispatch] = []

    def make(self, transfers: int | None) -> list[AnyAction]:
        """See `make`."""
        profile = self.profile
        steps = int(profile.seconds / STEP_S) if transfers is None else 1 << 30
        step = 0
        while step < steps:
            self.now = round(step * STEP_S, 3)
            if transfers is None or len(self.dispatched) < transfers:
                for _ in range(self._times(profile.requests)):
                    self.dispatch()
                if transfers is not None and len(self.dispatched) >= transfers:
                    del self.dispatched[transfers:]
                    steps = step + int(AFTER_S / STEP_S)
            for _ in range(self._times(profile.aborts)):
                self._abort()
            for _ in range(self._times(profile.preempts)):
                for engine in self.prefill:
                    self.plan.append(Preempt(at=self.now, engine=engine, pick=self.random.random()))
            for _ in range(self._times(profile.kills)):
                self._kill()
            for _ in range(self._times(profile.pauses)):
                self._pause()
            for _ in range(self._times(profile.partitions)):
                self._cut()
            step += 1
        return self.plan

    def _times(self, per_second: float) -> int:
        probability, times = per_second * STEP_S, 0
        while probability > 0:
            times += self.random.random() < probability
            probability -= 1
        return times

    def dispatch(self) -> Dispatch | None:
        """A request of a random kind, now; none when chance takes one engine twice."""
        random, profile = self.random, self.profile
        p, d = random.choice(self.prefill), random.choice(self.decode)
        if p == d:
            return None
        both = set(self.prefill) & set(self.decode)
        mode = random.choice([mode for mode in profile.modes if not (both and mode == "pull")])
        prompt = random.randint(1, 24)
        tokens = random.choice((prompt, prompt, random.randint(0, prompt)))
        delays: list[float | None] = [random.random() * profile.late_leg_s, random.random() * profile.late_leg_s]
        spoiled = asks = ""
        if random.random() < profile.missing_leg:
            delays[random.randrange(2)] = None
            spoiled = "a leg is missing"
        if random.random() < profile.wrong_p:
            spoiled = "sent to the wrong P"
            asks = random.choice(self.decode if mode == "pull" else self.prefill)
            if asks == (p if mode == "pull" else d):
                asks = ""
        dispatch = Dispatch(
            at=self.now, number=len(self.dispatched) + 1, mode=mode, p=p, d=d, prompt=prompt, tokens=tokens,
            chunked=random.random() < 0.5, delays=(delays[0], delays[1]), spoiled=spoiled, asks=asks,
        )  # fmt: skip
        self.dispatched.append(dispatch)
        self.plan.append(dispatch)
        return dispatch

    def _abort(self) -> None:
        if self.dispatched:
            dispatch = self.random.choice(self.dispatched[-6:])
            engine = self.random.choice((dispatch.p, dispatch.d))
            self.plan.append(Abort(at=self.now, number=dispatch.number, engine=engine))

    def _kill(self) -> None:
        random, profile = self.random, self.profile
        told = random.random() * profile.os_tells_s if random.random() < profile.os_tells else None
        self.plan.append(
            Kill(at=self.now, engine=random.choice(self.engines), down_s=random.random() * 8.0, told_s=told)
        )

    def _pause(self) -> None:
        random = self.random
        for_s = random.random() * random.choice((3.0, 30.0))
        self.plan.append(Pause(at=self.now, engine=random.choice(self.engines), for_s=for_s))

    def _cut(self) -> None:
        random = self.random
        a, b = random.choice(self.prefill), random.choice(self.decode)
        if random.random() < 0.5:
            a, b = b, a
        for_s = random.random() * random.choice((3.0, 20.0))
        self.plan.append(Cut(at=self.now, a=a, b=b, both=random.random() < 0.5, for_s=for_s))
