"""Segments and byte ranges over them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.reference.pools import PAGE_BYTES, PoolError, SegmentPool, cross, segments_within, spread


def test_take_is_all_or_nothing() -> None:
    pytest.importorskip("torch", reason="the pool is a torch tensor")
    pool = SegmentPool(5, 64)
    first = pool.take(3)
    assert first == (0, 1, 2)
    assert pool.take(3) is None and pool.free == 2
    assert pool.take(0) == ()
    pool.give([1])
    assert pool.take(3) == (1, 3, 4)
    assert pool.take(1) is None
    pool.give((0, 1, 2, 3, 4))
    assert pool.free == 5 and pool.take(5) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("back", [[3], [-1], [5], [0, 0], [0, 4]])
def test_give_refuses_what_was_not_taken_and_changes_nothing(back: list[int]) -> None:
    pytest.importorskip("torch", reason="the pool is a torch tensor")
    pool = SegmentPool(5, 64)
    assert pool.take(2) == (0, 1)
    with pytest.raises(PoolError):
        pool.give(back)
    assert pool.free == 3 and pool.take(3) == (2, 3, 4)


def test_the_memory_is_page_aligned_and_large_enough() -> None:
    pytest.importorskip("torch", reason="the pool is a torch tensor")
    pool = SegmentPool(3, 100)
    assert pool.base % PAGE_BYTES == 0 and len(pool.tensor) == 300
    assert pool.address(2) == pool.base + 200 == pool.tensor[200:].data_ptr()
    with pytest.raises(PoolError):
        pool.address(3)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, list[int], int, int]:
    size = draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True))
    begin = draw(st.integers(0, len(ids) * size))
    return 12, size, ids, begin, draw(st.integers(begin, len(ids) * size)) - begin


@given(ranges())
def test_spread_names_every_byte_once_in_order(case: tuple[int, int, list[int], int, int]) -> None:
    count, size, ids, offset, length = case
    bytes_of = [segment * size + within for segment in ids for within in range(size)]
    addresses, sizes = spread(1000, count, size, ids, offset, length)
    found = [int(a) - 1000 + i for a, n in zip(addresses, sizes, strict=True) for i in range(int(n))]
    assert found == bytes_of[offset : offset + length]
    assert all(int(n) > 0 for n in sizes)
    assert (addresses[1:] != addresses[:-1] + sizes[:-1]).all()  # nothing left to join


@pytest.mark.parametrize(
    ("segments", "offset", "size"), [([0], 0, 11), ([0], -1, 2), ([0], 4, -1), ([7], 0, 1), ([-1], 0, 1)]
)
def test_spread_checks_its_bounds(segments: list[int], offset: int, size: int) -> None:
    with pytest.raises(PoolError):
        spread(0, 7, 10, segments, offset, size)


@given(ranges(), ranges(), st.integers(1, 20) | st.none())
def test_cross_pairs_the_same_bytes(
    one: tuple[int, int, list[int], int, int], other: tuple[int, int, list[int], int, int], most: int | None
) -> None:
    length = min(one[4], other[4])
    sides = [spread(0, *case[:3], case[3], length) for case in (one, other)]
    local, remote, sizes = cross(sides[0], sides[1], most)
    wanted = [[int(a) + i for a, n in zip(*side, strict=True) for i in range(int(n))] for side in sides]
    for starts, bytes_of in zip((local, remote), wanted, strict=True):
        assert [int(a) + i for a, n in zip(starts, sizes, strict=True) for i in range(int(n))] == bytes_of
    assert most is None or all(int(n) <= most for n in sizes)


def test_cross_refuses_unequal_sides() -> None:
    with pytest.raises(PoolError):
        cross((np.array([0]), np.array([4])), (np.array([0]), np.array([5])))


def test_sizing_names_the_setting() -> None:
    assert segments_within(1000, 100, 250, "landing", "landing_bytes") == 10
    with pytest.raises(PoolError, match=r"landing memory of 250 bytes .* set landing_bytes to 300 or more"):
        segments_within(250, 100, 250, "landing", "landing_bytes")
    with pytest.raises(PoolError, match="set staging_bytes to 100 or more"):
        segments_within(0, 100, 0, "staging", "staging_bytes")
