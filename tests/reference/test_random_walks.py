"""Random walks of a pair of engines: aborts, preemptions, cuts and stuck writes at any time. Nothing may be left, and
no token may be computed on top of a wrong one (`VllmLike._compute` looks at all of them).
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .vllm_like import Pair, Request, Status

MOVES = {
    "dispatch": 6, "prefill": 2, "decode": 2, "p step": 12, "d step": 16, "settle": 14, "wait": 3, "abort p": 1,
    "abort d": 3, "preempt p": 2, "preempt d": 2, "cut": 1, "heal": 2, "stick": 2, "loosen": 2, "reset d": 0.3,
    "hit": 8, "again": 6, "busy": 2, "hear": 4, "catch up": 2,
}  # fmt: skip
"""Moves and how often they come."""


class Walk:
    def __init__(self, packed: bool, recompute: bool, holding_first: bool, chunked: bool) -> None:
        d = {"blocks": 16, "recompute": recompute, "holding_first": holding_first}
        p = {"blocks": 16, "chunk": 6, "chunked": chunked, "holding_first": holding_first}
        self.pair = Pair(
            packed=packed, p=p, d=d, landing_segments=6, wait_s=40.0, lease_s=40.0, orphan_s=20.0, write_s=2.0,
            suspect_after_s=6.0,
        )  # fmt: skip
        self.waiting: dict[int, set[str]] = {}
        self.all: list[Request] = []
        self.count = 0

    def take(self, part: str) -> int:
        """The number of a dispatch whose `part` has not been sent yet."""
        for number, parts in self.waiting.items():
            if part not in parts:
                parts.add(part)
                return number
        self.count += 1
        self.waiting[self.count] = {part}
        return self.count

    def again(self, which: int) -> None:
        """A router tries a transfer once more, mostly one that still writes; vLLM may give it the same request id."""
        pair = self.pair
        hanging = {post.transfer_id.split("/")[0] for post in pair.p.engine.held_writes}
        params = {leg: leg.kv_transfer_params or {} for leg in self.all}
        legs = [leg for leg in self.all if params[leg]["transfer_id"] in hanging and leg.over] or self.all[-4:]
        if legs:
            leg = legs[which % len(legs)]
            prefill = "do_remote_decode" in params[leg]
            engine, make = (pair.p, pair.prefill) if prefill else (pair.d, pair.decode)
            more = {"request_id": leg.request_id} if which % 2 and leg.request_id not in engine.requests else {}
            assert leg.prompt_token_ids is not None
            self.all.append(make(leg.prompt_token_ids, params[leg]["transfer_id"], **more))

    def move(self, move: str, which: int) -> None:
        pair, cluster = self.pair, self.pair.cluster
        if move == "dispatch":
            for part in ("prefill", "decode") if which % 2 else ("decode", "prefill"):
                self.move(part, which)
        elif move in ("prefill", "decode"):
            number = self.take(move)
            prompt = pair.prompt(5 + number * 7 % 17, seed=number)
            leg = pair.prefill(prompt, f"t{number}") if move == "prefill" else pair.decode(prompt, f"t{number}")
            self.all.append(leg)
        elif move == "p step":
            pair.p.step()
        elif move == "d step":
            pair.d.step()
        elif move == "settle":
            cluster.settle()
        elif move == "wait":
            cluster.wait(0.5 + which % 4)
        elif move == "cut":
            cluster.cut.add("PD"[which % 2])
        elif move == "heal":
            cluster.cut.clear()
        elif move == "stick":
            cluster.stuck = True
        elif move == "loosen":
            self.loosen()
        elif move == "again":
            self.again(which)
        elif move in ("busy", "hear", "catch up"):
            inbox = (pair.p, pair.d)[which % 2].engine.inbox
            inbox.busy = move != "catch up"
            inbox.hear({"busy": 0, "hear": 1 + which // 4}.get(move, len(inbox)))
        elif move == "reset d":
            pair.d.side.reset()
        elif move == "hit":
            waiting = [one for one in pair.d.waiting if one.status is Status.WAITING and not one.blocks]
            if waiting:
                leg = waiting[which % len(waiting)]
                leg.hit = min(4 * (which % 5), (leg.num_prompt_tokens - 1) // 4 * 4)
        else:
            what, where = move.split()
            engine = pair.p if where == "p" else pair.d
            legs = [one for one in self.all if engine.requests.get(one.request_id) is one and not one.over]
            if what == "preempt":
                legs = [one for one in legs if one.status is Status.RUNNING]
            if legs:
                leg = legs[which % len(legs)]
                engine.abort(leg) if what == "abort" else engine.preempt(leg)

    def loosen(self) -> None:
        self.pair.cluster.stuck = False
        self.pair.p.engine.release_writes()

    def end(self) -> None:
        self.pair.cluster.cut.clear()
        self.loosen()
        for one in (self.pair.p, self.pair.d):
            one.engine.inbox.busy = False
            one.engine.inbox.hear()
        self.pair.until_quiet(most=3000, seconds=0.5)
        self.pair.cluster.wait(60.0)
        self.pair.check_nothing_left()
        assert all(one.over for one in self.all)


@pytest.mark.parametrize("holding_first", [True, False], ids=["0.32", "0.26"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])
@pytest.mark.parametrize(
    ("packed", "chunked"), [(True, False), (True, True), (False, False)], ids=["packed", "chunks", "direct"]
)
@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_walks(packed: bool, chunked: bool, recompute: bool, holding_first: bool, seed: int) -> None:
    walk = Walk(packed, recompute, holding_first, chunked)
    random = Random(seed)
    for move in random.choices(list(MOVES), list(MOVES.values()), k=120):
        walk.move(move, random.randrange(12))
    walk.end()
