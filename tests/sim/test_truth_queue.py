"""An engine that prefills one prompt at a time, fed by a Poisson stream, is the M/D/1 queue of the textbooks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.model.timing import EngineCost, profiles
from pushkv.sim import workload

from .worlds import scenario, simulate

N = 8192
"""Tokens of a prompt, and of a step: prompts never share one."""
REQUESTS = 2500

Floats = NDArray[np.float64]


def lindley(arrival_s: Floats, service_s: float) -> Floats:
    """Each one's wait on this very stream: what the one before waited and took, less the time since it came."""
    waits = np.zeros(len(arrival_s))
    for i in range(1, len(arrival_s)):
        waits[i] = max(0.0, waits[i - 1] + service_s - (arrival_s[i] - arrival_s[i - 1]))
    return waits


def md1_s(rho: float, service_s: float) -> float:
    """Pollaczek and Khinchine for a service time without variance: rho / (2 mu (1 - rho))."""
    return rho * service_s / (2 * (1 - rho))


@pytest.mark.parametrize(("mode", "rho"), [("push", 0.7), ("pull", 0.4)])
def test_the_mean_wait_for_prefill_is_that_of_md1(mode: str, rho: float) -> None:
    """The server is the device. It idles between two prompts for at most one look of the loop, so the service time
    lies between two values, and the mean wait on this stream between Lindley's for them; and that is
    Pollaczek-Khinchine's within three sigma of such streams.
    """
    hardware = profiles.hardware("h200")
    cost, serving = EngineCost(profiles.model("qwen3-8b"), hardware), hardware.serving
    low_s = cost.device_s([(N, 0)])
    high_s = cost.floor_s(low_s, cost.launch_s(N)) + serving.idle_poll_s + serving.schedule_s
    plan = scenario(
        mode=mode, input_len=N, output_len=1, token_budget=N, qps=rho / low_s, requests=REQUESTS, seed=5, decode=4
    )  # D is no bottleneck
    legs = simulate(plan).log
    order = np.argsort(legs.column("arrival_s"))
    lone_ms = simulate(scenario(mode=mode, input_len=N, output_len=1, token_budget=N)).log.milliseconds("prefill")[0]
    waits_s = (legs.milliseconds("prefill")[order] - lone_ms) * 1e-3
    assert waits_s.min() >= -1e-9
    arrival_s = workload.generate(plan).arrival_s
    low, high = lindley(arrival_s, low_s).mean(), lindley(arrival_s, high_s).mean()
    assert low - 1e-6 <= waits_s.mean() <= high + 1e-6
    assert high / low < 1.05, "the bounds are close"
    others = [lindley(streams(seed, rho / low_s), low_s).mean() for seed in range(100, 130)]
    assert np.mean(others) == pytest.approx(md1_s(rho, low_s), rel=3 * np.std(others) / np.mean(others) / 30**0.5)
    assert waits_s.mean() == pytest.approx(md1_s(rho, low_s), abs=3 * np.std(others))
    assert 3 * np.std(others) < 0.5 * md1_s(rho, low_s), "the bound means something"


def streams(seed: int, qps: float) -> Floats:
    return workload.poisson(REQUESTS, qps, np.random.Generator(np.random.PCG64(seed)))
