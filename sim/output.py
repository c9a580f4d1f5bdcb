"""Where a command's results go: a table, JSON, files. Decides when a path is refused; not what is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pushkv.sim import report
from pushkv.sim.errors import BadInput

__all__ = ["check_writable", "emit", "write_text"]


def emit(json_out: str | None, doc: dict[str, Any], text: str) -> None:
    """JSON to stdout alone, or to a file with the table on stdout, or the table only."""
    if json_out == "-":
        print(report.to_json(doc))
        return
    if json_out is not None:
        write_text("--json", json_out, report.to_json(doc) + "\n")
    print(text)


def check_writable(flag: str, path: str) -> None:
    """Raises `BadInput` when ``path`` cannot become a file: before a long run, not after it."""
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise BadInput(f"{flag} {path} is a folder; name a file")
    if not folder.is_dir():
        raise BadInput(f"{flag} {path}: the folder {folder} does not exist; make it first")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise BadInput(f"{flag} {path} cannot be written: permission denied")


def write_text(flag: str, path: str, text: str) -> None:
    """Write a file. Raises `BadInput` when that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{flag} {path} cannot be written: {error.strerror}") from None
