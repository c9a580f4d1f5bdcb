"""A scatter that nobody waits for any more must not run: its blocks may be somebody else's."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from pushkv.reference.copies import Copy
from pushkv.reference.loading import Loading
from pushkv.reference.ports import Load

LOADS = [Load("r", "t", ([1],), 0, 4), Load("s", "u", ([2],), 0, 4)]


def test_given_up_before_it_was_taken() -> None:
    loading = Loading(LOADS)
    assert loading.wait(0.01) == LOADS
    assert not loading.take()


def test_taken_in_time_is_waited_for() -> None:
    loading = Loading(LOADS)
    assert loading.take()
    timer = threading.Timer(0.3, loading.begun, ([],))
    timer.start()
    assert not loading.wait(0.2), "the first wait is over before it has begun"
    timer.join()


def test_what_has_failed_is_said_and_nothing_else() -> None:
    loading = Loading(LOADS)
    assert loading.take()
    loading.failed.append(LOADS[1])
    loading.begun([])
    assert loading.wait(0.01) == LOADS[1:]


def test_the_last_copy_of_each_lane_is_waited_for_and_no_other() -> None:
    """The engine's thread asks the device once per lane: the others have ended by then."""
    joined: list[int] = []

    class Numbered(Copy):
        def __init__(self, number: int, lane: int) -> None:
            super().__init__(lane=lane)
            self.number = number

        def join(self) -> None:
            joined.append(self.number)

    loading = Loading(LOADS)
    assert loading.take()
    loading.begun([Numbered(number, lane) for number, lane in enumerate((0, 1, 1, 0, 1))])
    assert not loading.wait(0.01)
    assert sorted(joined) == [3, 4]
