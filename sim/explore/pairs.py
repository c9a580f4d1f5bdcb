"""Two runs of one seed that must not differ: with and without a stalled peer (I6), with and without an earlier attempt
of the same request (I7).

Memory is ample in both, and what a process does inside takes no time, so that nothing but the protocol could carry
what one transfer suffers over to another: chance is each transfer's and each lane's own.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from pushkv.model.protocol import Settings
from pushkv.model.protocol import events as ev
from pushkv.sim.explore import plan
from pushkv.sim.explore.case import EARLIER, STALLED, Case, Played, violation_of
from pushkv.sim.explore.profiles import LOOK_S, Config, Driver, Profile
from pushkv.sim.explore.transcript import Transcript
from pushkv.sim.explore.violation import Violation
from pushkv.sim.explore.world import World

WARM_S = 5.0
"""Time for all links to come up before the first request."""
EVER_S = 1e6
FIRST_TRY = 900
"""Number of the earlier attempt."""

History = dict[str, list[tuple[float, str, str, str]]]


def possible(check: str, config: Config) -> bool:
    """Whether engines are left for the others when one is stalled."""
    apart = config.prefill != config.decode and max(len(config.prefill), len(config.decode)) > 1
    return check == EARLIER or apart


def play(case: Case, *, transcript: bool = False) -> Played:
    """Both runs of ``case``. The transcript is that of the run with the stalled peer or the earlier attempt."""
    profile, config, settings = case.parts()
    profile, settings = ample(profile, settings)
    random = Random((case.seed << 8) | 7)
    actions: list[plan.AnyAction] = [action for action in case.plan() if not isinstance(action, plan.Preempt)]
    if case.check == STALLED:
        more, fewer, ignored = _stalled(random, actions, config)
    else:
        more, fewer, ignored = _earlier(random, actions)
        settings = replace(settings, beat_s=1000.0, suspect_after_s=3000.0)
    worlds: list[World] = []
    lines: list[str] = []
    found: list[History] = []
    for chosen in (more, fewer):
        world = World(case.seed, profile if case.check == STALLED else profile.calm(), config, settings, case.faults)
        if chosen is more and transcript:
            lines = Transcript(world).lines
        worlds.append(world)
        runner = _Runner(world, chosen, profile)
        violation = violation_of(runner.run)
        if violation:
            return Played(violation, tuple(worlds), lines)
        found.append(_history(world, ignored))
    return Played(violation_of(lambda: _compare(case.check, *found)), tuple(worlds), lines)


def ample(profile: Profile, settings: Settings) -> tuple[Profile, Settings]:
    """The same where nobody takes anything from anybody. Ranks that are due at the same instant have their turns in one
    order, whoever armed its timer first: they draw from the chance of the same transfer.
    """
    return (
        replace(profile, inside_s=0.0, timer_late_s=0.0, rank_late_s=1e-6, blocks=1000, preempts=0.0),
        replace(
            settings, landing_segments=1000, staging_bytes=1 << 30, remembered_ids=10_000, tombstones_per_link=10_000,
            open_per_link=1000,
        ),
    )  # fmt: skip


class _Runner:
    def __init__(self, world: World, actions: list[plan.AnyAction], unkind: Profile) -> None:
        self.world, self.unkind = world, unkind
        self.driver = Driver(world, actions=actions)

    def run(self) -> None:
        world, driver = self.world, self.driver
        for name, process in world.processes.items():
            for other in world.config.decode if name in world.config.prefill else world.config.prefill:
                for rank, links in enumerate(world.links(name, other) if other != name else ()):
                    for link in links:
                        process.receive(rank, ev.Greet(link))
        world.run(WARM_S)
        for action in driver.actions:
            while action.at + WARM_S > world.now:
                world.run(min(LOOK_S, action.at + WARM_S - world.now))
            driver.do(action)
            if isinstance(action, plan.Dispatch) and action.number == FIRST_TRY:
                driver.requests[FIRST_TRY].profile = self.unkind
        world.run(world.settings.wait_s + world.settings.lease_s)


def _stalled(
    random: Random, actions: list[plan.AnyAction], config: Config
) -> tuple[list[plan.AnyAction], list[plan.AnyAction], set[str]]:
    sides = [list(side) for side in (config.prefill, config.decode) if len(side) > 1]
    victim = random.choice(random.choice(sides))
    requests = [action for action in actions if isinstance(action, plan.Dispatch)]
    its = {action.number for action in requests if victim in (action.p, action.d, action.asks)}
    astray = {action.number for action in requests if action.asks and action.number in its}

    def concerns(action: plan.AnyAction) -> bool:
        """Faults of the stalled peer, and its requests that were sent to another: they touch the others' links."""
        if isinstance(action, plan.Dispatch | plan.Abort):
            return action.number in astray
        return victim in (getattr(action, name, "") for name in ("engine", "a", "b"))

    kept = [action for action in actions if not concerns(action)]
    at = random.random() * (1.0 + max((action.at for action in requests), default=0.0))
    ways: tuple[list[plan.AnyAction], ...] = (
        [plan.Pause(at=at, engine=victim, for_s=EVER_S)],
        [plan.Kill(at=at, engine=victim, down_s=EVER_S, told_s=None)],
        [
            plan.Cut(at=at, a=victim, b=other, both=True, for_s=EVER_S)
            for other in (*config.prefill, *config.decode)
            if other != victim
        ],
    )
    stall = random.choice(ways)
    fewer = [action for action in kept if getattr(action, "number", None) not in its]
    return [*kept, *stall], fewer, {f"t{number}" for number in its}


def _earlier(
    random: Random, actions: list[plan.AnyAction]
) -> tuple[list[plan.AnyAction], list[plan.AnyAction], set[str]]:
    calm: list[plan.AnyAction] = [action for action in actions if isinstance(action, plan.Dispatch | plan.Abort)]
    requests = [action for action in actions if isinstance(action, plan.Dispatch)]
    if not requests:
        return calm, calm, set()
    again = random.choice(requests)
    first: dict[str, Any] = {"at": max(0.0, again.at - 2.0 * random.random()), "number": FIRST_TRY}
    first["mode"] = random.choice((again.mode, again.mode, "packed", "early", "late"))
    more = [*calm, msgspec.structs.replace(again, **first)]
    for engine in (again.p, again.d):
        if random.random() < 0.6:  # about when the client tries again: before, or while both are under way
            at = max(first["at"], again.at + 1.5 * random.random() - 0.5)
            more.append(plan.Abort(at=at, number=FIRST_TRY, engine=engine))
    return more, calm, {f"t{FIRST_TRY}"}


def _history(world: World, ignored: set[str]) -> History:
    """What every host was told of every transfer, and when."""
    found: History = {}
    for process in dict.fromkeys(world.by_incarnation.values()):
        for at, action in process.host.history:
            tid = getattr(action, "transfer_id", "")
            if tid not in ignored:
                entry = (round(at - WARM_S, 6), process.name, type(action).__name__, getattr(action, "reason", ""))
                found.setdefault(tid, []).append(entry)
    return found


def _compare(check: str, with_it: History, without: History) -> None:
    name = "I6" if check == STALLED else "I7"
    for tid in sorted(with_it.keys() | without.keys()):
        ours, theirs = with_it.get(tid, []), without.get(tid, [])
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            seen, expected = (" ".join(map(str, side[at])) if at < len(side) else "nothing" for side in (ours, theirs))
            raise Violation(f"{name}: with the {check} {tid} sees: {seen}; without it: {expected}")
