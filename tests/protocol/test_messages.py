"""What is on the wire: round trips, and any byte string decodes or raises ``MessageError``, nothing else (F27)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.model.protocol import MessageError, decode, encode
from pushkv.model.protocol import messages as msg

numbers = st.integers(0, 2**63 - 1)
incarnations = st.integers(0, 2**64 - 1)
names = st.text(max_size=64)
memories = st.none() | st.lists(st.integers(0, 2**31), max_size=8) | st.binary(max_size=16)
asks = st.builds(msg.Ask, numbers, st.integers(0, 4), numbers)
both = {"src": incarnations, "dst": incarnations}
attempt = {**both, "attempt": numbers}

MESSAGES = st.one_of(
    st.builds(msg.Hello, **both, number=numbers, floor=numbers, facts=st.binary(max_size=64)),
    st.builds(msg.Welcome, **both, echo=numbers, floor=numbers, facts=st.binary(max_size=64), refusal=names),
    st.builds(
        msg.Register,
        **attempt,
        transfer_id=names,
        tokens=numbers,
        fanout=numbers,
        packed=st.booleans(),
        lowest=numbers,
        memory=memories,
    ),
    st.builds(msg.Grant, **attempt, memory=memories),
    st.builds(msg.Cancel, **attempt, transfer_id=names, requeue=st.booleans()),
    st.builds(msg.Offer, **attempt, tokens=numbers, finished=st.booleans()),
    st.builds(msg.Written, **attempt, part=numbers, tokens=numbers, last=st.booleans()),
    st.builds(msg.Failed, **attempt, reason=names),
    st.builds(msg.Cancelled, **attempt),
    st.builds(
        msg.Beat,
        **both,
        number=numbers,
        echo=numbers,
        highest=numbers,
        lowest=numbers,
        open=st.lists(asks, max_size=5).map(tuple),
        missing=st.lists(numbers, max_size=5).map(tuple),
    ),
)


def _refusal(frame: bytes) -> str:
    try:
        decode(frame)
    except MessageError as error:
        return error.kind
    return ""


@given(MESSAGES)
@settings(max_examples=150, deadline=None)
def test_round_trip(message: msg.Message) -> None:
    assert decode(encode(message)) == message


def test_every_kind_is_covered_and_keeps_its_number() -> None:
    """The order of ``KINDS`` is the wire format."""
    assert [kind.__name__ for kind in msg.KINDS] == (
        ["Hello", "Welcome", "Register", "Grant", "Cancel", "Offer", "Written", "Failed", "Cancelled", "Beat"]
    )
    assert encode(msg.Cancelled(1, 2, 3)) == bytes((msg.VERSION, 8, 0x93, 1, 2, 3))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_or_are_refused(frame: bytes) -> None:
    assert _refusal(frame) in ("", "oversized", "truncated", "version", "unknown", "malformed")


@given(MESSAGES, st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_messages_decode_or_are_refused(message: msg.Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for candidate in (bytes(frame), bytes(frame[:cut])):
        _refusal(candidate)


def test_a_prefix_of_a_message_is_refused() -> None:
    frame = encode(msg.Offer(1, 2, 3, 4, True))
    for length in range(len(frame)):
        with pytest.raises(MessageError):
            decode(frame[:length])


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (b"", "truncated"),
        (b"\x01", "truncated"),
        (b"\x01\x08", "malformed"),
        (b"\x02\x08", "version"),
        (b"\x01\xff", "unknown"),
        (b"\x02\x08\x93\x01\x02\x03", "version"),
        (b"\x00\x08\x93\x01\x02\x03", "version"),
        (bytes((1, len(msg.KINDS))) + b"\x90", "unknown"),
        (b"\x01\xff\x90", "unknown"),
        (b"\x01\x08\x93\x01\x02", "malformed"),
        (b"\x01\x08\x93\x01\x02\x03\x04", "malformed"),
        (b"\x01\x08\x93\x01\x02\xff", "malformed"),
        (b"\x01\x08\x93\x01\x02\xa1a", "malformed"),
        (b"\x01\x08" + b"\x91" * 5000, "malformed"),
        (bytes(msg.MAX_FRAME_BYTES + 1), "oversized"),
        (bytes((msg.VERSION, 0)).ljust(msg.MAX_FRAME_BYTES, b"\0"), "malformed"),
    ],
)
def test_refusals_have_a_kind(frame: bytes, kind: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode(frame)
    assert caught.value.kind == kind


def test_deeply_nested_memory_is_refused() -> None:
    frame = bytes((1, 3, 0x94, 1, 2, 3)) + b"\x91" * 100_000 + b"\x01"
    with pytest.raises(MessageError):
        decode(frame)


def test_an_oversized_message_is_not_sent() -> None:
    """To the byte: the largest that is sent is the largest that is read."""
    around = len(encode(msg.Grant(1, 2, 3, bytes(1 << 17)))) - (1 << 17)
    largest = msg.Grant(1, 2, 3, bytes(msg.MAX_FRAME_BYTES - around))
    assert len(encode(largest)) == msg.MAX_FRAME_BYTES
    assert decode(encode(largest)) == largest
    with pytest.raises(MessageError) as caught:
        encode(msg.Grant(1, 2, 3, bytes(msg.MAX_FRAME_BYTES - around + 1)))
    assert caught.value.kind == "oversized"


def test_a_hundred_thousand_blocks_fit() -> None:
    encode(msg.Grant(2**64 - 1, 2**64 - 1, 2**63 - 1, list(range(100_000, 200_000))))


def test_text_and_lists_are_bounded() -> None:
    for message in (
        msg.Failed(1, 2, 3, "x" * 65),
        msg.Cancel(1, 2, 3, "x" * 257),
        msg.Beat(1, 2, 0, 0, 0, 0, (), tuple(range(msg.MAX_OPEN + 1))),
    ):
        with pytest.raises(MessageError) as caught:
            decode(encode(message))
        assert caught.value.kind == "malformed"


def test_later_fields_may_be_missing() -> None:
    """A peer of an earlier minor version leaves out what has a default."""
    short = bytes((msg.VERSION, 0)) + msgspec.msgpack.encode([1, 2, 3])
    assert decode(short) == msg.Hello(1, 2, 3)
