"""model/ is pure: it imports an allow-list only, opens nothing and draws no random numbers.

An allow-list, because a list of what is forbidden would be out of date with the next library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[1] / "model"

ALLOWED = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "json",  # TOML strings are quoted with it
    "math",
    "msgspec",
    "numpy",
    "operator",
    "types",
    "typing",
}
ALLOWED_IN = {"timing/profiles.py": {"importlib.resources", "tomllib"}}  # reads the profiles that come with the package
FORBIDDEN_CALLS = {"__import__", "breakpoint", "compile", "eval", "exec", "input", "open", "print"}
FORBIDDEN_NUMPY = {"fromfile", "genfromtxt", "load", "loadtxt", "memmap", "random", "save", "savetxt", "savez"}


def impurities(source: str, path: str = "protocol/x.py") -> list[str]:
    """What ``source``, a module at ``path`` inside model/, does that it must not."""
    depth = path.count("/") + 1
    found = []
    for node in ast.walk(ast.parse(source)):
        for name in _imports(node, depth):
            allowed = name.split(".")[0] in ALLOWED or name == "pushkv.model" or name.startswith("pushkv.model.")
            if name.startswith("numpy.") and name.split(".")[1] in FORBIDDEN_NUMPY:
                allowed = False
            if not allowed and name not in ALLOWED_IN.get(path, ()):
                found.append(f"line {node.lineno}: imports {name}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: calls {node.func.id}")
        if (
            isinstance(node, ast.Attribute)
            and node.attr in FORBIDDEN_NUMPY
            and isinstance(node.value, ast.Name)
            and node.value.id in ("np", "numpy")
        ):
            found.append(f"line {node.lineno}: uses numpy.{node.attr}")
    return found


def _imports(node: ast.AST, depth: int) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level == 0:
            # `from numpy import random` brings in a module as well as `import numpy.random` does.
            module = node.module or ""
            yield module
            if module == "numpy":
                yield from (f"numpy.{alias.name}" for alias in node.names)
            elif module == "pushkv":
                yield from (f"pushkv.{alias.name}" for alias in node.names)
        elif node.level > depth:
            yield "." * node.level + (node.module or "")  # climbs out of model/


def modules() -> list[Path]:
    return sorted(MODEL.rglob("*.py"))


def test_there_is_something_to_check() -> None:
    assert len(modules()) > 20
    assert {path.relative_to(MODEL).parts[0] for path in modules()} >= {"protocol", "layout", "timing", "routing"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(MODEL)))
def test_model_is_pure(path: Path) -> None:
    assert impurities(path.read_text(encoding="utf-8"), str(path.relative_to(MODEL))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "import datetime as d",
        "from threading import Lock",
        "import socket, math",
        "import asyncio",
        "import multiprocessing.pool",
        "import subprocess",
        "import random",
        "import os.path",
        "from io import BytesIO",
        "from pathlib import Path",
        "import simpy",
        "import torch",
        "import vllm.config",
        "import nixl",
        "import zmq",
        "import importlib",
        "import tomllib",
        "from numpy import random",
        "import numpy.random",
        "from numpy.random import default_rng",
        "x = np.random.default_rng()",
        "x = np.load('f')",
        "from pushkv.sim import world",
        "from pushkv import sim",
        "from ...sim import world",
        "def f():\n    import time",
        "if TYPE_CHECKING:\n    import simpy",
        "x = open('f')",
        "print(1)",
        "x = __import__('time')",
    ],
)
def test_the_check_can_fail(line: str) -> None:
    assert impurities(f'"""A module."""\nimport math\n{line}\n') != []


@pytest.mark.parametrize(
    "line",
    [
        "from __future__ import annotations",
        "from collections.abc import Mapping",
        "import numpy.typing as npt",
        "from pushkv.model.protocol import events",
        "from ..timing import ModelShape",
        "from .states import TABLE",
    ],
)
def test_the_check_can_pass(line: str) -> None:
    assert impurities(line) == []


def test_only_the_module_of_profiles_may_read_files() -> None:
    line = "from importlib.resources import files"
    assert impurities(line, "timing/profiles.py") == []
    assert impurities(line, "timing/compute.py") != []
