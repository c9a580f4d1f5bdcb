"""Notices of writes: whole when every batch has come; whatever a peer sends, little is kept and nothing is made up."""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.reference import notices as notices_
from pushkv.reference import transport
from pushkv.reference.notices import NOTICE_BYTES, Notices, Room, pack

WORD = st.integers(0, (1 << 32) - 1)
SMALL = st.integers(0, 4)
NOTICE = st.sampled_from([b"", b"landed", b"other", bytes(24), bytes(NOTICE_BYTES), bytes(NOTICE_BYTES + 1)])
FRAMES = st.one_of(
    st.binary(max_size=120),
    st.builds(pack, st.integers(0, 3), SMALL, SMALL, NOTICE),
    st.builds(pack, st.integers(0, (1 << 64) - 1), WORD, WORD, NOTICE),
)


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A real frame with a byte changed, or of another length."""
    frame = bytearray(pack(draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(1, 3)), b"landed"))
    for _ in range(draw(st.integers(1, 3))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))] if draw(st.booleans()) else frame)


def whole(frames: Sequence[bytes], notice: bytes) -> bool:
    """Whether all batches of a write with this notice are among `frames`."""
    batches: dict[tuple[int, int], set[int]] = defaultdict(set)
    for frame in frames:
        if frame[:4] == b"pkv1" and frame[20:] == notice and len(frame) >= 20:
            number, batch, count = struct.unpack_from("<QII", frame, 4)
            batches[number, count].add(batch)
    return any(0 < count <= sum(batch < count for batch in seen) for (_, count), seen in batches.items())


def kept(notices: Notices) -> int:
    """Batches that are remembered."""
    return sum(len(seen) for room in notices._rooms.values() for seen in room._seen.values())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_notice_is_whole_when_every_batch_has_come(order: tuple[int, ...]) -> None:
    notices = Notices()
    for position, batch in enumerate(order):
        assert notices.take() == []
        for _ in range(2 if position < 2 else 1):  # a repetition counts once
            notices.add("a", pack(7, batch, 3, b"landed"))
        notices.add("b", pack(7, 0, 2, b"other"))  # another peer's write of the same number
    assert notices.take() == [("a", b"landed")]
    assert notices.take() == [] and notices.refused == 0
    notices.add("b", pack(7, 1, 2, b"other"))
    assert notices.take() == [("b", b"other")]


def test_what_cannot_be_is_refused() -> None:
    notices = Notices()
    frames = (
        b"", b"hello", b"x" * 40, pack(1, 9, 3, b""), pack(1, 3, 3, b""), pack(1, 0, 0, b"none at all"),
        pack(1, 0, 1, bytes(NOTICE_BYTES + 1)), pack(1, 0, 1, bytes(5 << 20)), pack(1, 0, (1 << 32) - 1, b"many"),
    )  # fmt: skip
    for frame in frames:
        notices.add("a", frame)
    assert notices.take() == [] and notices.refused == len(frames) and kept(notices) == 0


def test_batches_of_different_writes_make_no_write() -> None:
    """The number, the count and the notice must agree."""
    notices = Notices()
    for batch, frame in enumerate((pack(1, 0, 2, b"a"), pack(1, 1, 2, b"b"), pack(1, 1, 3, b"a"), pack(2, 1, 2, b"a"))):
        notices.add("a", frame)
        assert notices.take() == [], batch
    notices.add("a", pack(1, 1, 2, b"a"))
    assert notices.take() == [("a", b"a")]


def test_one_write_keeps_no_more_than_there_is_room_for() -> None:
    notices = Notices()
    for batch in range(200_000):
        notices.add("a", pack(1, batch, 200_001, b"landed"))
    assert kept(notices) == 0 and notices.refused == 200_000
    for batch in range(60_000):
        notices.add("a", pack(1, batch, 60_001, b"landed"))
        notices.add("a", pack(2, batch, 60_001, b"landed"))
    assert kept(notices) == 60_000 and notices.refused == 260_000
    notices.forget("a")
    assert not notices._rooms


def test_many_writes_and_many_peers_keep_no_more_either() -> None:
    notices = Notices()
    for number in range(10_000):
        notices.add("a", pack(number, 0, 2, b""))
    assert len(notices._rooms["a"]) == notices_._WRITES and notices.refused == 10_000 - notices_._WRITES
    for number in range(10_000):
        notices.add(f"peer {number}", pack(1, 0, 2, b""))
    assert len(notices._rooms) == notices_._PEERS


def test_only_what_is_expected_is_kept() -> None:
    notices, room = Notices(), Room(1, 4)
    notices.add("a", pack(1, 0, 2, b"earlier"))
    notices.expect(lambda agent, notice: room if (agent, notice) == ("a", b"landed") else None)
    assert kept(notices) == 0
    for agent, notice in (("b", b"landed"), ("a", b"other")):
        notices.add(agent, pack(1, 0, 1, notice))
    assert notices.take() == [] and notices.refused == 2 and not notices._rooms
    for batch in range(2):
        notices.add("a", pack(1, batch, 2, b"landed"))
    assert notices.take() == [("a", b"landed")] and (len(room), room.batches) == (0, 4)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.one_of(FRAMES, changed())), max_size=60))
def test_any_bytes_complete_no_write_that_is_not_complete(said: list[tuple[str, bytes]]) -> None:
    notices = Notices()
    for position, (agent, frame) in enumerate(said, 1):
        notices.add(agent, frame)
        for who, notice in notices.take():
            assert who == agent and whole([one for by, one in said[:position] if by == who], notice)
    assert kept(notices) + notices.refused <= len(said)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5)), max_size=6), st.randoms(use_true_random=False),
    st.lists(st.binary(max_size=60).filter(lambda raw: not raw.startswith(b"pkv1")), max_size=5),
)  # fmt: skip
def test_repeated_and_reordered_batches_complete_every_write(
    writes: list[tuple[str, int]], random: object, junk: list[bytes]
) -> None:
    frames = [
        (agent, pack(number, batch, batches, b"%d" % number))
        for number, (agent, batches) in enumerate(writes)
        for batch in range(batches)
    ]
    random.shuffle(frames)  # type: ignore[attr-defined]
    notices, said, found = Notices(), list[bytes](), list[tuple[str, bytes]]()
    for agent, frame in frames:
        again = next((one for by, one in frames if by == agent and one in said), frame)
        for one in (frame, *junk, *([again] if struct.unpack_from("<I", again, 16)[0] > 1 else [])):
            notices.add(agent, one)
        said.append(frame)
        for who, notice in notices.take():
            assert whole(said, notice)
            found.append((who, notice))
    assert set(found) == {(agent, b"%d" % number) for number, (agent, _) in enumerate(writes)}


@given(st.integers(0, 3), st.integers(0, 9), st.lists(st.tuples(st.sampled_from([b"x", b"y", b"z"]), SMALL, SMALL)))
def test_a_room_is_never_more_than_full(writes: int, batches: int, said: list[tuple[bytes, int, int]]) -> None:
    room = Room(writes, batches)
    for name, batch, count in said:
        if batch < count:
            room.add(name + bytes([count]), batch, count)
        assert len(room) <= writes and 0 <= room.batches <= batches
        assert sum(len(seen) for seen in room._seen.values()) <= batches - room.batches


class Agent:
    """NIXL, of which only the notices are asked for."""

    def __init__(self) -> None:
        self.found: dict[str, list[bytes]] = {}

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found, self.found = self.found, {}
        return found


@given(st.lists(st.dictionaries(st.text(max_size=5), st.lists(st.one_of(FRAMES, changed()), max_size=5), max_size=3)))
def test_the_transport_survives_any_notice(said: list[dict[str, list[bytes]]]) -> None:
    agent = Agent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "make_agent", lambda name, backend: agent)
        one = transport.Transport("x", "LIBFABRIC")
    come: dict[str, list[bytes]] = defaultdict(list)
    for found in said:
        agent.found = found
        for name, frames in found.items():
            come[name] += frames
        assert all(whole(come[name], notice) for name, notice in one.progress())
    assert one.counters["notices"] <= sum(map(len, come.values())) and not one.counters["errors"]
