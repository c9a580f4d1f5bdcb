"""Fixtures of the tests that play whole engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pushkv.reference import trace

from .engine_pairs import Make, Pair
from .inprocess import Engine, Exchange, play


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    return play(monkeypatch)


@pytest.fixture
def pair(exchange: Exchange, tmp_path: Path) -> Iterator[Make]:
    """Makes P and D with so many ranks; at the end their traces are played again."""
    made: list[Engine] = []

    def make(p_tp: int, d_tp: int, *, cpu: bool = False, **more: Any) -> Pair:
        blocks = {} if cpu else {"block": 32}
        made.append(Engine("P", p_tp, tmp_path, cpu=cpu, **more))
        made.append(Engine("D", d_tp, tmp_path, cpu=cpu, **blocks, **more))
        return made[0], made[1]

    yield make
    for engine in made:
        engine.stop()
        assert not any(rank.alive for rank in engine.ranks)
    for path in [path for engine in made for path in engine.traces()]:
        told, expected = trace.replay(path)
        assert told == expected
