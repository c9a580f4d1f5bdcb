"""The published P5en point, as this project reads it: scenario, prompts, arrivals, and what D did before.

Decides every assumption that the scripts of this folder share; README.md says where each comes from.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pushkv.sim import scenario as scenarios
from pushkv.sim.blocks import BlockPool
from pushkv.sim.metrics import RequestLog
from pushkv.sim.trace import PREFILL, TraceWriter
from pushkv.sim.workload import Workload
from pushkv.sim.world import World

T, R = TypeVar("T"), TypeVar("R")
History = tuple[str, float, int, int]

MODES = ("pull", "push")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
RATES = (1, 2, 4, 8)
INPUT, OUTPUT, PROMPTS = 16384, 128, 100
PUBLISHED_TTFT_MS = {"pull": 1744.0, "push": 540.0}
PUBLISHED_TPOT_MS = {"pull": 10.4, "push": 7.0}
WITHIN = 0.15
HISTORY_MS = 80.0
"""P's prefill time while the server ran what came before; D's block pool hardly knows it."""
SWEEPS, HISTORIES = 2, 4
"""How often the whole sweep ran on the server before the scored run, and how many different such servers there are."""


def scenario(mode: str, cached: float, requests: int = PROMPTS) -> scenarios.Scenario:
    """One P and one D at TP8; ``cached`` is the part of each prompt that P finds in its prefix cache."""
    return scenarios.load(
        None,
        {
            "model": "qwen3-32b", "hardware": "h200", "calibration": "compiled", "fabric": "efa-p5en",
            "prefill_tp": 8, "decode_tp": 8, "max_num_seqs": 8, "block_size": 16, "mode": mode,
            "prefill_cached_fraction": cached, "input_len": INPUT, "output_len": OUTPUT, "requests": requests,
        },
    )  # fmt: skip


def prompts(count: int, length: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Lengths of sonnet prompts: whole lines of a poem, about 12 tokens each, up to ``length``."""
    short = np.abs(rng.normal(0.0, 3.0 * math.sqrt(length / 12), count))
    return np.minimum(length, np.round(length - short)).astype(np.int32)


def arrivals(count: int, rate: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Poisson arrivals as ``vllm bench serve`` makes them: stretched so that the last comes at ``count / rate``."""
    at = np.cumsum(rng.exponential(1.0 / rate, count))
    return at * (count / rate / at[-1])


def load(count: int, rate: float, seed: int, length: int = INPUT) -> Workload:
    """One benchmark run. Of one seed, a longer run begins with the gaps and lengths of a shorter one."""
    lengths = prompts(count, length, np.random.default_rng([seed, length, 1]))
    at = arrivals(count, rate, np.random.default_rng([seed, length, 2]))
    return Workload(at, lengths, np.full(count, OUTPUT, np.int32))


@dataclass(frozen=True, slots=True)
class Score:
    """Means over the prompts of one run; ``runs``: runs of blocks over blocks (1: every block by itself)."""

    ttft_ms: float
    tpot_ms: float
    runs: float


def score(mode: str, cached: float, work: Workload, pool: BlockPool | None) -> Score:
    """Run ``work`` on a D whose block pool is ``pool`` (None: a fresh one)."""
    log = go(mode, cached, work, pool)[0].log
    blocks = float(np.sum(-(-work.input_len // 16)))
    return Score(
        float(log.milliseconds("ttft").mean()),
        float(log.milliseconds("tpot").mean()),
        float(log.column("descriptors").sum()) / 8 / 64 / blocks,
    )


def history_of(mode: str, seed: int) -> History:
    """What D had served before the run of ``seed``, where nothing else is said."""
    return (mode, cached_for(HISTORY_MS), seed % HISTORIES, SWEEPS)


_histories: dict[History, BlockPool] = {}


def history(mode: str, cached: float, seed: int, sweeps: int = SWEEPS) -> BlockPool | None:
    """D's block pool after ``sweeps`` times every length at every rate, 100 prompts each, one run after the other;
    None without any."""
    key = (mode, cached, seed, sweeps)
    if sweeps and key not in _histories:
        _histories[key] = _serve(key)
    return _histories.get(key)


def parallel(function: Callable[[T], R], todo: Sequence[T], needed: Iterable[History]) -> Iterator[R]:
    """``function`` of each, in two processes, after the histories ``needed``."""
    keys = [key for key in dict.fromkeys(needed) if key[-1]]
    with multiprocessing.Pool(2) as workers:
        _histories.update(zip(keys, workers.map(_serve, keys, chunksize=1), strict=True))
    with multiprocessing.Pool(2) as workers:  # forked now: these have the histories
        yield from workers.imap(function, todo)


def _serve(key: History) -> BlockPool:
    mode, cached, seed, sweeps = key
    parts, start_s = [], 0.0
    for sweep in range(sweeps):
        for length in LENGTHS:
            for rate in RATES:
                run = load(PROMPTS, rate, 1_000_000 + 1000 * seed + 100 * sweep + rate, length)
                parts.append((run.arrival_s + start_s, run.input_len))
                start_s += 2 * PROMPTS / rate + 60.0  # long enough for the last to leave
    at = np.concatenate([a for a, _ in parts])
    work = Workload(at, np.concatenate([n for _, n in parts]), np.full(len(at), OUTPUT, np.int32))
    return go(mode, cached, work, None)[0].engines["D0"].pool


def prefill_ms(cached: float) -> float:
    """What a lone 16k prompt takes P, from its first step to its last token's."""
    _, trace = go("push", cached, load_one(), None, traced=True)
    (span,) = [span for span in trace.spans if span.name == PREFILL]
    return (span.end_s - span.start_s) * 1e3


def load_one(length: int = INPUT) -> Workload:
    """One prompt."""
    return Workload(np.zeros(1), np.array([length], np.int32), np.array([OUTPUT], np.int32))


@cache
def cached_for(target_ms: float) -> float:
    """The cached part, in whole blocks, with which P's lone prefill takes ``target_ms``, as closely as blocks allow."""
    low, high = 0, INPUT // 16
    while high - low > 1:
        middle = (low + high) // 2
        if prefill_ms(middle * 16 / INPUT) > target_ms:
            low = middle
        else:
            high = middle
    return high * 16 / INPUT


def go(
    mode: str, cached: float, work: Workload, pool: BlockPool | None, *, traced: bool = False
) -> tuple[World, TraceWriter]:
    """Run ``work`` as `score` does; the world afterwards, and what was recorded where ``traced``."""
    trace = TraceWriter()
    world = World(scenario(mode, cached, len(work)), work, RequestLog(), trace=trace if traced else None)
    if pool is not None:
        world.engines["D0"].pool = copy.deepcopy(pool)
    world.go()
    return world, trace
