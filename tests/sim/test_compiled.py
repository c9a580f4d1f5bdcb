"""The compiled build says what the sources say. Skipped unless ``PUSHKV_FAST`` names its interpreter (`make fast`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAST = os.environ.get("PUSHKV_FAST", "")

COMPILED = str(Path(FAST).absolute())
BUILDS = (COMPILED, sys.executable)

pytestmark = pytest.mark.skipif(not FAST, reason="the compiled build is tried by `make fast`")

SCENARIOS = {
    "calm": ("--qps", "4", "--input-len", "4096"),
    "preempting": ("--qps", "3", "--input-len", "3000", "--output-len", "900", "--model", "llama-3.3-70b"),
    "chunked": ("--qps", "2", "--input-len", "9000", "--overlap", "chunk"),
}


SEEDS = "0:420"
"""Each profile on each shape twelve times, and the pairs of runs that go with them."""


def said(python: str, command: str, flags: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """The JSON of ``pushkv COMMAND FLAGS``. Not in a folder with the sources: compiled modules are installed ones."""
    line = (python, "-m", "pushkv.sim.cli", command, *flags, "--json", "-")
    out = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(out)
    return found


def build(python: str, module: str, folder: Path) -> str:
    """The ending of the file that ``module`` is loaded from."""
    where = (python, "-c", f"import {module} as module; print(module.__file__)")
    return Path(subprocess.run(where, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()).suffix


@pytest.mark.parametrize("module", ["sim.world", "sim.explore.world", "model.protocol.endpoint"])
def test_the_one_is_compiled_and_the_other_is_not(module: str, tmp_path: Path) -> None:
    """Or the tests below would compare a build with itself."""
    assert build(COMPILED, f"pushkv.{module}", tmp_path) == ".so"
    assert build(sys.executable, f"pushkv.{module}", tmp_path) == ".py"


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_to_the_last_digit(name: str, tmp_path: Path) -> None:
    """Times of requests, tokens, utilisation: all that ``pushkv compare`` counts."""
    usual = (
        "--model",
        "qwen3-32b",
        "--prefill-tp",
        "4",
        "--decode-tp",
        "4",
        "--fabric",
        "efa-p5en",
        "--requests",
        "300",
    )
    fast, slow = (said(python, "compare", usual + SCENARIOS[name], tmp_path)["runs"] for python in BUILDS)
    for run in (*fast, *slow):
        del run["wall_s"]
    assert fast == slow


def test_seeds_are_played_alike(tmp_path: Path) -> None:
    """Every count of the explorer: outcomes by reason, messages, faults that hit, crash points, events."""
    fast, slow = (said(python, "explore", ("--seeds", SEEDS, "--no-progress"), tmp_path) for python in BUILDS)
    assert fast["versions"].pop("build") == "compiled"
    assert slow["versions"].pop("build") == "interpreted"
    for found in (fast, slow):
        for name in ("wall_s", "cpu_s", "events_per_cpu_s"):
            del found[name]
        for tally in found["profiles"].values():
            del tally["cpu_s"]
    assert len(fast["profiles"]) == 7
    assert fast["violations"] == []
    assert fast == slow
