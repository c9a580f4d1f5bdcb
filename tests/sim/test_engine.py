"""An engine's steps: what the scheduler puts into them, in which order, and when they begin and end."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings

from pushkv.model.timing import EngineCost, profiles
from pushkv.sim.request import Request
from pushkv.sim.scheduler import Batch
from pushkv.sim.ticks import ticks
from pushkv.sim.world import World

from .worlds import Row, clusters, completed, scenario, world


class Step(NamedTuple):
    """One launched step: when the device begins and ends with it, how many decode, and the chunks (request, new,
    before)."""

    start: int
    end: int
    count: int
    context: int
    chunks: list[tuple[int, int, int]]
    running: int


Steps = dict[str, list[Step]]


def watch(made: World) -> Steps:
    """Record the steps of every engine of ``made``."""
    steps: Steps = defaultdict(list)
    for name, engine in made.engines.items():

        def note(start: int, batch: Batch, name: str = name, engine: Any = engine) -> None:
            chunks = [(request.index, new, before) for request, new, before in batch.parts]
            steps[name].append(Step(start, batch.end, batch.count, batch.context, chunks, engine.running))

        engine.on_step = note
    return steps


def run(rows: list[Row], **flags: Any) -> tuple[World, Steps]:
    made = world(scenario(**{"mode": "pushkv", "path": "packed", **flags}), rows, fast=False)
    steps = watch(made)
    made.go()
    return made, steps


def test_a_prompt_longer_than_the_budget_goes_in_chunks() -> None:
    _, steps = run([(0.0, 20_000, 2)])
    assert [step.chunks for step in steps["P0"]] == [[(0, 8192, 0)], [(0, 8192, 8192)], [(0, 3616, 16_384)]]


def test_prompts_that_wait_share_the_next_step() -> None:
    """Three come while the first is computed: the next step takes 8,192 tokens of them, in order, the last one in
    part."""
    _, steps = run([(0.0, 8000, 2), (0.01, 5000, 2), (0.02, 3000, 2), (0.03, 500, 2)])
    assert [step.chunks for step in steps["P0"]] == [
        [(0, 8000, 0)],
        [(1, 5000, 0), (2, 3000, 0), (3, 192, 0)],
        [(3, 308, 192)],
    ]


def test_no_more_than_max_num_seqs_run() -> None:
    _, steps = run([(0.0, 100, 50)] * 12, max_num_seqs=3)
    assert max(step.running for step in steps["D0"]) == 3
    assert max(len(step.chunks) for step in steps["P0"]) <= 3
    assert {step.count for step in steps["D0"]} <= {0, 1, 2, 3}


def test_a_prefix_that_p_has_is_not_computed() -> None:
    _, steps = run([(0.0, 1000, 2)], prefill_cached_fraction=0.5)
    assert [step.chunks for step in steps["P0"]] == [[(0, 504, 496)]], "whole blocks of 16"
    _, steps = run([(0.0, 1000, 2)], prefill_cached_fraction=1.0)
    assert [step.chunks for step in steps["P0"]] == [[(0, 1, 999)]], "the last token is always computed"


def test_decode_steps_follow_each_other_on_the_device_and_cost_their_context() -> None:
    """With async scheduling the next step is launched while one runs: the device never waits, and each step is one
    token of context dearer."""
    made, steps = run([(0.0, 2000, 100)])
    base_s, slope_s = EngineCost(profiles.model("qwen3-8b"), profiles.hardware("h200")).decode_line(1)
    decodes = steps["D0"]
    assert len(decodes) == 100
    for number, step in enumerate(decodes):
        assert (step.count, step.context) == (1, 2000 + number)
        if number:
            assert step.start == decodes[number - 1].end
            assert step.end - step.start == ticks(base_s) + ticks(slope_s) * step.context
    assert made.engines["D0"].steps == 100


def test_a_batch_of_decodes_is_one_line_of_cost() -> None:
    _, steps = run([(0.0, 500 + 100 * i, 60) for i in range(8)])
    cost = EngineCost(profiles.model("qwen3-8b"), profiles.hardware("h200"))
    full = [step for step in steps["D0"] if step.count == 8]
    assert len(full) > 20
    for step in full[2:]:
        base_s, slope_s = cost.decode_line(8)
        assert step.end - step.start == ticks(base_s) + ticks(slope_s) * step.context


def preemptions(made: World, name: str) -> list[tuple[int, list[int]]]:
    """Record who is preempted on an engine, and who runs there then, oldest first."""
    engine, seen = made.engines[name], list[tuple[int, list[int]]]()
    real = engine._preempt

    def note(request: Request) -> None:
        seen.append((request.index, [r.index for r in (*engine.active, *engine.prefilling)]))
        real(request)

    engine._preempt = note  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("mode", ["pull", "push", "pushkv"])
def test_the_youngest_is_preempted_and_computed_again(mode: str) -> None:
    """Twelve that grow beyond D's cache. Who is thrown out came last; he comes back with his prompt and what he had
    said, and says the rest."""
    rows: list[Row] = [(0.05 * i, 200, 300) for i in range(12)]
    made = world(scenario(mode=mode, num_blocks=80), rows, fast=False)
    steps, thrown = watch(made), preemptions(made, "D0")
    made.go()
    assert len(thrown) >= 5
    assert all(index == running[-1] for index, running in thrown)
    assert made.totals().preemptions_decode == len(thrown)
    again = [chunk for step in steps["D0"] for chunk in step.chunks]
    assert {index for index, _, _ in again} == {index for index, _ in thrown}
    assert all(200 < new + before < 500 for _, new, before in again)
    said = sum(step.count for step in steps["D0"]) + len(again)
    assert said == 12 * 300


def test_a_step_that_preempts_lets_nobody_in() -> None:
    """As in vLLM: else the one just thrown out would be let in again, compute a chunk and be thrown out, for ever,
    while others wait. (Nor does it come back before there is room for all of it, so it takes many to see some.)"""
    rows: list[Row] = [(0.2, 263, 117), (0.2, 1271, 83)] * 16
    plan = scenario(mode="pull", num_blocks=48, max_num_seqs=2, block_size=32, token_budget=256)
    made = world(plan, rows, fast=False)
    engine = made.engines["P0"]
    seen: list[bool] = []
    real = engine._schedule

    def check(now: int) -> Batch | None:
        thrown, waited = engine.preemptions, len(engine.waiting)
        batch = real(now)
        if engine.preemptions > thrown:
            seen.append(len(engine.waiting) == waited + engine.preemptions - thrown)
        return batch

    engine._schedule = check  # type: ignore[method-assign]
    made.go()
    assert len(seen) > 10 and all(seen)
    assert completed(made) == 32


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(clusters)
def test_limits_hold_in_every_step(case: tuple[dict[str, Any], list[Row]]) -> None:
    """Budget, places, one step at a time on the device, chunks that follow on, blocks for all tokens computed."""
    flags, rows = case
    made = world(scenario(**flags), rows, fast=False)
    plan = made.scenario
    steps: Steps = defaultdict(list)
    for name, engine in made.engines.items():

        def note(start: int, batch: Batch, name: str = name, engine: Any = engine) -> None:
            for request, new, before in batch.parts:
                assert len(request.blocks) * plan.block_size >= before + new
            taken = engine.pool.blocks - len(engine.pool)
            assert taken <= engine.pool.blocks
            chunks = [(request.index, new, before) for request, new, before in batch.parts]
            steps[name].append(Step(start, batch.end, batch.count, batch.context, chunks, engine.running))

        engine.on_step = note
    made.go()
    for all_steps in steps.values():
        done: dict[int, int] = {}
        for number, step in enumerate(all_steps):
            assert step.end > step.start
            assert sum(new for _, new, _ in step.chunks) + step.count <= max(plan.token_budget, step.count)
            assert step.running <= plan.max_num_seqs
            if number:
                assert step.start >= all_steps[number - 1].end
            for index, new, before in step.chunks:
                assert new > 0
                assert before in (0, done.get(index, before)), "goes on where it was, or from the start"
                done[index] = before + new
