"""What vLLM's engine thread does for one request never looks at a prompt's tokens or at a list of blocks, however long.

The office is the real one. Its own thread may look, and does: a test says when it is that thread's turn.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.model.protocol import Settings
from pushkv.model.protocol import events as ev
from pushkv.reference.office import Office, Open, Table, Total
from pushkv.reference.ports import Address
from pushkv.reference.rules import Rules
from pushkv.reference.scheduler import SchedulerSide

FEW = 8
"""Items that may be looked at."""


class Long(list[int]):
    """A list that refuses to be walked while it is `closed`."""

    closed = True

    def __iter__(self) -> Iterator[int]:
        assert not self.closed, "somebody walks a long list on the engine thread"
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        assert not self.closed or not isinstance(index, slice) or len(range(*index.indices(len(self)))) <= FEW
        return super().__getitem__(index)


class Blocks:
    """vLLM's `KVCacheBlocks`: the lists of ids are made when asked for."""

    def __init__(self, ids: Long) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([*self._ids],)


class Desk:
    """An engine's scheduler side and office, and what the rank was told."""

    def __init__(self, *, path: str = "packed", backoff: int = 0, chunked: bool = False) -> None:
        self.told: list[Any] = []
        self.knocks: list[int] = []  # how many words lay there at each
        self.office: Office = Office(
            Settings(landing_segments=1 << 20), 1, path=path, segment_bytes=1, token_bytes=1,
            landing_bytes=lambda tokens, links: tokens, deliver=lambda rank, word: self.told.append(word),
            wake=lambda: self.knocks.append(len(self.office.inbox)), stop=lambda drain_s: None,
        )  # fmt: skip
        rules = Rules(Address("P", "h", 1, 1), block_tokens=16, backoff=backoff, chunked=chunked)
        self.side = SchedulerSide(self.office, rules)

    def turn(self, *lists: Long) -> None:
        """The office's thread has its turn."""
        for one in lists:
            one.closed = False
        self.office.turn(1.0)
        for one in lists:
            one.closed = True

    def report(self, record: ev.Record) -> None:
        self.office.report(0, record, 1.0)

    def of(self, kind: type) -> list[Any]:
        return [word for word in self.told if type(word) is kind]


def request(name: str, tokens: list[int], **params: Any) -> Any:
    return SimpleNamespace(
        request_id=name, prompt_token_ids=tokens, _all_token_ids=[*range(len(tokens))], num_prompt_tokens=len(tokens),
        num_computed_tokens=0, kv_transfer_params={"transfer_id": "t", **params}, lora_request=None, cache_salt=None,
        mm_features=[], max_tokens=1,
    )  # fmt: skip


FROM_P: dict[str, Any] = {
    "do_remote_prefill": True, "remote_engine_id": "P", "remote_host": "h", "remote_port": 1, "tp_size": 1,
}  # fmt: skip


@pytest.mark.parametrize("backoff", [0, 1], ids=["attention", "hybrid"])
def test_a_prefill(backoff: int) -> None:
    desk, tokens, blocks = Desk(backoff=backoff), Long(range(5000)), Long(range(313))
    one = request("cmpl-a-0-00000001", tokens, do_remote_decode=True)
    desk.side.on_new_request(one)
    desk.side.step({one.request_id: 5000}, None)
    one.num_computed_tokens = one.num_prompt_tokens
    keep, _ = desk.side.finished(one, (blocks,), True)
    assert keep
    desk.turn(tokens, blocks)
    key = desk.of(ev.Begin)[0].transfer_id
    assert key.startswith("t/0.0:") and desk.of(Table)[0].blocks[0] is blocks
    desk.report(ev.Released(key))
    desk.report(ev.Sent(key, True, ""))
    assert desk.side.step({}, None).sent == [one.request_id]
    assert not any(desk.office._handles.sizes().values())


def test_a_chunk_hands_over_the_lists_that_vllm_has_made() -> None:
    """The model runner appends to the first of them what later steps add; what a chunk means is what was there."""
    desk, tokens, first, more = Desk(chunked=True), Long(range(5000)), Long(range(200)), Long(range(200, 313))
    one = request("cmpl-a-0-00000001", tokens, do_remote_decode=True)
    name = one.request_id
    desk.side.on_new_request(one)
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
    new = SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=(first,))
    scheduled = {name: 3200}
    output = SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    assert desk.side.step(scheduled, None, output).chunks
    cached = SimpleNamespace(req_ids=[name], num_computed_tokens=[3200], new_block_ids=[(more,)], resumed_req_ids=set())
    scheduled = {name: 1800}
    output = SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=[], scheduled_cached_reqs=cached)
    assert desk.side.step(scheduled, None, output).chunks
    first.extend(range(200, 313))
    desk.turn(tokens, first, more)
    assert [(table.tokens, table.blocks) for table in desk.of(Table)] == [
        (3200, ([*range(313)],)), (5000, ([*range(313)],)),
    ]  # fmt: skip


def test_a_packed_load_takes_the_block_lists_that_vllm_has_made() -> None:
    desk, tokens, blocks = Desk(), Long(range(5000)), Long(range(313))
    one = request("cmpl-b-0-00000002", tokens, **FROM_P)
    assert desk.side.matched_tokens(one, 0) == (None, False)
    desk.side.step({}, None)
    desk.turn(tokens)
    key = desk.of(ev.Expect)[0].transfer_id
    assert desk.of(Total)[0].transfer_id == key and len(desk.of(Open)) == 1
    desk.report(ev.Offered(key, True))
    desk.report(ev.Landed(key))
    assert desk.side.matched_tokens(one, 0) == (4999, False)
    desk.side.allocated(one, Blocks(blocks), 4999)
    new = SimpleNamespace(req_id=one.request_id, block_ids=(blocks,))
    output = SimpleNamespace(scheduled_new_reqs=[new])
    (load,) = desk.side.step({one.request_id: 1}, None, output).load
    assert load.blocks[0] is blocks and load.transfer_id == key and load.request_id == one.request_id
    desk.side.finished(one, (blocks,), True)


def test_a_direct_load_has_its_block_lists_made_elsewhere() -> None:
    desk, tokens, blocks = Desk(path="direct"), Long(range(5000)), Long(range(313))
    one = request("cmpl-b-0-00000002", tokens, **FROM_P)
    desk.side.matched_tokens(one, 0)
    desk.turn(tokens)
    key = desk.of(ev.Expect)[0].transfer_id
    desk.report(ev.Offered(key, True))
    assert desk.side.matched_tokens(one, 0) == (5000, True)
    desk.side.allocated(one, Blocks(blocks), 5000)
    desk.side.step({}, None)
    desk.turn(blocks)
    assert desk.of(ev.Expose)[0].memory == (0, ([*range(313)],))
    desk.report(ev.Landed(key))
    assert desk.side.step({}, None).received == [one.request_id]


def test_the_second_of_two_with_the_same_key_is_refused_and_nothing_of_it_is_kept() -> None:
    desk = Desk()
    both = [request(f"cmpl-a-0-0000000{n}", [*range(50)], do_remote_decode=True) for n in range(2)]
    for one in both:
        desk.side.on_new_request(one)
    desk.side.step({one.request_id: 50 for one in both}, None)
    desk.turn()
    assert len(desk.of(ev.Begin)) == 1 and desk.office.counters["requests_refused:ambiguous"] == 1
    for one in both:
        one.num_computed_tokens = 50
        assert desk.side.finished(one, ([1, 2, 3, 4],), True)[0]
    desk.turn()
    assert desk.side.step({}, None).sent == [both[1].request_id]
    key = desk.of(ev.Begin)[0].transfer_id
    desk.report(ev.Sent(key, True, ""))
    desk.report(ev.Released(key))
    assert desk.side.step({}, None).sent == [both[0].request_id]
    assert not any(desk.office._handles.sizes().values()) and not len(desk.side.prefill)


def test_what_cannot_be_hashed_is_refused_beside_the_engine_thread() -> None:
    desk = Desk()
    one: Any = request("cmpl-b-0-00000002", [1, 2, "x"], **FROM_P)  # type: ignore[list-item]
    assert desk.side.matched_tokens(one, 0) == (None, False)
    desk.turn()
    some, later = desk.side.matched_tokens(one, 0)
    assert later and some  # the policy is to fail: one block is asked for, and reported as failed
    assert desk.office.counters["requests_refused:identity"] == 1
    assert not any(desk.office._handles.sizes().values())


def test_what_office_and_scheduler_both_count_adds_up() -> None:
    desk = Desk()
    one: Any = request("cmpl-b-0-00000002", [1, 2, "x"], **FROM_P)  # type: ignore[list-item]
    desk.side.matched_tokens(one, 0)
    desk.turn()
    for _ in range(2):  # the same id again, while the books still have it
        again = request("cmpl-c-0-00000003", [1, 2, 3], **FROM_P)
        desk.side.matched_tokens(again, 0)
        desk.side.finished(again, (), False)
    counters, _ = desk.side.readings()
    assert desk.office.counters["requests_refused:identity"] == desk.side.counters["requests_refused:identity"] == 1
    assert counters["requests_refused:identity"] == 2


def test_the_office_is_woken_once_for_all_that_a_pass_has_to_say() -> None:
    """Its thread wants the interpreter as soon as it is awake: it would take it from the rest of the pass."""
    desk = Desk()
    prompts = [request(f"cmpl-{n}-0-00000001", [n] * 50, do_remote_decode=True, transfer_id=f"p{n}") for n in range(4)]
    loads = [request(f"cmpl-{n}-0-00000002", [n] * 50, **FROM_P, transfer_id=f"d{n}") for n in range(4)]
    for one in prompts + loads:
        desk.side.on_new_request(one)
    for one in loads:
        desk.side.matched_tokens(one, 0)
    assert not desk.knocks
    desk.side.step({one.request_id: 50 for one in prompts}, None)
    assert desk.knocks == [12], "held, wanted, begun"
    desk.turn()
    for one in prompts:
        one.num_computed_tokens = 50
        assert desk.side.finished(one, ([1, 2, 3, 4],), True)[0]
    assert len(desk.knocks) == 1
    desk.side.over()
    assert desk.knocks == [12, 4]
    desk.turn()
    desk.side.step({}, None)
    desk.side.over()
    assert len(desk.knocks) == 2, "nothing was said"


def test_an_abort_is_told_at_once() -> None:
    """No step need follow."""
    desk = Desk()
    one = request("cmpl-a-0-00000001", [*range(50)], do_remote_decode=True)
    desk.side.on_new_request(one)
    desk.side.step({one.request_id: 50}, None)
    desk.turn()
    desk.side.finished(one, ([1, 2, 3, 4],), False)
    assert desk.knocks == [2, 1]
    other = request("cmpl-b-0-00000002", [*range(50)], **FROM_P)
    desk.side.matched_tokens(other, 0)
    desk.side.step({}, None)
    desk.turn()
    desk.side.finished(other, (), False)
    assert desk.knocks[3:] == [1]


def calls_of(function: Callable[..., Any], *arguments: Any) -> int:
    """How many functions, of Python and of C, a call of `function` calls, itself among them."""
    found: list[str] = []
    gc.collect()
    gc.disable()  # its callbacks are calls, too
    sys.setprofile(lambda frame, event, argument: found.append(event))
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
        gc.enable()
    return sum(event in ("call", "c_call") for event in found) - 1  # but for the end of counting


def cost_of_a_load(blocks: int) -> list[int]:
    """Calls of each hook of a packed load of so many blocks."""
    desk, tokens, ids = Desk(), Long(range(16 * blocks)), Long(range(blocks))
    one = request("cmpl-b-0-00000002", tokens, **FROM_P)
    found = [
        calls_of(desk.side.on_new_request, one),
        calls_of(desk.side.matched_tokens, one, 0),
        calls_of(desk.side.step, {}, None),
    ]
    desk.turn(tokens)
    key = desk.of(ev.Expect)[0].transfer_id
    again = calls_of(desk.side.matched_tokens, one, 0)
    assert again == 1, "asked again and again while it waits"
    desk.report(ev.Offered(key, True))
    desk.report(ev.Landed(key))
    output = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=one.request_id, block_ids=(ids,))])
    found += [
        again,
        calls_of(desk.side.matched_tokens, one, 0),
        calls_of(desk.side.allocated, one, Blocks(ids), 16 * blocks - 1),
        calls_of(desk.side.step, {one.request_id: 1}, None, output),
        calls_of(desk.side.finished, one, (ids,), True),
    ]
    return found


def cost_of_a_prefill(blocks: int) -> list[int]:
    """Calls of each hook of a prefill of so many blocks."""
    desk, tokens, ids = Desk(), Long(range(16 * blocks)), Long(range(blocks))
    one = request("cmpl-a-0-00000001", tokens, do_remote_decode=True)
    found = [
        calls_of(desk.side.on_new_request, one),
        calls_of(desk.side.matched_tokens, one, 0),
        calls_of(desk.side.step, {one.request_id: 16 * blocks}, None),
    ]
    one.num_computed_tokens = one.num_prompt_tokens
    found.append(calls_of(desk.side.finished, one, (ids,), True))
    desk.turn(tokens, ids)
    key = desk.of(ev.Begin)[0].transfer_id
    desk.report(ev.Released(key))
    desk.report(ev.Sent(key, True, ""))
    found.append(calls_of(desk.side.step, {}, None))
    return found


@pytest.mark.parametrize(("cost", "most"), [(cost_of_a_prefill, 100), (cost_of_a_load, 120)])
def test_what_a_request_costs_does_not_grow_with_its_blocks(cost: Callable[[int], list[int]], most: int) -> None:
    assert cost(10) == cost(10_000)
    assert sum(cost(10)) <= most


def test_a_step_in_which_nothing_happens_is_over_at_once() -> None:
    desk = Desk()
    assert calls_of(desk.side.step, {"other": 1}, None) <= 6
