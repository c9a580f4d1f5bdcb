"""Which cells of the transition tables a search went through, and those that none can.

A cell is ``(table, state, event)``. ``watched`` records the look-ups that a machine makes when it moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pushkv.model.protocol.states import TABLES

Cell = tuple[str, str, str]

CELLS: Final[frozenset[Cell]] = frozenset(
    (name, str(state), event)
    for name, (_, table) in TABLES.items()
    for state, edges in table.items()
    for event in edges
)

UNREACHABLE: Final[dict[Cell, str]] = {
    ("receiving", "registered", "landed"): "a shard is exposed when its transfer has memory; without it no part counts",
    ("receiving", "offered", "landed"): "as from registered: what has no memory is not written to",
    (
        "incoming",
        "wanting",
        "landed",
    ): "no rank lands before it exposes, but for nothing at all, and that is not offered",
}
"""Cells that no world reaches, each with the reason."""


class _Edges(dict[str, Any]):
    """The edges out of one state; remembers which were taken."""

    def __init__(self, table: str, state: str, edges: Any, taken: set[Cell]) -> None:
        super().__init__(edges)
        self._table, self._state, self._taken = table, state, taken

    def __getitem__(self, event: str) -> Any:
        after = super().__getitem__(event)
        self._taken.add((self._table, self._state, event))
        return after


@contextmanager
def watched() -> Iterator[set[Cell]]:
    """The cells that are taken meanwhile. The tables are the machines' own, so they are put back at the end."""
    taken: set[Cell] = set()
    before = {name: dict(table) for name, (_, table) in TABLES.items()}
    try:
        for name, (_, table) in TABLES.items():
            for state, edges in before[name].items():
                table[state] = _Edges(name, str(state), edges, taken)  # type: ignore[index]
        yield taken
    finally:
        for name, (_, table) in TABLES.items():
            table.update(before[name])  # type: ignore[attr-defined]
