"""How Hypothesis runs: the same examples everywhere, and no clock.

A change is judged by what it does, not by the luck of a run or the speed of a machine. Look for new examples with
``--hypothesis-profile seek``.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_CALM = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=_CALM)
settings.register_profile("seek", deadline=None, suppress_health_check=_CALM)
settings.load_profile("same")
