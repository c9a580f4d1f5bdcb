"""The world has eyes: every fault of real systems has a mutant, and a property notices it within a few runs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pushkv.model.protocol import LocalProtocolError
from pushkv.sim.explore.violation import Violation
from tests.protocol.mutants import MUTANTS, hunt
from tests.protocol.mutants.registry import SEEDS, Mutant
from tests.protocol.mutants.table import ELSEWHERE, FAULTS, FILE, bare, rows
from tests.protocol.transcripts import STORIES


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    played, broken = hunt(MUTANTS[name])
    assert broken, f"{name} survives {played} runs"


def test_every_fault_has_a_mutant_or_lies_elsewhere() -> None:
    assert list(FAULTS) == [f"F{number:02}" for number in range(1, 43)]
    covered = {fault for mutant in MUTANTS.values() for fault in mutant.faults}
    assert covered | set(ELSEWHERE) == set(FAULTS)
    assert not covered & set(ELSEWHERE)


def test_the_rules_name_what_there_is() -> None:
    """Of the table in the document: each transcript, each mutant."""
    document = (FILE.parent / "protocol.md").read_text(encoding="utf-8")
    rows = [line for line in document.splitlines() if re.match(r"\| \d ", line)]
    assert len(rows) == 9
    for row in rows:
        _, _, stories, mutants, _ = row.split("|")
        found = [name for name in re.findall(r"`(\w+)`", stories) if not name.startswith("test_")]
        assert set(found) <= STORIES.keys() and set(re.findall(r"`(\w+)`", mutants)) <= MUTANTS.keys()
        assert (found or "none:" in stories) and "`" in mutants


def test_the_table_is_fresh() -> None:
    """Renew: ``python -m tests.protocol.mutants --write``."""
    written = FILE.read_text(encoding="utf-8")
    assert bare(written) == bare("\n".join(rows()))
    assert "survives" not in written


def test_what_survives_or_only_crashes_is_no_catch() -> None:
    def nothing(seed: int) -> None:
        return

    def crash(seed: int) -> None:
        raise LocalProtocolError("no")

    def other(seed: int) -> None:
        raise Violation("I1: another")

    def unsound(seed: int) -> None:
        raise Violation("I2: with the mutant or without")

    def found(trial: Any) -> Mutant:
        return Mutant("m", lambda patch: None, trial, ("I2",), ("F01",), "")

    assert hunt(found(nothing)) == (SEEDS, "")
    with pytest.raises(AssertionError, match="only an exception notices: LocalProtocolError"):
        hunt(found(crash))
    with pytest.raises(AssertionError, match="another property"):
        hunt(found(other))
    with pytest.raises(AssertionError, match="without the mutant: I2"):
        hunt(found(unsound))
