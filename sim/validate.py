"""Predictions beside measurements: two vLLM servers on a pair of H200, and figures that others published.

Decides how the measurement is replayed (what the servers and the client did, in which order), what is compared, within
which limits, and which rows had a hand in the constants. It computes no cost and holds no constant that was fitted:
those stand in the profiles, each with its source.

Measured are the files of ``experiments/h200_pair/data``; its README says how. A row is in-sample where a constant was
fitted to it or to what was logged beside it, out-of-sample otherwise. The blind rows were measured after their
prediction was written down (``blind_predictions.csv``); they are held to the same limits, and a miss does not fail.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pushkv.model.timing import EngineCost, post_s, profiles, transfer_s
from pushkv.model.timing.calibrate import engine_rows
from pushkv.model.timing.fabric import Op
from pushkv.sim import catalog, scenario, world
from pushkv.sim.errors import BadInput
from pushkv.sim.metrics import Floats
from pushkv.sim.progress import Progress
from pushkv.sim.report import Check, Validation
from pushkv.sim.workload import Workload

__all__ = [
    "BLIND_FILE",
    "CALIBRATIONS",
    "REQUEST_FILES",
    "Files",
    "Point",
    "Prediction",
    "Server",
    "find_data",
    "read_servers",
    "replay",
    "run",
    "serving_checks",
]

_REPOSITORY = Path(__file__).resolve().parents[1]
_H200_DATA = Path("experiments/h200_pair/data")
_PUBLISHED_DATA = Path("experiments/published/data")

REQUEST_FILES = {"h200_requests.csv": "", "h200_requests_32b.csv": "", "h200_requests_compiled.csv": "compiled"}
"""Files of requests, and how their servers were configured besides vLLM's eager mode."""

BLIND_FILE = "h200_requests_blind.csv"
"""Requests of eager servers whose prediction was written down first."""

_BLIND_PREDICTIONS = "blind_predictions.csv"
_CONFIGURATIONS = {**REQUEST_FILES, BLIND_FILE: ""}

CALIBRATIONS = {
    ("qwen3-8b", "", "pull"): "eager-prefill",
    ("qwen3-8b", "", "push"): "eager-push",
    ("qwen3-8b", "compiled", "pull"): "compiled-pull",
    ("qwen3-8b", "compiled", "push"): "compiled-push",
}
"""Calibration of the h200 profile by model, configuration and mode; other models take the tables' own."""

_TABLE_CALIBRATION = {"": "eager-prefill", "compiled": "compiled"}
_CACHE_TOKENS = {"qwen3-8b": 797_038, "qwen3-32b": 258_161}  # of either server, from README
_BLOCK = 16

# What the client did: three requests to warm up (600 tokens in, 8 out), then the points one after the other on the same
# pair of servers. It builds each random prompt in its own event loop before sending it, "about 8 ms for 16k" (README),
# which puts every later send back. The pauses are not recorded; nothing is under way after them.
_WARM_UP = [(float(second), 600, 8) for second in range(3)]
_BUILD_S_PER_TOKEN = 0.5e-6
_PAUSE_S = 5.0
_FIRST_S = 5.0

# A point at 4096 tokens and 5 per second that is not in the file ran between two that are, on the same pools of blocks.
_LEFT_OUT_AFTER = ("h200_requests.csv", 4096, 2.0)
_LEFT_OUT = {"requests": 40, "input_len": 4096, "output_len": 96, "qps": 5.0, "seed": 5, "lasts_s": 15.0}

_LONG = 4096  # tokens: "10 % from 4k up"
_FITTED_AT = (1024, 4.0)  # the only point whose rows fitted constants
_LIMIT_P90, _LIMIT_TPOT, _LIMIT_SHAPE, _LIMIT_PUBLISHED = 0.15, 0.05, 0.15, 0.15


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
    def answered(self) -> int:
        """Requests that were not failed."""
        return int(np.count_nonzero(np.isfinite(self.ttft_ms)))


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
        return known or _TABLE_CALIBRATION[self.configuration]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says about the answered requests of one `Point`; milliseconds."""

    leg_ms: Floats
    ttft_ms: Floats
    tpot_ms: Floats


def run(data: str | None = None, *, progress: Progress | None = None) -> Validation:
    """All checks over the measurements in ``data`` (default: those of the repository). Raises `BadInput`."""
    files = find_data(data)
    servers = read_servers(files)
    bare = [s for s in servers if s.calibration != _TABLE_CALIBRATION[s.configuration]]
    blind = _servers(files, [BLIND_FILE])
    count = _Counter(progress, sum(len(_workload(server)) for server in servers + blind + bare))
    checks = [*_engine_checks(files), *_nixl_checks(files)]
    groups: dict[str, list[Check]] = {}
    for server in servers:
        for point, found in zip(server.points, replay(server, progress=count.next()), strict=True):
            groups.setdefault(_group(server, point), []).extend(serving_checks(server, point, found))
    for group in sorted(groups, key=list(_GROUPS).index):
        if group == _IN:
            checks += _window_checks(files)
        checks += groups[group]
    blind_checks: list[Check] = []
    for server in blind:
        for point, found in zip(server.points, replay(server, progress=count.next()), strict=True):
            blind_checks += serving_checks(server, point, found)
    checks += blind_checks
    checks += _shape_checks(servers)
    checks += _published_checks(files)
    unfitted: list[Check] = []
    for server in bare:
        plain = _TABLE_CALIBRATION[server.configuration]
        for point, found in zip(server.points, replay(server, plain, progress=count.next()), strict=True):
            unfitted += serving_checks(server, point, found)
    notes = (*_blind_notes(files, blind_checks), *_notes(files, bare, unfitted))
    inputs = {str(name): hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.named()}
    return Validation(tuple(checks), inputs, notes)


# ---- the measurement, replayed -------------------------------------------------------------------------------------


def replay(server: Server, calibration: str | None = None, *, progress: Progress | None = None) -> list[Prediction]:
    """Simulate all that ``server`` was asked, in one world: its pools of blocks are carried from point to point.

    ``calibration`` replaces the server's own. One prediction per point, of its answered requests, in their order.
    """
    blocks = _CACHE_TOKENS.get(server.model)
    load = _workload(server)
    plan = scenario.load(
        None,
        {
            "model": server.model,
            "mode": server.mode,
            "calibration": calibration or server.calibration,
            "num_blocks": None if blocks is None else blocks // _BLOCK,
            "requests": len(load),
        },
    )
    log = world.run(plan, arrivals=load, progress=progress).log
    log = log.rows(np.argsort(log.column("arrival_s"), kind="stable"))  # a log is in the order in which requests end
    found = []
    for first, point in _positions(server):
        rows = first + np.flatnonzero(np.isfinite(point.ttft_ms))
        found.append(Prediction(*(log.milliseconds(name)[rows] for name in ("prefill", "ttft", "tpot"))))
    return found


def _workload(server: Server) -> Workload:
    arrival_s = [second for second, _, _ in _WARM_UP]
    input_len, output_len = [n for _, n, _ in _WARM_UP], [out for _, _, out in _WARM_UP]
    for start_s, point in _starts(server):
        arrival_s += (start_s + point.arrival_s).tolist()
        input_len += [point.input_len] * len(point.output_len)
        output_len += point.output_len
        if _is_before_left_out(server, point):
            arrival_s += (arrival_s[-1] + _PAUSE_S + _left_out_s()).tolist()
            input_len += [int(_LEFT_OUT["input_len"])] * int(_LEFT_OUT["requests"])
            output_len += [int(_LEFT_OUT["output_len"])] * int(_LEFT_OUT["requests"])
    sent_s = np.array(arrival_s) + np.cumsum(np.array(input_len) * _BUILD_S_PER_TOKEN)
    return Workload(sent_s, np.array(input_len, dtype=np.int32), np.array(output_len, dtype=np.int32))


def _starts(server: Server) -> Iterator[tuple[float, Point]]:
    start_s = _FIRST_S
    for point in server.points:
        yield start_s, point
        start_s += float(point.arrival_s[-1]) + _PAUSE_S
        if _is_before_left_out(server, point):
            start_s += _LEFT_OUT["lasts_s"]


def _positions(server: Server) -> Iterator[tuple[int, Point]]:
    """Where the requests of each point begin in the workload."""
    first = len(_WARM_UP)
    for point in server.points:
        yield first, point
        first += len(point.output_len)
        if _is_before_left_out(server, point):
            first += int(_LEFT_OUT["requests"])


def _is_before_left_out(server: Server, point: Point) -> bool:
    here = (server.file, point.input_len, point.qps) == _LEFT_OUT_AFTER
    return here and not any((p.input_len, p.qps) == (_LEFT_OUT["input_len"], _LEFT_OUT["qps"]) for p in server.points)


def _left_out_s() -> Floats:
    rng = np.random.default_rng(int(_LEFT_OUT["seed"]))
    gaps_s: Floats = rng.exponential(1 / _LEFT_OUT["qps"], int(_LEFT_OUT["requests"]))
    return np.cumsum(gaps_s)


class _Counter:
    """One progress bar over several runs."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._before = self._now = 0

    def next(self) -> Progress | None:
        if self._progress is None:
            return None
        self._before = self._now
        return self._report

    def _report(self, done: int, total: int) -> None:
        self._now = self._before + done
        assert self._progress is not None
        self._progress(self._now, self._total)


# ---- the files -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Files:
    """The folders of the measurements; remembers what was read, and what is not there."""

    folders: tuple[Path, ...]
    used: dict[str, Path] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

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
        folders = (h200, h200.parent, _REPOSITORY / _PUBLISHED_DATA)
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


def _servers(files: Files, names: Iterable[str]) -> list[Server]:
    columns = ("model", "mode", "input_len", "output_len", "qps", "arrival_s", "prefill_leg_ms", "ttft_ms", "tpot_ms")
    servers = []
    for file in names:
        grouped: dict[tuple[str, str], dict[tuple[int, float], list[dict[str, float]]]] = {}
        for line, row in enumerate(files.rows(file, (*columns, "e2e_ms")), 2):
            values = {column: _value(file, line, column, row[column]) for column in columns[2:]}
            point = (int(_needed(file, line, "input_len", values)), _needed(file, line, "qps", values))
            _needed(file, line, "output_len", values)
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


def _value(file: str, line: int, column: str, text: str | None) -> float:
    """A number; NaN for an empty cell."""
    if not text:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BadInput(f"--data: {file} line {line}: {column} {text!r} is not possible; expected a number from 0 up")
    return value


def _needed(file: str, line: int, column: str, values: Mapping[str, float]) -> float:
    if not values[column] > 0:
        raise BadInput(f"--data: {file} line {line}: {column} must be a number above 0")
    return values[column]


# ---- checks --------------------------------------------------------------------------------------------------------

_IN = "in-sample: vLLM at 1024 tokens and 4 per s, where the constants were fitted"
_IN_COMPILED = "in-sample: the same, compiled server"
_OUT = "out-of-sample: vLLM's other points"
_OUT_COMPILED = "out-of-sample: the compiled server's other points"
_BLIND = "out-of-sample: measured after the prediction was written down"
_GROUPS = (_IN, _IN_COMPILED, _OUT, _OUT_COMPILED)


def _group(server: Server, point: Point) -> str:
    if server.file == BLIND_FILE:
        return _BLIND
    fitted = (point.input_len, point.qps) == _FITTED_AT and (server.model, server.configuration, server.mode) in (
        CALIBRATIONS
    )
    if server.configuration:
        return _IN_COMPILED if fitted else _OUT_COMPILED
    return _IN if fitted else _OUT


def serving_checks(server: Server, point: Point, found: Prediction) -> list[Check]:
    ok = np.isfinite(point.ttft_ms)
    leg, ttft, tpot = point.leg_ms[ok], point.ttft_ms[ok], point.tpot_ms[ok]
    short = point.input_len < _LONG
    limit_and_noise = (0.15, 0.10) if short else (0.10, 0.05)
    binding = server.file != BLIND_FILE
    group, name = _group(server, point), f"{server.model.removeprefix('qwen3-')} {server.mode} {point.name}"

    def check(what: str, measured: np.floating, predicted: np.floating, *bounds: float) -> Check:
        limit, noise = (*bounds, None, None)[:2]
        return Check(group, f"{name} {what}", "ms", float(measured), float(predicted), limit, noise, binding)

    return [
        check("TTFT mean", ttft.mean(), found.ttft_ms.mean(), *limit_and_noise),
        check("TTFT p90", np.percentile(ttft, 90), np.percentile(found.ttft_ms, 90), _LIMIT_P90),
        check("TPOT mean", np.nanmean(tpot), np.nanmean(found.tpot_ms), _LIMIT_TPOT),
        check("leg mean", leg.mean(), found.leg_ms.mean()),
        check("hand-over", np.median(ttft - leg), np.median(found.ttft_ms - found.leg_ms)),
    ]


def _engine_checks(files: Files) -> list[Check]:
    """What the fit leaves of the tables that it was made from."""
    checks = []
    for file, configuration in (("h200_engine.csv", ""), ("h200_engine_compiled.csv", "compiled")):
        rows = files.rows(file, ("model", "kind", "batch", "context_or_input_len", "ms"))
        hardware = profiles.hardware("h200", _TABLE_CALIBRATION[configuration])
        with catalog.profile_errors(f"--data: {file}"):
            for row in engine_rows(rows) if rows else ():
                cost = EngineCost(catalog.model(row.model), hardware)
                what = f"prefill {row.length}" if row.kind == "prefill" else f"decode {row.batch} x {row.length}"
                name = f"{row.model.removeprefix('qwen3-')} {what}"
                checks.append(Check(f"in-sample: {file}", name, "ms", row.ms, row.predict_ms(cost)))
    return checks


def _nixl_checks(files: Files) -> list[Check]:
    """The rows of NIXL's table that constants come from: random 32 KiB (posting), large contiguous ones (the wire)."""
    file = "h200_nixl_ucx_nvlink.csv"
    nvlink = profiles.fabric("nvlink-ucx")
    checks = []
    columns = ("op", "pattern", "desc_bytes", "descs", "make_us", "post_us", "total_us")
    for line, row in enumerate(files.rows(file, columns), 2):
        values = {column: _value(file, line, column, row[column]) for column in columns[2:]}
        size, count = int(_needed(file, line, "desc_bytes", values)), int(_needed(file, line, "descs", values))
        op = _op(file, line, row["op"])
        name = f"{op} {row['pattern']} {count} x {size >> 10} KiB"
        if row["pattern"] == "random" and size == 32768 and count >= 16:
            host_ms = (values["make_us"] + values["post_us"]) / 1e3
            predicted_ms = post_s(nvlink, count, size * count, op) * 1e3
            checks.append(Check(f"in-sample: {file}", f"{name} post", "ms", host_ms, predicted_ms))
        elif row["pattern"] == "contig" and size * count > 500e6:
            predicted_ms = transfer_s(nvlink, size * count, count, op) * 1e3
            checks.append(Check(f"in-sample: {file}", f"{name} move", "ms", values["total_us"] / 1e3, predicted_ms))
    return checks


def _window_checks(files: Files) -> list[Check]:
    """Posting as vLLM logged it in the windows of `_FITTED_AT`: transfers of 144 MB at most, but for the cold start."""
    file = "h200_transfer_windows.csv"
    nvlink = profiles.fabric("nvlink-ucx")
    checks = []
    columns = ("n", "avg_post_ms", "avg_MB", "avg_descs")
    for line, row in enumerate(files.rows(file, ("mode", *columns)), 2):
        values = {column: _value(file, line, column, row[column]) for column in columns}
        if values["avg_MB"] <= 144.0 and values["n"] > 3:
            op: Op = "READ" if row["mode"] == "pull" else "WRITE"
            descriptors = values["avg_descs"]
            post_ms = post_s(nvlink, round(descriptors), 1, op, order="allocated") * 1e3
            checks.append(Check(_IN, f"8b {row['mode']} 1024@4 posting", "ms", values["avg_post_ms"], post_ms))
    return checks


def _shape_checks(servers: Sequence[Server]) -> list[Check]:
    """Models without a table: lone prefill and lone decode step from the 8B's calibration and their shape."""
    legs: dict[tuple[str, int], list[float]] = {}
    steps: dict[tuple[str, int, int], list[float]] = {}
    for server in servers:
        if server.model == "qwen3-8b" or server.configuration:
            continue
        for point in server.points:
            legs.setdefault((server.model, point.input_len), []).append(float(np.nanmin(point.leg_ms)))
            key = (server.model, point.input_len, point.output_len[0])
            steps.setdefault(key, []).append(float(np.nanmin(point.tpot_ms)))
    group = "out-of-sample: Qwen3-32B from the 8B table and its shape, fastest request"
    hardware = profiles.hardware("h200", _TABLE_CALIBRATION[""])
    checks = []
    for (model, n), measured in legs.items():
        cost = EngineCost(catalog.model(model), hardware)
        predicted_ms = (cost.prefill_s(n) + cost.request_s(n)) * 1e3
        name = f"{model.removeprefix('qwen3-')} prefill {n}"
        checks.append(Check(group, name, "ms", min(measured), predicted_ms, _LIMIT_SHAPE))
    for (model, n, out), measured in steps.items():
        step_ms = EngineCost(catalog.model(model), hardware).step_s((), 1, n + out // 2) * 1e3
        name = f"{model.removeprefix('qwen3-')} decode step {n}"
        checks.append(Check(group, name, "ms", min(measured), step_ms, _LIMIT_SHAPE))
    return checks


def _published_checks(files: Files) -> list[Check]:
    file = "published.csv"
    group = "published: transfers of Mooncake, posting on EFA (their profiles come from them)"
    efa, roce, shape = profiles.fabric("efa-p5en"), profiles.fabric("roce-8x200"), profiles.model("qwen3-8b")
    checks = []
    for line, row in enumerate(files.rows(file, ("metric", "input_len", "value")), 2):
        metric = row["metric"]
        if metric == "kv_transfer":
            values = {"input_len": _value(file, line, "input_len", row["input_len"])}
            tokens = int(_needed(file, line, "input_len", values))
            # One of eight ranks moves its share, K and V of each layer, one block more than the prompt (README there).
            share = (tokens + _BLOCK) * shape.kv_bytes_per_token_rank(8)
            name, predicted_s = f"Mooncake, 8b, {tokens} tokens", transfer_s(roce, share, 2 * shape.layers)
        elif metric.startswith("post_time_"):
            count = int(_value(file, line, "metric", metric.split("_")[2]))
            name, predicted_s = f"EFA, post {count} descriptors", post_s(efa, count, count * 4096)
        else:
            continue
        measured = _value(file, line, "value", row["value"])
        checks.append(Check(group, name, "ms", measured, predicted_s * 1e3, _LIMIT_PUBLISHED))
    return checks


def _op(file: str, line: int, text: str) -> Op:
    if text == "READ" or text == "WRITE":
        return text  # type: ignore[return-value]
    raise BadInput(f"--data: {file} line {line}: op {text!r} is not known; expected WRITE or READ")


# ---- notes ---------------------------------------------------------------------------------------------------------


_WRITTEN = {  # columns of the predictions that were written down, by what a check calls them
    "TTFT mean": "ttft_mean_ms",
    "TTFT p90": "ttft_p90_ms",
    "TPOT mean": "tpot_mean_ms",
    "leg mean": "leg_mean_ms",
    "hand-over": "handover_median_ms",
}


def _blind_notes(files: Files, checks: Sequence[Check]) -> Iterator[str]:
    """What was written down before the blind rows were measured: how good it was, and whether it is still said."""
    if not checks:
        return
    file = _BLIND_PREDICTIONS
    columns = ("predicted_at", "commit", "model", "mode", "input_len", "qps", "default", *_WRITTEN.values())
    written: dict[str, float] = {}
    when: dict[str, None] = {}
    for line, row in enumerate(files.rows(file, columns), 2):
        if row["default"] != "yes":
            continue
        when[f"{row['predicted_at']} at {row['commit']}"] = None
        length, qps = (_needed(file, line, name, {name: _value(file, line, name, row[name])}) for name in columns[4:6])
        point = f"{row['model'].removeprefix('qwen3-')} {row['mode']} {int(length)}@{qps:g}"
        for what, column in _WRITTEN.items():
            written[f"{point} {what}"] = _needed(file, line, column, {column: _value(file, line, column, row[column])})
    then = [(check, replace(check, predicted=written[check.name])) for check in checks if check.name in written]
    limited = [old for _, old in then if old.limit is not None]
    if not limited:
        return
    missed = ", ".join(f"{old.name} {old.error:+.1%}" for old in limited if not old.passed) or "none"
    moved = max(abs(new.predicted / old.predicted - 1.0) for new, old in then)
    yield (
        f"Blind rows, as predicted on {', '.join(when)} ({file}) and measured after: {len(limited)} limits, missed:"
        f" {missed}. They do not fail this command. Today's predictions differ from those by"
        f" {moved:.1%} at most; a constant or rule changed since then may know these rows."
    )


def _notes(files: Files, bare: Sequence[Server], unfitted: Sequence[Check]) -> Iterator[str]:
    nvlink, h200 = profiles.fabric("nvlink-ucx"), profiles.hardware("h200")
    yield (
        "leg: prefill leg as the client sees it; hand-over: median of TTFT less leg. noise: two runs with the same"
        " arrivals, mean TTFT, upper bound (README of the data). Rows without a limit are shown only."
    )
    factors = {s.calibration: h200.calibrations[s.calibration].launch_factor for s in bare}
    yield (
        "Fitted beside the engine and NIXL tables, to rows at 1024 tokens and 4 per s alone. Eager servers, two"
        f" constants: {nvlink.read.allocated_s * 1e6:.2f} us to post a descriptor in the order of vLLM's block pool,"
        " READ and WRITE alike, from both modes' posting times; and the launch factor in push, from its mean TTFT."
        " Compiled servers, another configuration with its own table, two: a launch factor per mode, likewise. "
        + ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
        + "; pull on eager servers has none."
    )
    missed = [check for check in unfitted if not check.passed]
    if unfitted:
        rows = ", ".join(f"{check.name} {check.error:+.0%}" for check in missed) or "none"
        yield f"Without the launch factors these servers would miss {len(missed)} limits: {rows}."
    yield (
        "What the factors stand for has not been found: prefill legs at 1k have two modes in every run (31 to 36 and 42"
        " to 49 ms eager, 32 and 53 compiled), in stretches that do not follow the arrivals. A factor is the state of"
        " the host in one run; another run at 1k may lie anywhere between."
    )
    yield (
        "Not quite out-of-sample: the rate of reading weights (0.80 of peak) was chosen knowing Qwen3-32B's TPOT."
        " Not recorded, so assumed: pauses between points, and the arrivals of 4096@5, in no file, which ran before"
        " 16000@0.5."
    )
    if files.absent:
        yield f"Not in {files.folders[0]}: {', '.join(files.absent)}."
