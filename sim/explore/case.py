"""One run to play: a seed of a profile on a shape, or the part of it that still breaks a property; as a file, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from pushkv.model.protocol import Settings
from pushkv.sim.errors import BadInput, unknown
from pushkv.sim.explore import plan
from pushkv.sim.explore.profiles import CONFIGS, PROFILES, Config, Driver, Profile
from pushkv.sim.explore.transcript import Transcript
from pushkv.sim.explore.world import SETTINGS, World

SCHEMA = 1
RUN, STALLED, EARLIER = "run", "stalled peer", "earlier attempt"
"""What is checked: one run with all properties, or two that must not differ (``pairs``)."""


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``actions`` is the part of the seed's plan that is played, ``faults`` the labels of what chance may do; ``None``:
    everything. ``changes`` and ``settings`` are what differs from the named profile and the usual settings.
    """

    schema: int
    seed: int
    profile: str
    shape: str
    transfers: int | None
    check: str = RUN
    violation: str = ""
    actions: tuple[plan.AnyAction, ...] | None = None
    faults: tuple[str, ...] | None = None
    changes: dict[str, Any] = {}
    settings: dict[str, int | float] = {}

    @property
    def broken(self) -> str:
        """Name of the property in ``violation``."""
        return self.violation.split(":")[0]

    @property
    def command(self) -> str:
        """What plays the whole seed again."""
        return f"pushkv replay {self.seed} --profile {self.profile} --shape {self.shape} --transfers {self.transfers}"

    def parts(self) -> tuple[Profile, Config, Settings]:
        """What its world is made of."""
        changes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in self.changes.items()}
        settings: dict[str, Any] = self.settings
        return replace(PROFILES[self.profile], **changes), CONFIGS[self.shape], replace(SETTINGS, **settings)

    def plan(self) -> tuple[plan.AnyAction, ...]:
        """Its actions, or the whole plan."""
        if self.actions is not None:
            return self.actions
        profile, config, settings = self.parts()
        return tuple(plan.make(World(self.seed, profile, config, settings).random, profile, config, self.transfers))


def case_of(
    seed: int, profile: Profile, config: Config, transfers: int | None, settings: Settings = SETTINGS, check: str = RUN
) -> Case:
    """The case of a seed, also of profiles and settings that have no name."""
    usual = PROFILES[profile.name]
    return Case(
        schema=SCHEMA,
        seed=seed,
        profile=profile.name,
        shape=next(name for name, known in CONFIGS.items() if known == config),
        transfers=transfers,
        check=check,
        changes=_differences(profile, usual),
        settings=_differences(settings, SETTINGS),
    )


def _differences(value: Any, usual: Any) -> dict[str, Any]:
    pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
    different: dict[str, Any] = msgspec.to_builtins({n: found for n, found in pairs if found != getattr(usual, n)})
    return {name: list(found) if isinstance(found, tuple) else found for name, found in different.items()}


@dataclass
class Played:
    """What came of a case. ``violation`` is empty when all properties hold."""

    violation: str
    worlds: tuple[World, ...]
    lines: Sequence[str] = ()

    @property
    def broken(self) -> str:
        """Name of the property."""
        return self.violation.split(":")[0]


def play_case(case: Case, *, transcript: bool = False) -> Played:
    """Play it. Any exception of the machines is a violation, too: no host or peer may make them raise."""
    from pushkv.sim.explore import pairs

    if case.check != RUN:
        return pairs.play(case, transcript=transcript)
    profile, config, settings = case.parts()
    world = World(case.seed, profile, config, settings, case.faults)
    driver = Driver(world, case.transfers, case.actions)
    lines = Transcript(world).lines if transcript else []
    return Played(violation_of(driver.play), (world,), lines)


def violation_of(play: Any) -> str:
    """What ``play`` breaks."""
    try:
        play()
    except AssertionError as error:
        return str(error) if str(error)[:1] in "IV" else f"V5: {error!r}"
    except Exception as error:
        return f"V5: {error!r}"
    return ""


def to_json(case: Case) -> str:
    """The case as a file's text."""
    return msgspec.json.format(msgspec.json.encode(case), indent=2).decode() + "\n"


def from_json(path: str, text: bytes) -> Case:
    """The case in a file. Raises `BadInput` for one that is none."""
    try:
        case = msgspec.json.decode(text, type=Case)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadInput(f"{path} is not a case of pushkv explore: {error}") from None
    if case.schema != SCHEMA:
        raise BadInput(f"{path} has schema {case.schema}; this version reads schema {SCHEMA}")
    for what, value, known in (
        ("profile", case.profile, PROFILES),
        ("shape", case.shape, CONFIGS),
        ("check", case.check, (RUN, STALLED, EARLIER)),
    ):
        if value not in known:
            raise unknown(f"{path}: {what}", value, known)
    try:
        parts = case.parts()
    except (TypeError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from None
    engines = {**parts[1].prefill, **parts[1].decode}
    for action in case.plan():
        for name in ("p", "d", "engine", "a", "b"):
            if getattr(action, name, next(iter(engines))) not in engines:
                raise unknown(f"{path}: engine", getattr(action, name), engines)
    return case
