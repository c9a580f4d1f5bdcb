"""What one peer may hold of this engine's staging memory, in the segments in which it is given."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from .channels import until
from .engine_pairs import hand_over
from .inprocess import Engine, Exchange
from .said import wanted

pytest.importorskip("torch", reason="the caches are torch tensors")

PROMPTS = 14
"""Small ones: the bytes of all are less than a peer's share, their segments are more than there are."""
TOKENS = 8


def test_a_frozen_peer_leaves_staging_to_the_others(exchange: Exchange, tmp_path: Path) -> None:
    """Its writes do not end, and more of its prompts wait in front: another decode engine gets its own at once."""
    p, frozen, well = (Engine(name, 1, tmp_path) for name in ("P", "D1", "D2"))
    try:
        for d in (frozen, well):
            assert hand_over((p, d), f"warm {d.name}", TOKENS, True) == ("", True)
        (rank,), (transport,) = p.ranks, p.transports
        staging, post = rank.sending.staging, transport.post
        dead = next(fellow.agent for link, fellow in rank.fellows.items() if link[0] == "D1")
        held: list[Any] = []

        def never_ends(agent: str, *more: Any) -> Any:
            write = post(agent, *more)
            if agent == dead:
                write.due = float("inf")
                held.append(write)
            return write

        transport.post = never_ends  # type: ignore[method-assign]
        for number in range(PROMPTS):
            frozen.say(wanted(f"stuck {number}", p.address, TOKENS, TOKENS, True))
            p.prefill(f"stuck {number}", TOKENS, ([1 + number],))
        assert until(lambda: len(held) == staging.count // 2)
        time.sleep(0.1)
        assert (
            rank.endpoint.sender.staged_bytes
            < staging.count * staging.segment_bytes // 2
            < PROMPTS * staging.segment_bytes
        )
        assert staging.free == staging.count // 2, "the share of one peer"
        for number in range(3):
            assert hand_over((p, well), f"next {number}", TOKENS, True) == ("", True)
        transport.post = post  # type: ignore[method-assign]
        for write in held:
            write.due = 0.0
        for engine in (p, well):
            engine.emptied()
    finally:
        for engine in (p, frozen, well):
            engine.stop()


def test_a_second_part_is_packed_while_the_first_is_written(exchange: Exchange, tmp_path: Path) -> None:
    """Two parts of half a share each need a segment more than a share where segments do not divide it."""
    p, d = (Engine(name, 1, tmp_path, staging_bytes=17 << 12) for name in ("P", "D"))
    try:
        assert hand_over((p, d), "warm", TOKENS, True) == ("", True)
        (rank,), (transport,) = p.ranks, p.transports
        transport.delay_s = 1.0
        tokens = 2 * int(17 * 4096 * 0.25) // rank.card.bytes_per_token  # two parts
        d.say(wanted("long", p.address, tokens, tokens, True))
        p.prefill("long", tokens, (list(range(1, 2 + tokens // 16)),))
        assert until(lambda: rank.sending.writes_open == 2), "the second part waits for the first"
        transport.delay_s = 0.0
        p.emptied()
    finally:
        for engine in (p, d):
            engine.stop()
