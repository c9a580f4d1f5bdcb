"""Where NIXL's backends run: UCX wherever NIXL is installed, LIBFABRIC in what `libfabric_env.sh` makes.

`LIBFABRIC_ENV` names its folder: if it is set, tests fail where the environment is missing; if it is empty, they
are left out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASKED = os.environ.get("LIBFABRIC_ENV")
RUN = ROOT / (ASKED or "build/libfabric") / "run"

needs_libfabric = pytest.mark.skipif(
    ASKED == "" or (ASKED is None and not RUN.exists()),
    reason=f"{RUN.parent} is not there, or not wanted; tests/reference/libfabric_env.sh makes it",
)
needs_ucx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nixl", "torch")), reason="needs NIXL and torch"
)


def run_case(backend: str, module: str, *arguments: str, timeout_s: float = 300.0) -> str:
    """Run `module` of these tests as a program where `backend` is; what it printed. Fails if it does."""
    if backend == "LIBFABRIC":
        assert RUN.exists(), f"{RUN.parent} is not there, though LIBFABRIC_ENV asks for it"
    python = str(RUN) if backend == "LIBFABRIC" else sys.executable
    paths = os.pathsep.join([str(ROOT), str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python, "-m", f"tests.reference.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": paths, "NIXL_LOG_LEVEL": "ERROR"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout
