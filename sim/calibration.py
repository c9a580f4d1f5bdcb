"""Fit a profile to a CSV table of measurements.

Decides how the table is read, what kind it is (engine steps or transfers, by its columns) and which model each row
means. It does not decide the fit: `pushkv.model.timing.calibrate` does.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pushkv.model.timing import ModelShape, Residual, calibrate, calibrate_posting, profiles
from pushkv.sim import catalog
from pushkv.sim.errors import BadInput, unknown

__all__ = ["Fitted", "fit"]

_ENGINE_COLUMNS = {"model", "kind", "batch", "context_or_input_len", "ms"}
_POSTING_COLUMNS = {"op", "pattern", "desc_bytes", "descs", "make_us", "post_us"}

Rows = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fit: the profile as TOML text, the constants found, and what the fit says about each row."""

    toml: str
    constants: Mapping[str, Any]
    residuals: tuple[Residual, ...]

    def document(self) -> dict[str, Any]:
        """For JSON: constants and residuals, times in milliseconds."""
        rows = [asdict(residual) | {"error": residual.error} for residual in self.residuals]
        return {"constants": dict(self.constants), "residuals": rows}


def fit(path: str, hardware: str, *, model: str | None = None, tp: int = 1, budget: int = 8192, name: str) -> Fitted:
    """Fit the table at ``path``; ``model`` says what it measures, if the table's name for it is not a built-in one.

    ``tp`` and ``budget`` (tokens per step) are those of the measured engine. Raises `BadInput`.
    """
    columns, rows = _read(path)
    if columns >= _POSTING_COLUMNS:
        with catalog.profile_errors(f"table {path}"):
            posting = calibrate_posting(rows)
        rates = {op: rate and asdict(rate) for op, rate in (("write", posting.write), ("read", posting.read))}
        return Fitted(posting.to_toml(), rates, posting.residuals)
    if columns >= _ENGINE_COLUMNS:
        start = catalog.hardware(hardware)
        shapes = _shapes(path, rows, model)
        with catalog.profile_errors(f"table {path}"):
            engine = calibrate(rows, shapes, start, tp=tp, budget=budget, name=name)
        return Fitted(engine.to_toml(), asdict(engine.calibration), engine.residuals)
    raise BadInput(
        f"table {path} has the columns {','.join(sorted(columns))}; expected {','.join(sorted(_ENGINE_COLUMNS))}"
        f" for engine steps or {','.join(sorted(_POSTING_COLUMNS))} for transfers"
    )


def _read(path: str) -> tuple[set[str], Rows]:
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            columns = set(reader.fieldnames or ())
    except OSError as error:
        raise BadInput(f"table {path} cannot be read: {error.strerror}; give a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"table {path} is not CSV text: {error}") from None
    if not columns:
        raise BadInput(f"table {path} is empty; expected a line with the names of its columns")
    if not rows:
        raise BadInput(f"table {path} has no rows; give at least one measurement")
    return columns, rows


def _shapes(path: str, rows: Rows, model: str | None) -> dict[str, ModelShape]:
    measured = list(dict.fromkeys(row["model"] for row in rows))
    if model is not None:
        if len(measured) > 1:
            raise BadInput(f"--model {model} is for a table of one model; {path} has {', '.join(measured)}")
        return {measured[0]: catalog.model(model)}
    for one in measured:
        if one not in profiles.names("models"):
            raise unknown(f"table {path}: model", one, profiles.names("models"), also="or say --model config.json")
    return {one: catalog.model(one) for one in measured}
