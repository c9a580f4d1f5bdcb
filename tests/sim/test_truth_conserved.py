"""Nothing is won or lost: tokens, bytes, descriptors, blocks, and entries in the books."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pushkv.model.timing import profiles
from pushkv.sim.scheduler import Batch
from pushkv.sim.world import World

from .worlds import WAYS, Row, clusters, completed, leaks, rest, scenario, way_name, world

SEGMENT = 32 << 20


class Tally:
    """Tokens that the engines of ``made`` compute, counted step by step."""

    def __init__(self, made: World) -> None:
        self.prompts: Counter[str] = Counter()
        self.made = 0
        for name, engine in made.engines.items():
            engine.on_step = self.prefill if name in made.prefills else self.decode

    def prefill(self, _: int, batch: Batch) -> None:
        assert batch.count == 0, "P does not decode"
        for request, new, _before in batch.parts:
            self.prompts[request.flight.id] += new

    def decode(self, _: int, batch: Batch) -> None:
        """One token for each that decodes, and one for each recomputed prompt that is complete with this step."""
        self.made += batch.count + sum(before + new == request.target for request, new, before in batch.parts)


def run_to_rest(flags: dict[str, Any], rows: list[Row]) -> tuple[World, Tally]:
    made = world(scenario(**flags), rows, fast=False)
    tally = Tally(made)
    made.go()
    rest(made, 5.0)
    return made, tally


def check(made: World, tally: Tally, rows: list[Row]) -> None:
    assert completed(made) == len(made.log) == len(rows)
    assert leaks(made) == []
    assert tally.made == sum(out for _, _, out in rows)
    plan, log = made.scenario, made.log
    order = np.argsort(log.column("arrival_s"), kind="stable")
    assert sorted(log.column("input_len")) == sorted(n for _, n, _ in rows)
    shape = profiles.model(plan.model)
    n, sent = log.column("input_len")[order], log.column("bytes")[order]
    assert (sent == n * shape.kv_bytes_per_token).all(), "each byte crosses the wire once, whatever the TP"
    descriptors = log.column("descriptors")
    poster, other = (plan.prefill_tp, plan.decode_tp) if plan.mode != "pull" else (plan.decode_tp, plan.prefill_tp)
    if plan.path == "packed" and plan.mode == "pushkv":
        pairs = max(poster, other)
        least = np.ceil(log.column("input_len") * (shape.kv_bytes_per_token / pairs) / SEGMENT)
        assert (descriptors >= least * pairs).all()
        assert (descriptors % pairs == 0).all()
    else:
        each = shape.layers * poster * max(1, other // poster)
        blocks = np.ceil(log.column("input_len") / plan.block_size)
        assert (descriptors % each == 0).all()
        assert (descriptors >= each).all()
        assert (descriptors <= blocks * each).all()
    totals = made.totals()
    if not totals.preemptions_prefill:
        cached = sum(_cached(made, length) for _, length, _ in rows)
        assert sum(tally.prompts.values()) == sum(length for _, length, _ in rows) - cached


def _cached(made: World, n: int) -> int:
    """Of a prompt, what P has by the scenario's word: whole blocks, and never the last token."""
    found = int(n * made.scenario.prefill_cached_fraction)
    return found - found % made.scenario.block_size if found < n else n - 1


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(clusters)
def test_nothing_is_lost_in_small_clusters_that_are_short_of_everything(case: tuple[dict[str, Any], list[Row]]) -> None:
    flags, rows = case
    check(*run_to_rest(flags, rows), rows)


TIGHT: list[tuple[str, dict[str, Any], list[Row]]] = [
    (
        "P preempts",
        {"num_blocks": 80, "token_budget": 256},
        [(0.001 * i, 1200, 5) for i in range(8)],
    ),
    ("D preempts", {"num_blocks": 60, "token_budget": 8192}, [(0.03 * i, 200, 400) for i in range(12)]),
    ("one at a time", {"num_blocks": 90, "max_num_seqs": 1}, [(0.01 * i, 300 + 50 * i, 20) for i in range(10)]),
]


@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize(("what", "flags", "rows"), TIGHT, ids=[what for what, _, _ in TIGHT])
def test_nothing_is_lost_by_preemption(way: dict[str, str], what: str, flags: dict[str, Any], rows: list[Row]) -> None:
    made, tally = run_to_rest({**way, **flags}, rows)
    totals = made.totals()
    if what == "P preempts":
        assert totals.preemptions_prefill > 0
    if what == "D preempts":
        assert totals.preemptions_decode > 0
        assert totals.kv_peak_decode == 1.0
    check(made, tally, rows)


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_several_engines_share_the_work(way: dict[str, str]) -> None:
    rows = [(0.01 * i, 100 + 37 * (i % 11), 10 + i % 7) for i in range(60)]
    made, tally = run_to_rest({**way, "prefill": 3, "decode": 2, "prefill_tp": 2, "decode_tp": 4}, rows)
    check(made, tally, rows)
    assert all(engine.steps > 0 for engine in made.engines.values())
