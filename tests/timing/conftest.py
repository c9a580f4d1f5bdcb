"""The measured tables that the timing tests compare with."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

Table = Callable[[str], list[dict[str, str]]]
_EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="session")
def table() -> Table:
    """Read a CSV of an experiment by its name."""

    def read(name: str) -> list[dict[str, str]]:
        folder = "published" if name.startswith("published") else "h200_pair"
        with (_EXPERIMENTS / folder / "data" / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return read
