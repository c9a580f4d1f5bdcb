"""Single decisions of a rank, which long runs seldom come to."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import Endpoint, LocalProtocolError
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.test_contract import LINK, ME, YOU, endpoint, heard, said


def register(attempt: int, name: str = "t", *, packed: bool = False, lowest: int = 1) -> ev.Received:
    return heard(msg.Register(YOU, ME, attempt, name, 4, 1, packed, lowest, (1,)))


def test_an_attempt_that_replaces_another_outlives_it() -> None:
    """F11: the older one is stopped, and neither its end nor its cancel touches the newer."""
    made = endpoint()
    made.step([ev.Begin("t", 4), register(1), ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert [type(a) for a in said(made, register(2))] == [ev.Abandon, ev.Post]
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t"))) == []
    assert said(made, ev.WriteQuiet(1)) == [msg.Cancelled(ME, YOU, 1)]
    assert made.sender.claim(2, 0.0)
    assert said(made, ev.WriteDone(2)) == (
        [msg.Written(ME, YOU, 2, 0, 4, True), ev.Sent("t", True, ""), ev.Released("t")]
    )


def test_nothing_of_a_stopping_shard_is_posted() -> None:
    """F09: the second part is ready when the first is being stopped."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1, True), register(1, packed=True), ev.Computed("t", 2, False)], 0.0, [])
    made.step([ev.Packed(1), ev.Computed("t", 4, True), ev.Packed(2)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t"))) == [ev.Abandon(1)]
    assert not made.sender.claim(2, 0.0)


def test_a_registration_of_what_is_handed_over_is_answered() -> None:
    """As many ranks as there are have been served, and one more is still open: a third is too late."""
    links = [("D", rank) for rank in range(3)]
    made = endpoint(*links)
    none = msg.Register(YOU, ME, 1, "t", 4, 1, False, 1)
    made.step([ev.Begin("t", 4), heard(none, links[0])], 0.0, [])
    made.step([heard(msg.Register(YOU, ME, 1, "t", 0, 1, False, 1, ()), links[1])], 0.0, [])
    assert said(made, heard(none, links[2])) == [msg.Failed(ME, YOU, 1, "ended")]


def test_a_cancel_that_overtakes_its_registration_is_kept() -> None:
    """E4: answered at once, refused for ever, and the prefill is not waited for."""
    made = endpoint()
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t"))) == [msg.Cancelled(ME, YOU, 1)]
    assert said(made, register(1)) == [msg.Cancelled(ME, YOU, 1)]
    assert said(made, ev.Begin("t", 4)) == [ev.Sent("t", False, "cancelled"), ev.Released("t")]


def test_a_repeated_registration_brings_its_grant() -> None:
    """Once: what is repeated further, or comes without memory, changes nothing."""
    made = endpoint()
    bare = msg.Register(YOU, ME, 1, "t", 4, 1, False, 1)
    made.step([ev.Begin("t", 4), heard(bare), ev.Computed("t", 4, True)], 0.0, [])
    assert said(made, heard(bare)) == []
    assert said(made, register(1)) == [ev.Post(1, "t", LINK, 0, 4, False, (1,))]
    assert said(made, register(1), heard(msg.Grant(YOU, ME, 1, (1,))), heard(bare)) == []
    assert made.sender.counters == {"register_again": 4, "grant_ignored": 1}


def test_a_beat_repeats_the_parts_that_were_lost() -> None:
    """F19: also of what is still under way."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1, True), register(1, packed=True), ev.Computed("t", 2, False)], 0.0, [])
    made.step([ev.Packed(1)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    written = msg.Written(ME, YOU, 1, 0, 2, False)
    assert said(made, ev.WriteDone(1)) == [written]
    lacking = msg.Beat(YOU, ME, 0, 0, 1, 1, (msg.Ask(1, msg.ASK_GRANTED, 0),))
    assert said(made, heard(lacking)) == [written]
    assert said(made, heard(msg.Beat(YOU, ME, 0, 0, 1, 1, (msg.Ask(1, msg.ASK_GRANTED, 1),)))) == []


def test_what_lies_below_the_lowest_open_is_seen() -> None:
    """A registration that comes after its receiver has closed it opens nothing."""
    made = endpoint()
    made.step([register(5, lowest=5)], 0.0, [])
    assert said(made, register(2, "late")) == [msg.Failed(ME, YOU, 2, msg.FORGOTTEN)]


def test_as_many_notices_are_kept_as_the_settings_say() -> None:
    made = endpoint(tombstones_per_link=2)
    for attempt in (1, 2, 3):
        made.step([heard(msg.Cancel(YOU, ME, attempt, "t"))], 0.0, [])
    answers = [said(made, register(attempt))[0] for attempt in (1, 2, 3)]
    assert answers == [
        msg.Failed(ME, YOU, 1, msg.FORGOTTEN), msg.Cancelled(ME, YOU, 2), msg.Cancelled(ME, YOU, 3)
    ]  # fmt: skip


def test_a_count_is_closed_once() -> None:
    """F27: a peer that closes the count twice is not believed the second time."""
    made = endpoint()
    made.step([ev.Expect("t", (LINK,), 4, False, 1, (1,))], 0.0, [])
    for part in (1, 5):
        assert said(made, heard(msg.Written(YOU, ME, 1, part, 1, True))) == []
    assert made.receiver.counters == {"written_refused": 1}
    assert said(made, heard(msg.Written(YOU, ME, 1, 0, 3, False))) == [ev.Landed("t")]


def test_a_peer_that_greets_before_it_is_connected_is_not_talked_to() -> None:
    made = Endpoint(ME, SETTINGS)
    made.step([heard(msg.Hello(YOU, 0, 1)), heard(msg.Hello(YOU, 0, 2))], 0.0, [])
    made.step([ev.Expect("t", (LINK,), 4, False)], 0.0, [])
    assert said(made, now=2 * SETTINGS.beat_s) == []
    assert said(made, ev.Connected(LINK, YOU), now=2 * SETTINGS.beat_s)[0] == msg.Welcome(ME, YOU, 2)


def test_words_of_strangers_and_for_others_are_counted() -> None:
    made = endpoint()
    made.step([heard(msg.Grant(YOU, ME, 1, (1,)), ("X", 0)), heard(msg.Grant(9, ME, 1, (1,)))], 0.0, [])
    made.step([heard(msg.Grant(YOU, 9, 1, (1,))), heard(msg.Welcome(YOU, ME, 1), ("Y", 0))], 0.0, [])
    assert made.counters == {"stranger": 3, "misdirected": 1}


def test_a_handle_says_what_it_is_about() -> None:
    """Registration, number among the parts, and the first token that is wanted; not of one that is over."""
    made = endpoint()
    wanted = msg.Register(YOU, ME, 3, "t", 4, 1, True, 1, (1,))
    made.step([ev.Begin("t", 10, 1, True), heard(wanted), ev.Computed("t", 8, False)], 0.0, [])
    made.step([ev.Computed("t", 10, True)], 0.0, [])
    assert [made.sender.about(handle) for handle in (1, 2)] == [(3, 0, 6), (3, 1, 6)]
    made.step([heard(msg.Cancel(YOU, ME, 3, "t")), ev.Packed(1)], 0.0, [])
    with pytest.raises(LocalProtocolError, match="handle 1 is not open"):
        made.sender.about(1)
    assert made.sender.about(2) == (3, 1, 6)
