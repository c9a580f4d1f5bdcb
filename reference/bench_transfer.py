"""`pushkv bench-transfer`: direct against packed writes between two processes, over real NIXL.

Decides which cases are measured, and how they are reported: a table, JSON, and CSV with the columns that `pushkv
calibrate` fits posting constants to. What one measurement is, is in `bench_sides`.

Cases: every size by every fragmentation. Fragmentation is the number of blocks that follow each other in memory, on
both sides, in otherwise random order; `all` is one stretch, where `each` posts a descriptor per block nonetheless, and
`copy` stays within P's memory. So `all direct` is the wire at its best, and `all copy` one pass over the bytes.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .backends import BACKENDS
from .bench_sides import Case, Sizes, side

__all__ = ["CSV_COLUMNS", "BenchError", "Request", "run", "table_rows", "to_csv"]

CSV_COLUMNS = (
    *("op", "pattern", "desc_bytes", "descs", "make_us", "post_us", "wait_us", "total_us", "GBps"),
    *("path", "layout", "tokens", "run", "gather_us", "scatter_us", "bytes_equal"),
)
_LAYOUTS = {"apart": "nhd_apart", "interleaved": "interleaved"}
_ANSWER_S = 600.0


class BenchError(ValueError):
    """Settings that cannot be measured, or a side that failed. One sentence."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure. runs: blocks per stretch, 0 for all. layout: K and V apart or interleaved."""

    backend: str = "UCX"
    device: str = "cpu"
    layout: str = "apart"
    tokens: tuple[int, ...] = (1024, 4096)
    runs: tuple[int, ...] = (1, 4, 16, 0)
    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    block_tokens: int = 16
    segment_bytes: int = 2 << 20
    repeats: int = 5


def run(request: Request, progress: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """Measures everything; the document for JSON. Raises `BenchError`."""
    _check(request)
    sizes = Sizes(
        request.backend,
        request.device,
        _LAYOUTS[request.layout],
        request.layers,
        request.kv_heads,
        request.head_dim,
        request.block_tokens,
        request.segment_bytes,
        max(request.tokens),
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    pipes, sides = [], []
    try:
        for rank, between in enumerate((ours, theirs)):
            pipe, end = context.Pipe()
            process = context.Process(target=side, args=(rank, sizes, end, between), daemon=True)
            process.start()
            end.close()
            pipes.append(pipe)
            sides.append(process)
        ours.close()
        theirs.close()
        _answer(pipes, sides)
        rows = []
        for tokens in request.tokens:
            for stretch in request.runs:
                for path in ("direct", "packed") if stretch else ("copy", "direct", "each", "packed"):
                    progress(f"{tokens} tokens, runs of {stretch or 'all'}, {path}")
                    case = Case(path, tokens, stretch, seed=tokens + stretch)
                    measured = []
                    for _ in range(request.repeats + 1):  # the first one warms up
                        pipes[0].send(case)
                        measured.append(_answer(pipes, sides))
                    rows.append(_median(case, measured))
        pipes[0].send(None)
        for process in sides:
            process.join(10)
    finally:
        for process in sides:
            if process.is_alive():
                process.kill()
                process.join()
    direct = {(row["tokens"], row["run"]): row["total_ms"] for row in rows if row["path"] == "direct"}
    for row in rows:
        row["times_faster"] = direct[row["tokens"], row["run"]] / row["total_ms"]
    return {"schema": 1, "settings": asdict(request), "rows": rows}


def table_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """The table for people; times in milliseconds."""
    rows = [["tokens run path", "MB", "descs", "gather", "post", "wire", "scatter", "total", "GB/s", "ratio"]]
    for row in document["rows"]:
        times = (row["gather_ms"], row["make_ms"] + row["post_ms"], row["wire_ms"], row["scatter_ms"], row["total_ms"])
        rows.append(
            [
                f"{row['tokens']} {row['run'] or 'all'} {row['path']}",
                f"{row['bytes'] / 1e6:.0f}",
                str(row["descriptors"]),
                *(f"{value:.1f}" if value >= 1 or not value else f"{value:.2f}" for value in times),
                f"{row['GB_per_s']:.2f}",
                f"{row['times_faster']:.1f}×" + ("" if row["bytes_equal"] else " WRONG BYTES"),
            ]
        )
    return rows


def to_csv(document: Mapping[str, Any]) -> str:
    """One line per row. Packed times on the wire are `make_us` to `wait_us`, with gather and scatter beside them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in document["rows"]:
        if row["path"] == "copy":
            continue
        many = row["path"] == "direct" and row["run"] > 0
        us = {key: round(row[f"{key}_ms"] * 1e3, 1) for key in ("make", "post", "wire", "total", "gather", "scatter")}
        writer.writerow(
            [
                *("WRITE", "random" if many else "contig", row["bytes"] // row["descriptors"], row["descriptors"]),
                *(us["make"], us["post"], us["wire"], us["total"], round(row["GB_per_s"], 2)),
                *(row["path"], document["settings"]["layout"], row["tokens"], row["run"] or "all"),
                *(us["gather"], us["scatter"], str(row["bytes_equal"]).lower()),
            ]
        )
    return text.getvalue()


def _check(request: Request) -> None:
    if request.backend not in BACKENDS:
        raise BenchError(f"--backend {request.backend!r} is not known; choose from {', '.join(BACKENDS)}")
    if request.layout not in _LAYOUTS:
        raise BenchError(f"--layout {request.layout!r} is not known; choose from {', '.join(_LAYOUTS)}")
    if request.device not in ("cpu", "cuda"):
        raise BenchError(f"--device {request.device!r} is not known; choose from cpu, cuda")
    counts = [*request.tokens, request.layers, request.kv_heads, request.head_dim, request.block_tokens]
    if not request.tokens or not request.runs or min(*counts, request.repeats, request.segment_bytes) < 1:
        raise BenchError("sizes and counts must be 1 or more")
    if any(tokens % request.block_tokens for tokens in request.tokens):
        raise BenchError(f"--tokens must be multiples of the block of {request.block_tokens} tokens")
    for module, how in (("torch", "pip install torch"), ("nixl", "pip install nixl")):
        if importlib.util.find_spec(module) is None:
            raise BenchError(f"bench-transfer needs {module}, which is not installed; {how}")
    if request.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BenchError("--device cuda: torch sees no CUDA device; say --device cpu")
        if torch.cuda.device_count() < 2:
            raise BenchError("--device cuda needs two devices, one for each side; torch sees one")


def _answer(pipes: Sequence[Any], sides: Sequence[Any]) -> Any:
    """P's next answer, unless a side fails first."""
    import multiprocessing.connection as connection

    ready = connection.wait([*pipes, *(process.sentinel for process in sides)], _ANSWER_S)
    if not ready:
        raise BenchError(f"no answer from the two sides for {_ANSWER_S:.0f} s")
    for who, pipe in zip("PD", pipes, strict=True):
        if pipe in ready:
            try:
                kind, value = pipe.recv()
            except EOFError:
                break
            if kind == "error":
                raise BenchError(f"{who} failed: {value}")
            return value
    raise BenchError("a side ended without a word")


def _median(case: Case, measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kept = measured[1:]
    row: dict[str, Any] = {"path": case.path, "tokens": case.tokens, "run": case.run}
    row |= {key: kept[0][key] for key in ("descriptors", "bytes")}
    for key in ("gather", "make", "post", "wire", "scatter", "total"):
        row[f"{key}_ms"] = statistics.median(one[f"{key}_s"] for one in kept) * 1e3
    row["GB_per_s"] = row["bytes"] / row["total_ms"] / 1e6
    row["bytes_equal"] = all(one["equal"] for one in measured)
    return row
