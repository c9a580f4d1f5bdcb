"""Tables fit a terminal, JSON is JSON, and both say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pushkv.model.timing import Residual
from pushkv.sim import report
from pushkv.sim.metrics import COMPLETED, RequestLog, Totals
from pushkv.sim.report import Check, Validation
from pushkv.sim.scenario import load

from .conftest import FakeResult, fake_run


def result(size: float, rows: int = 3, **flags: Any) -> FakeResult:
    log = RequestLog()
    for _ in range(rows):
        log.add(0.0, 4096, 256, size, 3 * size, size / 2, COMPLETED, int(1e12 * size), 64000, size / 9, size / 7)
    totals = Totals(10 * size, int(1e6 * size), int(1e6 * size), 12345678, 12345678, 1.0, 1.0, 1e9 * size, 1e9 * size)
    return FakeResult(load(None, flags), log, totals, wall_s=size)


SIZES = [1e-4, 1.0, 12345.678]
LONG = {
    "model": "llama-3.3-70b",
    "fabric": "nvlink-ucx",
    "prefill": 100,
    "decode": 100,
    "prefill_tp": 8,
    "decode_tp": 8,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 3])
def test_tables_fit_eighty_columns(size: float, rows: int) -> None:
    flags = {**LONG, "requests": 10**9, "input_len": 10**7, "seed": 10**12}
    docs = [report.document(result(size, rows, mode=mode, **flags)) for mode in ("pull", "push", "pushkv")]
    for text in (report.simulate(docs[2]), report.compare(docs), report.compare(docs[:1])):
        assert max(map(len, text.splitlines())) <= report.WIDTH


def test_a_table_that_is_too_wide_loses_the_end_of_its_names() -> None:
    text = report.table([["n" * 90, "1"], ["short", "22"]])
    assert text.splitlines()[0] == "n" * 75 + "…" + "   1"
    assert max(map(len, text.splitlines())) == 80


def test_the_document_is_that_of_the_design() -> None:
    doc = json.loads(report.to_json(report.document(result(1.0))))
    assert list(doc) == ["schema", "scenario", "summary", "events", "machine_steps", "wall_s"]
    assert list(doc["summary"]) == [
        "requests",
        "completed",
        "failed",
        "duration_s",
        "throughput_rps",
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
        "prefill_ms",
        "handover_ms",
        "transfer",
        "preemptions",
        "kv_peak_fraction",
        "held_block_s",
    ]
    assert list(doc["summary"]["transfer"]) == ["bytes", "descriptors", "post_ms", "wire_ms"]
    assert doc["summary"]["ttft_ms"] == {"mean": 1000.0, "p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert doc["summary"]["handover_ms"]["mean"] == 500.0
    assert doc["schema"] == 1


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.to_json({"x": float("nan")})


def test_compare_gives_ratios_to_the_first() -> None:
    docs = [report.document(fake_run(load(None, {"mode": m, "requests": 9}))) for m in ("pull", "push", "pushkv")]
    text = report.compare(docs)
    line = next(line for line in text.splitlines() if line.startswith("TTFT mean"))
    assert line.split() == ["TTFT", "mean,", "ms", "2,000.0", "1,000.0", "0.50×", "1,000.0", "0.50×"]
    assert list(report.documents(docs)) == ["schema", "runs"]


def test_a_run_without_results_shows_dashes() -> None:
    doc = report.document(result(1.0, rows=0))
    assert "time to first token, ms" in report.simulate(doc)
    assert "nan" not in report.simulate(doc).lower()
    assert "nan" not in report.compare([doc, doc]).lower()


def checks(*rows: Check) -> Validation:
    return Validation(
        rows, {"experiments/h200/" + "x" * 70 + ".csv": "0123456789abcdef" * 4}, ("assumed: " + "word " * 40,)
    )


def test_validation() -> None:
    good = Check("in-sample", "TTFT mean, qwen3-8b 1024@4 pull", "ms", 80.0, 88.0, limit=0.15, noise=0.09)
    bad = Check("out-of-sample", "TTFT mean, qwen3-32b 4096@1.2 push" * 3, "ms", 1000.0, 1200.0, limit=0.1)
    shown = Check("out-of-sample", "maximum", "ms", 1000.0, 5000.0)
    text = report.validate(checks(good, bad, shown))
    assert max(map(len, text.splitlines())) <= report.WIDTH
    assert "+10.0%" in text
    assert "+20.0%" in text
    assert text.count("MISS") == 1
    assert "3 checks, 1 outside the limit" in text
    assert "0123456789abcdef" in text
    assert not checks(good, bad).passed
    assert checks(good, shown).passed
    doc = checks(good, bad).document()
    assert [row["passed"] for row in doc["checks"]] == [True, False]
    json.dumps(doc, allow_nan=False)


def test_a_miss_that_does_not_bind_is_shown_and_does_not_fail() -> None:
    missed = Check("out-of-sample", "TTFT mean", "ms", 1000.0, 1200.0, limit=0.1, binding=False)
    assert not missed.passed
    assert checks(missed).passed
    text = report.validate(checks(missed))
    assert text.count("MISS") == 1
    assert "1 checks, 1 outside the limit (1 of them only reported)" in text
    (row,) = checks(missed).document()["checks"]
    assert (row["passed"], row["binding"]) == (False, False)


def test_calibration_table() -> None:
    text = report.calibrate([Residual("a" * 70, 10.0, 11.0), Residual("b", 20000.0, 18000.0)])
    assert max(map(len, text.splitlines())) <= report.WIDTH
    assert text.endswith("2 rows: root mean square error 10.0%, largest 10.0%")
