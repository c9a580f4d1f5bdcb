"""A mutant: a mistake that some real system made, put into the code on purpose, and the property that must notice it.

A *trial* plays one seed and raises ``Violation`` when a property does not hold. An exception of the machines
(``LocalProtocolError``, ``KeyError``) is no answer: it says that the mutant is crude, not that the world has eyes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pushkv.model.protocol import Settings
from pushkv.sim.explore.profiles import CONFIGS, Config, Driver, Profile
from pushkv.sim.explore.violation import Violation
from pushkv.sim.explore.world import SETTINGS, World

SEEDS = 60
"""A mutant that lives longer has survived."""

Patch = pytest.MonkeyPatch
Trial = Callable[[int], None]


@dataclass(frozen=True)
class Mutant:
    """``apply`` breaks the code; under ``trial`` a property of ``expected`` (``"I1 V2"``) must then break."""

    name: str
    apply: Callable[[Patch], None]
    trial: Trial
    expected: tuple[str, ...]
    faults: tuple[str, ...]
    what: str
    profile: Profile | None = None
    """What ``trial`` plays, when it is no trial of its own."""
    settings: Settings = SETTINGS


MUTANTS: dict[str, Mutant] = {}


def mutant(played: Profile | Trial, expected: str, settings: Settings = SETTINGS, *shapes: Config) -> Any:
    """Register a mutant. ``played``: a profile, played on ``shapes`` in turn (all shapes, if none is named), or a
    trial. Its docstring begins with the faults that it stands for.
    """
    profile = played if isinstance(played, Profile) else None
    trial = _explore(played, settings, shapes) if isinstance(played, Profile) else played

    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        head, _, what = " ".join((apply.__doc__ or "").split()).partition(": ")
        faults = tuple(re.findall(r"F\d\d", head))
        assert faults and re.fullmatch(r"F\d\d(, F\d\d)*", head), f"{apply.__name__} names no fault"
        name = apply.__name__
        MUTANTS[name] = Mutant(name, apply, trial, tuple(expected.split()), faults, what, profile, settings)
        return apply

    return add


def _explore(profile: Profile, settings: Settings, shapes: tuple[Config, ...]) -> Trial:
    configs = shapes or tuple(CONFIGS.values())

    def trial(seed: int) -> None:
        Driver(World(seed, profile, configs[seed % len(configs)], settings)).play()

    return trial


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method by what ``make`` makes of it."""
    patch.setattr(owner, name, make(getattr(owner, name)))


def hunt(found: Mutant) -> tuple[int, str]:
    """Play seeds until a property notices: (seeds played, the violation); the violation is empty if none did.

    Raises ``AssertionError`` for a seed in which another property than those expected breaks, or one breaks without the
    mutant as well.
    """
    crash: Exception | None = None
    for seed in range(SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            found.apply(patch)
            try:
                found.trial(seed)
            except Violation as violation:
                broken = str(violation)
                if not broken.startswith(found.expected):
                    raise AssertionError(
                        f"seed {seed} breaks another property than {found.expected}: {broken}"
                    ) from None
            except Exception as error:
                crash = error
                continue
            else:
                continue
        try:
            found.trial(seed)
        except Violation as violation:
            raise AssertionError(f"seed {seed} breaks a property without the mutant: {violation}") from None
        return seed + 1, broken
    if crash is not None:
        raise AssertionError(f"only an exception notices: {type(crash).__name__}: {crash}")
    return SEEDS, ""
