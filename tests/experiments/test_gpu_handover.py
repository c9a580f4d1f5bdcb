"""What the GPU experiment makes of requests and records: stages, rows, and one line per request."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import script

FOLDER = Path(__file__).parents[2] / "experiments" / "gpu_handover"


def module(name: str) -> Any:
    return script(FOLDER / f"{name}.py")


report = module("report")


@dataclass
class Served:
    """As `load.Served`."""

    number: str
    mode: str = "chunk"
    row: str = "open:16000:0.5:2"
    input_len: int = 16000
    sent_s: float = 100.0
    prefill_s: float = 0.5
    token_s: list[float] = field(default_factory=lambda: [0.52, 0.525, 0.53])
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)


SEND = {
    "side": "send", "transfer_id": "a/0.0:digest", "enqueued_s": 100.2, "computed_s": 0.0, "verdict_s": 100.509,
    "gather_s": 0.003, "post_s": 0.001, "wire_s": 0.006, "longest_turn_s": 0.002,
    "parts": [
        [8192, 100.1, 100.2, 100.3, 100.3, 100.301, 100.305],
        [7808, 100.2, 100.25, 100.499, 100.4995, 100.5, 100.508],
    ],
}  # fmt: skip
RECEIVE = {"side": "receive", "transfer_id": "a/0.0:digest", "heard_s": 100.306, "landed_s": 100.51}
LOAD = {
    "side": "load", "transfer_id": "a/0.0:digest", "asked_s": 100.512, "launched_s": 100.513, "loaded_s": 100.516,
    "longest_turn_s": 0.001,
}  # fmt: skip


def known(folder: Path) -> dict[str, Any]:
    (folder / "p.jsonl").write_text(json.dumps(SEND) + "\n", encoding="utf-8")
    (folder / "d.jsonl").write_text(json.dumps(RECEIVE) + "\n" + json.dumps(LOAD) + "\n", encoding="utf-8")
    found: dict[str, Any] = report.read_records([folder / "p.jsonl", folder / "d.jsonl", folder / "not there"])
    return found


def test_stages_count_from_the_end_of_the_prefill(tmp_path: Path) -> None:
    records = known(tmp_path)
    assert set(records["a"]) == {"send", "receive", "load"}
    at = report.stages(Served("a"), records["a"])
    wanted = {
        "enqueued": -300.0, "launched_first": -300.0, "gathered_first": -200.0, "launched_last": -250.0,
        "gathered": -1.0, "posted": 0.0, "written": 8.0, "verdict": 9.0, "heard": -194.0, "landed": 10.0, "asked": 12.0,
        "launched": 13.0, "loaded": 16.0, "token": 20.0, "wire_ms": 6.0, "parts": 2.0, "turn_p_ms": 2.0,
    }  # fmt: skip
    assert {name: at[name] for name in wanted} == pytest.approx(wanted)
    assert "computed" not in at  # the verdict came before the engine knew


def test_a_row_and_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = Served("b", token_s=[], error="timeout")
    requests = [Served("a"), lost]
    of = {"a": report.stages(Served("a"), known(tmp_path)["a"]), "b": report.stages(lost, {})}
    line = report.finish(report.row_of("chunk", requests[0].row, requests, of), 5.0)
    assert (line["n"], line["lost"]) == (1, 1)
    assert line["handover_p50"] == pytest.approx(20.0)
    assert line["land_p50"] == pytest.approx(10.0) and line["land_steps"] == pytest.approx(2.0)
    report.append_csv(tmp_path / "requests.csv", requests[:1], of)
    report.append_csv(tmp_path / "requests.csv", requests[1:], of)
    with (tmp_path / "requests.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["error"] for row in rows] == ["", "timeout"]
    assert float(rows[0]["landed_ms"]) == pytest.approx(10.0) and rows[1]["landed_ms"] == ""
    report.print_stages("chunk", "open", [of["a"]])
    report.print_stages("push", "open", [{"token": 3.0}])  # no records: nothing to say
    shown = capsys.readouterr().out
    assert "landed: D has all" in shown and "push" not in shown
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    report.print_table([line])
    assert "handover_p50" in capsys.readouterr().out


def test_the_interval_of_a_mean() -> None:
    mean, half = report.mean_and_interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and half == pytest.approx(1.96 * 1.2909944 / 2)
    assert report.quantile([3.0, 1.0, 2.0], 0.99) == 3.0
