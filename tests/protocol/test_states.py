"""The tables are whole, and the documents that are drawn from them are fresh."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pushkv.model.protocol import Settings, diagrams
from pushkv.model.protocol.states import RECEIVING_SETTLED, SENDING_CLOSED, TABLES, Incoming, Outgoing

ROOT = Path(__file__).parents[2]
ENDS = {
    "sending": SENDING_CLOSED,
    "receiving": RECEIVING_SETTLED,
    "incoming": {Incoming.DONE},
    "outgoing": {Outgoing.DONE},
}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reached_and_only_ends_have_no_way_out(name: str) -> None:
    table: Mapping[Any, Mapping[str, str]] = TABLES[name][1]
    assert set(table) == set(type(next(iter(table))))
    seen, todo = set(), [next(iter(table))]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo += table[state].values()
    assert seen == set(table)
    assert {state for state in table if not table[state]} == set(ENDS.get(name, ()))


@pytest.mark.parametrize("name", TABLES)
def test_every_edge_is_used(name: str) -> None:
    """An edge that no machine takes would be a rule that nobody keeps."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "model" / "protocol").glob("*.py"))
    used = set(re.findall(r"""(?:move|_close|_stop|_end)\([^)]*?"(\w+)\"""", source))
    used |= set(re.findall(r"""\[entry\.state\]\["(\w+)"\]""", source))
    used |= set(re.findall(r"""else "(\w+)"\)""", source)) | {"send", "fail", "cancel"}
    assert {event for edges in TABLES[name][1].values() for event in edges} <= used


def test_the_diagrams_are_fresh() -> None:
    drawn = (ROOT / "docs" / "protocol-diagrams.md").read_text(encoding="utf-8")
    assert drawn == diagrams.text(), "python docs/draw.py"


def test_the_document_names_every_message_and_setting_of_a_bound() -> None:
    from pushkv.model.protocol.messages import KINDS

    document = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"`{kind.__name__}`" in document
    for name in ("wait_s", "lease_s", "write_s", "suspect_after_s", "beat_s", "drain_s", "orphan_s", "yields"):
        assert hasattr(Settings(), name)
        assert f"`{name}`" in document


@pytest.mark.parametrize(
    ("field", "value"), [("beat_s", 0), ("lease_s", -1.0), ("drain_s", float("nan")), ("staging_share", 1.5)]
)
def test_an_impossible_setting_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Settings(**{field: value})  # type: ignore[arg-type]


def test_suspicion_needs_more_than_two_beats() -> None:
    with pytest.raises(ValueError, match="suspect_after_s"):
        Settings(beat_s=5.0, suspect_after_s=10.0)
