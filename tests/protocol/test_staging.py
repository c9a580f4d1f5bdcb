"""Bytes of staging: in all, and per peer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pushkv.model.protocol.staging import Staging
from pushkv.sim.explore.world import SETTINGS


def staging(size: int = 100, share: float = 0.5) -> Staging:
    return Staging(replace(SETTINGS, staging_bytes=size, staging_share=share))


def test_a_peer_gets_its_share_and_no_more() -> None:
    made = staging()
    assert made.take("a", 30) and made.take("a", 20)
    assert not made.take("a", 1)
    assert made.take("b", 50) and made.used == 100
    assert not made.take("c", 1)
    made.give_back("a", 20)
    assert made.used == 80 and not made.take("a", 21) and made.take("a", 20)


def test_what_is_larger_than_its_share_goes_alone() -> None:
    made = staging()
    assert made.take("a", 60) and not made.take("a", 1)
    assert made.take("b", 40)
    made.give_back("a", 60)
    assert made.take("a", 60)
    made.give_back("a", 60)
    made.give_back("b", 40)
    assert made.used == 0 and made.take("c", 1000) and not made.take("d", 1)


def test_whoever_gave_all_back_is_forgotten() -> None:
    made = staging()
    for number in range(100):
        assert made.take(f"peer{number}", 10)
        made.give_back(f"peer{number}", 10)
    assert not made._by_peer


@pytest.mark.parametrize(("bytes_per_token", "tokens"), [(1, 25), (10, 2), (25, 1), (26, 1), (1000, 1)])
def test_two_parts_fit_in_a_share(bytes_per_token: int, tokens: int) -> None:
    assert staging().part_tokens(bytes_per_token) == tokens


def test_tokens_without_bytes_are_one_part() -> None:
    assert staging().part_tokens(0) >= 1 << 40


def test_parts_of_no_bytes_come_and_go() -> None:
    """A rank whose heads a sibling writes sends nothing of its own."""
    memory = staging()
    assert memory.take("D", 0) and memory.take("D", 0) and memory.take("D", 10)
    for size in (0, 10, 0):
        memory.give_back("D", size)
    assert memory.used == 0 and memory.take("D", 100)
