"""The trace file: named tracks, matching flows, times in microseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pushkv.sim.errors import BadInput
from pushkv.sim.trace import TraceWriter


def written(path: Path) -> list[dict[str, Any]]:
    trace = TraceWriter()
    for request in (1, 2):
        at_s = float(request)
        mine = {"request": request}
        trace.span("P0/engine", "prefill", at_s, at_s + 0.5, mine)
        trace.span("P0/transfer", "post", at_s + 0.5, at_s + 0.6, mine)
        trace.span("wire/P0-D1", "write", at_s + 0.55, at_s + 0.7, mine)
        trace.span("D1/memory", "held", at_s, at_s + 0.7, mine)
        trace.span("D1/engine", "decode", at_s + 0.8, at_s + 0.9)
        trace.instant("D1/engine", "first token", at_s + 0.9, mine)
        trace.flow(request, "D1/memory", at_s, "s")
        trace.flow(request, "P0/transfer", at_s + 0.5, "t")
        trace.flow(request, "D1/engine", at_s + 0.85, "f")
    trace.span("D10/engine", "decode", 0.0, 1.0)
    trace.span("D2/engine", "decode", 0.0, 1.0)
    trace.write(path)
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_every_track_has_a_name_of_its_own(tmp_path: Path) -> None:
    events = written(tmp_path / "t.json")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert list(processes.values()) == ["P0", "wire", "D1", "D2", "D10"]  # in the order of the data's way
    names = {f"{processes[pid]}/{thread}" for (pid, _), thread in threads.items()}
    assert names >= {"P0/engine", "P0/transfer", "wire/P0-D1", "D1/memory", "D1/engine"}
    assert len(threads) == len(names) == 7
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} == set(threads)


def test_flows_start_and_end_and_lie_on_spans(tmp_path: Path) -> None:
    events = written(tmp_path / "t.json")
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    assert {i: [e["ph"] for e in points] for i, points in flows.items()} == {1: list("stf"), 2: list("stf")}
    assert len({(e["name"], e["cat"]) for points in flows.values() for e in points}) == 1  # viewers match these too
    spans = [e for e in events if e["ph"] == "X"]
    for point in (e for points in flows.values() for e in points):
        covering = [
            s
            for s in spans
            if (s["pid"], s["tid"]) == (point["pid"], point["tid"]) and s["ts"] <= point["ts"] <= s["ts"] + s["dur"]
        ]
        assert covering, point


def test_times_are_microseconds_and_arguments_are_kept(tmp_path: Path) -> None:
    prefill = next(e for e in written(tmp_path / "t.json") if e["name"] == "prefill")
    assert (prefill["ts"], prefill["dur"], prefill["args"]) == (1e6, 5e5, {"request": 1})


def test_an_empty_trace_is_a_valid_file(tmp_path: Path) -> None:
    TraceWriter().write(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        TraceWriter().write(tmp_path / "absent" / "t.json")


def test_spans_that_overlap_get_lanes_of_their_own(tmp_path: Path) -> None:
    trace = TraceWriter()
    trace.span("D0/engine", "decode", 0.0, 2.0, {"request": 1})
    trace.span("D0/engine", "decode", 1.0, 3.0, {"request": 2})  # overlaps the first
    trace.span("D0/engine", "inner", 0.5, 1.5, {"request": 3})  # lies within the first
    trace.span("D0/engine", "decode", 2.5, 4.0, {"request": 4})  # the first lane is free again
    trace.flow(2, "D0/engine", 1.2, "s")
    trace.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tids = {e["args"]["request"]: e["tid"] for e in events if e["ph"] == "X"}
    assert tids[1] == tids[3] == tids[4] != tids[2]
    assert [e["tid"] for e in events if e["ph"] == "s"] == [tids[2]]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {tids[1]: "engine", tids[2]: "engine 2"}
