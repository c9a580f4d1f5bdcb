"""``Seen`` against a plain set."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.model.protocol.seen import Seen

steps = st.lists(st.tuples(st.sampled_from(("add", "raise")), st.integers(1, 12)), max_size=40)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_it_is_a_set_of_integers(steps: list[tuple[str, int]]) -> None:
    seen, model = Seen(100), set[int]()
    for kind, number in steps:
        if kind == "add":
            seen.add(number)
            model.add(number)
        else:
            seen.raise_floor(number)
            model |= set(range(1, number + 1))
        assert [n for n in range(1, 15) if n in seen] == sorted(model)
        assert seen.highest == max(model, default=0)
        gaps = [n for n in model if n - 1 not in model and n > 1]
        assert seen.runs == len(gaps)


@given(st.lists(st.integers(1, 10_000), max_size=200), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_it_is_bounded_and_forgets_nothing(numbers: list[int], max_runs: int) -> None:
    seen = Seen(max_runs)
    for number in numbers:
        seen.add(number)
        assert seen.runs <= max_runs
    assert all(number in seen for number in numbers)


def test_in_order_it_is_one_integer() -> None:
    seen = Seen(4)
    for number in range(1, 1000):
        assert number not in seen
        seen.add(number)
        assert seen.runs == 0
        assert seen.floor == number


def test_past_the_bound_the_lowest_gap_counts_as_seen() -> None:
    seen = Seen(2)
    for number in (2, 4, 6):
        seen.add(number)
    assert 1 in seen
    assert 3 not in seen
    assert 5 not in seen
    assert seen.runs == 2
