"""The same scenario gives the same result to the last bit: in another process, without the fast paths, through the
real encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from pushkv.sim.metrics import FAILED
from pushkv.sim.scenario import Fault
from pushkv.sim.world import Result

from .worlds import WAYS, Row, clusters, faulty_clusters, hasty, scenario, simulate, text, way_name

QUICK = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(clusters)
def test_fast_paths_and_encoding_change_nothing(case: tuple[dict[str, Any], list[Row]]) -> None:
    flags, rows = case
    plan = scenario(**flags)
    wanted = text(simulate(plan, rows))
    assert text(simulate(plan, rows)) == wanted
    assert text(simulate(plan, rows, fast=False)) == wanted
    assert text(simulate(plan, rows, encoded=True)) == wanted


@QUICK
@given(faulty_clusters(for_good=True))
def test_fast_paths_and_encoding_change_nothing_when_things_go_wrong(
    case: tuple[dict[str, Any], list[Row], list[Fault]],
) -> None:
    flags, rows, faults = case
    plan = scenario(faults=faults, **flags)
    options = {"settings": hasty(plan)}
    wanted = text(simulate(plan, rows, **options))
    assert text(simulate(plan, rows, fast=False, **options)) == wanted
    assert text(simulate(plan, rows, encoded=True, **options)) == wanted


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_a_longer_run_under_load_is_the_same_without_the_fast_paths(way: dict[str, str]) -> None:
    """Hundreds of requests that overlap, queue and preempt: jumps begin and end everywhere."""
    plan = scenario(**way, requests=150, qps=14, input_len=1024, output_len=200, num_blocks=420, seed=3)
    wanted = simulate(plan)
    assert wanted.totals.preemptions_decode > 0
    assert text(simulate(plan, fast=False)) == text(wanted)


def test_blocks_that_come_back_in_the_middle_of_a_jump() -> None:
    """D decodes for seconds. Blocks of a failed transfer are settled meanwhile, after steps that took some and before
    steps that take more: whoever comes next gets the same numbers, so the same descriptors, as step by step.
    """
    plan = scenario(mode="pushkv", path="direct", faults=[Fault("pause", "P0", 0.52, 1.5)])
    rows: list[Row] = [(0.0, 100, 900), (0.5, 500, 5), (2.5, 500, 5), (2.6, 700, 5)]
    options = {"settings": hasty(plan)}
    fast, slow = simulate(plan, rows, **options), simulate(plan, rows, fast=False, **options)
    assert (fast.log.column("status") == FAILED).sum() == 1
    assert text(fast) == text(slow)


@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize("target", ["P0", "D0"])
def test_a_pause_in_the_middle_of_a_jump(way: dict[str, Any], target: str) -> None:
    """A stopped process takes no steps: those that were being jumped over end where the pause begins, and go on after
    it."""
    rows: list[Row] = [(0.0, 100, 300), (0.9, 200, 20), (2.2, 300, 20)]
    plan = scenario(**way, faults=[Fault("pause", target, 0.7, 0.5)])
    fast, calm = simulate(plan, rows), simulate(scenario(**way), rows)
    assert text(fast) == text(simulate(plan, rows, fast=False))
    stopped_s = _end_s(fast, 300) - _end_s(calm, 300)
    assert stopped_s == pytest.approx(0.5 if target == "D0" else 0.0, abs=0.02)


def _end_s(result: Result, output_len: int) -> float:
    log = result.log
    return float(log.column("finish_s")[log.column("output_len") == output_len][0])


FAULTS = """
[[fault]]
kind = "prefill-kill"
target = "P1"
at_s = 0.5
duration_s = 1.0
[[fault]]
kind = "partition"
target = "P0-D0"
at_s = 0.7
duration_s = 0.5
[[fault]]
kind = "pause"
target = "D1"
at_s = 1.0
duration_s = 0.4
"""

LINES = [
    "--mode pull --seed 4",
    "--mode push --faults faults.toml --prefill 2 --decode 2",
    "--mode pushkv --prefill-tp 2 --decode-tp 4 --fabric efa-p5en --num-blocks 200",
    "--mode pushkv --faults faults.toml --prefill 2 --decode 2 --router sequential",
]


def printed(line: str, folder: Path, hash_seed: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pushkv.sim.cli", "simulate", *f"--requests 60 --qps 30 --json - {line}".split()],
        capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    assert document.pop("wall_s") >= 0
    return document


@pytest.mark.parametrize("line", LINES)
def test_two_processes_print_the_same_json(line: str, tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(FAULTS)
    first, second = printed(line, tmp_path, "1"), printed(line, tmp_path, "2")
    assert json.dumps(first) == json.dumps(second)
    assert first["summary"]["requests"] == 60
