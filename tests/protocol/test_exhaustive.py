"""Every interleaving of the smallest worlds, and proof that the search has eyes: mutants are caught in them."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import events as ev
from pushkv.sim import cli
from pushkv.sim.explore import tally
from pushkv.sim.explore.coverage import CELLS, UNREACHABLE, Cell, watched
from pushkv.sim.explore.exhaustive import Search, explore_all
from pushkv.sim.explore.worlds import DEEP, SMALL, STANDARD
from tests.protocol.mutants import MUTANTS

BY_NAME = {scope.name: scope for scope in (*STANDARD, *DEEP)}
CAUGHT = {
    "freed_at_the_first_failure": ("early: too late", "I1"),
    "cancel_not_answered": ("late: given up", "I5c"),
    "failed_with_a_handle_active": ("early: broken", "I1"),
    "gathers_do_not_count_as_readers": ("packed: broken", "I2"),
    "landed_after_an_abort_is_kept": ("inside", "I5c"),
    "drain_time_ignored": ("early: restarted", "I1"),
    "giving_way_is_a_failure": ("opposite, packed: preempted", "V1"),
    "silence_taken_for_death": ("silence", "I1"),
    "beats_repeat_nothing": ("packed: lost and doubled", "V1"),
}


@pytest.fixture(scope="module")
def taken() -> set[Cell]:
    """Cells that the smallest worlds take; every one of these worlds is searched to the end on the way."""
    with watched() as cells:
        for scope in SMALL:
            result = explore_all(scope)
            assert not result.violation, f"{result}\n{result.transcript}"
            assert result.empty and result.ends
    return cells


def test_every_cell_is_taken_or_listed(taken: set[Cell]) -> None:
    assert CELLS - taken - UNREACHABLE.keys() == set(), "neither taken nor listed"
    assert taken & UNREACHABLE.keys() == set(), "listed as unreachable, and taken"


def test_what_is_listed_is_a_cell() -> None:
    assert UNREACHABLE.keys() <= CELLS
    assert all(UNREACHABLE.values())


@pytest.mark.parametrize("name", CAUGHT)
def test_a_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, expected = CAUGHT[name]
    MUTANTS[name].apply(monkeypatch)
    result = explore_all(BY_NAME[world])
    assert expected in result.violation
    assert result.transcript.splitlines()


def test_a_violation_is_told_as_a_story(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS["cancel_not_answered"].apply(monkeypatch)
    lines = explore_all(BY_NAME["late: given up"]).transcript.splitlines()
    assert any("D/ledger  * aborts t-1" in line for line in lines)
    assert any("-> P Cancel attempt=1 t-1" in line for line in lines)
    assert [float(line.split()[0]) for line in lines] == sorted(float(line.split()[0]) for line in lines)
    assert any(line.startswith("   2.000") for line in lines), "the first beat"


def test_revocation_settles() -> None:
    """E3: what the fabric has revoked is free although its writer never answers."""
    search = Search(BY_NAME["late: revoked"])
    result = search.run()
    assert result.empty
    taken = [event for event in search.moves.parts.events.values if event[0] == "takes"]
    assert any(isinstance(event[1], ev.Revoked) for event in taken)


def test_a_limit_cuts_off() -> None:
    result = explore_all(BY_NAME["two late"], limit=100)
    assert not result.empty and not result.violation
    assert "cut off" in str(result)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--exhaustive", "--only", "early: broken"]) == 0
    out = capsys.readouterr().out
    assert "frontier empty" in out and "broken=1" in out and "not taken" not in out


def test_the_command_cuts_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--exhaustive", "--deep", "--only", "restarted", "--limit", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    deep = [scope.name for scope in DEEP if "restarted" in scope.name]
    assert len(deep) > len([scope for scope in STANDARD if "restarted" in scope.name])
    assert [line.split("  ")[0] for line in lines[:-1]] == deep
    assert all("cut off" in line for line in lines[:-1])


def test_the_command_fails_and_tells_what_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MUTANTS["cancel_not_answered"].apply(monkeypatch)
    assert cli.main(["explore", "--exhaustive", "--only", "late: given up"]) == 1
    out = capsys.readouterr().out
    assert "Violation: I5c" in out and "-> P Cancel attempt=1 t-1" in out


def test_the_compiled_build_is_told_where_to_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tally, "versions", lambda: {"build": "compiled"})
    assert cli.main(["explore", "--exhaustive", "--only", "late: given up"]) == 2
    assert "use the sources" in capsys.readouterr().err


def test_names_of_worlds_are_unique() -> None:
    for worlds in (STANDARD, DEEP):
        assert len({scope.name for scope in worlds}) == len(worlds)
