"""`reset_cache` on the prefill engine: what was computed with the old weights is not sent, and nothing else is lost."""

from __future__ import annotations

import pytest

from .vllm_like import Pair, Status

PATHS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])


@PATHS
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])
def test_a_finished_prompt_that_waits_is_not_sent(packed: bool, recompute: bool) -> None:
    pair = Pair(packed=packed, d={"recompute": recompute})
    prompt = pair.prompt(21)
    p = pair.prefill(prompt)
    pair.steps(3)
    assert p.status is Status.STOPPED and pair.p.requests, "held for D"
    assert pair.p.side.reset()
    pair.steps(2)
    assert not pair.p.requests and len(pair.p.free) == 64
    d = pair.decode(prompt)
    pair.until_quiet(seconds=0.1)
    assert d.status is (Status.STOPPED if recompute else Status.ERROR)
    if recompute:  # else vLLM is given a load that fails
        assert d.load == [(0, False)]
    pair.check_nothing_left()


@PATHS
def test_a_prompt_that_has_not_begun_is_sent(packed: bool) -> None:
    """It is computed with the new weights."""
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    d, p = pair.decode(prompt), pair.prefill(prompt)
    assert pair.p.side.reset()
    pair.until_quiet()
    assert p.status is d.status is Status.STOPPED
    assert d.load[0] == ((20, False) if packed else (21, True))
    pair.check_nothing_left()


@PATHS
def test_a_prompt_whose_write_is_under_way_is_held_until_nothing_reads_it(packed: bool) -> None:
    pair = Pair(packed=packed, d={"recompute": True})
    prompt = pair.prompt(21)
    d, p = pair.decode(prompt), pair.prefill(prompt)
    pair.cluster.stuck = True
    pair.steps(4)
    held = 64 - len(pair.p.free)
    assert p.status is Status.STOPPED and (held > 0) == (not packed), "packed: its write reads staging memory"
    assert pair.p.side.reset()
    pair.steps(3)
    assert 64 - len(pair.p.free) == held
    pair.cluster.stuck = False
    pair.p.engine.release_writes()
    pair.until_quiet(seconds=0.1)
    assert d.status is Status.STOPPED
    pair.check_nothing_left()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_prompt_of_which_chunks_have_left_is_not_sent(steps: int) -> None:
    """Its first chunks are of the old weights. P's own request goes on; D computes all of the prompt."""
    pair = Pair(p={"chunked": True, "chunk": 6}, d={"recompute": True})
    prompt = pair.prompt(33)
    d, p = pair.decode(prompt), pair.prefill(prompt)
    pair.steps(steps)
    assert p.status is Status.RUNNING
    assert pair.p.side.reset()
    pair.until_quiet(seconds=0.1)
    assert p.status is d.status is Status.STOPPED
    assert all(not external for external, _ in d.load)
    pair.check_nothing_left()


@PATHS
def test_after_a_reset_prompts_are_handed_over_as_before(packed: bool) -> None:
    pair = Pair(packed=packed, d={"recompute": True})
    for number in range(3):
        prompt = pair.prompt(21, seed=number)
        d = pair.decode(prompt, f"t{number}")
        pair.prefill(prompt, f"t{number}")
        pair.until_quiet()
        assert d.load[0][0] and d.status is Status.STOPPED
        assert pair.p.side.reset() and pair.d.side.reset()
    pair.check_nothing_left()
