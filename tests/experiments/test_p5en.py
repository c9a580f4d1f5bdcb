"""The P5en scripts: what they assume, what they keep in results/, and that a trace is only a record."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "p5en"
sys.path.insert(0, str(FOLDER))

import point  # noqa: E402
import region  # noqa: E402

from pushkv.sim.metrics import RequestLog  # noqa: E402
from pushkv.sim.timeline import story  # noqa: E402


def columns(log: RequestLog) -> list[list[float]]:
    return [log.column(name).tolist() for name in ("arrival_s", "first_token_s", "finish_s", "descriptors", "wire_s")]


def test_arrivals_are_those_of_the_benchmark() -> None:
    at = point.arrivals(40, 8.0, np.random.default_rng(1))
    assert at[-1] == pytest.approx(5.0) and np.all(np.diff(at) >= 0)
    lengths = point.prompts(1000, 16384, np.random.default_rng(1))
    assert lengths.max() <= 16384 and lengths.min() > 15500


def test_cached_part_gives_the_prefill_time() -> None:
    assert 350 < point.prefill_ms(0.0) < 400
    assert point.cached_for(0.0) == 1.0
    assert point.prefill_ms(point.cached_for(80.0)) == pytest.approx(80.0, abs=0.5)


@pytest.mark.parametrize("mode", point.MODES)
def test_tpot_by_mechanism(mode: str) -> None:
    cached = point.cached_for(80.0)
    used = point.history(mode, cached, 0, 1)
    tpot_ms = [point.score(mode, cached, point.load(point.PROMPTS, 8, seed), used).tpot_ms for seed in range(3)]
    assert float(np.mean(tpot_ms)) == pytest.approx(point.PUBLISHED_TPOT_MS[mode], rel=point.WITHIN)


def test_region_is_not_empty() -> None:
    rows = region.read()
    inside = [row for row in rows if region.holds(row)]
    assert inside and all(row["prompts"] < point.PROMPTS for row in inside)
    assert region.sentence(rows).startswith("Both means hold")


@pytest.mark.parametrize("mode", [*point.MODES, "pushkv"])
def test_trace_is_only_a_record(mode: str) -> None:
    work = point.load(12, 8, 0)
    world, trace = point.go(mode, 0.8, work, None, traced=True)
    assert columns(world.log) == columns(point.go(mode, 0.8, work, None)[0].log)
    told = story(mode, trace, 5)
    in_order = world.log.rows(np.argsort(world.log.column("arrival_s"), kind="stable"))
    assert told.ttft_ms == pytest.approx(in_order.milliseconds("ttft")[5], abs=1e-3)
    names = {span.name for span in told.spans}
    assert {"prefill", "post", "into batch", "decode", "step"} <= names
    assert ("landing memory" in names) == (mode == "pushkv")
    assert ("read" in names) == (mode == "pull")
