"""One row per request, as CSV or Parquet.

Decides the columns, their order and their units. It computes no latency: `pushkv.sim.metrics` does. Rows are written in
chunks, so that a million of them need no more memory than the log itself.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pushkv.sim.errors import BadInput
from pushkv.sim.metrics import COMPLETED, RequestLog

__all__ = ["check_requests_out", "write_requests"]

_INTEGERS = frozenset({"request", "input_len", "output_len", "bytes", "descriptors"})
_CHUNK_ROWS = 16_384

Columns = dict[str, NDArray[Any]]


def check_requests_out(path: str) -> None:
    """Raise `BadInput` before a long run if ``path`` could not be written after it."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise BadInput(f"--requests-out {path} has no known ending; use .csv or .parquet")
    if suffix == ".parquet":
        _parquet()


def write_requests(log: RequestLog, path: str) -> None:
    """Write one row per request, in order of arrival, in the format that the file's ending names."""
    check_requests_out(path)
    try:
        if Path(path).suffix.lower() == ".parquet":
            _write_parquet(log, path)
        else:
            _write_csv(log, path)
    except OSError as error:
        raise BadInput(f"--requests-out {path} cannot be written: {error.strerror}") from None


def _write_csv(log: RequestLog, path: str) -> None:
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, columns in enumerate(_chunks(log)):
            if not number:
                writer.writerow(columns)
            writer.writerows(zip(*(_text(name, values) for name, values in columns.items()), strict=True))


def _write_parquet(log: RequestLog, path: str) -> None:
    arrow, parquet = _parquet()
    writer = None
    try:
        for columns in _chunks(log):
            table = arrow.table({name: arrow.array(*_arrow(name, values)) for name, values in columns.items()})
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _chunks(log: RequestLog) -> Iterator[Columns]:
    """The columns in order of arrival, a chunk of rows at a time; one empty chunk for an empty log."""
    order = np.argsort(log.column("arrival_s"), kind="stable")
    for start in range(0, max(len(log), 1), _CHUNK_ROWS):
        part = log.rows(order[start : start + _CHUNK_ROWS])
        columns: Columns = {"request": np.arange(start, start + len(part), dtype=np.float64)}
        columns |= {name: part.column(name) for name in ("arrival_s", "input_len", "output_len")}
        columns["status"] = np.where(part.column("status") == COMPLETED, "completed", "failed")
        for name in ("ttft", "tpot", "e2e", "prefill", "handover", "post", "wire"):
            columns[f"{name}_ms"] = part.milliseconds(name)
        columns |= {name: part.column(name) for name in ("bytes", "descriptors")}
        yield columns


def _text(name: str, values: NDArray[Any]) -> list[str]:
    if name == "status":
        return list(values.tolist())
    form = "{:.0f}" if name in _INTEGERS else "{:.12g}" if name.endswith("_s") else "{:.9g}"
    return ["" if math.isnan(value) else form.format(value) for value in values.tolist()]


def _arrow(name: str, values: NDArray[Any]) -> tuple[NDArray[Any], None, NDArray[np.bool_] | None]:
    if name == "status":
        return values, None, None
    missing = np.isnan(values)
    if name in _INTEGERS:
        values = np.where(missing, 0, values).astype(np.int64)
    return values, None, missing


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput("writing .parquet needs pyarrow: pip install 'pushkv[parquet]', or use .csv") from None
    return pyarrow, pyarrow.parquet
