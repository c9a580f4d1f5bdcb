"""The request log and its summary, against numpy on small data."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.sim.metrics import COMPLETED, FAILED, RequestLog, Totals, summary

NAN = math.nan
times = st.floats(0, 1e4)
rows = st.lists(
    st.tuples(
        times, st.integers(1, 10**6), st.integers(1, 10**4), times, times, times, st.integers(0, 1), times, times
    ),
    max_size=30,
)


def fill(data: list[Any]) -> RequestLog:
    log = RequestLog()
    for arrival, input_len, output_len, ttft, decode, prefill, status, post, wire in data:
        first = arrival + ttft
        log.add(arrival, input_len, output_len, first, first + decode, prefill, status, 2**40, 3, post, wire)
    return log


@given(rows)
def test_summary_is_what_numpy_says(data: list[Any]) -> None:
    totals = Totals(duration_s=10.0, preemptions_decode=3, kv_peak_prefill=0.25, held_block_s_decode=7.5)
    got = summary(fill(data), totals)
    done = [row for row in data if row[6] == COMPLETED]
    assert (got["requests"], got["completed"], got["failed"]) == (len(data), len(done), len(data) - len(done))
    assert got["throughput_rps"] == pytest.approx(len(done) / 10)
    assert got["transfer"]["bytes"] == 2**40 * len(data)
    assert got["transfer"]["descriptors"] == 3 * len(data)
    assert got["preemptions"] == {"prefill": 0, "decode": 3}
    assert got["kv_peak_fraction"] == {"prefill": 0.25, "decode": 0.0}
    assert got["held_block_s"] == {"prefill": 0.0, "decode": 7.5}
    expected = {
        "ttft_ms": [row[3] for row in done],
        "tpot_ms": [row[4] / (row[2] - 1) for row in done if row[2] > 1],
        "e2e_ms": [row[3] + row[4] for row in done],
        "prefill_ms": [row[5] for row in done],
        "handover_ms": [row[3] - row[5] for row in done],
    }
    for name, values_s in expected.items():
        check(got[name], values_s)
    check(got["transfer"]["post_ms"], [row[7] for row in done])
    check(got["transfer"]["wire_ms"], [row[8] for row in done])
    json.dumps(got, allow_nan=False)


def check(got: dict[str, float | None], values_s: list[float]) -> None:
    if not values_s:
        assert got == {"mean": None, "p50": None, "p90": None, "p99": None}
        return
    values_ms = np.array(values_s) * 1e3
    close: dict[str, Any] = {"rel": 1e-6, "abs": 1e-3}  # differences of times around 1e4 s
    assert got["mean"] == pytest.approx(values_ms.mean(), **close)
    for percent in (50, 90, 99):
        assert got[f"p{percent}"] == pytest.approx(np.percentile(values_ms, percent), **close)


def test_an_empty_run_is_null_and_not_nan() -> None:
    got = summary(RequestLog(), Totals())
    assert got["throughput_rps"] is None
    assert got["ttft_ms"]["mean"] is None
    assert "NaN" not in json.dumps(got, allow_nan=False)


def test_a_run_that_failed_altogether_is_null_and_not_nan() -> None:
    log = RequestLog()
    log.add(0.0, 10, 10, NAN, NAN, NAN, FAILED, 0, 0, NAN, NAN)
    got = summary(log, Totals(duration_s=math.inf, kv_peak_decode=NAN))
    assert (got["completed"], got["failed"]) == (0, 1)
    assert got["duration_s"] is None
    assert got["e2e_ms"]["p99"] is None
    json.dumps(got, allow_nan=False)


def test_a_request_with_one_token_has_no_time_per_token() -> None:
    log = RequestLog()
    log.add(0.0, 10, 1, 1.0, 1.0, 0.5, COMPLETED, 1, 1, 0.1, 0.1)
    got = summary(log, Totals(duration_s=1.0))
    assert got["tpot_ms"]["mean"] is None
    assert got["ttft_ms"]["mean"] == 1000.0


def test_a_million_rows_are_lean_and_quick() -> None:
    log, add_s = RequestLog(), []
    for _ in range(5):
        start_s = time.perf_counter()
        for _ in range(20_000):
            log.add(1.0, 4096, 256, 2.0, 3.0, 0.5, COMPLETED, 10**9, 64000, 0.1, 0.2)
        add_s.append((time.perf_counter() - start_s) / 20_000)
    assert sys.getsizeof(log._cells) / len(log) < 100  # so a million take less than 100 MB
    assert min(add_s) < 10e-6  # about 0.6 µs; the bound leaves room for a slow, busy machine
