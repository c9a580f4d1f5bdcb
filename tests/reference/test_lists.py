"""Lists on their way to a device."""

from __future__ import annotations

from typing import Any

import pytest

from pushkv.reference.lists import Lists

torch: Any = pytest.importorskip("torch", reason="lists are tensors")


class Event:
    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def test_pieces_are_used_in_turn_and_only_when_their_copy_is_over() -> None:
    lists = Lists(torch.device("cpu"), ((2, 8), (1, 32)))
    events = [Event(), Event(), Event()]
    taken = []
    for event in events:  # the third finds the small ones in use
        here, there = lists.take(5)
        lists.give(here, there, event)
        taken.append(here.data_ptr())
    assert len(set(taken)) == 3 and not lists.missed
    here, there = lists.take(5)
    assert lists.missed == 1 and len(here) == len(there) == 5
    lists.give(here, there, Event())  # goes with its copy
    events[1].over = True  # not the first: copies end in the order of the stream
    assert lists.take(5)[0].data_ptr() not in taken
    events[0].over = True
    here, there = lists.take(5)
    assert here.data_ptr() == taken[0] and lists.missed == 2
    lists.give(here, there, None)
    assert lists.take(8)[0].data_ptr() == taken[1]


def test_longer_than_any_piece() -> None:
    lists = Lists(torch.device("cpu"), ((1, 8),))
    here, there = lists.take(9)
    assert lists.missed == 1 and len(here) == len(there) == 9
    lists.give(here, there, None)
    assert len(lists.take(8)[0]) == 8 and lists.missed == 1
    assert len(lists.take(8)[0]) == 8 and lists.missed == 2  # one that was never given back


def test_pieces_do_not_overlap() -> None:
    lists = Lists(torch.device("cpu"), ((3, 4),))
    found = [lists.take(4) for _ in range(3)]
    for number, (here, there) in enumerate(found):
        here.fill_(number)
        there.fill_(-number)
    assert [here.tolist() for here, _ in found] == [[0] * 4, [1] * 4, [2] * 4]
    assert [there.tolist() for _, there in found] == [[0] * 4, [-1] * 4, [-2] * 4]
