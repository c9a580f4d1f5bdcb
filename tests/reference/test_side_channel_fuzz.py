"""Any bytes on the side channel's sockets are counted and dropped, and the next good frame is heard."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pushkv.model.protocol.messages import MAX_FRAME_BYTES
from pushkv.reference import envelope
from pushkv.reference.side_channel import SideChannel

from .channels import D, P, channel, gather, until

HEADS = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda version, length, ranks, rest: struct.pack(">BHHH", version, length, *ranks) + rest,
        st.sampled_from([0, 1, 1, 1, 2, 255]),
        st.one_of(st.integers(0, 4), st.sampled_from([256, 257, 65535])),
        st.tuples(st.integers(0, 2), st.integers(0, 2)),
        st.one_of(st.sampled_from([b"PD", b"DP", b"PE", b"P", b"", b"\xff\xfe"]), st.binary(max_size=600)),
    ),
)
PARTS = st.lists(st.one_of(HEADS, st.binary(max_size=100)), min_size=1, max_size=4)
MANY = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def routed() -> Iterator[tuple[SideChannel, zmq.Socket[bytes]]]:
    """A channel P, and a raw DEALER that is connected to it as D."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with channel(P, None) as p:
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.ROUTING_ID, envelope.routing_id(P, D))
        raw.connect(f"tcp://127.0.0.1:{p.port}")
        yield p, raw
        context.destroy(linger=0)


@pytest.fixture
def dealt() -> Iterator[tuple[SideChannel, zmq.Socket[bytes]]]:
    """A channel D that has opened P, and the raw ROUTER that it takes for P."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.ROUTER)
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    with channel(D, None) as d:
        d.open(P, "127.0.0.1", port)
        d.send(P, b"first")
        assert raw.recv_multipart() == [envelope.routing_id(P, D), envelope.head(P, D), b"first"]
        yield d, raw
        context.destroy(linger=0)


def good(parts: list[bytes], to: tuple[str, int], by: tuple[str, int]) -> bool:
    return len(parts) == 2 and parts[0] == envelope.head(to, by) and parts[1] != b""


@MANY
@given(parts=PARTS)
def test_into_the_router(routed: tuple[SideChannel, zmq.Socket[bytes]], parts: list[bytes]) -> None:
    p, raw = routed
    dropped = sum(p.counters.values())
    raw.send_multipart(parts)
    raw.send_multipart((envelope.head(P, D), b"good"))
    expected = [(D, parts[1])] if good(parts, P, D) else []
    assert gather(p, 1 + len(expected)) == [*expected, (D, b"good")]
    assert (sum(p.counters.values()) > dropped) != bool(expected)


@MANY
@given(parts=PARTS)
def test_into_the_dealer(dealt: tuple[SideChannel, zmq.Socket[bytes]], parts: list[bytes]) -> None:
    d, raw = dealt
    dropped = sum(d.counters.values())
    raw.send_multipart((envelope.routing_id(P, D), *parts))
    raw.send_multipart((envelope.routing_id(P, D), envelope.head(D, P), b"good"))
    expected = [(P, parts[1])] if good(parts, D, P) else []
    assert gather(d, 1 + len(expected)) == [*expected, (P, b"good")]
    assert (sum(d.counters.values()) > dropped) != bool(expected)


def test_an_oversized_frame_ends_its_connection_only(routed: tuple[SideChannel, zmq.Socket[bytes]]) -> None:
    p, raw = routed
    with channel(("E", 0), None) as e:
        e.open(P, "127.0.0.1", p.port)
        e.send(P, b"before")
        assert gather(p, 1) == [(("E", 0), b"before")]
        raw.send_multipart((envelope.head(P, D), bytes(MAX_FRAME_BYTES + 1000)))
        e.send(P, b"after")
        assert gather(p, 1) == [(("E", 0), b"after")]
        assert gather(p, 1, patience_s=0.3) == []


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=300))
def test_no_zmq_at_all(routed: tuple[SideChannel, zmq.Socket[bytes]], junk: bytes) -> None:
    p, raw = routed
    with socket.create_connection(("127.0.0.1", p.port)) as one, contextlib.suppress(OSError):
        one.sendall(junk)
    raw.send_multipart((envelope.head(P, D), b"good"))
    assert gather(p, 1) == [(D, b"good")]


@given(raw=st.one_of(HEADS, st.binary(max_size=1200)))
def test_heads_are_read_or_refused(raw: bytes) -> None:
    links = envelope.links(raw)
    if links is not None:
        assert envelope.head(*links) == raw


@given(
    to=st.tuples(st.text(min_size=1, max_size=64), st.integers(0, envelope.MAX_RANK)),
    by=st.tuples(st.text(min_size=1, max_size=64), st.integers(0, envelope.MAX_RANK)),
)
def test_heads_come_back(to: tuple[str, int], by: tuple[str, int]) -> None:
    assert envelope.links(envelope.head(to, by)) == (to, by)
    assert (envelope.routing_id(to, by) == envelope.routing_id(by, to)) == (to == by)


def test_versions_are_counted_apart(routed: tuple[SideChannel, zmq.Socket[bytes]]) -> None:
    p, raw = routed
    raw.send_multipart((b"\x02" + envelope.head(P, D)[1:], b"x"))
    raw.send_multipart((envelope.head(P, D), b""))
    assert until(lambda: p.counters == {"version": 1, "malformed": 1}, [p])
