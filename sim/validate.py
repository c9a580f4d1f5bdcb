"""Predictions beside measurements: two vLLM servers on a pair of H200, and figures that others published.

Decides what is compared, within which limits, and which rows had a hand in the constants. How the measurements are read
is in ``measured``, how they are simulated in ``h200_pair``. It computes no cost and holds no constant that was fitted:
those stand in the profiles, each with its source.

Measured are the files of ``experiments/h200_pair/data``, and those of ``experiments/gpu_handover/results`` that ``own``
names; their READMEs say how. A row is in-sample where a constant was
fitted to it or to what was logged beside it, out-of-sample otherwise. The blind rows were measured after their
prediction was written down (``blind_predictions.csv``); they are held to the same limits, and a miss does not fail. Nor
does one of this project's own runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pushkv.model.timing import EngineCost, post_s, profiles, transfer_s
from pushkv.model.timing.calibrate import engine_rows
from pushkv.model.timing.fabric import Op
from pushkv.sim import catalog, own
from pushkv.sim.errors import BadInput
from pushkv.sim.h200_pair import BLOCK, Prediction, replay, workload
from pushkv.sim.measured import (
    BLIND_FILE,
    CALIBRATIONS,
    TABLE_CALIBRATION,
    Files,
    Point,
    Server,
    find_data,
    needed,
    number,
    read_blind_servers,
    read_servers,
)
from pushkv.sim.progress import Progress
from pushkv.sim.report import Check, Stages, Validation

__all__ = ["run", "serving_checks"]

_BLIND_PREDICTIONS = "blind_predictions.csv"

_LONG = 4096  # tokens: "10 % from 4k up"
_FEW = 8  # tokens of an answer, below which TPOT is chance
_FITTED_AT = (1024, 4.0)  # the only point whose rows fitted constants
_LIMIT_P90, _LIMIT_TPOT, _LIMIT_SHAPE, _LIMIT_PUBLISHED = 0.15, 0.05, 0.15, 0.15


def run(data: str | None = None, *, progress: Progress | None = None) -> Validation:
    """All checks over the measurements in ``data`` (default: those of the repository). Raises `BadInput`."""
    files = find_data(data)
    servers = read_servers(files)
    bare = [s for s in servers if s.calibration != TABLE_CALIBRATION[s.configuration]]
    blind, ours = read_blind_servers(files), own.read(files)
    requests = sum(len(workload(server)) for server in servers + blind + bare) + sum(map(own.total, ours))
    count = _Counter(progress, requests)
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
    own_checks: dict[bool, list[Check]] = {True: [], False: []}
    stages: list[Stages] = []
    for one in ours:
        for row, found in own.replay(one, progress=count.next()):
            own_checks[one.fitted(row)] += _own_checks(one, row, found)
            stages += _own_stages(one, row, found)
    checks += own_checks[True] + own_checks[False]
    checks += _shape_checks(servers)
    checks += _published_checks(files)
    unfitted: list[Check] = []
    for server in bare:
        plain = TABLE_CALIBRATION[server.configuration]
        for point, found in zip(server.points, replay(server, plain, progress=count.next()), strict=True):
            unfitted += serving_checks(server, point, found)
    notes = (*_blind_notes(files, blind_checks), *_own_notes(ours), *_notes(files, bare, unfitted))
    inputs = {str(name): hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.named()}
    return Validation(tuple(checks), inputs, notes, tuple(stages))


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


# ---- checks --------------------------------------------------------------------------------------------------------

_IN = "in-sample: vLLM at 1024 tokens and 4 per s, where the constants were fitted"
_IN_COMPILED = "in-sample: the same, compiled server"
_OUT = "out-of-sample: vLLM's other points"
_OUT_COMPILED = "out-of-sample: the compiled server's other points"
_BLIND = "out-of-sample: measured after the prediction was written down"
_OWN_IN = "in-sample: runs of experiments/gpu_handover that constants were fitted to"
_OWN = "out-of-sample: the other runs of experiments/gpu_handover"
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
    ok = point.answered
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


def _own_checks(one: own.Own, row: own.Row, found: Prediction) -> list[Check]:
    ok = row.answered
    leg, ttft, tpot = row.leg_ms[ok], row.ttft_ms[ok], row.tpot_ms[ok]
    limit = 0.15 if np.median(row.input_len) < _LONG else 0.10
    group = _OWN_IN if one.fitted(row) else _OWN

    def check(what: str, measured: np.floating, predicted: np.floating, limit: float | None = None) -> Check:
        name = f"{one.name} {row.name} {what}"
        return Check(group, name, "ms", float(measured), float(predicted), limit, None, False, what)

    checks = [
        check("TTFT", ttft.mean(), found.ttft_ms.mean(), limit),
        check("p90", np.percentile(ttft, 90), np.percentile(found.ttft_ms, 90), _LIMIT_P90),
        check("leg", leg.mean(), found.leg_ms.mean()),
    ]
    if row.output_len.max() > _FEW:
        checks.append(check("TPOT", np.nanmean(tpot), np.nanmean(found.tpot_ms), _LIMIT_TPOT))
    return [*checks, check("hand-over", np.median(ttft - leg), np.median(found.ttft_ms - found.leg_ms))]


def _own_stages(one: own.Own, row: own.Row, found: Prediction) -> list[Stages]:
    """One, where the hand-overs were written down, of the stages that both know: a direct transfer gathers nothing."""
    both = (row.stages_ms, found.stages_ms)
    names = [name for name in own.STAGES if all(np.isfinite(stages[name]).any() for stages in both)]
    if not names:
        return []
    measured = {name: float(np.nanmedian(row.stages_ms[name])) for name in names}
    predicted = {name: float(np.nanmedian(found.stages_ms[name])) for name in names}
    return [Stages(one.file, f"{one.mode} {row.name}", measured, predicted)]


def _engine_checks(files: Files) -> list[Check]:
    """What the fit leaves of the tables that it was made from."""
    checks = []
    for file, configuration in (("h200_engine.csv", ""), ("h200_engine_compiled.csv", "compiled")):
        rows = files.rows(file, ("model", "kind", "batch", "context_or_input_len", "ms"))
        hardware = profiles.hardware("h200", TABLE_CALIBRATION[configuration])
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
        values = {column: number(file, line, column, row[column]) for column in columns[2:]}
        size, count = int(needed(file, line, "desc_bytes", values)), int(needed(file, line, "descs", values))
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
        values = {column: number(file, line, column, row[column]) for column in columns}
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
    hardware = profiles.hardware("h200", TABLE_CALIBRATION[""])
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
            values = {"input_len": number(file, line, "input_len", row["input_len"])}
            tokens = int(needed(file, line, "input_len", values))
            # One of eight ranks moves its share, K and V of each layer, one block more than the prompt (README there).
            share = (tokens + BLOCK) * shape.kv_bytes_per_token_rank(8)
            name, predicted_s = f"Mooncake, 8b, {tokens} tokens", transfer_s(roce, share, 2 * shape.layers)
        elif metric.startswith("post_time_"):
            count = int(number(file, line, "metric", metric.split("_")[2]))
            name, predicted_s = f"EFA, post {count} descriptors", post_s(efa, count, count * 4096)
        else:
            continue
        measured = number(file, line, "value", row["value"])
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
        length, qps = (needed(file, line, name, {name: number(file, line, name, row[name])}) for name in columns[4:6])
        point = f"{row['model'].removeprefix('qwen3-')} {row['mode']} {int(length)}@{qps:g}"
        for what, column in _WRITTEN.items():
            written[f"{point} {what}"] = needed(file, line, column, {column: number(file, line, column, row[column])})
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


def _own_notes(ours: Sequence[own.Own]) -> Iterator[str]:
    """What was fitted to this project's own runs."""
    if ours:
        yield (
            "experiments/gpu_handover: errors of mean and P90 TTFT, mean TPOT and mean prefill leg, and the median"
            " hand-over, measured and predicted; ! is outside the limit. Fitted to the rows called in-sample"
            " (experiments/gpu_handover/fit.py prints what to which): the times of the connector, the rates of its"
            " kernels, and of these servers how fast they read weights, launch prefills and answer. A busy row is"
            f" simulated {own.TIMES} times. Rows of requests_8b.csv and requests_32b.csv, and of those that end in"
            " again, are of earlier connectors."
        )
        if any(one.mode == "direct" for one in ours):
            yield (
                "Direct transfers are predicted too short: nothing was fitted to them, and beside a busy P their"
                " descriptors take longer than alone."
            )
        lost = [f"{one.name} {text}" for one in ours for text in one.lost]
        if lost:
            yield f"Nothing of it was answered, so it is not scored: {', '.join(lost)}."


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
