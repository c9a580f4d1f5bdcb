"""The transition tables as mermaid state diagrams: ``docs/protocol-diagrams.md`` is drawn from them, by
``docs/draw.py``.

Decides nothing. A table is the truth; a picture of it that somebody drew by hand would be another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pushkv.model.protocol.states import TABLES

INTRODUCTION = """\
# State diagrams of the protocol

Drawn from the tables in `model/protocol/states.py` by `python docs/draw.py`; do not edit. The rules are in
`docs/protocol.md`.
"""


def diagram(table: Mapping[Any, Mapping[str, str]]) -> str:
    """One table as a mermaid diagram. Events that lead from one state to the same other share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table))}"]
    for state, edges in table.items():
        targets: dict[str, list[str]] = {}
        for event, target in edges.items():
            targets.setdefault(target, []).append(event)
        lines += [f"    {state} --> {target}: {', '.join(events)}" for target, events in targets.items()]
        if not edges:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines)


def text() -> str:
    """The whole document."""
    parts = [INTRODUCTION]
    for title, table in TABLES.values():
        parts.append(f"## {title}\n\n```mermaid\n{diagram(table)}\n```\n")
    return "\n".join(parts)
