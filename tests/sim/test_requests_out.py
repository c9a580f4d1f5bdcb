"""One row per request: columns, order, units, and both formats."""

from __future__ import annotations

import builtins
import csv
import math
from pathlib import Path
from typing import Any

import pytest

from pushkv.sim import requests_out
from pushkv.sim.errors import BadInput
from pushkv.sim.metrics import COMPLETED, FAILED, RequestLog
from pushkv.sim.requests_out import check_requests_out, write_requests

NAN = math.nan


def two_rows() -> RequestLog:
    log = RequestLog()
    log.add(5.0, 100, 1, NAN, 9.0, NAN, FAILED, 0, 0, NAN, NAN)
    log.add(1.0, 4096, 256, 2.0, 3.275, 0.5, COMPLETED, 2**40, 64000, 0.1, 0.2)
    return log


def test_requests_out_csv(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    write_requests(two_rows(), str(path))
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["request"] == "0"
    assert first["arrival_s"] == "1"  # in order of arrival, not of completion
    assert (first["input_len"], first["status"], first["bytes"]) == ("4096", "completed", str(2**40))
    assert (first["ttft_ms"], first["tpot_ms"], first["handover_ms"]) == ("1000", "5", "500")
    assert (second["status"], second["ttft_ms"], second["e2e_ms"]) == ("failed", "", "4000")


def test_requests_out_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")  # an extra; the refusal without it is tested below
    path = tmp_path / "r.parquet"
    write_requests(two_rows(), str(path))
    got = parquet.read_table(path).to_pydict()
    assert got["bytes"] == [2**40, 0]
    assert got["status"] == ["completed", "failed"]
    assert got["ttft_ms"] == [1000.0, None]


def test_parquet_without_pyarrow_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInput, match=r"pip install 'pushkv\[parquet\]'"):
        check_requests_out("r.parquet")


def test_requests_out_of_another_kind_is_refused() -> None:
    with pytest.raises(BadInput, match=r"use \.csv or \.parquet"):
        check_requests_out("r.xlsx")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_chunks_make_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    pyarrow = pytest.importorskip("pyarrow") if ending == "parquet" else None
    monkeypatch.setattr(requests_out, "_CHUNK_ROWS", 3)
    log, path = RequestLog(), tmp_path / f"r.{ending}"
    for number in range(7):
        log.add(6.0 - number, 10 + number, 2, 7.0, 8.0, 0.5, COMPLETED, 1, 1, 0.1, 0.1)
    write_requests(log, str(path))
    if pyarrow:
        import pyarrow.parquet

        got = pyarrow.parquet.read_table(path).to_pydict()
        assert (got["request"], got["input_len"]) == (list(range(7)), list(range(16, 9, -1)))
    else:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert [row["request"] for row in rows] == [str(n) for n in range(7)]
        assert [row["input_len"] for row in rows] == [str(n) for n in range(16, 9, -1)]


def test_an_empty_log_is_a_file_with_names_only(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    write_requests(RequestLog(), str(path))
    assert path.read_text().startswith("request,arrival_s,input_len,output_len,status,ttft_ms,")
    assert path.read_text().count("\n") == 1


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written: No such file"):
        write_requests(two_rows(), str(tmp_path / "absent" / "r.csv"))
