"""What was measured: CSV files of requests and tables, read and checked.

Decides where the measurements lie, what a usable one is, and which servers and points they come from; and with which
calibration each server is predicted. Predicts nothing (``h200_pair``) and compares nothing (``validate``).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pushkv.sim import catalog
from pushkv.sim.errors import BadInput
from pushkv.sim.metrics import Floats

__all__ = [
    "BLIND_FILE",
    "CALIBRATIONS",
    "REQUEST_FILES",
    "TABLE_CALIBRATION",
    "Files",
    "Point",
    "Server",
    "find_data",
    "needed",
    "number",
    "read_blind_servers",
    "read_servers",
]

_REPOSITORY = Path(__file__).resolve().parents[1]
_H200_DATA = Path("experiments/h200_pair/data")
_PUBLISHED_DATA = Path("experiments/published/data")
_OWN_DATA = Path("experiments/gpu_handover/results")

REQUEST_FILES = {"h200_requests.csv": "", "h200_requests_32b.csv": "", "h200_requests_compiled.csv": "compiled"}
"""Files of requests, and how their servers were configured besides vLLM's eager mode."""

BLIND_FILE = "h200_requests_blind.csv"
"""Requests of eager servers whose prediction was written down first."""

_CONFIGURATIONS = {**REQUEST_FILES, BLIND_FILE: ""}

CALIBRATIONS = {
    ("qwen3-8b", "", "pull"): "eager-prefill",
    ("qwen3-8b", "", "push"): "eager-push",
    ("qwen3-8b", "compiled", "pull"): "compiled-pull",
    ("qwen3-8b", "compiled", "push"): "compiled-push",
}
"""Calibration of the h200 profile by model, configuration and mode; other models take the tables' own."""

TABLE_CALIBRATION = {"": "eager-prefill", "compiled": "compiled"}
"""Calibration of the h200 profile that was fitted to the engine table of a configuration, and to nothing else."""


@dataclass(frozen=True, slots=True)
class Point:
    """Requests of one length at one rate, in the order in which they were sent.

    ``arrival_s``: when the client meant to send. The other columns are milliseconds as the client saw them, NaN where
    the request failed.
    """

    input_len: int
    qps: float
    output_len: tuple[int, ...]
    arrival_s: Floats
    leg_ms: Floats
    ttft_ms: Floats
    tpot_ms: Floats

    @property
    def name(self) -> str:
        return f"{self.input_len}@{self.qps:g}"

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which requests did not fail."""
        return np.isfinite(self.ttft_ms)


@dataclass(slots=True)
class Server:
    """One pair of servers and the points that it was measured at, in order."""

    file: str
    model: str
    mode: str
    points: list[Point] = field(default_factory=list)

    @property
    def configuration(self) -> str:
        return _CONFIGURATIONS[self.file]

    @property
    def calibration(self) -> str:
        """The calibration that it is predicted with."""
        known = CALIBRATIONS.get((self.model, self.configuration, self.mode))
        return known or TABLE_CALIBRATION[self.configuration]


@dataclass(slots=True)
class Files:
    """The folders of the measurements; remembers what was read, and what is not there."""

    folders: tuple[Path, ...]
    used: dict[str, Path] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def there(self, name: str) -> bool:
        """Whether a file is in one of the folders."""
        return any((folder / name).is_file() for folder in self.folders)

    def rows(self, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
        """The rows of a CSV that must have ``columns``; none where the file is not there."""
        path = next((folder / name for folder in self.folders if (folder / name).is_file()), None)
        if path is None:
            if name not in self.absent:
                self.absent.append(name)
            return []
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise BadInput(f"--data: {path} cannot be read: {error}") from None
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise BadInput(f"--data: {path} has no column {missing[0]}; expected {','.join(columns)}")
        self.used[name] = path
        return rows

    def named(self) -> Iterator[tuple[Path, Path]]:
        """Files read: what to call each, and where it is."""
        for path in self.used.values():
            inside = path.resolve().is_relative_to(_REPOSITORY)
            yield (path.resolve().relative_to(_REPOSITORY) if inside else path), path


def find_data(data: str | None) -> Files:
    """The folder ``data``, or those of the repository that this file lies in. Raises `BadInput`."""
    if data is None:
        h200 = _REPOSITORY / _H200_DATA
        folders = (h200, h200.parent, _REPOSITORY / _PUBLISHED_DATA, _REPOSITORY / _OWN_DATA)
        if not folders[0].is_dir():
            raise BadInput(
                f"the measurements are not part of the installed package: give --data FOLDER, {_H200_DATA} of a clone"
                " of the repository"
            )
        return Files(folders)
    folder = Path(data)
    if not folder.is_dir():
        raise BadInput(f"--data {data} is not a folder; give one that holds {', '.join(REQUEST_FILES)}")
    return Files((folder,))


def read_servers(files: Files) -> list[Server]:
    """Every pair of servers in `REQUEST_FILES`. Raises `BadInput` where there is none."""
    servers = _servers(files, REQUEST_FILES)
    if not servers:
        where = " or ".join(map(str, files.folders))
        raise BadInput(f"--data: no measured requests in {where}; expected {', '.join(REQUEST_FILES)}")
    return servers


def read_blind_servers(files: Files) -> list[Server]:
    """Every pair of servers in `BLIND_FILE`; none where it is not there."""
    return _servers(files, [BLIND_FILE])


def _servers(files: Files, names: Iterable[str]) -> list[Server]:
    columns = ("model", "mode", "input_len", "output_len", "qps", "arrival_s", "prefill_leg_ms", "ttft_ms", "tpot_ms")
    servers = []
    for file in names:
        grouped: dict[tuple[str, str], dict[tuple[int, float], list[dict[str, float]]]] = {}
        for line, row in enumerate(files.rows(file, (*columns, "e2e_ms")), 2):
            values = {column: number(file, line, column, row[column]) for column in columns[2:]}
            point = (int(needed(file, line, "input_len", values)), needed(file, line, "qps", values))
            needed(file, line, "output_len", values)
            if row["mode"] not in ("pull", "push"):
                raise BadInput(f"--data: {file} line {line}: mode {row['mode']!r} is neither pull nor push")
            grouped.setdefault((row["model"], row["mode"]), {}).setdefault(point, []).append(values)
        for (model, mode), points in grouped.items():
            catalog.model(model)
            other = grouped.get((model, "push" if mode == "pull" else "pull"), {})
            servers.append(Server(file, model, mode))
            for point, rows in points.items():
                servers[-1].points.append(_point(file, point, rows, other.get(point, [])))
    return servers


def _point(file: str, point: tuple[int, float], rows: list[dict[str, float]], twins: list[dict[str, float]]) -> Point:
    """One point of one mode; arrivals that were not recorded are those of the other mode."""
    if any(math.isnan(row["arrival_s"]) for row in rows):
        if len(rows) != len(twins) or any(math.isnan(row["arrival_s"]) for row in twins):
            raise BadInput(
                f"--data: {file}: some requests of {point[0]} tokens at {point[1]:g} per s have no arrival_s"
            )
        rows = _in_order(rows, twins)
        rows = [row | {"arrival_s": twin["arrival_s"]} for row, twin in zip(rows, twins, strict=True)]
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    if np.any(np.diff(column["arrival_s"]) < 0) or column["arrival_s"][0] < 0:
        raise BadInput(f"--data: {file}: arrival_s at {point[0]} tokens and {point[1]:g} per s is not in order")
    if not np.any(np.isfinite(column["ttft_ms"])):
        raise BadInput(f"--data: {file}: no request at {point[0]} tokens and {point[1]:g} per s was answered")
    outputs = tuple(int(n) for n in column["output_len"])
    return Point(*point, outputs, column["arrival_s"], column["prefill_leg_ms"], column["ttft_ms"], column["tpot_ms"])


def _in_order(rows: list[dict[str, float]], twins: list[dict[str, float]]) -> list[dict[str, float]]:
    """A failed request put where the prefill legs of the others line up best with those of the other mode.

    It loads P and D like the others, and is not scored.
    """
    failed = [row for row in rows if math.isnan(row["prefill_leg_ms"])]
    if len(failed) != 1:
        return rows
    rest = [row for row in rows if row is not failed[0]]
    orders = [[*rest[:i], *failed, *rest[i:]] for i in range(len(rows))]

    def apart(order: list[dict[str, float]]) -> float:
        legs = np.array([[row["prefill_leg_ms"] for row in side] for side in (order, twins)])
        return float(np.nansum(np.log(legs[0] / legs[1]) ** 2))

    return min(orders, key=apart)


def number(file: str, line: int, column: str, text: str | None) -> float:
    """A number from 0 up; NaN for an empty cell. Raises `BadInput`."""
    if not text:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BadInput(f"--data: {file} line {line}: {column} {text!r} is not possible; expected a number from 0 up")
    return value


def needed(file: str, line: int, column: str, values: Mapping[str, float]) -> float:
    """``values[column]``, above 0. Raises `BadInput`."""
    if not values[column] > 0:
        raise BadInput(f"--data: {file} line {line}: {column} must be a number above 0")
    return values[column]
