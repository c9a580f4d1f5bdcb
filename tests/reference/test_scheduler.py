"""The scheduler side on a pair of engines whose protocol is the real one."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import events as ev

from .vllm_like import Pair, Status

PATHS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "direct"])
ORDERS = pytest.mark.parametrize("first", ["prefill", "decode", "together"])


@PATHS
@ORDERS
def test_a_prompt_is_handed_over(packed: bool, first: str) -> None:
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    if first == "prefill":
        p = pair.prefill(prompt)
        pair.steps(3)
        d = pair.decode(prompt)
    else:
        d = pair.decode(prompt)
        if first == "decode":
            pair.steps(3)
        p = pair.prefill(prompt)
    pair.until_quiet()
    assert p.status is d.status is Status.STOPPED
    assert d.load == ([(20, False)] if packed else [(21, True), (0, False)])
    pair.check_nothing_left()


def test_packed_holds_no_block_while_it_waits() -> None:
    pair = Pair()
    prompt = pair.prompt(21)
    pair.decode(prompt)
    pair.steps(5)
    assert len(pair.d.free) == 64


@PATHS
def test_a_local_prefix_is_not_asked_for(packed: bool) -> None:
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    d = pair.decode(prompt, hit=8)
    pair.steps()
    pair.prefill(prompt)
    pair.until_quiet()
    assert pair.d.engine.arrivals == [(d_key(pair), 13, 21, packed)]
    assert d.load[0] == ((12, False) if packed else (13, True))
    pair.check_nothing_left()


def d_key(pair: Pair) -> str:
    return pair.d.engine.arrivals[0][0]


@pytest.mark.parametrize("then", [0, 4, 12, 20])
@PATHS
def test_a_local_prefix_may_change_until_the_load(packed: bool, then: int) -> None:
    """Smaller than what landed: computed here, never a gap. Larger: less is scattered."""
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    d = pair.decode(prompt, hit=8)
    pair.steps()
    d.hit = then
    pair.prefill(prompt)
    pair.until_quiet()
    assert d.status is Status.STOPPED
    useful = 20 - then if packed and then >= 8 else 0
    assert d.load[0][0] == useful
    pair.check_nothing_left()


@PATHS
def test_a_full_local_prefix_lets_the_prefill_engine_go(packed: bool) -> None:
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    d = pair.decode(prompt, hit=20)
    p = pair.prefill(prompt)
    pair.until_quiet()
    assert (p.status, d.status) == (Status.STOPPED, Status.STOPPED)
    assert d.load == [(0, False)]
    pair.check_nothing_left()


@pytest.mark.parametrize("tokens", [1, 2, 3])
@PATHS
def test_tiny_prompts(packed: bool, tokens: int) -> None:
    pair = Pair(packed=packed)
    prompt = pair.prompt(tokens)
    p, d = pair.prefill(prompt), pair.decode(prompt)
    pair.until_quiet()
    assert p.status is d.status is Status.STOPPED
    assert bool(pair.d.engine.arrivals) == (tokens > 1)
    pair.check_nothing_left()


def test_requests_without_our_parameters_are_left_alone() -> None:
    pair = Pair()
    for params in (None, {}, {"something": "else"}):
        request = pair.prefill(pair.prompt(9))
        request.kv_transfer_params = params
    pair.p.side.prefill._legs.clear()
    pair.p.side.prefill._booked.clear()
    pair.p.side.prefill._queued.clear()
    for params in (None, {}, {"something": "else"}):
        request = pair.decode(pair.prompt(9), params={})
        pair.d.side.decode.finished(request)
        request.kv_transfer_params = params
    pair.steps(6)
    assert not pair.d.requests and not pair.p.requests


# ---------------------------------------------------------------- aborts


@pytest.mark.parametrize("steps", range(8))
@PATHS
@ORDERS
def test_the_decode_leg_may_be_aborted_at_any_step(packed: bool, first: str, steps: int) -> None:
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    if first == "prefill":
        pair.prefill(prompt)
        pair.steps(2)
    d = pair.decode(prompt, max_tokens=4)
    if first == "together":
        pair.prefill(prompt)
    for _ in range(steps):
        pair.steps()
    pair.d.abort(d)
    if first == "decode":
        pair.prefill(prompt)
    pair.until_quiet()
    pair.check_nothing_left()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("steps", range(5))
@PATHS
def test_aborts_between_the_halves_of_a_step(packed: bool, steps: int, half: bool) -> None:
    """The news are in the queue, and vLLM does not know them yet."""
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    pair.prefill(prompt)
    d = pair.decode(prompt, max_tokens=4)
    for _ in range(steps):
        pair.p.step()
        pair.d.step()
        pair.cluster.settle()
    if half:
        pair.p.step()
    pair.d.abort(d)
    pair.until_quiet()
    pair.check_nothing_left()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("recompute", [True, False])
@PATHS
def test_the_prefill_leg_may_be_aborted_at_any_step(packed: bool, recompute: bool, steps: int) -> None:
    pair = Pair(packed=packed, p={"chunk": 6}, d={"recompute": recompute})
    prompt = pair.prompt(21)
    p, d = pair.prefill(prompt), pair.decode(prompt)
    pair.steps(steps)
    ended = p.over
    pair.p.abort(p)
    pair.until_quiet()
    assert d.status is (Status.STOPPED if recompute or ended else Status.ERROR)
    pair.check_nothing_left()


@PATHS
def test_writes_in_flight_keep_the_blocks_of_an_aborted_request(packed: bool) -> None:
    """The fence: an abort frees nothing that somebody may still write into."""
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    pair.prefill(prompt)
    d = pair.decode(prompt)
    pair.cluster.stuck = True
    pair.steps(4)
    assert pair.p.engine.held_writes
    pair.d.abort(d)
    pair.steps(5)
    assert (len(pair.d.free) == 64) == packed  # packed: it never had a block
    assert pair.d.engine.ledger.landing_free == (61 if packed else 64)
    pair.cluster.stuck = False
    pair.p.engine.release_writes()
    pair.cluster.settle()
    pair.until_quiet()
    pair.check_nothing_left()


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("recompute", [True, False])
@PATHS
def test_a_prefill_engine_that_falls_silent(packed: bool, recompute: bool) -> None:
    pair = Pair(packed=packed, d={"recompute": recompute})
    prompt = pair.prompt(21)
    d = pair.decode(prompt)
    pair.prefill(prompt, transfer_id="another")  # so that they know each other
    pair.steps(3)
    pair.p_falls_silent()
    assert d.status is (Status.STOPPED if recompute else Status.ERROR)


@PATHS
def test_the_log_says_why_a_prompt_did_not_come(packed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's answer is "Internal server error", whatever the reason: under the request's name the log has it, once."""
    pair = Pair(packed=packed, d={"recompute": False})
    prompt = pair.prompt(21)
    unnamed = pair.decode(prompt, params={"remote_port": "here"})
    given_up = pair.decode(prompt, transfer_id="given up")
    late, silent = pair.decode(prompt), pair.decode(prompt, transfer_id="never")
    pair.prefill(prompt)
    pair.d.abort(given_up)
    pair.cluster.stuck = True
    pair.steps(4)
    pair.p_falls_silent()
    said: dict[str, list[tuple[str, str]]] = {one.request_id: [] for one in (unnamed, given_up, late, silent)}
    for record in caplog.records:
        name, peer, reason = record.args
        said[name].append((peer, reason))
    assert said[unnamed.request_id] == [("'P'", "remote_port is missing or not from 1 to 65535")]
    assert said[given_up.request_id] == []
    assert said[late.request_id] == said[silent.request_id] == [("'P'", "peer silent")]
    assert unnamed.status is late.status is silent.status is Status.ERROR


def test_a_direct_load_that_fails_unsettled_gives_its_error_at_once_and_its_blocks_later() -> None:
    pair = Pair(packed=False, d={"recompute": False})
    prompt = pair.prompt(21)
    pair.prefill(prompt)
    d = pair.decode(prompt)
    pair.cluster.stuck = True
    pair.steps(4)
    assert pair.p.engine.held_writes and d.status is Status.REMOTE
    pair.p_falls_silent()
    assert d.status is Status.ERROR
    assert d.request_id in pair.d.requests and len(pair.d.free) < 64
    pair.cluster.cut.clear()
    pair.cluster.stuck = False
    pair.p.engine.release_writes()
    pair.until_quiet(seconds=1.0)
    pair.check_nothing_left()


def test_a_direct_load_that_fails_unsettled_is_not_computed_into_the_same_blocks() -> None:
    pair = Pair(packed=False, d={"recompute": True})
    prompt = pair.prompt(21)
    pair.prefill(prompt)
    d = pair.decode(prompt)
    pair.cluster.stuck = True
    pair.steps(4)
    pair.p_falls_silent()
    assert d.status is Status.REMOTE
    pair.cluster.cut.clear()
    pair.cluster.stuck = False
    pair.p.engine.release_writes()
    pair.until_quiet(seconds=1.0)
    assert d.status is Status.STOPPED
    pair.check_nothing_left()


def test_no_block_waits_for_a_prompt_where_its_failure_could_not_be_told() -> None:
    """vLLM 0.26 ends when a load into the blocks of several groups is said to have failed: none is asked for."""
    pair = Pair(packed=False, d={"recompute": False, "failed_requests": False, "may_fail": False})
    arrives, lost = pair.prompt(21), pair.prompt(21, 1)
    pair.prefill(arrives)
    d = pair.decode(arrives)
    pair.until_quiet(seconds=1.0)
    assert d.status is Status.STOPPED
    late = pair.decode(lost, "never")
    pair.steps(4)
    assert len(pair.d.free) == 64 and late.status is not Status.REMOTE
    pair.p_falls_silent()
    pair.until_quiet(seconds=1.0)
    assert late.status is Status.STOPPED  # computed, whatever the policy
    pair.check_nothing_left()


# ---------------------------------------------------------------- preemption, memory, the rest


@PATHS
def test_a_prefill_that_is_preempted_goes_on_later(packed: bool) -> None:
    pair = Pair(packed=packed, p={"chunk": 6})
    prompt = pair.prompt(21)
    p, d = pair.prefill(prompt), pair.decode(prompt)
    pair.steps(2)
    pair.p.preempt(p)
    pair.until_quiet()
    assert p.preemptions == 1 and d.load[0][0] >= 20
    assert pair.p.engine.fenced
    pair.check_nothing_left()


@PATHS
def test_a_decode_that_is_preempted_after_its_load_computes_here(packed: bool) -> None:
    pair = Pair(packed=packed)
    prompt = pair.prompt(21)
    pair.prefill(prompt)
    d = pair.decode(prompt, max_tokens=30)
    pair.steps(8)
    assert d.status is Status.RUNNING
    pair.d.preempt(d)
    pair.until_quiet()
    assert d.status is Status.STOPPED and d.load[-1] == (0, False)
    pair.check_nothing_left()


def test_a_prefill_preempted_in_its_last_step_is_not_delivered() -> None:
    """Old versions end such a request without its blocks: the decode engine is told, and nothing is held."""
    pair = Pair(d={"recompute": True})
    prompt = pair.prompt(21)
    p, d = pair.prefill(prompt), pair.decode(prompt)
    pair.p.side.prefill.scheduled({p.request_id: 21}, ())
    pair.p.waiting.remove(p)
    p.status = Status.STOPPED
    p.num_computed_tokens = 0
    pair.p._free(p, False)
    pair.until_quiet()
    assert d.status is Status.STOPPED and d.load == [(0, False)]
    pair.check_nothing_left()


@pytest.mark.parametrize("holding_first", [True, False], ids=["0.32", "0.26"])
@PATHS
def test_a_small_cache_on_both_sides(packed: bool, holding_first: bool) -> None:
    """Opposite orders of admission, caches of two requests, many requests: everything ends."""
    d = {"blocks": 12, "recompute": True, "holding_first": holding_first}
    pair = Pair(packed=packed, p={"blocks": 12}, d=d, landing_segments=6)
    prompts = [pair.prompt(17, seed=n) for n in range(8)]
    for n in range(8):
        pair.prefill(prompts[n], f"t{n}")
        pair.decode(prompts[7 - n], f"t{7 - n}")
    pair.until_quiet(most=600, seconds=0.1)
    pair.check_nothing_left()


@PATHS
def test_reset_drops_what_the_old_weights_computed(packed: bool) -> None:
    pair = Pair(packed=packed, d={"recompute": True})
    prompt = pair.prompt(21)
    d = pair.decode(prompt)
    pair.prefill(prompt)
    pair.d.step()
    pair.cluster.settle()
    pair.p.step()
    pair.cluster.settle()
    assert pair.d.side.reset()
    pair.until_quiet()
    assert d.load == [(0, False)]
    pair.check_nothing_left()


@PATHS
def test_hybrid_models_leave_the_last_token_to_the_decode_engine(packed: bool) -> None:
    pair = Pair(packed=packed, p={"backoff": 1}, d={"backoff": 1})
    prompt = pair.prompt(22)
    p, d = pair.prefill(prompt), pair.decode(prompt)
    pair.until_quiet()
    assert p.num_prompt_tokens == 21 and p.returned is not None
    assert d.load[0] == ((21, False) if packed else (21, True))
    pair.check_nothing_left()


def test_opaque_formats_move_whole_units() -> None:
    """The last block is copied as it is; what is behind the prompt in it is not read."""
    pair = Pair(p={"unit_tokens": 4}, d={"unit_tokens": 4})
    prompt = pair.prompt(20)
    pair.prefill(prompt)
    d = pair.decode(prompt)
    pair.until_quiet()
    assert d.load == [(19, False)]
    pair.check_nothing_left()


def test_asking_again_costs_a_look_up() -> None:
    """Thousands of times a second: the office is asked for news, nothing else."""
    pair = Pair()
    d = pair.decode(pair.prompt(2000))
    pair.steps(2)
    told = len(pair.d.engine.told)
    for _ in range(1000):
        assert pair.d.side.matched_tokens(d, 0) == (None, False)
    assert len(pair.d.engine.told) == told


def test_tables_are_bounded_by_what_is_open() -> None:
    pair = Pair()
    for n in range(60):
        prompt = pair.prompt(9, seed=n)
        pair.prefill(prompt, f"t{n}")
        d = pair.decode(prompt, f"t{n}")
        if n % 3 == 0:
            pair.steps(n % 4)
            pair.d.abort(d)
        pair.until_quiet()
    pair.check_nothing_left()


def test_an_engine_that_stops_drains() -> None:
    pair = Pair()
    pair.p.side.stop(1.0)
    assert pair.p.engine.stopped


@pytest.mark.parametrize(("last", "wanted"), [(True, [0, 4, 12, 16, 22]), (False, [0, 4, 12, 16, 20])])
def test_chunks_are_told_of_in_whole_blocks(last: bool, wanted: list[int]) -> None:
    """And the rest of a block with the last one: at once, or where a group does not keep all tokens, at the end."""
    pair = Pair(p={"chunked": True, "chunked_last": last, "chunk": 6})
    prompt = pair.prompt(22)
    p, d = pair.prefill(prompt), pair.decode(prompt)
    pair.until_quiet()
    told = [one for one in pair.p.engine.told if isinstance(one, ev.Computed)]
    assert [one.tokens for one in told if not one.final] == wanted
    assert [one.tokens for one in told if one.final] == [22]
    assert p.status is d.status is Status.STOPPED
    assert d.load == [(21, False)]
    pair.check_nothing_left()


def test_an_aborted_prefill_keeps_its_blocks_while_a_chunk_is_gathered() -> None:
    pair = Pair(p={"chunked": True, "chunk": 6})
    prompt = pair.prompt(22)
    p = pair.prefill(prompt)
    d = pair.decode(prompt)
    pair.cluster.settle()
    pair.p.step()
    free = len(pair.p.free)
    pair.p.abort(p)  # nothing has looked at the step since
    assert len(pair.p.free) == free
    pair.cluster.settle()
    pair.p.step()
    assert len(pair.p.free) > free
    pair.until_quiet()
    assert d.status is Status.ERROR
    pair.check_nothing_left()
