"""The command line on the real world: what it refuses, what it prints and what it writes."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pushkv.sim import cli
from pushkv.sim.metrics import RequestLog

from .worlds import WAYS, scenario, simulate, way_name, world

HEAD = "arrival_s,input_len,output_len\n"
CONFIG = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip


def flags(way: dict[str, str]) -> list[str]:
    return [word for name, value in way.items() for word in (f"--{name}", value)]


def without(field: str) -> str:
    return json.dumps({name: value for name, value in CONFIG.items() if name != field})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "broken.toml": "[model\n",
        "typo.toml": "fabrik = 'tcp'\n",
        "layers.json": without("num_hidden_layers"),
        "heads.json": without("num_attention_heads"),
        "good.json": json.dumps(CONFIG),
        "unsorted.csv": HEAD + "1.0,10,10\n0.5,10,10\n",
        "negative.csv": HEAD + "-1.0,10,10\n",
        "zero.csv": HEAD + "0.0,10,0\n",
        "long.csv": HEAD + "0.0,900000,10\n",
        "mixed.csv": HEAD + "0.0,500,20\n0.001,17,1\n0.2,3000,5\n",
        "ghost.toml": "[[fault]]\nkind = 'pause'\ntarget = 'D7'\nat_s = 1\nduration_s = 1\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


BAD = [
    ("--mode pushkw", "did you mean 'pushkv'"),
    ("--fabric infiniband", "--fabric 'infiniband' is not known"),
    ("--arrival bursty", "choose from poisson, uniform, trace"),
    ("--prefill-tp 3", "use 1, 2, 4, 8"),
    ("--decode-tp 5", "does not divide the heads"),
    ("--qps -2", "expected a number above 0"),
    ("--qps nan", "--qps nan is not possible"),
    ("--output-len 0", "expected a whole number from 1 up"),
    ("--scenario broken.toml", "broken.toml is not TOML"),
    ("--scenario absent.toml", "absent.toml cannot be read"),
    ("--scenario typo.toml", "did you mean 'fabric'"),
    ("--model layers.json", "num_hidden_layers is missing"),
    ("--model heads.json", "num_attention_heads is missing"),
    ("--arrival trace --trace unsorted.csv", "unsorted.csv line 3"),
    ("--arrival trace --trace negative.csv", "negative.csv line 2"),
    ("--arrival trace --trace zero.csv", "zero.csv line 2"),
    ("--arrival trace --trace long.csv", "900000 tokens does not fit the KV cache"),
    ("--model llama-3.3-70b", "use --prefill-tp 2"),
    ("--model qwen3-32b --gpu-memory-utilization 0.3", "GB of weights per GPU"),
    ("--input-len 900000", "900000 tokens does not fit the KV cache of a prefill engine"),
    ("--num-blocks 10 --input-len 161", "does not fit the KV cache"),
    ("--faults ghost.toml", "target D7 does not exist; the last one is D0"),
    ("--mode pull --router concurrent", "use --router sequential"),
    ("--mode pull --path packed", "--path belongs to --mode pushkv"),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("line", "names"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_and_exit_2(line: str, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pushkv: error: ") and err.count("\n") == 1
    assert names in err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_json_holds_what_the_design_says(way: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    line = "--arrival trace --trace mixed.csv --model good.json --json - --no-progress"
    assert cli.main(["simulate", *flags(way), *line.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert list(document) == ["schema", "scenario", "summary", "events", "machine_steps", "wall_s"]
    summary = document["summary"]
    assert (summary["requests"], summary["completed"], summary["failed"]) == (3, 3, 0)
    for spread in ("ttft_ms", "tpot_ms", "e2e_ms", "prefill_ms"):
        assert all(summary[spread][key] > 0 for key in ("mean", "p50", "p90", "p99")), spread
    assert summary["handover_ms"]["p99"] > 0  # a short prompt may be decoded before P has answered
    assert summary["transfer"]["bytes"] == 3517 * 2 * 32 * 8 * 128 * 2
    assert summary["transfer"]["descriptors"] > 0
    assert summary["duration_s"] > 0.2
    assert document["machine_steps"] > 0 and document["events"] > 0


def compare(line: str) -> list[str]:
    return ["compare", *line.split(), "--no-progress"]


@pytest.mark.usefixtures("here")
def test_compare_runs_the_same_arrivals_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(compare("--requests 20 --qps 5 --output-len 20 --json -")) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["scenario"]["mode"] for run in runs] == ["pull", "push", "pushkv"]
    assert len({run["summary"]["transfer"]["bytes"] for run in runs}) == 1
    ttft = [run["summary"]["ttft_ms"]["mean"] for run in runs]
    assert ttft[2] < ttft[0] and ttft[2] < ttft[1], "what the whole project is about"
    assert cli.main(compare("--requests 20 --router concurrent")) == 0


# ---- the trace -----------------------------------------------------------------------------------------------------


def traced(way: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    argv = ["simulate", *flags(way), *line.split(), "--trace-out", "trace.json", "--no-progress"]
    assert cli.main(argv) == 0
    capsys.readouterr()
    events: list[dict[str, Any]] = json.loads(Path("trace.json").read_text())["traceEvents"]
    return events


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize("input_len", [700, 20_000])
def test_every_request_has_an_arrow_from_registration_over_the_write_to_the_first_token(
    way: dict[str, str], input_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"--requests 12 --qps 6 --output-len 5 --input-len {input_len} --prefill 2 --decode 2"
    events = traced(way, line, capsys)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    owners = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert set(arrows) == set(range(12))
    for points in arrows.values():
        phases = [point["ph"] for point in sorted(points, key=lambda point: point["ts"])]
        assert phases[0] == "s" and phases[-1] == "f"
        assert set(phases[1:-1]) == {"t"}
        over = {owners[point["pid"]] for point in points if point["ph"] == "t"}
        assert "wire" in over
        start = min(points, key=lambda point: point["ts"])
        assert owners[start["pid"]][0] == ("P" if way["mode"] == "pull" else "D")
        for point in points:
            if point["ph"] != "f":  # a viewer hangs the arrow on the slice around it
                around = slices[point["pid"], point["tid"]]
                assert any(a - 1e-6 <= point["ts"] <= b + 1e-6 for a, b in around), names[point["pid"], point["tid"]]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_a_trace_changes_nothing_and_its_bytes_lie_on_the_wire(
    way: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from pushkv.sim.trace import TraceWriter

    plan = scenario(**way, requests=15, qps=10, output_len=30)
    trace = TraceWriter()
    watched, plain = simulate(plan, trace=trace), simulate(plan)
    assert watched.log._cells == plain.log._cells
    assert watched.totals == plain.totals
    wire = [span for span in trace.spans if span.track.startswith("wire/")]
    assert math.fsum(span.end_s - span.start_s for span in wire) == pytest.approx(plain.log.column("wire_s").sum())
    posting = [span for span in trace.spans if span.name == "post"]
    assert math.fsum(span.end_s - span.start_s for span in posting) == pytest.approx(plain.log.column("post_s").sum())


# ---- one row per request -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_requests_out_csv_and_parquet_hold_the_same(way: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    line = "--arrival trace --trace mixed.csv --no-progress --json r.json"
    for file in ("r.csv", "r.parquet"):
        assert cli.main(["simulate", *flags(way), *line.split(), "--requests-out", file]) == 0
    with Path("r.csv").open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    table = parquet.read_table("r.parquet").to_pylist()
    assert [int(row["input_len"]) for row in rows] == [500, 17, 3000]
    assert [row["status"] for row in rows] == ["completed"] * 3
    assert rows[1]["tpot_ms"] == "", "one token has no time between tokens"
    for row, same in zip(rows, table, strict=True):
        for name, value in same.items():
            if value is None:
                assert row[name] == ""
            elif isinstance(value, str):
                assert row[name] == value
            else:
                assert float(row[name]) == pytest.approx(value, rel=1e-8)
    ttft = [float(row["ttft_ms"]) for row in rows]
    mean = json.loads(Path("r.json").read_text())["summary"]["ttft_ms"]["mean"]
    assert mean == pytest.approx(sum(ttft) / 3)


# ---- the world's own promises --------------------------------------------------------------------------------------


def test_progress_is_told_and_ends_at_the_number_of_requests() -> None:
    told: list[tuple[int, int]] = []
    plan = scenario(mode="pushkv", requests=2500, qps=500, input_len=16, output_len=1)
    simulate(plan, progress=lambda now, all_: told.append((now, all_)))
    assert told[-1] == (2500, 2500)
    assert [now for now, _ in told] == sorted(now for now, _ in told)
    assert len(told) >= 3


def test_rows_are_added_to_the_log_that_is_given() -> None:
    log = RequestLog()
    assert simulate(scenario(requests=3), log=log).log is log
    assert len(log) == 3


def test_no_requests_are_no_run() -> None:
    made = world(scenario(), [])
    made.go()
    assert len(made.log) == 0
    assert made.totals().duration_s == 0
