"""Calibration: what it fits, that it gives back what it was given, and what broken tables say."""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pushkv.model.timing import (
    EngineCost,
    Hardware,
    PostingRates,
    ProfileError,
    calibrate,
    calibrate_posting,
    profiles,
)
from pushkv.model.timing.fields import Fields

from .conftest import Table

QWEN = profiles.model("qwen3-8b")
ROW = {"model": "qwen3-8b", "kind": "prefill", "batch": "1", "context_or_input_len": "1024", "ms": "43"}
FITTED = (
    "matrix_efficiency",
    "attention_efficiency",
    "context_efficiency",
    "launch_layer_s",
    "graph_launch_layer_s",
    "layer_s",
    "batch_layer_s",
)
POST = {"op": "WRITE", "pattern": "contig", "desc_bytes": "4096", "descs": "16", "make_us": "3", "post_us": "10"}


@pytest.mark.parametrize(
    ("calibration", "name", "graph_tokens"),
    [("eager-prefill", "h200_engine.csv", 0), ("compiled", "h200_engine_compiled.csv", 256)],
)
def test_the_packaged_h200_is_what_calibrate_finds(
    table: Table, calibration: str, name: str, graph_tokens: int
) -> None:
    start = profiles.hardware("h100")  # the start does not decide the result
    start = Hardware.from_mapping("h200", profiles.read("hardware", "h200")).with_calibration(start.calibration)
    fit = calibrate(table(name), QWEN, start, name=calibration, graph_tokens=graph_tokens)
    packaged = profiles.hardware("h200", calibration).calibration
    for key in FITTED:
        assert getattr(fit.calibration, key) == pytest.approx(getattr(packaged, key), rel=0.01), key
    assert fit.calibration.weights_efficiency == packaged.weights_efficiency
    assert max(abs(row.error) for row in fit.residuals) < 0.03


def test_another_start_finds_the_same(table: Table) -> None:
    rows = table("h200_engine.csv")
    here = profiles.hardware("h200", "compiled")
    there = calibrate(rows, QWEN, here, graph_tokens=0).calibration
    assert there.launch_layer_s == pytest.approx(profiles.hardware("h200").calibration.launch_layer_s, rel=0.01)


def test_the_text_is_a_profile_that_gives_the_fit_back(table: Table) -> None:
    fit = calibrate(table("h200_engine.csv"), QWEN, profiles.hardware("h200"), name="my engine")
    again = Hardware.from_mapping("h200", tomllib.loads(fit.to_toml()))
    assert again == fit.hardware
    assert again.assumed == fit.hardware.assumed
    assert EngineCost(QWEN, again).prefill_s(5000) == EngineCost(QWEN, fit.hardware).prefill_s(5000)


def test_it_recovers_the_constants_of_made_up_measurements() -> None:
    truth = profiles.hardware("h200", "compiled")
    cost = EngineCost(QWEN, truth)
    rows: list[dict[str, Any]] = []
    for n in (64, 1024, 4096, 20000, 60000):
        rows.append({**ROW, "context_or_input_len": n, "ms": (cost.prefill_s(n) + cost.request_s(n)) * 1e3})
    for batch, n in ((1, 100), (16, 1000), (64, 1000), (64, 4000), (128, 4000)):
        ms = cost.step_s((), batch, batch * n) * 1e3
        run: dict[str, Any] = {"kind": "decode_step", "batch": batch, "context_or_input_len": n - 1, "output_tokens": 2}
        rows.append({**ROW, **run, "ms": ms})
    fit = calibrate(rows, {"qwen3-8b": QWEN}, profiles.hardware("h200"), graph_tokens=256)
    assert max(abs(row.error) for row in fit.residuals) < 1e-4
    for key in FITTED:
        assert getattr(fit.calibration, key) == pytest.approx(getattr(truth.calibration, key), rel=0.01), key


def test_a_table_of_one_kind_leaves_the_rest_alone(table: Table) -> None:
    start = profiles.hardware("h200", "compiled")
    decode = calibrate([row for row in table("h200_engine.csv") if row["kind"] == "decode_step"], QWEN, start)
    assert decode.calibration.matrix_efficiency == start.calibration.matrix_efficiency
    assert decode.calibration.layer_s != start.calibration.layer_s
    prefill = calibrate([row for row in table("h200_engine.csv") if row["kind"] == "prefill"], QWEN, start)
    assert prefill.calibration.layer_s == start.calibration.layer_s
    assert prefill.calibration.context_efficiency == start.calibration.context_efficiency
    assert prefill.calibration.launch_layer_s != start.calibration.launch_layer_s


def test_one_decode_length_says_nothing_about_context_and_a_launch_factor_is_dropped(table: Table) -> None:
    start = profiles.hardware("h200")
    start = start.with_calibration(replace(start.calibration, launch_factor=1.3, context_efficiency=0.5))
    rows = [row for row in table("h200_engine.csv") if row["context_or_input_len"] in ("1024", "512", "128")]
    short = calibrate([row for row in rows if row["context_or_input_len"] == "1024"], QWEN, start).calibration
    assert short.context_efficiency == 0.5
    assert short.launch_factor == 1.0
    assert calibrate(rows, QWEN, start).calibration.context_efficiency != 0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ms": "nan"}, "row 1: ms is 'nan', expected a finite number above 0"),
        ({"ms": "-4"}, "row 1: ms is '-4'"),
        ({"ms": "0"}, "row 1: ms is '0'"),
        ({"ms": "fast"}, "row 1: ms is 'fast', expected a number"),
        ({"ms": None}, "row 1: no ms; the columns are model, kind"),
        ({"ms": ""}, "row 1: no ms"),
        ({"kind": "train"}, "row 1: kind is 'train', expected prefill or decode_step"),
        ({"batch": "1.5"}, "row 1: batch is '1.5', expected a whole number"),
        ({"batch": "2"}, "row 1: batch is 2 for a prefill"),
        ({"model": "gpt-9"}, "unknown model 'gpt-9' in the table; known: qwen3-8b"),
    ],
)
def test_broken_engine_rows_are_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ProfileError, match=says) as caught:
        calibrate([{**ROW, **change}], QWEN, profiles.hardware("h200"))
    assert "\n" not in str(caught.value)


def test_missing_columns_and_empty_tables_are_refused() -> None:
    with pytest.raises(ProfileError, match="no rows"):
        calibrate([], QWEN, profiles.hardware("h200"))
    with pytest.raises(ProfileError, match="row 1: no kind"):
        calibrate(csv.DictReader(io.StringIO("model,ms\nqwen3-8b,3\n")), QWEN, profiles.hardware("h200"))
    with pytest.raises(ProfileError, match="no rows"):
        calibrate_posting([])


def test_posting_fit_of_the_nvlink_table(table: Table) -> None:
    fit = calibrate_posting(table("h200_nixl_ucx_nvlink.csv"))
    assert len(fit.residuals) == 76
    for rates in (fit.write, fit.read):
        assert rates is not None
        assert 4.5e-6 < rates.shuffled_s < 5.5e-6
        assert 1e-5 < rates.call_s < 2e-5
        assert rates.contiguous_s < 5e-9
    tables = tomllib.loads(fit.to_toml())["posting"]
    assert PostingRates.from_fields(Fields("text", tables["write"])) == fit.write
    assert PostingRates.from_fields(Fields("text", tables["read"])) == fit.read


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{**POST, "op": "COPY"}], "op is 'COPY'"),
        ([{**POST, "pattern": "odd"}], "pattern is 'odd'"),
        ([{**POST, "post_us": "-1"}], "post_us is '-1'"),
        ([{**POST, "descs": None}], "row 1: no descs"),
        ([POST, POST], "WRITE rows of one pattern only"),
    ],
)
def test_broken_transfer_rows_are_refused(rows: Iterable[dict[str, Any]], says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        calibrate_posting(rows)
