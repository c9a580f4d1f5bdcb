"""Tables in the docs that a module prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def check_table(document: str, module: str, table: str) -> None:
    """``table`` stands in ``docs/``, and is what ``python -m module`` prints."""
    docs = (Path(__file__).parents[2] / "docs" / document).read_text(encoding="utf-8")
    assert table in docs, f"python -m {module} prints the table"
    printed = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == table
