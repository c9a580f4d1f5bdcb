"""The long exploration: portions are resumed, are of one state of the sources, and are there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pushkv.sim.explore import runner, tally
from tests.scripts import script

SCRIPT = Path(__file__).parents[2] / "experiments" / "explore" / "run.py"


@pytest.fixture(scope="module")
def run() -> Any:
    return script(SCRIPT)


def changed(path: Path, **versions: str) -> None:
    """The portion at ``path``, as if other ``versions`` had played it."""
    found = json.loads(path.read_bytes())
    found["versions"] |= versions
    path.write_text(json.dumps(found))


def test_what_was_played_is_not_played_again_and_adds_up(run: Any, tmp_path: Path) -> None:
    assert run.play(range(12), 4, 1, tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(first) == ["0-4.json", "4-8.json", "8-12.json"]
    (tmp_path / "4-8.json").unlink()
    assert run.play(range(12), 4, 1, tmp_path)
    assert {name: (tmp_path / name).read_bytes() == text for name, text in first.items()} == {
        "0-4.json": True, "4-8.json": False, "8-12.json": True,  # the CPU time differs
    }  # fmt: skip
    found, whole = run.merge(tmp_path), runner.explore(range(12))
    assert found.seeds == [(0, 12)]
    assert found.versions == tally.versions()
    assert (found.total.events, found.total.outcomes) == (whole.total.events, whole.total.outcomes)


def test_a_portion_of_other_sources_is_not_there(run: Any, tmp_path: Path) -> None:
    assert run.play(range(4), 2, 1, tmp_path)
    changed(tmp_path / "2-4.json", sources="0123")
    with pytest.raises(run.NotOneSum, match=r"different sources \(.*: 1, the first is 0-2.json; 0123: 1, .* 2-4.json"):
        run.merge(tmp_path)
    assert run.play(range(4), 2, 1, tmp_path)
    assert run.merge(tmp_path).versions["sources"] == tally.sources()


def test_other_versions_of_the_rest_are_named(run: Any, tmp_path: Path) -> None:
    assert run.play(range(2), 1, 1, tmp_path)
    changed(tmp_path / "0-1.json", python="3.99")
    assert run.merge(tmp_path).versions["python"].endswith(", 3.99")


def test_a_seed_counts_once(run: Any, tmp_path: Path) -> None:
    assert run.play(range(2, 4), 2, 1, tmp_path)
    assert run.play(range(4), 4, 1, tmp_path)
    with pytest.raises(run.NotOneSum, match=r"2-4.json has seeds in common"):
        run.merge(tmp_path)


def test_it_goes_on_from_a_sum(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portions do not travel with a checkout, their sum does."""

    def runs(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["run.py", "--results", str(tmp_path), "--portion", "2", *options])
        assert run.main() == 0
        return sorted(path.name for path in (tmp_path / "portions").iterdir())

    assert runs("--seeds", "0:4") == ["0-2.json", "2-4.json"]
    shutil.rmtree(tmp_path / "portions")
    assert runs("--seeds", "0:6") == ["0-4.json", "4-6.json"]
    assert runs("--seeds", "0:6") == ["0-4.json", "4-6.json"]
    found, whole = tally.from_json((tmp_path / "million.json").read_bytes()), runner.explore(range(6))
    assert (found.seeds, found.total.events) == ([(0, 6)], whole.total.events)
    shutil.rmtree(tmp_path / "portions")
    changed(tmp_path / "million.json", sources="0123")
    assert runs("--seeds", "0:2") == ["0-2.json"]


def test_nothing_is_no_sum(run: Any, tmp_path: Path) -> None:
    with pytest.raises(run.NotOneSum, match="nothing was played"):
        run.merge(tmp_path)


def running(group: int) -> list[str]:
    """Processes of ``group`` that have not ended. (An orphan that nobody reaps has.)"""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            found.append(name)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("everybody", [False, True], ids=["alone", "with its workers"])
def test_it_can_be_stopped(
    number: signal.Signals, everybody: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also when its workers are told as well, as by ``timeout`` or a shell."""
    command = [sys.executable, str(SCRIPT), "--jobs", "2", "--portion", "20", "--results", str(tmp_path)]
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is not
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, heeded))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            first = process.stdout.readline()
            (os.killpg if everybody else os.kill)(process.pid, number)
            _, errors = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "0:20 0 violations" in first
    assert (process.returncode, errors) == (130, "")
    patience = 100
    while running(process.pid) and patience:
        time.sleep(0.1)
        patience -= 1
    assert not running(process.pid)
    names = {path.name for path in (tmp_path / "portions").iterdir()}
    assert "0-20.json" in names
    assert all(tally.from_json((tmp_path / "portions" / name).read_bytes()).total.runs == 20 for name in names)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".json", ".txt"}
