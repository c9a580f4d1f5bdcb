"""The world has eyes: every mutant of ``mutants`` is caught by a property within a few seeds."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import LocalProtocolError
from pushkv.sim.explore.ghost import Violation
from pushkv.sim.explore.profiles import CONFIGS, Driver
from pushkv.sim.explore.world import World
from tests.protocol.mutants import MUTANTS

SEEDS = 60


def _breach(world: World) -> str:
    try:
        Driver(world).play()
    except Violation as violation:
        return str(violation)
    except (LocalProtocolError, KeyError) as error:
        return f"V5: {error!r}"
    return ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, profile, expected, settings = MUTANTS[name]
    configs = list(CONFIGS.values())
    for seed in range(SEEDS):
        with monkeypatch.context() as patch:
            apply(patch)
            breach = _breach(World(seed, profile, configs[seed % len(configs)], settings))
        if breach:
            if breach[:2] not in expected.split() and breach[:3] not in expected.split():
                pytest.fail(f"seed {seed} breaks another property than {expected}: {breach}")
            return
    pytest.fail(f"{name} survives {SEEDS} seeds")
