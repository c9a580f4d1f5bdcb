"""Everything is in pyproject.toml. Here is only the compiled build of the simulator, the explorer and the core under
them, for those who ask for it with ``PUSHKV_COMPILE=1``; it needs mypy and a C compiler. Same sources, same results,
faster.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup

COMPILED = {
    "model/protocol": (
        "deadlines endpoint incoming ledger outgoing peer receiver receiving seen sender sending settings staging"
        " states"
    ),
    "model/routing": "dispatch",
    "sim": (
        "baselines blocks clock connector costs engine fabric host metrics network pushkv request scheduler ticks"
        " transfers world"
    ),
    "sim/explore": "bounds causes fabric ghost host network plan process profiles scheduling world",
}
"""What a simulated request passes through, and a seed of the explorer. Messages and events are msgspec's, which are C
already.
"""


def extensions() -> list[object]:
    """The compiled modules. mypyc takes a module's name from its folders, so the sources are linked where it looks."""
    from mypyc.build import mypycify

    package = Path("build/sources/pushkv")
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    for part in ("model", "sim", "reference", "router"):
        link = package / part
        link.unlink(missing_ok=True)
        link.symlink_to(Path("../../..") / part, target_is_directory=True)
    sources = [str(package / folder / f"{name}.py") for folder, names in COMPILED.items() for name in names.split()]
    return list(mypycify(["--config-file=", *sources]))


if os.environ.get("PUSHKV_COMPILE") == "1" and "bdist_wheel" in sys.argv:  # not when pip only asks for the metadata
    setup(ext_modules=extensions())
else:
    setup()
