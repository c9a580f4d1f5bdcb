"""The bell rings once per copy, in their order, also for one that fails, and not after it is closed."""

from __future__ import annotations

import threading

from pushkv.reference.bell import Bell

from .channels import until


class Copy:
    def __init__(self, fails: bool = False) -> None:
        self.done, self.fails = threading.Event(), fails

    def wait(self) -> None:
        self.done.wait(20)
        if self.fails:
            raise RuntimeError("the device is gone")


def test_it_rings_when_a_copy_is_done() -> None:
    rings: list[int] = []
    bell = Bell(lambda: rings.append(threading.get_ident()))
    copies = [Copy(), Copy(fails=True), Copy()]
    for copy in copies:
        bell.watch(copy)
    assert not rings
    for number, copy in enumerate(copies, 1):
        copy.done.set()
        assert until(lambda number=number: len(rings) == number)
    assert set(rings) != {threading.get_ident()}
    bell.close()
    late = Copy()
    late.done.set()
    bell.watch(late)
    assert not until(lambda: len(rings) > len(copies), patience_s=0.05)


def test_a_copy_that_waits_delays_no_other() -> None:
    rings: list[int] = []
    bell = Bell(lambda: rings.append(1))
    waiting, other = Copy(), Copy()
    bell.watch(waiting, waiting=True)
    bell.watch(other)
    other.done.set()
    assert until(lambda: len(rings) == 1)
    waiting.done.set()
    assert until(lambda: len(rings) == 2)
    bell.close()


def test_nothing_begins_behind_its_end() -> None:
    rings: list[int] = []
    bell = Bell(lambda: rings.append(1))
    bell.close()
    for waiting in (False, True):
        copy = Copy()
        copy.done.set()
        bell.watch(copy, waiting=waiting)
    assert not until(lambda: bool(rings), patience_s=0.05)
