"""A world that answers at once, so that the command line and the reports are tested without the simulator."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import pushkv.sim
from pushkv.sim.metrics import COMPLETED, FAILED, RequestLog, Totals
from pushkv.sim.scenario import Scenario
from pushkv.sim.trace import TraceWriter
from pushkv.sim.workload import generate


@dataclass
class FakeResult:
    scenario: Scenario
    log: RequestLog
    totals: Totals
    wall_s: float


def fake_run(
    scenario: Scenario,
    *,
    progress: Callable[[int, int], None] | None = None,
    trace: TraceWriter | None = None,
    log: RequestLog | None = None,
    fast: bool = True,
) -> FakeResult:
    """Every request takes a second, or two with pull; the last one fails."""
    log = RequestLog() if log is None else log
    arrivals = generate(scenario)
    ttft_s = 2.0 if scenario.mode == "pull" else 1.0
    for number, arrival_s in enumerate(arrivals.arrival_s.tolist()):
        if progress:
            progress(number + 1, len(arrivals))
        failed = number == len(arrivals) - 1
        first_s, finish_s = arrival_s + ttft_s, arrival_s + ttft_s + 0.5
        status = FAILED if failed else COMPLETED
        log.add(arrival_s, 1024, 128, first_s, finish_s, 0.9, status, 10**9, 64000, 0.02, 0.01)
        if trace:
            trace.span("P0/engine", "prefill", arrival_s, arrival_s + 0.9, {"request": number})
    totals = Totals(duration_s=float(arrivals.arrival_s[-1]) + 3, events=10, machine_steps=20, kv_peak_decode=0.5)
    return FakeResult(scenario, log, totals, 0.25)


@pytest.fixture
def fake_world(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("pushkv.sim.world")
    module.run = fake_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pushkv.sim.world", module)
    monkeypatch.setattr(pushkv.sim, "world", module, raising=False)
