"""What the tests play in bulk, one by one, so that a mutant meets the cheapest first: seeds of every profile on every
shape, the first states of exhaustive worlds, and the trials in which the hand-made mutants are caught.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pushkv.sim.explore import pairs
from pushkv.sim.explore.case import EARLIER, SCHEMA, STALLED, Case, play_case
from pushkv.sim.explore.exhaustive import explore_all
from pushkv.sim.explore.profiles import CONFIGS, PROFILES, play
from pushkv.sim.explore.worlds import STANDARD
from tests.protocol.mutants import trials

SEEDS = 3
"""Of each profile on each shape. ``make explore`` plays these and thousands more."""
STATES = 1500
"""Of each exhaustive world."""
TRIALS = (trials.isolation, trials.retry, trials.wrong_engine, trials.own_pause, trials.churn, trials.forged)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", CONFIGS)
@pytest.mark.parametrize("profile", PROFILES)
def test_seed(profile: str, shape: str, seed: int) -> None:
    play(seed, PROFILES[profile], CONFIGS[shape])


@pytest.mark.parametrize("check", [STALLED, EARLIER])
@pytest.mark.parametrize("shape", ["fan-in", "fan-out"])
@pytest.mark.parametrize("profile", ["lossy", "hostile"])
def test_pair(profile: str, shape: str, check: str) -> None:
    assert pairs.possible(check, CONFIGS[shape])
    case = Case(schema=SCHEMA, seed=1, profile=profile, shape=shape, transfers=8, check=check)
    assert not play_case(case).violation


@pytest.mark.parametrize("scope", STANDARD, ids=lambda scope: scope.name)
def test_world(scope: object) -> None:
    assert not explore_all(scope, STATES).violation  # type: ignore[arg-type]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.__name__)
def test_trial(trial: Callable[[int], None]) -> None:
    trial(1)
