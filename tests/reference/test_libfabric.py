"""The transport over NIXL's LIBFABRIC backend, without EFA, in the environment that `libfabric_env.sh` makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = Path(os.environ.get("PUSHKV_LIBFABRIC_ENV", ROOT / "build" / "libfabric")) / "run"
CASES = (
    "bytes_are_there_when_the_notice_comes",
    "stopped_target_is_waited_for",
    "killed_target_breaks_its_own_writes_only",
)

pytestmark = pytest.mark.skipif(
    not RUN.exists(), reason=f"{RUN.parent} is not there; tests/reference/libfabric_env.sh makes it"
)


@pytest.mark.parametrize("case", CASES)
def test_over_libfabric(case: str) -> None:
    code = Path(__file__).with_name("libfabric_cases.py")
    paths = os.pathsep.join([str(ROOT), str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(RUN), str(code), case],
        env={**os.environ, "PYTHONPATH": paths, "NIXL_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
