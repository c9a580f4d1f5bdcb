"""Scripts of ``experiments/``, which no package holds, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def script(path: Path) -> Any:
    """The script at ``path``, run as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
