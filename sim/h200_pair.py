"""The measurement on a pair of H200, simulated as it was made.

Decides what the servers and the client did, in which order: how the requests of all points follow each other in one
run. Holds no constant that was fitted: those stand in the profiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from pushkv.sim import scenario, world
from pushkv.sim.measured import Point, Server
from pushkv.sim.metrics import Floats
from pushkv.sim.progress import Progress
from pushkv.sim.workload import Workload

__all__ = ["BLOCK", "Prediction", "positions", "replay", "workload"]

BLOCK = 16
"""Tokens of a KV block, of all servers."""

CACHE_TOKENS = {"qwen3-8b": 797_038, "qwen3-32b": 258_161}  # of either server, from the README of the data

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


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says about the answered requests of one `Point`; milliseconds.

    ``stages_ms``: when each stage of a hand-over was over, from the end of P's leg.
    """

    leg_ms: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    stages_ms: Mapping[str, Floats] = field(default_factory=dict)


def replay(server: Server, calibration: str | None = None, *, progress: Progress | None = None) -> list[Prediction]:
    """Simulate all that ``server`` was asked, in one world: its pools of blocks are carried from point to point.

    ``calibration`` replaces the server's own. One prediction per point, of its answered requests, in their order.
    """
    blocks = CACHE_TOKENS.get(server.model)
    load = workload(server)
    plan = scenario.load(
        None,
        {
            "model": server.model,
            "mode": server.mode,
            "calibration": calibration or server.calibration,
            "num_blocks": None if blocks is None else blocks // BLOCK,
            "requests": len(load),
        },
    )
    log = world.run(plan, arrivals=load, progress=progress).log
    log = log.rows(np.argsort(log.column("arrival_s"), kind="stable"))  # a log is in the order in which requests end
    found = []
    for first, point in positions(server):
        rows = first + np.flatnonzero(point.answered)
        leg, ttft, tpot = (log.milliseconds(name)[rows] for name in ("prefill", "ttft", "tpot"))
        found.append(Prediction(leg, ttft, tpot))
    return found


def workload(server: Server) -> Workload:
    """Every request that ``server`` was sent, as late as the client sent it."""
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


def positions(server: Server) -> Iterator[tuple[int, Point]]:
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
