"""`pushkv bench-transfer`: its sentences without NIXL or a device, its table, and one small run over real NIXL."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pushkv.model.timing import calibrate_posting
from pushkv.reference import bench_transfer
from pushkv.sim import cli

HERE = all(importlib.util.find_spec(module) for module in ("torch", "nixl"))
SMALL = ["--tokens", "64,256", "--runs", "1,4,all", "--layers", "2", "--repeats", "1", "--segment-bytes", "100000"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--backend", "TCP"], "--backend 'TCP' is not known; choose from UCX, LIBFABRIC"),
        (["--device", "tpu"], "--device 'tpu' is not known"),
        (["--layout", "x"], "--layout 'x' is not known"),
        (["--tokens", "100"], "--tokens must be multiples of the block of 16 tokens"),
        (["--tokens", "many"], "--tokens many"),
        (["--runs", "0"], "--runs 0"),
        (["--repeats", "0"], "--repeats 0"),
        (["--json", "-", "--csv", "-"], "both mean stdout"),
        (["--csv", "/nowhere/at/all.csv"], "does not exist"),
        (["--device", "cuda"], "CUDA device" if HERE else "is not installed"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench-transfer", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and sentence in err


@pytest.mark.parametrize("missing", ["torch", "nixl"])
def test_what_is_missing_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find: Callable[[str], Any] = lambda name: None if name == missing else object()  # noqa: E731
    monkeypatch.setattr(bench_transfer.importlib.util, "find_spec", find)  # type: ignore[attr-defined]
    assert cli.main(["bench-transfer"]) == 2
    assert f"bench-transfer needs {missing}, which is not installed" in capsys.readouterr().err


@pytest.mark.skipif(not HERE, reason="needs torch and NIXL")
@pytest.mark.parametrize("layout", ["apart", "interleaved"])
def test_a_small_run(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.csv"
    assert cli.main(["bench-transfer", *SMALL, "--layout", layout, "--json", "-", "--csv", str(table)]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert [row["path"] for row in rows[:8]] == [*2 * ["direct", "packed"], "copy", "direct", "each", "packed"]
    assert len(rows) == 16 and all(row["bytes_equal"] for row in rows)
    assert {row["bytes"] for row in rows} == {2 * 4096 * 64, 2 * 4096 * 256}
    one = {(row["tokens"], row["run"], row["path"]): row["descriptors"] for row in rows}
    each = 4 if layout == "apart" else 2  # regions
    assert one[256, 1, "direct"] == one[256, 0, "each"] == 16 * each
    assert one[256, 4, "direct"] == 4 * each and one[256, 0, "direct"] == each
    assert one[256, 1, "packed"] == 1
    with table.open() as file:
        lines = list(csv.DictReader(file))
    posted = [row["path"] for row in rows if row["path"] != "copy"]
    assert [line["path"] for line in lines] == posted
    assert tuple(lines[0]) == bench_transfer.CSV_COLUMNS
    assert calibrate_posting(lines).write is not None  # what `pushkv calibrate` does with it
