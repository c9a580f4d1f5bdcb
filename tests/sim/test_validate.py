"""Validation replays the measurement as it was made, names what it read, and keeps fitted and predicted rows apart."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pushkv.model.timing import profiles
from pushkv.sim import cli, h200_pair, measured, own, report, scenario, validate, world
from pushkv.sim.errors import BadInput
from pushkv.sim.report import Validation
from tests.scripts import script

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "h200_pair"
DATA = EXPERIMENT / "data"
BLIND_GROUP = "out-of-sample: measured after the prediction was written down"
LIMITS = {"TTFT mean": (0.15, 0.10), "TTFT p90": (0.15, 0.15), "TPOT mean": (0.05, 0.05)}  # at 1k, from 4k up


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate.run()


@pytest.fixture(scope="module")
def servers() -> list[measured.Server]:
    return measured.read_servers(measured.find_data(None))


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    return script(EXPERIMENT / "fit.py")


# ---- what is compared ----------------------------------------------------------------------------------------------


def test_every_measured_row_meets_every_target(found: Validation) -> None:
    assert [check.name for check in found.checks if check.binding and not check.passed] == []


def test_every_measured_point_is_held_to_the_limits(found: Validation) -> None:
    points = set()
    for file in measured.REQUEST_FILES:
        with (DATA / file).open(encoding="utf-8") as rows:
            points |= {
                (file.endswith("_compiled.csv"), row["model"][6:], row["mode"], row["input_len"], float(row["qps"]))
                for row in csv.DictReader(rows)
            }
    assert len(points) == 12
    for compiled, model, mode, length, qps in points:
        for metric, (short, long) in LIMITS.items():
            name = f"{model} {mode} {length}@{qps:g} {metric}"
            (check,) = (c for c in found.checks if c.name == name and ("compiled" in c.group) == compiled)
            assert check.limit == (short if length == "1024" else long)
            assert check.unit == "ms"


def test_only_rows_at_1024_tokens_and_4_per_second_and_the_tables_are_in_sample(found: Validation) -> None:
    for check in found.checks:
        if not check.what:  # this project's own runs: tests/sim/test_own.py
            fitted = "1024@4 " in check.name or ".csv" in check.group
            assert check.group.startswith("in-sample") == fitted, check
    assert any(check.group.startswith("out-of-sample") and "32b prefill" in check.name for check in found.checks)
    assert sum(check.group.startswith("published") for check in found.checks) == 5


def test_at_most_two_constants_are_fitted_per_configuration_and_all_stand_in_profiles(fit: ModuleType) -> None:
    nvlink, hardware = profiles.fabric("nvlink-ucx"), profiles.hardware("h200")
    assert nvlink.read.allocated_s == nvlink.write.allocated_s
    for configuration, constants in (("", 1), ("compiled", 2)):  # and posting, which eager servers fit
        names = [name for (_, c, _), name in measured.CALIBRATIONS.items() if c == configuration]
        assert sum(hardware.calibrations[name].launch_factor != 1.0 for name in names) == constants
    assert nvlink.read.allocated_s == pytest.approx(fit.posting()["both"], rel=0.002)


def test_launch_factors_are_where_the_rows_they_come_from_put_them(
    fit: ModuleType, servers: list[measured.Server]
) -> None:
    post_s, calibrations = profiles.fabric("nvlink-ucx").read.allocated_s, profiles.hardware("h200").calibrations
    for server in servers:
        factor = calibrations[server.calibration].launch_factor
        if factor != 1.0:
            assert fit.launch_factor(server, post_s) == pytest.approx(factor, rel=0.02), server.calibration


def test_inputs_are_named_with_their_hashes(found: Validation) -> None:
    assert "experiments/h200_pair/data/h200_requests.csv" in found.inputs
    assert "experiments/published/data/published.csv" in found.inputs
    assert {f"experiments/gpu_handover/results/{name}" for name in own.FILES} <= set(found.inputs)
    assert len(found.inputs) == 10 + len(own.FILES)
    for name, digest in found.inputs.items():
        assert digest == hashlib.sha256((EXPERIMENT.parents[1] / name).read_bytes()).hexdigest()


def test_the_report_fits_a_terminal_and_says_what_was_fitted(found: Validation) -> None:
    text = report.validate(found)
    assert max(map(len, text.splitlines())) <= report.WIDTH
    assert "MISS" not in text.replace(_block(text, BLIND_GROUP), "")
    notes = " ".join(text.split())
    assert "two constants: 3.91 us to post a descriptor" in notes
    assert "Without the launch factors these servers would miss" in notes
    assert "has not been found" in notes


def _block(text: str, group: str) -> str:
    return next(block for block in text.split("\n\n") if block.startswith(group))


def test_the_same_data_gives_the_same_document(found: Validation) -> None:
    assert report.to_json(validate.run().document()) == report.to_json(found.document())


# ---- measured after the prediction was written down ----------------------------------------------------------------


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_blind_points_are_held_to_the_same_limits_and_bind_nobody(found: Validation) -> None:
    blind = [check for check in found.checks if check.group == BLIND_GROUP]
    free = [check.name for check in found.checks if not check.binding and not check.what]
    assert free == [check.name for check in blind]
    assert len([check for check in blind if check.limit is not None]) == 14 * len(LIMITS)
    for check in blind:
        limits = next((LIMITS[metric] for metric in LIMITS if check.name.endswith(metric)), None)
        length = int(check.name.split()[2].split("@")[0])
        assert check.limit == (None if limits is None else limits[length >= 4096])


def test_every_blind_point_was_predicted_and_none_of_them_had_been_measured() -> None:
    def points(rows: list[dict[str, str]]) -> set[tuple[str, str, int, float]]:
        return {(row["model"], row["mode"], int(row["input_len"]), float(row["qps"])) for row in rows}

    rows, written = _csv(DATA / measured.BLIND_FILE), _csv(EXPERIMENT / "blind_predictions.csv")
    assert points(rows) == points(written) == points([row for row in written if row["default"] == "yes"])
    assert not any(points(rows) & points(_csv(DATA / file)) for file in measured.REQUEST_FILES)
    for row in written:
        there = [one for one in rows if points([one]) == points([row])]
        assert len(there) == int(row["requests"])
        assert {one["output_len"] for one in there} == {row["output_len"]}


def test_blind_predictions_are_as_they_were_written() -> None:
    digest = hashlib.sha256((EXPERIMENT / "blind_predictions.csv").read_bytes()).hexdigest()
    assert digest == "760e604317adb4cccf8844d5d9f05d40b0b41d0beb4d96d440623fe99e0521fc"


def test_a_note_scores_what_was_written_and_says_how_far_predictions_have_moved_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = next(note for note in validate.run().notes if note.startswith("Blind rows"))
    assert "42 limits, missed: 32b push 8192@0.5 TTFT mean +14.9%." in note
    monkeypatch.setitem(measured.CALIBRATIONS, ("qwen3-32b", "", "push"), "compiled")  # another simulator than then
    changed = validate.run()
    moved = next(note for note in changed.notes if note.startswith("Blind rows"))
    assert moved.split("Today")[0] == note.split("Today")[0]
    assert moved != note


def test_arrivals_of_blind_points_are_those_of_both_modes() -> None:
    sent: dict[tuple[str, str, str], list[str]] = {}
    for row in _csv(DATA / measured.BLIND_FILE):
        sent.setdefault((row["model"] + row["input_len"], row["qps"], row["mode"]), []).append(row["arrival_s"])
    for (length, qps, mode), arrivals in sent.items():
        assert arrivals == sent[length, qps, "push" if mode == "pull" else "pull"]


@pytest.mark.parametrize(
    ("column", "text", "says"),
    [("ttft_mean_ms", "soon", "line 2: ttft_mean_ms 'soon' is not possible"), ("qps", "0", "line 2: qps must be")],
)
def test_written_predictions_that_cannot_be_used_are_one_line(
    tmp_path: Path, column: str, text: str, says: str
) -> None:
    shutil.copy(DATA / "h200_requests_32b.csv", tmp_path)
    shutil.copy(DATA / measured.BLIND_FILE, tmp_path)
    rows = _csv(EXPERIMENT / "blind_predictions.csv")
    rows[0][column] = text
    with (tmp_path / "blind_predictions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(BadInput, match=f"blind_predictions.csv {says}"):
        validate.run(str(tmp_path))


# ---- how the measurement is replayed -------------------------------------------------------------------------------


def test_a_failed_request_is_where_the_legs_line_up_and_its_point_takes_the_arrivals_of_the_other_mode(
    servers: list[measured.Server],
) -> None:
    pull, push = (
        next(p for s in servers if (s.file, s.mode) == ("h200_requests.csv", mode) for p in s.points if p.qps == 0.5)
        for mode in ("pull", "push")
    )
    (failed,) = np.flatnonzero(np.isnan(push.ttft_ms))
    assert failed in (1, 2)  # the fourth waited for the third and is there; the legs of those before it do not differ
    assert push.arrival_s.tolist() == pull.arrival_s.tolist()
    assert (pull.answered.sum(), push.answered.sum()) == (40, 39)
    assert len(push.output_len) == 40


def test_sends_are_late_by_the_time_that_prompts_take_to_build(servers: list[measured.Server]) -> None:
    server = servers[0]
    load = h200_pair.workload(server)
    assert load.input_len[:4].tolist() == [600, 600, 600, 1024]  # three requests to warm up
    assert len(load) == 3 + 5 * 40  # and a point that is in no file
    for start, point in h200_pair.positions(server):
        rows = slice(start, start + len(point.output_len))
        assert set(load.input_len[rows].tolist()) == {point.input_len}
        late_s = np.diff(load.arrival_s[rows] - point.arrival_s)
        assert late_s == pytest.approx(np.full(39, point.input_len * 0.5e-6))
    assert np.all(np.diff(load.arrival_s) > 0)


def test_a_point_left_out_that_is_there_takes_the_place_of_the_assumed_one(servers: list[measured.Server]) -> None:
    server = servers[0]
    one = server.points[2]
    there = measured.Point(4096, 5.0, one.output_len, one.arrival_s, one.leg_ms, one.ttft_ms, one.tpot_ms)
    more = measured.Server(server.file, server.model, server.mode, [*server.points[:3], there, server.points[3]])
    assert len(h200_pair.workload(more)) == 3 + 5 * 40
    assert len(h200_pair.replay(more)) == 5


def test_progress_goes_up_to_the_total_once() -> None:
    seen: list[tuple[int, int]] = []
    validate.run(progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == seen[0][1]


def test_a_write_of_a_32b_waits_for_the_next_prefill_so_push_loses_to_pull() -> None:
    handover_ms = {}
    for mode in ("pull", "push"):
        plan = scenario.load(
            None, {"model": "qwen3-32b", "mode": mode, "input_len": 16000, "qps": 0.3, "output_len": 96, "requests": 60}
        )
        log = world.run(plan).log
        handover_ms[mode] = float(np.median(log.milliseconds("handover")))
    assert handover_ms["push"] > handover_ms["pull"] + 400


# ---- other folders -------------------------------------------------------------------------------------------------


def test_a_folder_with_some_of_the_files_is_scored_and_the_rest_is_named(tmp_path: Path) -> None:
    shutil.copy(DATA / "h200_requests_32b.csv", tmp_path)
    some = validate.run(str(tmp_path))
    assert {check.name.split()[0] for check in some.checks} == {"32b"}
    assert list(some.inputs) == [str(tmp_path / "h200_requests_32b.csv")]
    assert "h200_engine.csv" in some.notes[-1]


def test_without_the_repository_one_line_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured, "_REPOSITORY", tmp_path)
    assert cli.main(["validate"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "give --data FOLDER" in said


HEADER = "model,mode,input_len,output_len,qps,arrival_s,prefill_leg_ms,ttft_ms,tpot_ms,e2e_ms\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is not a folder"),
        ("", "no measured requests"),
        ("model,mode\n", "has no column input_len"),
        (HEADER, "no measured requests"),
        (HEADER + "qwen3-8b,pull,x,96,4.0,0.0,35,84,5.5,605\n", "line 2: input_len 'x' is not possible"),
        (HEADER + "qwen3-8b,pull,1024,96,0,0.0,35,84,5.5,605\n", "line 2: qps must be a number above 0"),
        (HEADER + "qwen3-8b,pull,1024,96,4,-1,35,84,5.5,605\n", "line 2: arrival_s '-1' is not possible"),
        (HEADER + "qwen3-8b,pull,1024,96,4,,35,84,5.5,605\n", "have no arrival_s"),
        (HEADER + "qwen3-8b,pull,1024,96,4,0.0,,,,failed\n", "no request at 1024 tokens and 4 per s was answered"),
        (HEADER + "qwen3-8b,pushkv,1024,96,4,0.0,35,84,5.5,605\n", "mode 'pushkv' is neither pull nor push"),
        (HEADER + "qwen3-9b,pull,1024,96,4,0.0,35,84,5.5,605\n", "'qwen3-9b' is not known"),
        (HEADER + "qwen3-8b,pull,1024,96,4,2.0,35,84,5.5,605\nqwen3-8b,pull,1024,96,4,1.0,35,84,5.5,605\n", "in order"),
    ],
)
def test_data_that_cannot_be_used_is_one_line_that_names_it(tmp_path: Path, text: str | None, says: str) -> None:
    folder = tmp_path / "data"
    if text is not None:
        folder.mkdir()
    if text:
        (folder / "h200_requests.csv").write_text(text)
    with pytest.raises(BadInput, match=says):
        validate.run(str(folder))


def test_the_command_prints_json_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--json", "-", "--no-progress"]) == 0
    doc = json.loads(capsys.readouterr().out)
    assert doc["passed"] is True
    assert {"group", "name", "measured", "predicted", "error", "limit", "noise"} <= set(doc["checks"][0])
