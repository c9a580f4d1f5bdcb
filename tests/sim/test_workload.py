"""Arrivals: how many, in what order, at what rate, and which traces are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.sim import workload
from pushkv.sim.errors import BadInput
from pushkv.sim.scenario import load

rates = st.floats(0.01, 1e4)


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@given(count=st.integers(1, 500), qps=rates, seed=st.integers(0, 2**32))
def test_poisson_arrivals_are_sorted_and_start_at_zero(count: int, qps: float, seed: int) -> None:
    at_s = workload.poisson(count, qps, rng(seed))
    assert len(at_s) == count
    assert at_s[0] == 0.0
    assert (np.diff(at_s) >= 0).all()
    assert np.isfinite(at_s).all()


@given(qps=rates, seed=st.integers(0, 2**32))
def test_poisson_rate_and_spread(qps: float, seed: int) -> None:
    """Mean and standard deviation of exponential gaps are both 1/qps; 20,000 gaps settle within five sigma."""
    gaps_s = np.diff(workload.poisson(20_001, qps, rng(seed)))
    assert gaps_s.mean() * qps == pytest.approx(1.0, abs=0.036)
    assert gaps_s.std() * qps == pytest.approx(1.0, abs=0.06)


@given(count=st.integers(2, 500), qps=rates)
def test_uniform_arrivals_are_evenly_spaced(count: int, qps: float) -> None:
    at_s = workload.uniform(count, qps)
    assert len(at_s) == count
    assert np.diff(at_s) == pytest.approx(1 / qps)


def test_the_seed_decides_and_the_mode_does_not() -> None:
    def arrivals(**flags: object) -> list[float]:
        return workload.generate(load(None, {"requests": 50, **flags})).arrival_s.tolist()

    assert arrivals(mode="pull", seed=7) == arrivals(mode="pushkv", seed=7)
    assert arrivals(seed=7) != arrivals(seed=8)


def test_lengths_follow_the_scenario() -> None:
    made = workload.generate(load(None, {"requests": 5, "input_len": 300, "output_len": 7, "arrival": "uniform"}))
    assert made.input_len.tolist() == [300] * 5
    assert made.output_len.tolist() == [7] * 5


def test_a_million_requests_take_sixteen_bytes_each() -> None:
    made = workload.generate(load(None, {"requests": 1_000_000}))
    assert made.arrival_s.nbytes + made.input_len.nbytes + made.output_len.nbytes == 16_000_000


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_trace_is_read_in_any_order_of_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "user,output_len,arrival_s,input_len\na,5,0.5,100\n\nb,6,0.5,200\nc,7,2,300\n")
    made = workload.read_trace(path)
    assert made.arrival_s.tolist() == [0.5, 0.5, 2.0]
    assert made.input_len.tolist() == [100, 200, 300]
    assert made.output_len.tolist() == [5, 6, 7]
    assert len(workload.read_trace(path, 2)) == 2


HEAD = "arrival_s,input_len,output_len\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "is empty; expected the columns arrival_s,input_len,output_len"),
        (HEAD, "has no rows"),
        ("arrival,input_len,output_len\n0,1,1\n", "look at arrival_s"),
        ("arrival_s,input_len,input_len,output_len\n0,1,1,1\n", "look at input_len"),
        (HEAD + "1,10,10\n0.5,10,10\n", "line 3: arrival_s 0.5 comes after 1; sort the rows"),
        (HEAD + "-1,10,10\n", "line 2: arrival_s '-1' is not a time"),
        (HEAD + "nan,10,10\n", "line 2: arrival_s 'nan' is not a time"),
        (HEAD + "inf,10,10\n", "line 2: arrival_s 'inf' is not a time"),
        (HEAD + "soon,10,10\n", "line 2: arrival_s 'soon' is not a time"),
        (HEAD + "0,0,10\n", "line 2: input_len '0' is not a length"),
        (HEAD + "0,10,-3\n", "line 2: output_len '-3' is not a length"),
        (HEAD + "0,10.5,3\n", "line 2: input_len '10.5' is not a length"),
        (HEAD + "0,99999999999,3\n", "line 2: input_len '99999999999' is not a length"),
        (HEAD + "0,10\n", "line 2: 2 values, expected 3 or more"),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(BadInput) as caught:
        workload.read_trace(write(tmp_path / "t.csv", text))
    assert names in str(caught.value)
    assert "t.csv" in str(caught.value)


def test_a_trace_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00arrival")
    with pytest.raises(BadInput, match="is not CSV text"):
        workload.read_trace(str(path))
    with pytest.raises(BadInput, match="cannot be read"):
        workload.read_trace(str(tmp_path / "absent.csv"))


def test_a_trace_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has 1 rows, fewer than requests = 2"):
        workload.read_trace(write(tmp_path / "t.csv", HEAD + "0,1,1\n"), 2)


def test_a_request_that_no_cache_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"prompt of 2000 tokens does not fit .* prefill engine, 1600 tokens"):
        workload.generate(load(None, {"num_blocks": 100, "input_len": 2000}))
    with pytest.raises(BadInput, match=r"request .* of 1700 tokens does not fit .* decode engine, 1600 tokens"):
        workload.generate(load(None, {"num_blocks": 100, "input_len": 1000, "output_len": 700}))
    path = write(tmp_path / "t.csv", HEAD + "0,10,10\n1,2000,1\n")
    with pytest.raises(BadInput, match="prompt of 2000 tokens does not fit"):
        workload.generate(load(None, {"num_blocks": 100, "arrival": "trace", "trace": path}))
