"""What of the transport needs no NIXL: cutting into batches, names, and the sentence when NIXL is not there."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.reference.notices import batches_at_most
from pushkv.reference.transport import Transport, TransportError, _cuts, agent_name, link_of


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


def test_what_a_peer_relies_on_is_refused() -> None:
    """How many batches there can be, and how long a notice is, both sides know."""
    for limits in ({"batch_descriptors": 63}, {"batch_bytes": (1 << 20) - 1}):
        with pytest.raises(TransportError, match="at least 64 and 1048576"):
            Transport("x", **limits)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 3 << 20), max_size=400), st.integers(64, 100), st.integers(1 << 20, 3 << 20))
def test_there_are_no_more_batches_than_a_peer_makes_room_for(sizes: list[int], most: int, most_bytes: int) -> None:
    cuts = _cuts(np.array(sizes, np.int64), most, most_bytes)
    assert len(cuts) <= batches_at_most(1, len(sizes), sum(sizes))


@given(st.text(max_size=20), st.integers(0, 1 << 16), st.integers(0, (1 << 64) - 1))
def test_an_agent_is_named_after_its_link(engine: str, rank: int, incarnation: int) -> None:
    assert link_of(agent_name(engine, rank, incarnation)) == (engine, rank)


@given(st.one_of(st.text(max_size=30), st.from_regex(r"[a-z.]*\.[0-9\u0660-\u0669-]*\.[0-9a-f]*", fullmatch=True)))
def test_any_name_is_read_or_refused(name: str) -> None:
    link = link_of(name)
    assert link is None or name.startswith(f"{link[0]}.")
