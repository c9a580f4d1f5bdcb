"""Constants of this project's connector in the profile `h200`, from the rows that `pushkv validate` calls in-sample.

    python experiments/gpu_handover/fit.py

Prints, per constant, the value, the rows that it comes from and what the profile has. Most are differences of two
medians; where the simulator stands between a constant and what was measured, the constant is searched for with it.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import staged

from pushkv.model.timing import EngineCost, gather_s, post_s, profiles
from pushkv.sim import catalog, own
from pushkv.sim.measured import find_data
from pushkv.sim.scenario import Scenario

RESULTS = Path(__file__).parent / "results"
HOOKS, THIRD, LOOP = "hooks/requests.csv", "requests_8b_third.csv", "requests_8b_loop.csv"
SHORT, LONG = 1024, 16000
FITTED = "eager-2-queue"

NVLINK, H200, SHAPE = profiles.fabric("nvlink-ucx"), profiles.hardware("h200", FITTED), profiles.model("qwen3-8b")
BYTES = SHAPE.kv_bytes_per_token_rank(1)


@cache
def lines(file: str, mode: str, row: str) -> tuple[dict[str, float], ...]:
    """The answered requests of a row, numbers only."""
    assert (file, mode, row) in own.FITTED
    with (RESULTS / file).open(encoding="utf-8") as text:
        rows = [line for line in csv.DictReader(text) if (line["mode"], line["row"]) == (mode, row)]
    return tuple(
        {name: float(value) for name, value in line.items() if name.endswith("_ms") and value}
        | {"parts": float(line["parts"])}
        for line in rows
        if line["ttft_ms"]
    )


def between(row: tuple[str, str, str], first: str, then: str) -> float:
    """Median seconds from one stage to another."""
    return statistics.median(line[f"{then}_ms"] - line[f"{first}_ms"] for line in lines(*row)) / 1e3


def until(row: tuple[str, str, str], stage: str) -> float:
    """Median seconds from the end of P's leg."""
    return statistics.median(line[f"{stage}_ms"] for line in lines(*row)) / 1e3


def each_part(row: tuple[str, str, str], name: str) -> float:
    """Median seconds of a part."""
    return statistics.median(line[name] / line["parts"] for line in lines(*row)) / 1e3


def line_through(short_s: float, long_s: float) -> tuple[float, float]:
    """(seconds, seconds per token) through the two lengths."""
    each_s = (long_s - short_s) / (LONG - SHORT)
    return short_s - each_s * SHORT, each_s


def until_noted(row: tuple[str, str, str]) -> float:
    """Median seconds from the request for the scatter until D's engine has the first token."""
    with (RESULTS / HOOKS).open(encoding="utf-8") as text:
        served = [line for line in csv.DictReader(text) if line["row"] == row[2] and line["ttft_ms"]]
    hooks = staged.lines_of(RESULTS / "hooks" / "hooks_chunk_D.jsonl")
    (found,) = staged.by_row(served, hooks).values()
    return statistics.median(line["finished"] - line["asked"] for line in found) / 1e3


@contextmanager
def constants(serving: dict[str, float], calibration: dict[str, float]) -> Iterator[None]:
    """Simulate with these, whatever the profile says."""
    resolve = catalog.resolve

    def changed(plan: Scenario) -> catalog.Parts:
        parts = resolve(plan)
        hardware = replace(parts.hardware, serving=replace(parts.hardware.serving, **serving))
        changes: dict[str, Any] = dict(calibration)
        return replace(parts, hardware=hardware.with_calibration(replace(hardware.calibration, **changes)))

    with mock.patch.object(catalog, "resolve", changed), mock.patch("pushkv.sim.world.catalog.resolve", changed):
        yield


def searched(
    row: tuple[str, str, str], what: Callable[[own.Row, Any], tuple[float, float]], low: float, high: float,
    use: Callable[[float], tuple[dict[str, float], dict[str, float]]],
) -> float:  # fmt: skip
    """The constant with which the simulator says of ``row`` what was measured, by bisection; ``what`` grows with it."""
    servers = [one for one in own.read(find_data(None)) if (one.file, one.mode) == row[:2]]
    (server,) = (replace(one, rows=tuple(each for each in one.rows if each.text == row[2])) for one in servers)
    while high - low > 0.002 * high:
        middle = (low + high) / 2
        with constants(*use(middle)):
            ((measured, found),) = own.replay(server)
        there, predicted = what(measured, found)
        low, high = (middle, high) if predicted < there else (low, middle)
    return (low + high) / 2


def leg(row: own.Row, found: Any) -> tuple[float, float]:
    return float(np.nanmean(row.leg_ms)), float(np.mean(found.leg_ms))


def landed(row: own.Row, found: Any) -> tuple[float, float]:
    return float(np.nanmedian(row.stages_ms["landed"])), float(np.median(found.stages_ms["landed"]))


def landing(row: own.Row, found: Any) -> tuple[float, float]:
    """From landing to the first token."""
    measured, predicted = (one.ttft_ms - one.leg_ms - one.stages_ms["landed"] for one in (row, found))
    return float(np.nanmedian(measured)), float(np.median(predicted))


def weights_efficiency() -> tuple[float, float]:
    """(milliseconds of a lone decode's step without a connector, the rate of reading weights that gives it)."""
    text = (RESULTS / "decode_cost_8b.jsonl").read_text(encoding="utf-8").splitlines()
    (step_ms,) = (line["median"] for line in map(json.loads, text) if (line["variant"], line["decodes"]) == ("none", 1))
    low, high = 0.5, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        hardware = H200.with_calibration(replace(H200.calibration, weights_efficiency=middle))
        slow = EngineCost(SHAPE, hardware).step_s((), 1, 64 + 400 // 2) * 1e3 > step_ms
        low, high = (middle, high) if slow else (low, middle)
    return step_ms, low


def fitted() -> Iterator[tuple[str, float, float, str]]:
    """Every constant: its name, what the rows say, what the profile has, which rows."""
    serving, calibration = H200.serving, H200.calibration
    short_hooks, long_hooks = (HOOKS, "chunk", "open:1024:4:16"), (HOOKS, "chunk", "open:16000:0.5:10")
    short = (THIRD, "chunk", "open:1024:4:24")
    busy = [(THIRD, "chunk", "busy:16000:0.5:10:2000")]
    busy += [(LOOP, mode, "busy:16000:0.5:12:2000") for mode in ("chunk", "packed")]
    whole_short, whole_long = (LOOP, "packed", "open:1024:4:32"), (LOOP, "packed", "open:16000:0.5:20")
    whole_loop = (LOOP, "packed", "loop:16000:10")

    step_ms, rate = weights_efficiency()
    yield "weights_efficiency", rate, calibration.weights_efficiency, f"decode_cost_8b.jsonl: {step_ms} ms"
    factor = searched(short, leg, 0.5, 1.5, lambda x: ({}, {"launch_factor": x}))
    yield "launch_factor", factor, calibration.launch_factor, f"{short}: mean leg"

    copied = between(long_hooks, "launched", "loaded") - H200.pass_launch_s
    yield (
        "fused_scatter_bytes_per_s",
        LONG * BYTES / copied,
        H200.fused_scatter_bytes_per_s,
        f"{long_hooks}: launched to loaded",
    )
    bench = json.loads((RESULTS / "bench_transfer_32b_shape.json").read_text(encoding="utf-8"))["rows"]
    parts = [(min(row["bytes"], 512 << 20), row["gather_ms"] / 1e3) for row in bench if row["path"] == "packed"]
    (less, sooner), (more, later) = sorted(parts)
    yield (
        "fused_gather_bytes_per_s",
        (more - less) / (later - sooner),
        H200.fused_gather_bytes_per_s,
        "bench_transfer: first parts",
    )

    load_s, load_each_s = line_through(*(between(row, "asked", "launched") for row in (short_hooks, long_hooks)))
    yield "load_s", load_s, serving.load_s, f"{short_hooks}, {long_hooks}: asked to launched"
    yield "load_per_token_s", load_each_s, serving.load_per_token_s, "the same"
    cost = EngineCost(SHAPE, H200)
    prepared = (
        until_noted(row) - serving.decode_launch_s - cost.step_s((), 1, length)
        for row, length in ((short_hooks, SHORT), (long_hooks, LONG))
    )
    prepare_s, prepare_each_s = line_through(*prepared)
    yield "prepare_s", prepare_s, serving.prepare_s, "the same: asked to finished, less a decode step and its launch"
    yield "prepare_per_token_s", prepare_each_s, serving.prepare_per_token_s, "the same"

    yield "landed_s", between(short, "written", "landed") - NVLINK.message_s, serving.landed_s, f"{short}: from written"
    size = SHORT * BYTES
    posting_s = post_s(NVLINK, -(-size // (32 << 20)), size, order="allocated")
    yield "part_s", between(short, "gathered", "posted") - posting_s, serving.part_s, f"{short}: gathered to posted"
    seen_s = gather_s(H200, size, busy=True, fused=True) + serving.transfer_poll_s
    result_s = seen_s - serving.client_out_s - until(short, "gathered")
    yield "result_s", result_s, calibration.result_s, f"{short}: the gather, seen before P's leg ends"
    out_s = serving.client_out_s + calibration.answer_per_token_s * SHORT
    start_short = until(whole_short, "gathered") + out_s - seen_s
    whole = {"transfer_start_per_token_s": 0.0}
    slow = searched(whole_long, landed, 0.0, 20e-3, lambda x: (whole | {"transfer_start_s": x}, {}))
    start_s, start_each_s = line_through(start_short, slow)
    yield "transfer_start_s", start_s, serving.transfer_start_s, f"{whole_short}: gathered, {whole_long}: landed"
    yield "transfer_start_per_token_s", start_each_s, serving.transfer_start_per_token_s, "the same"
    beside_s = each_part(whole_loop, "gather_ms") - each_part(whole_long, "gather_ms")
    steps_s = [cost.step_s([(8192, 0)]), cost.step_s([(LONG - 8192, 8192)])]
    layer_s = statistics.fmean(steps_s) / SHAPE.layers
    yield "beside_layers", beside_s / layer_s, H200.beside_layers, f"{whole_loop}, {whole_long}: gather_ms of a part"
    ids_s = (until(busy[0], "gathered") - until(busy[1], "gathered")) / LONG
    yield "answer_per_token_s", ids_s, calibration.answer_per_token_s, f"{busy[:2]}: gathered"
    each = [searched(row, landing, 0.0, 2e-3, lambda x: ({}, {"stream_s": x})) for row in busy]
    yield (
        "stream_s",
        statistics.fmean(each),
        calibration.stream_s,
        f"mean of {len(busy)}, {busy}: landing to first token",
    )


def main() -> None:
    """Print every constant."""
    for name, found, has, rows in fitted():
        print(f"{name:28} {found:11.4g}  profile {has:11.4g}  {rows}")


if __name__ == "__main__":
    main()
