"""The block pool: vLLM's free-list order, nothing lost, and the number of descriptors that follows from it."""

from __future__ import annotations

from array import array
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from pushkv.sim.blocks import BlockPool, runs


class FreeList:
    """vLLM's own: a deque, taken from the left; uncached blocks of a request come back to the left, cached ones to the
    right."""

    def __init__(self, blocks: int, *, cached: bool) -> None:
        self.free = deque(range(1, blocks + 1))
        self.cached = cached

    def take(self, count: int) -> list[int]:
        return [self.free.popleft() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        if self.cached:
            self.free.extend(blocks)
        else:
            self.free.extendleft(blocks)  # the last one of the request ends up leftmost


# True: a request arrives and takes some; False: one of those present grows by one block, or leaves.
moves = st.lists(st.tuples(st.sampled_from(["take", "grow", "leave"]), st.integers(0, 12)), max_size=80)


@given(blocks=st.integers(1, 60), cached=st.booleans(), steps=moves)
def test_blocks_come_and_go_in_the_order_of_the_free_list(
    blocks: int, cached: bool, steps: list[tuple[str, int]]
) -> None:
    pool, model = BlockPool(blocks, cached=cached), FreeList(blocks, cached=cached)
    held: list[tuple[array[int], list[int]]] = []
    fewest = blocks
    for what, number in steps:
        if what == "take" and number <= len(pool):
            held.append((pool.take(number), model.take(number)))
        elif what == "grow" and held and number:
            growing = held[: min(number, len(pool))]
            pool.grow(real for real, _ in growing)
            for _, wanted in growing:
                wanted.extend(model.take(1))
        elif what == "leave" and held:
            real, wanted = held.pop(number % len(held))
            pool.give_back(real)
            model.give_back(wanted)
        fewest = min(fewest, len(model.free))
        assert [list(real) for real, _ in held] == [wanted for _, wanted in held]
        assert len(pool) == len(model.free)
    assert pool.fewest_free == fewest
    assert pool.peak_fraction == 1 - fewest / blocks
    for real, _ in held:
        pool.give_back(real)
    assert sorted(pool.take(blocks)) == list(range(1, blocks + 1))  # every block once: none lost, none twice


block_lists = st.lists(st.integers(1, 12), min_size=12, max_size=12)


@given(source=block_lists, destination=block_lists, blocks=st.integers(0, 12))
def test_runs_are_counted_as_by_hand(source: list[int], destination: list[int], blocks: int) -> None:
    expected = 0
    tail = source[len(source) - blocks :]
    for i in range(blocks):
        together = i > 0 and tail[i] == tail[i - 1] + 1 and destination[i] == destination[i - 1] + 1
        expected += not together
    assert runs(array("i", source), array("i", destination), blocks) == expected


def test_the_measured_warm_up_pattern() -> None:
    """Three prompts of 600 tokens one after the other on vLLM 0.26, 16 tokens to a block, 36 layers: 36, 1368, 36
    descriptors.

    The first lies in order on both sides. Its blocks come back last one first, so the second descends: one descriptor
    per block. The third gets them in order again.
    """
    p, d = BlockPool(1000), BlockPool(1000)
    counts = []
    for _ in range(3):
        source, destination = p.take(38), d.take(38)
        counts.append(runs(source, destination, 38))
        p.give_back(source)
        d.give_back(destination)
    assert counts == [1, 38, 1]
    assert [36 * count for count in counts] == [36, 1368, 36]
