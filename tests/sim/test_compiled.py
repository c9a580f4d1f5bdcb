"""The compiled build says what the sources say. Skipped unless ``PUSHKV_FAST`` names its interpreter (`make fast`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAST = os.environ.get("PUSHKV_FAST", "")

pytestmark = pytest.mark.skipif(not FAST, reason="the compiled build is tried by `make fast`")

SCENARIOS = {
    "calm": ("--qps", "4", "--input-len", "4096"),
    "preempting": ("--qps", "3", "--input-len", "3000", "--output-len", "900", "--model", "llama-3.3-70b"),
    "chunked": ("--qps", "2", "--input-len", "9000", "--overlap", "chunk"),
}


def compared(python: str, flags: tuple[str, ...], folder: Path) -> tuple[list[dict[str, object]], str]:
    """The runs of ``pushkv compare``, and which build made them."""
    usual = [
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
    ]
    command = (python, "-m", "pushkv.sim.cli", "compare", *usual, *flags, "--json", "-")
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    runs: list[dict[str, object]] = json.loads(out)["runs"]
    for run in runs:
        del run["wall_s"]
    where = (python, "-c", "from pushkv.sim import world; print(world.__file__)")
    return runs, subprocess.run(where, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_to_the_last_digit(name: str, tmp_path: Path) -> None:
    """Not in a folder with the sources: the compiled modules must be the ones that are installed."""
    fast, built = compared(str(Path(FAST).absolute()), SCENARIOS[name], tmp_path)
    slow, source = compared(sys.executable, SCENARIOS[name], tmp_path)
    assert built.endswith(".so")
    assert source.endswith(".py")
    assert fast == slow
