"""What is heard over LIBFABRIC's notices: a word goes on when all batches of its write have come, and whatever a peer
says, no more is kept than what it was granted can have.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.reference.grants import notice_of
from pushkv.reference.landing import Landing
from pushkv.reference.notices import Notices, pack
from pushkv.reference.transport import agent_name

ME, P, OLD = 7, 8, 5
LINK, OTHER = ("P", 0), ("Q", 0)
TOKENS = 4
SHARD = SimpleNamespace(bundles=[SimpleNamespace(row_bytes=32)], part_bytes=lambda part: 64 * (part.stop - part.start))
AGENT = agent_name(*LINK, P)


class Rank:
    """What the receiving half asks of a rank."""

    incarnation = ME
    bell = None
    facts = SimpleNamespace(layout=SimpleNamespace(views=[SimpleNamespace(head_start=0, head_stop=1)]))

    def __init__(self, arrival: str = "notification") -> None:
        fellow = SimpleNamespace(
            incarnation=P,
            incoming=SHARD,
            facts=SimpleNamespace(arrival=arrival),
            covers=1,
            misnamed=lambda links, fanout: "",
        )
        self.fellows: dict[Any, Any] = {LINK: fellow, OTHER: fellow}
        self.pending: deque[Any] = deque()
        self.counters: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def tell_office(self, report: Any, now: float) -> None:
        pass

    def record(self, record: Any) -> None:
        pass


class Side:
    """The receiving half and its transport's notices, as the thread uses them: ``t`` is expected from P."""

    def __init__(self, arrival: str = "notification") -> None:
        self.rank = Rank(arrival)
        self.landing = Landing(self.rank, None)  # type: ignore[arg-type]
        self.notices = Notices()
        self.notices.expect(self.landing.room)
        self.landing.commanded(ev.Expect("t", (LINK,), TOKENS, True), 0.0)
        self.register(1)

    def register(self, attempt: int) -> None:
        self.landing.named(LINK, msg.Register(ME, P, attempt, "t", TOKENS, 1, True, 1), 0.0)

    def frame(self, frame: bytes, agent: str = AGENT) -> list[int]:
        """The parts whose word goes on by this frame."""
        self.notices.add(agent, frame)
        for who, notice in self.notices.take():
            self.landing.noticed(who, notice)
        found = [event.message.part for event in self.rank.pending]
        self.rank.pending.clear()
        return found

    def kept(self) -> int:
        inbound = self.landing.inbound.get("t")
        assert not self.notices._rooms
        if inbound is None:
            return 0
        marks = sum(len(seen) for room in inbound.rooms.values() for seen in room._seen.values())
        return marks + len(inbound.early) + len(inbound.noticed) + sum(len(parts) for parts in inbound.parts.values())


def word(part: int, tokens: int = 1, attempt: int = 1, last: bool = False) -> msg.Written:
    return msg.Written(P, ME, attempt, part, tokens, last)


def test_a_word_waits_for_every_batch_of_its_write() -> None:
    side = Side()
    assert not side.landing.heard(LINK, word(0))
    assert side.frame(pack(3, 1, 2, notice_of(ME, 1, 0))) == []
    assert side.frame(pack(3, 1, 2, notice_of(ME, 1, 0))) == []
    assert side.frame(pack(3, 0, 2, notice_of(ME, 1, 0))) == [0]
    assert side.frame(pack(4, 0, 1, notice_of(ME, 1, 1))) == []
    assert side.landing.heard(LINK, word(1)), "its notice came first"
    assert side.notices.refused == 0


@pytest.mark.parametrize(
    ("agent", "notice"),
    [
        (agent_name(*LINK, OLD), notice_of(ME, 1, 0)),
        (agent_name(*OTHER, P), notice_of(ME, 1, 0)),
        (agent_name("nobody", 0, P), notice_of(ME, 1, 0)),
        ("no name", notice_of(ME, 1, 0)),
        (AGENT, notice_of(OLD, 1, 0)),
        (AGENT, notice_of(ME, 2, 0)),
        (AGENT, notice_of(ME, 1, TOKENS)),
        (AGENT, notice_of(ME, 1, 0)[:-1]),
        (AGENT, b""),
    ],
    ids=["predecessor", "other", "nobody", "unnamed", "mine", "attempt", "part", "short", "empty"],
)
def test_what_nobody_waits_for_is_refused(agent: str, notice: bytes) -> None:
    side = Side()
    assert not side.landing.heard(LINK, word(0))
    kept = side.kept()
    assert side.frame(pack(1, 0, 1, notice), agent) == [] and side.frame(pack(2, 0, 2, notice), agent) == []
    assert side.notices.refused == 2 and side.kept() == kept


def test_a_write_has_no_more_batches_than_its_bytes() -> None:
    side = Side()
    for number, batches in enumerate((1 << 20, 1 << 31, 100)):
        assert side.frame(pack(number, 0, batches, notice_of(ME, 1, 0))) == []
    assert side.notices.refused == 3 and side.kept() == 0


def test_an_ended_write_and_a_peer_that_has_died_leave_nothing() -> None:
    side = Side()
    side.landing.heard(LINK, word(0))
    side.frame(pack(1, 0, 2, notice_of(ME, 1, 0)))
    side.frame(pack(2, 0, 1, notice_of(ME, 1, 1)))
    assert side.kept() == 4
    side.register(2)
    assert side.kept() == 0, "another attempt has other writes"
    side.frame(pack(1, 1, 2, notice_of(ME, 1, 0)))
    side.landing.heard(LINK, word(0, attempt=2))
    side.frame(pack(3, 0, 2, notice_of(ME, 2, 0)))
    del side.rank.fellows[LINK]
    assert side.frame(pack(3, 1, 2, notice_of(ME, 2, 0))) == []
    side.landing.reported(ev.Settled("t"), 0.0)
    inbound = side.landing.inbound["t"]
    assert not (inbound.rooms or inbound.early or inbound.noticed) and not side.landing._of_attempt
    side.landing.forget("t")
    assert side.kept() == 0


@pytest.mark.parametrize("arrival", ["completion", "notification"])
def test_words_about_parts_that_cannot_be_are_refused(arrival: str) -> None:
    side = Side(arrival)
    wrong = (word(TOKENS), word(1 << 60), word(0, TOKENS + 1), word(0, 1 << 60), word(0, 0))
    for one in wrong:
        assert not side.landing.heard(LINK, one)
    assert side.rank.counters == {"impossible part": len(wrong)} and side.kept() == 0


def test_where_completion_is_arrival_no_notice_is_kept() -> None:
    side = Side("completion")
    assert side.frame(pack(1, 0, 2, notice_of(ME, 1, 0))) == [] and side.notices.refused == 1


NUMBER = st.integers(0, 2)
NOTICES = st.one_of(
    st.builds(notice_of, st.sampled_from([ME, ME, ME, OLD]), st.integers(0, 2), st.integers(0, TOKENS)),
    st.builds(notice_of, *[st.integers(0, (1 << 64) - 1)] * 3),
    st.binary(max_size=70),
)
FRAMES = st.one_of(
    st.binary(max_size=100),
    st.builds(pack, NUMBER, st.integers(0, 3), st.integers(0, 3), NOTICES),
    st.builds(pack, st.integers(0, (1 << 64) - 1), *[st.integers(0, (1 << 32) - 1)] * 2, NOTICES),
)
AGENTS = st.one_of(st.sampled_from([AGENT, AGENT, AGENT, agent_name(*LINK, OLD), agent_name(*OTHER, P)]), st.text())
WORDS = st.builds(word, st.integers(0, TOKENS), st.integers(0, TOKENS), st.integers(0, 2), st.booleans())
MOVES = st.one_of(st.tuples(AGENTS, FRAMES), WORDS, st.sampled_from(["register", "settle", "again"]))


@given(st.lists(MOVES, max_size=80))
def test_whatever_comes_no_word_goes_on_before_its_bytes(moves: list[Any]) -> None:
    side, attempt, known = Side(), 1, True
    come: dict[tuple[int, int, int, int], set[int]] = {}  # (attempt, part, number, batches): batches

    def there(attempt: int, part: int) -> bool:
        return any(key[:2] == (attempt, part) and len(seen) == key[3] for key, seen in come.items())

    for move in moves:
        if isinstance(move, tuple):
            agent, frame = move
            if agent == AGENT and len(frame) == 44 and frame[:4] == b"pkv1":
                number, batch, batches = (
                    int.from_bytes(frame[a:b], "little") for a, b in ((4, 12), (12, 16), (16, 20))
                )
                mine, about, part = (int.from_bytes(frame[a : a + 8], "little") for a in (20, 28, 36))
                if mine == ME and batch < batches:
                    come.setdefault((about, part, number, batches), set()).add(batch)
            for part in side.frame(frame, agent):
                assert known and there(attempt, part)
        elif isinstance(move, msg.Written):
            if side.landing.heard(LINK, move) and known and move.attempt == attempt:
                assert there(attempt, move.part)
        elif move == "register":
            attempt += 1
            side.register(attempt)
            known = True
        elif move == "settle":
            side.landing.reported(ev.Settled("t"), 0.0)
            known = False
        else:
            side.landing.commanded(ev.Expect("t", (LINK,), TOKENS, True), 0.0)
            known = False
        assert side.kept() <= 2 * TOKENS + 2 * TOKENS + 20
    side.landing.forget("t")
    assert not side.landing._of_attempt and side.kept() == 0


def test_a_registration_that_needs_no_memory_names_none() -> None:
    """Also while another link of its transfer is down: where this one would write does not matter."""
    side = Side()
    side.landing.commanded(ev.Expect("nothing", (("away", 0), LINK), 0, True), 0.0)
    named = side.landing.named(LINK, msg.Register(ME, P, 9, "nothing", 0, 0, True, 1, ()), 0.0)
    assert named.memory == []
