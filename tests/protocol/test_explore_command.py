"""``pushkv explore`` and ``pushkv replay``: exit codes, one line for bad input, JSON, what is counted, and that a seed
gives the same whoever plays it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pushkv.sim import cli, report
from pushkv.sim.explore import command, runner, tally
from pushkv.sim.explore.case import Case, case_of, play_case
from pushkv.sim.explore.causes import CRASH_STATES
from pushkv.sim.explore.profiles import CONFIGS, PROFILES
from pushkv.sim.explore.summary import NEVER, summary
from tests.protocol.mutants import MUTANTS

BAD_INPUT = [
    ("explore --seeds 5", "--seeds 5 is not possible: expected A:B"),
    ("explore --seeds 5:5", "expected A:B with A below B"),
    ("explore --seeds=-3:5", "--seeds -3:5 is not possible"),
    ("explore --jobs 0", "--jobs 0 is not possible: expected a whole number from 1"),
    ("explore --jobs many", "--jobs many is not possible"),
    ("explore --transfers 1e3", "--transfers 1e3 is not possible"),
    ("explore --profile hostil", "--profile 'hostil' is not known: did you mean 'hostile'?"),
    ("explore --shape cube", "--shape 'cube' is not known"),
    ("explore --json absent/x.json", "the folder absent does not exist"),
    ("explore --out absent", "--out absent is not a folder that can be written to"),
    ("explore --deep", "--deep belongs to --exhaustive"),
    ("explore --limit 5", "--limit belongs to --exhaustive"),
    ("explore --exhaustive --seeds 0:5", "--seeds belongs to random seeds"),
    ("explore --exhaustive --until-failure", "--until-failure belongs to random seeds"),
    ("explore --exhaustive --limit none", "--limit none is not possible: expected a whole number from 1"),
    ("explore --exhaustive --only absent", "--only absent: no world has that in its name"),
    ("replay", "the following arguments are required"),
    ("replay 3", "a seed needs --profile: choose from calm, lossy"),
    ("replay 3 --profile calm", "a seed needs --shape: choose from plain"),
    ("replay 3 --profile clam --shape plain", "did you mean 'calm'?"),
    ("replay absent.json", "absent.json cannot be read"),
    ("replay case.json", "case.json is not a case of pushkv explore"),
    ("replay case.json --profile calm", "--profile belongs to a seed"),
]


def test_the_hash_of_the_sources_is_of_what_a_seed_plays() -> None:
    """Else a long exploration would be lost with a change of the exhaustive search, or survive one of the machines."""
    names = {name.removeprefix("pushkv.") for name in tally._played()}
    assert {"sim.explore.pairs", "sim.explore.world", "sim.explore.tally", "model.protocol.sender"} < names
    machines = {path.stem for path in Path("model/protocol").glob("*.py")} - {"__init__", "diagrams"}
    assert machines <= {name.removeprefix("model.protocol.") for name in names}
    assert not names & {"sim.explore.exhaustive", "sim.explore.command", "sim.explore.shrink"}
    played = "import sys, pushkv.sim.explore.runner as r; r.explore(range(2), transfers=2); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", played], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if ".explore." in name} <= set(tally._played())


@pytest.mark.parametrize(("line", "message"), BAD_INPUT)
def test_bad_input(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("case.json").write_text("{}")
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pushkv: error: ")
    assert message in err


def test_the_help_names_the_profiles_that_exist() -> None:
    assert command._PROFILES.split(", ") == list(PROFILES)
    assert command._SHAPES.split(", ") == list(CONFIGS)
    assert command._TRANSFERS == runner.TRANSFERS


def test_clean_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--seeds", "0:7", "--transfers", "3", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    doc = json.loads(out)
    assert (doc["schema"], doc["seeds"], doc["runs"], doc["transfers"]) == (1, [[0, 7]], 7, 3)
    assert list(doc["profiles"]) == list(PROFILES)
    assert doc["events"] > 1000
    assert doc["events_per_cpu_s"] > 0
    assert set(doc["versions"]) == {"pushkv", "python", "msgspec", "sources", "build"}
    assert doc["violations"] == []
    assert doc["profiles"]["calm"]["outcomes"] == {"loaded": doc["profiles"]["calm"]["transfers"]}


def test_clean_seeds_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert cli.main(["explore", "--seeds", "0:3", "--profile", "lossy", "--transfers", "4", "--json", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("seeds 0:3: no violation\n3 runs")
    assert "events per CPU second" in out
    assert max(map(len, out.splitlines())) <= report.WIDTH
    assert json.loads(path.read_text())["runs"] == 3


def test_a_violation_is_told_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        MUTANTS["failed_with_a_handle_active"].apply(patch)
        line = "explore --seeds 0:40 --profile churn --shape plain --until-failure --out . --json found.json"
        assert cli.main(line.split()) == 1
        out, _ = capsys.readouterr()
        assert "The least of it that was found" in out
        assert "LOST" not in out
        case = json.loads(Path("found.json").read_text())["violations"][0]
        file = next(Path().glob("I*.json"))
        assert f"pushkv replay {case['seed']} --profile churn --shape plain --transfers 8\n" in out
        assert f"pushkv replay {file}" in out
        assert len(case["actions"]) <= 4
        for replayed in (str(file), f"{case['seed']} --profile churn --shape plain --transfers 8"):
            assert cli.main(["replay", *replayed.split()]) == 1
            out, _ = capsys.readouterr()
            assert out.splitlines()[-1].startswith(f"breaks {case['violation'][:3]}")
            assert "Columns: seconds, who, what." in out
            assert f"dispatches t{case['actions'][0]['number']}" in out
    assert cli.main(["replay", str(file)]) == 0
    assert capsys.readouterr().out == "no property is violated any more\n"


def test_replay_of_a_clean_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "3", "--profile", "lossy", "--shape", "plain", "--transfers", "2"]) == 0
    assert capsys.readouterr().out == "no property is violated\n"
    assert cli.main(["replay", "3", "--profile", "lossy", "--shape", "plain", "--transfers", "2", "--full"]) == 0
    out = capsys.readouterr().out
    assert "-> P" in out and "dispatches t1" in out


def timeless(found: tally.Exploration) -> dict[str, Any]:
    doc = tally.document(found)
    for key in ("wall_s", "cpu_s", "events_per_cpu_s", "jobs"):
        del doc[key]
    for profile in doc["profiles"].values():
        del profile["cpu_s"]
    return doc


def test_seeds_give_the_same_in_any_number_of_workers_and_portions() -> None:
    seeds = range(420, 442)
    once, twice, spread = (runner.explore(seeds, transfers=3, jobs=jobs) for jobs in (1, 1, 2))
    assert timeless(once) == timeless(twice) == timeless(spread)
    parts = [runner.explore(part, transfers=3) for part in (seeds[:9], seeds[9:])]
    parts[0].add(tally.from_json(json.dumps(tally.document(parts[1])).encode()))
    assert timeless(parts[0]) == timeless(once)


def test_an_interrupted_run_says_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[Case] = []

    def play(case: Case) -> Any:
        played.append(case)
        if len(played) > 60:
            raise KeyboardInterrupt
        return play_case(case)

    monkeypatch.setattr(runner, "play_case", play)
    assert cli.main(["explore", "--seeds", "0:160", "--transfers", "1"]) == 130
    out, _ = capsys.readouterr()
    assert "no violation (interrupted)" in out.splitlines()[0]


def test_what_hits_is_counted() -> None:
    """Labels, kinds, crash points: all from one world, as it happened."""
    world = play_case(case_of(1, PROFILES["hostile"], CONFIGS["plain"], 12)).worlds[0]
    labels = world.causes.labels
    lost = {label.split()[1] for label in labels if label.startswith("lost ")}
    doubled = {label.split()[1] for label in labels if label.startswith("doubled ")}
    assert lost and lost <= world.network.dropped
    assert doubled == world.network.duplicated
    assert len(set(labels)) == len(labels)
    counted = tally.Tally()
    counted.take(world)
    assert (counted.runs, counted.transfers, counted.events) == (1, len(world.requests), world.events)
    assert sum(counted.outcomes.values()) == len(world.requests)


def test_calm_is_calm() -> None:
    found = runner.explore(range(5), profile="calm", transfers=6)
    total = found.total
    assert not total.crashes
    assert set(total.faults) <= {"preemption"}
    assert not [key for key in total.fates if "reordered" not in key]
    text = summary(found)
    assert NEVER in text.split("Percent")[1]


def test_crash_points_that_were_not_hit_are_said() -> None:
    found = runner.explore(range(3), profile="paused", transfers=4)
    rows = summary(found).split("Runs in which")[1].splitlines()[2:]
    assert len(rows) == len(CRASH_STATES)
    assert all(row.split()[-2] == NEVER for row in rows)  # nobody is killed in this profile
