"""Which transfer a request of the scheduler side belongs to: parameters from the network, children, ambiguous ids."""

from __future__ import annotations

import pytest

from .vllm_like import Pair, Status


@pytest.mark.parametrize(
    "params",
    [
        {"remote_host": None},
        {"remote_port": 0},
        {"remote_port": "x"},
        {"remote_port": 70000},
        {"tp_size": 10**9},
        {"tp_size": True},
        {"remote_engine_id": ""},
        {"remote_engine_id": "a b"},
        {"transfer_id": 5},
        {"transfer_id": "x" * 5000},
    ],
)
@pytest.mark.parametrize("recompute", [True, False])
def test_parameters_come_from_the_network(params: dict[str, object], recompute: bool) -> None:
    pair = Pair(d={"recompute": recompute})
    d = pair.decode(pair.prompt(9), params=params)
    pair.until_quiet()
    assert d.status is (Status.STOPPED if recompute else Status.ERROR)
    pair.check_nothing_left()


def test_the_role_is_kept() -> None:
    pair = Pair(d={"recompute": True})
    wrong = pair.d.add(pair.prefill(pair.prompt(9)))
    pair.p.abort(wrong)
    wrong.status = Status.WAITING
    pair.d.requests[wrong.request_id] = wrong
    pair.until_quiet()
    assert wrong.status is Status.STOPPED and wrong.returned is None
    assert pair.d.side.counters["requests_refused:role"] == 1


def test_another_prompt_under_the_same_id_never_meets() -> None:
    pair = Pair(orphan_s=5.0)
    p = pair.prefill(pair.prompt(21, seed=1))
    d = pair.decode(pair.prompt(21, seed=2))
    pair.steps(4)
    assert d.status is Status.WAITING
    pair.until_quiet(seconds=0.5, most=2000)
    assert p.status is Status.STOPPED and d.status is Status.ERROR


def test_children_of_one_request_are_transfers_of_their_own() -> None:
    pair = Pair()
    prompt = pair.prompt(21)
    for child in range(3):
        pair.prefill(prompt, request_id=f"{child}_chatcmpl-x-1234567{child}")
    decodes = [pair.decode(prompt, request_id=f"{child}_chatcmpl-y-abcdef0{child}") for child in (2, 0, 1)]
    pair.until_quiet()
    assert all(d.status is Status.STOPPED and d.load[0] == (20, False) for d in decodes)
    pair.check_nothing_left()


def test_without_a_transfer_id_the_request_ids_meet() -> None:
    pair = Pair()
    prompt = pair.prompt(21)
    pair.prefill(prompt, transfer_id=None, request_id="chatcmpl-abc-00000001")
    d = pair.decode(prompt, transfer_id=None, request_id="chatcmpl-abc-99999999")
    pair.until_quiet()
    assert d.load == [(20, False)]
    pair.check_nothing_left()


def test_an_ambiguous_id_is_refused_on_both_sides() -> None:
    pair = Pair(d={"recompute": True})
    prompt = pair.prompt(21)
    p = [pair.prefill(prompt), pair.prefill(prompt)]
    d = [pair.decode(prompt), pair.decode(prompt)]
    pair.until_quiet()
    assert all(one.status is Status.STOPPED for one in p)
    assert [one.load[0][0] for one in d] == [20, 0]
    for one in (pair.p, pair.d):
        assert one.engine.counters["requests_refused:ambiguous"] == 1
    pair.check_nothing_left()


def test_what_the_router_gets_leads_the_decode_leg_to_the_prefill() -> None:
    """Sequential routers: the decode leg is sent with what the prefill leg returned."""
    pair = Pair()
    prompt = pair.prompt(21)
    p = pair.prefill(prompt, transfer_id=None, request_id="0_cmpl-abc-1-0000000a")
    pair.steps(3)
    assert p.returned is not None and p.returned["transfer_id"] == "cmpl-abc"
    d = pair.decode(prompt, transfer_id=None, request_id="0_cmpl-other-1-0000000b", params=p.returned)
    pair.until_quiet()
    assert d.load == [(20, False)]
    assert p.returned == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "P", "remote_host": "127.0.0.1",
        "remote_port": 5600, "tp_size": 1, "remote_request_id": "0_cmpl-abc-1-0000000a", "remote_block_ids": [],
        "remote_num_tokens": 21, "transfer_id": "cmpl-abc", "transfer_mode": "push",
    }  # fmt: skip
    pair.check_nothing_left()
