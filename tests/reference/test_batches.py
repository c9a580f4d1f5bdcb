"""What of the transport needs no NIXL: cutting into batches, notices, and the sentence when NIXL is not there."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from pushkv.reference.notices import Notices, pack
from pushkv.reference.transport import Transport, TransportError, _cuts


def test_batches_respect_both_limits() -> None:
    assert _cuts(np.array([5, 5, 5, 5, 5]), 2, 1000) == [(0, 2), (2, 4), (4, 5)]
    assert _cuts(np.array([5, 5, 5, 5, 5]), 100, 12) == [(0, 2), (2, 4), (4, 5)]
    assert _cuts(np.array([50, 1, 1, 50]), 100, 12) == [(0, 1), (1, 3), (3, 4)]


def test_without_nixl_a_sentence() -> None:
    code = (
        "import sys; sys.modules['nixl'] = None; sys.modules['nixl._api'] = None\n"
        "from pushkv.reference.transport import Transport, TransportError\n"
        "try: Transport('x')\nexcept TransportError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("NIXL is not installed")


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(TransportError, match="'TCP' is not known; choose from UCX, LIBFABRIC"):
        Transport("x", "TCP")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_notice_is_whole_when_every_batch_has_come(order: tuple[int, ...]) -> None:
    notices = Notices()
    for position, batch in enumerate(order):
        assert notices.take() == []
        for _ in range(2 if position < 2 else 1):  # a repetition counts once
            notices.add("a", pack(7, batch, 3, b"landed"))
        notices.add("b", pack(7, 0, 2, b"other"))  # another peer's write of the same number
    assert notices.take() == [("a", b"landed")]
    assert notices.take() == [] and notices.dropped == 0
    notices.add("b", pack(7, 1, 2, b"other"))
    assert notices.take() == [("b", b"other")]


def test_notices_are_bounded_and_strangers_are_counted() -> None:
    notices = Notices()
    for frame in (b"", b"hello", b"x" * 40, pack(1, 9, 3, b"")):
        notices.add("a", frame)
    assert notices.take() == [] and notices.dropped == 3
    for number in range(10_000):
        notices.add("a", pack(number, 0, 2, b""))
    assert len(notices._partial["a"]) <= 4096 and notices.dropped > 5000
    notices.forget("a")
    assert not notices._partial
