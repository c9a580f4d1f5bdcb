"""A scatter that nobody waits for any more must not run: its blocks may be somebody else's."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from pushkv.reference.landing import Loading


def test_given_up_before_it_was_taken() -> None:
    loading = Loading("t", ((1,),), 0)
    assert not loading.wait(0.01)
    assert not loading.take()


def test_taken_in_time_is_waited_for() -> None:
    loading = Loading("t", ((1,),), 0)
    assert loading.take()
    timer = threading.Timer(0.3, loading.begun, ([],))
    timer.start()
    assert loading.wait(0.2), "the first wait is over before it has begun"
    timer.join()


def test_an_error_is_no_success() -> None:
    loading = Loading("t", ((1,),), 0)
    assert loading.take()
    loading.begun([], "no such layout")
    assert not loading.wait(0.01)
    assert loading.error == "no such layout"
