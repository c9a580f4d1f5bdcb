"""Fit profiles to measurements.

Decides what a usable table of measurements is and which constants of a profile it determines. Does not read or write
files: rows in, numbers and TOML text out.

Engine rows do not determine everything. One model at one TP cannot tell the reading of weights from the cost per
layer, so `weights_efficiency` stays what the starting calibration says. Lone requests on an engine with a high launch
floor cannot tell a cost per request from one per step, so the serving overheads stay too. What is fitted: matrix,
attention and context efficiency, the launch floors (of graphs where `graph_tokens` says that there are such), cost per
layer, cost by batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .compute import EngineCost
from .fabric import PostingRates
from .fields import ProfileError
from .hardware import Calibration, Hardware
from .profile_text import calibration_toml, posting_toml
from .shapes import ModelShape

_ENGINE_COLUMNS = ("model", "kind", "batch", "context_or_input_len", "ms")
_POSTING_COLUMNS = ("op", "pattern", "desc_bytes", "descs", "make_us", "post_us")
_EFFICIENCIES = ("matrix_efficiency", "attention_efficiency", "context_efficiency")
_GUESS_S = 100e-6  # where a search starts for a time per layer that the starting calibration holds at 0


@dataclass(frozen=True, slots=True)
class Residual:
    """One row of the table and what the fitted model says about it; times in milliseconds."""

    label: str
    measured_ms: float
    model_ms: float

    @property
    def error(self) -> float:
        """Relative: (model - measured) / measured."""
        return self.model_ms / self.measured_ms - 1.0


@dataclass(frozen=True, slots=True)
class EngineFit:
    """What `calibrate` found."""

    hardware: Hardware
    residuals: tuple[Residual, ...]

    @property
    def calibration(self) -> Calibration:
        return self.hardware.calibration

    def to_toml(self) -> str:
        """A whole hardware profile with this calibration as its default."""
        return calibration_toml(self.hardware)


@dataclass(frozen=True, slots=True)
class PostingFit:
    """Posting constants by operation, and how they meet the rows (make and post together)."""

    write: PostingRates | None
    read: PostingRates | None
    residuals: tuple[Residual, ...]

    def to_toml(self) -> str:
        """The tables [posting.write] and [posting.read] of a fabric profile."""
        return posting_toml({"write": self.write, "read": self.read})


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One measurement: a lone prompt of `length` tokens, or the mean step of `batch` sequences decoding after it."""

    model: str
    kind: str
    batch: int
    length: int
    ms: float
    output_tokens: int

    @property
    def label(self) -> str:
        return f"{self.model} {self.kind} batch {self.batch} length {self.length}"

    def predict_ms(self, cost: EngineCost, budget: int = 8192) -> float:
        """What the model says: prefill with its serving overheads; decode at the mean context of its run."""
        if self.kind == "prefill":
            return (cost.prefill_s(self.length, budget) + cost.request_s(self.length)) * 1e3
        context = self.batch * (self.length + self.output_tokens // 2)
        return cost.step_s((), self.batch, context) * 1e3


def engine_rows(rows: Iterable[Mapping[str, Any]]) -> list[EngineRow]:
    """Check rows of a table with the columns model, kind (prefill or decode_step), batch, context_or_input_len, ms.

    An optional column `output_tokens` says how many tokens a decode run generated (200 without it: `pushkv`'s own
    measurement); its mean context is longer than the prompt by half of that.
    Errors: `ProfileError` that names the row (the first is 1) and the column.
    """
    found = []
    for number, row in enumerate(rows, 1):
        _columns(row, number, _ENGINE_COLUMNS)
        if row["kind"] not in ("prefill", "decode_step"):
            raise ProfileError(f"row {number}: kind is {row['kind']!r}, expected prefill or decode_step")
        batch, length = _count(row, number, "batch"), _count(row, number, "context_or_input_len")
        if row["kind"] == "prefill" and batch != 1:
            raise ProfileError(f"row {number}: batch is {batch} for a prefill, expected 1 (a lone request)")
        output = _count(row, number, "output_tokens") if row.get("output_tokens") else 200
        found.append(EngineRow(str(row["model"]), row["kind"], batch, length, _positive(row, number, "ms"), output))
    if not found:
        raise ProfileError("the table of measurements has no rows")
    return found


def calibrate(
    rows: Iterable[Mapping[str, Any]],
    shape: ModelShape | Mapping[str, ModelShape],
    hardware: Hardware,
    *,
    tp: int = 1,
    budget: int = 8192,
    name: str = "fitted",
    graph_tokens: int | None = None,
) -> EngineFit:
    """Fit a hardware profile's calibration to engine measurements by least squares of relative residuals.

    `shape`: the model measured, or several by name. `hardware` gives what is not fitted and where the search starts;
    a table with prefill rows only keeps its decode constants, and the reverse. `graph_tokens`: the largest prefill that
    the measured engine replayed as a graph; left out, it stays. `launch_factor` becomes 1: the rows' launches are what
    it multiplies. Errors: `ProfileError` for a broken row or a model without a shape.
    """
    measured = engine_rows(rows)
    shapes = {shape.name: shape} if isinstance(shape, ModelShape) else dict(shape)
    for row in measured:
        if row.model not in shapes:
            raise ProfileError(f"unknown model {row.model!r} in the table; known: {', '.join(sorted(shapes))}")
    at_start = replace(hardware.calibration, name=name, source=f"fitted to {len(measured)} rows", launch_factor=1.0)
    if graph_tokens is not None:
        at_start = replace(at_start, graph_tokens=graph_tokens)
    free = _determined(measured, at_start.graph_tokens)
    goal = np.array([row.ms for row in measured])

    def fitted(x: npt.NDArray[np.float64]) -> Hardware:
        values = {key: _value(key, float(v)) for key, v in zip(free, x, strict=True)}
        return hardware.with_calibration(replace(at_start, **values))  # type: ignore[arg-type]

    def model_ms(found: Hardware) -> npt.NDArray[np.float64]:
        costs = {key: EngineCost(shapes[key], found, tp) for key in {row.model for row in measured}}
        return np.array([row.predict_ms(costs[row.model], budget) for row in measured])

    start = np.array([_coordinate(key, getattr(at_start, key)) for key in free])
    best = fitted(_least_squares(lambda x: model_ms(fitted(x)) / goal - 1.0, start))
    pairs = zip(measured, model_ms(best), strict=True)
    return EngineFit(best, tuple(Residual(row.label, row.ms, float(ms)) for row, ms in pairs))


def calibrate_posting(rows: Iterable[Mapping[str, Any]]) -> PostingFit:
    """Fit a fabric's posting constants to a table of NIXL transfers, by least squares of the logarithm.

    Columns: op (WRITE or READ), pattern (contig or random), desc_bytes, descs, make_us, post_us. Host time spreads by
    tens of per cent from run to run, whence the logarithm. `allocated_s` is set to `shuffled_s`: a table of such
    transfers does not know it. Errors: `ProfileError` that names the row and the column.
    """
    checked: list[tuple[str, str, int, int, float]] = []
    for number, row in enumerate(rows, 1):
        _columns(row, number, _POSTING_COLUMNS)
        if row["op"] not in ("WRITE", "READ"):
            raise ProfileError(f"row {number}: op is {row['op']!r}, expected WRITE or READ")
        if row["pattern"] not in ("contig", "random"):
            raise ProfileError(f"row {number}: pattern is {row['pattern']!r}, expected contig or random")
        host_us = _positive(row, number, "post_us") + _positive(row, number, "make_us", zero=True)
        size, descriptors = _count(row, number, "desc_bytes"), _count(row, number, "descs")
        checked.append((row["op"], row["pattern"], size, descriptors, host_us))
    if not checked:
        raise ProfileError("the table of transfers has no rows")
    fits: dict[str, PostingRates] = {}
    residuals = []
    for op in ("WRITE", "READ"):
        mine = [row for row in checked if row[0] == op]
        if not mine:
            continue
        if len({pattern for _, pattern, *_ in mine}) < 2:
            raise ProfileError(f"the table has {op} rows of one pattern only; it needs contig and random")
        rates = _fit_posting(mine)
        fits[op] = rates
        for _, pattern, size, descriptors, host_us in mine:
            each_s = rates.contiguous_s if pattern == "contig" else rates.shuffled_s
            label = f"{op} {pattern} {descriptors} x {size} B"
            residuals.append(Residual(label, host_us / 1e3, (rates.call_s + each_s * descriptors) * 1e3))
    return PostingFit(fits.get("WRITE"), fits.get("READ"), tuple(residuals))


def _determined(rows: list[EngineRow], graph_tokens: int) -> list[str]:
    """The constants of a calibration that the rows determine."""
    prefill = [row for row in rows if row.kind == "prefill"]
    decode = [row for row in rows if row.kind == "decode_step"]
    found = []
    if prefill:
        found += ["matrix_efficiency", "attention_efficiency"]
    if any(row.length > graph_tokens for row in prefill):
        found.append("launch_layer_s")
    if any(row.length <= graph_tokens for row in prefill):
        found.append("graph_launch_layer_s")
    if decode:
        found += ["layer_s", "batch_layer_s"]
    if len({row.length for row in decode}) > 1:
        found.append("context_efficiency")
    return found


def _value(key: str, x: float) -> float:
    """The constant at a coordinate of the search: times stay above 0, efficiencies also below 1."""
    return 1.0 / (1.0 + math.exp(-x)) if key in _EFFICIENCIES else math.exp(x)


def _coordinate(key: str, value: float) -> float:
    """Where the search for a constant starts; an efficiency of 1 would lie at infinity."""
    if key not in _EFFICIENCIES:
        return math.log(value or _GUESS_S)
    inside = min(value, 0.99)
    return math.log(inside / (1.0 - inside))


def _fit_posting(rows: list[tuple[str, str, int, int, float]]) -> PostingRates:
    counts = np.array([row[3] for row in rows], dtype=float)
    contiguous = np.array([row[1] == "contig" for row in rows])
    goal = np.log([row[4] * 1e-6 for row in rows])

    def residual(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        call_s, shuffled_s, contiguous_s = np.exp(x)
        return np.asarray(np.log(call_s + np.where(contiguous, contiguous_s, shuffled_s) * counts) - goal)

    call_s, shuffled_s, contiguous_s = np.exp(_least_squares(residual, np.log([1e-5, 5e-6, 1e-8])))
    return PostingRates(float(call_s), float(shuffled_s), float(shuffled_s), float(contiguous_s))


def _least_squares(
    residual: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], start: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Levenberg-Marquardt with numeric derivatives; the same input gives the same output on one machine."""
    x, damping = start.astype(float), 1e-2
    now = residual(x)
    for _ in range(200):
        jacobian = np.stack([(residual(x + 1e-6 * unit) - now) / 1e-6 for unit in np.eye(len(x))], axis=1)
        system = np.vstack([jacobian, math.sqrt(damping) * np.eye(len(x))])
        step = np.linalg.lstsq(system, np.concatenate([-now, np.zeros(len(x))]), rcond=None)[0].clip(-0.5, 0.5)
        then = residual(x + step)
        if float(then @ then) < float(now @ now):
            x, now, damping = x + step, then, damping * 0.5
            if float(np.abs(step).max()) < 1e-7:
                break
        else:
            damping *= 4.0
            if damping > 1e12:
                break
    return x


def _columns(row: Mapping[str, Any], number: int, wanted: tuple[str, ...]) -> None:
    missing = [key for key in wanted if row.get(key) in (None, "")]
    if missing:
        raise ProfileError(f"row {number}: no {missing[0]}; the columns are {', '.join(wanted)}")


def _positive(row: Mapping[str, Any], number: int, key: str, *, zero: bool = False) -> float:
    try:
        value = float(row[key])
    except (TypeError, ValueError):
        raise ProfileError(f"row {number}: {key} is {row[key]!r}, expected a number") from None
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ProfileError(f"row {number}: {key} is {row[key]!r}, expected a finite number above 0")
    return value


def _count(row: Mapping[str, Any], number: int, key: str) -> int:
    value = _positive(row, number, key)
    if value != int(value):
        raise ProfileError(f"row {number}: {key} is {row[key]!r}, expected a whole number")
    return int(value)
