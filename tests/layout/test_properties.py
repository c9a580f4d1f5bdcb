"""Random pairs of engines against the oracle."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from .scenarios import Scenario, check, dense

_SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_SETTINGS
@given(dense())
def test_any_two_dense_caches(scenario: Scenario) -> None:
    check(scenario)


@_SETTINGS
@given(dense(hybrid=True))
def test_hybrid_models(scenario: Scenario) -> None:
    check(scenario)
