"""Single decisions of a rank, which long runs seldom come to."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import GAVE_WAY, Endpoint, LocalProtocolError
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


def test_a_beat_repeats_every_part_that_is_lacking() -> None:
    """F19: the first as well as the last."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1, True), register(1, packed=True), ev.Computed("t", 2, False)], 0.0, [])
    made.step([ev.Packed(1), ev.Computed("t", 3, False), ev.Packed(2)], 0.0, [])
    for handle in (1, 2):
        assert made.sender.claim(handle, 0.0)
        made.step([ev.WriteDone(handle)], 0.0, [])
    lacking = msg.Beat(YOU, ME, 0, 0, 1, 1, (msg.Ask(1, msg.ASK_GRANTED, 0),))
    assert said(made, heard(lacking)) == [msg.Written(ME, YOU, 1, 0, 2, False), msg.Written(ME, YOU, 1, 1, 1, False)]


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
    for late in (2, 4):
        assert said(made, register(late, "late")) == [msg.Failed(ME, YOU, late, msg.FORGOTTEN)]
    made = endpoint()
    made.step([register(3, lowest=2)], 0.0, [])
    assert said(made, register(1, "late")) == [msg.Failed(ME, YOU, 1, msg.FORGOTTEN)]
    assert said(made, register(2, "open")) == []


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
    assert made.counters == {"stranger": 2}
    made.step([heard(msg.Grant(YOU, 9, 1, (1,))), heard(msg.Welcome(YOU, ME, 1), ("Y", 0))], 0.0, [])
    assert made.counters == {"stranger": 3, "misdirected": 1}
    made.step([heard(msg.Welcome(YOU, 9, 1))], 0.0, [])
    assert made.counters == {"stranger": 3, "misdirected": 2}
    made.step([heard(msg.Hello(YOU, 0, 1), ("Z", 0)), heard(msg.Grant(YOU, ME, 1, (1,)), ("Z", 0))], 0.0, [])
    assert made.counters == {"stranger": 4, "misdirected": 2}, "whoever is not connected yet"


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


# ---------------------------------------------------------------- beats


def beat(lowest: int, *open_: msg.Ask) -> ev.Received:
    return heard(msg.Beat(YOU, ME, 0, 0, 9, lowest, open_))


def test_a_registration_that_a_beat_finds_lost_is_taken_when_it_comes() -> None:
    """It is the lowest that is open, so all below it are seen, and it is not."""
    made = endpoint()
    made.step([beat(2, msg.Ask(2, msg.ASK_REGISTERED, 0))], 0.0, [])
    assert said(made, register(1, "late")) == [msg.Failed(ME, YOU, 1, msg.FORGOTTEN)]
    assert said(made, register(2)) == []


def test_a_beat_has_an_offer_made_again_that_was_lost() -> None:
    """Begun to whom has heard of none, finished to whom has heard that it has begun."""
    made = endpoint()
    bare = heard(msg.Register(YOU, ME, 1, "t", 4, 1, False, 1))
    registered, offered = (beat(1, msg.Ask(1, stage, 0)) for stage in (msg.ASK_REGISTERED, msg.ASK_OFFERED))
    made.step([ev.Begin("t", 4), bare], 0.0, [])
    assert said(made, registered) == []
    made.step([ev.Computed("t", 2, False)], 0.0, [])
    assert said(made, registered) == [msg.Offer(ME, YOU, 1, 4, False)]
    assert said(made, offered) == []
    made.step([ev.Computed("t", 4, True)], 0.0, [])
    assert said(made, offered) == [msg.Offer(ME, YOU, 1, 4, True)]


def test_a_beat_repeats_a_cancel_that_was_lost() -> None:
    """F17: also one that gives way."""
    for stage, begun in (
        (msg.ASK_CANCELLED, [ev.Sent("t", False, "cancelled"), ev.Released("t")]),
        (msg.ASK_REQUEUE, []),
    ):
        made = endpoint()
        made.step([ev.Begin("t", 4), register(1)], 0.0, [])
        assert said(made, beat(1, msg.Ask(1, stage, 0))) == [msg.Cancelled(ME, YOU, 1), *begun]


def test_a_beat_lets_go_of_what_its_writer_has_closed() -> None:
    made = endpoint()
    for attempt in (1, 2, 3):
        made.step([heard(msg.Cancel(YOU, ME, attempt, "t"))], 0.0, [])
    for lowest, kept in ((1, 3), (3, 1), (4, 0)):
        made.step([beat(lowest)], 0.0, [])
        assert made.sender.sizes()["tombstones"] == kept


# ---------------------------------------------------------------- refusals, cancels and giving way


def test_a_refusal_is_remembered() -> None:
    made = endpoint(("D", 0), ("D", 1))
    made.step([ev.Begin("t", 4), register(1), ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    made.step([ev.Abort("t", "rejected")], 0.0, [])
    late = heard(msg.Register(YOU, ME, 1, "t", 4, 1, False, 1), ("D", 1))
    for _ in range(2):
        assert said(made, late) == [msg.Failed(ME, YOU, 1, "rejected")]


def test_what_is_being_stopped_keeps_its_name_and_its_reason() -> None:
    """Until nothing of it is active: another end changes nothing, and no other prefill takes its place."""
    made = endpoint()
    made.step([ev.Begin("t", 4), register(1), ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert said(made, ev.Abort("t", "rejected")) == [ev.Abandon(1)]
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t")), ev.Abort("t", "again"), ev.ProcessGone(("X", 0), 1)) == []
    with pytest.raises(LocalProtocolError, match="t began before"):
        made.step([ev.Begin("t", 4)], 0.0, [])
    assert said(made, ev.WriteQuiet(1)) == [
        msg.Failed(ME, YOU, 1, "rejected"), ev.Sent("t", False, "rejected"), ev.Released("t")
    ]  # fmt: skip
    assert said(made, ev.Begin("t", 4)) == [ev.Sent("t", False, "rejected"), ev.Released("t")]


def test_what_is_being_gathered_keeps_its_name() -> None:
    """Rule 3: its verdict has fallen, and no other prefill takes its place before nothing reads its source."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1), register(1, packed=True), ev.Computed("t", 4, True)], 0.0, [])
    assert said(made, ev.Abort("t", "rejected")) == [
        msg.Failed(ME, YOU, 1, "rejected"),
        ev.Sent("t", False, "rejected"),
    ]
    with pytest.raises(LocalProtocolError, match="t began before"):
        made.step([ev.Begin("t", 4)], 0.0, [])
    assert said(made, ev.Packed(1)) == [ev.Released("t")]
    assert said(made, ev.Begin("t", 4)) == [ev.Sent("t", False, "rejected"), ev.Released("t")]


def test_what_is_being_stopped_for_a_dead_receiver_is_told_to_nobody() -> None:
    """The host's word comes when nothing reads its memory any more; the name is free when nothing is active."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1), register(1, packed=True), ev.Computed("t", 4, True), ev.Packed(1)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert said(made, ev.Abort("t", "rejected")) == [ev.Abandon(1)]
    assert said(made, ev.ProcessGone(LINK, YOU)) == []
    with pytest.raises(LocalProtocolError, match="t began before"):
        made.step([ev.Begin("t", 4)], 0.0, [])
    assert said(made, ev.WriteQuiet(1)) == [ev.Sent("t", False, "rejected")]
    assert made.sender.staged_bytes == 0 and made.sender.sizes()["transfers"] == 0


def test_a_cancel_that_overtakes_its_registration_leaves_the_open_one() -> None:
    """F11: another attempt is open on the same link."""
    made = endpoint()
    made.step([ev.Begin("t", 4), register(1)], 0.0, [])
    assert said(made, heard(msg.Cancel(YOU, ME, 2, "t"))) == [msg.Cancelled(ME, YOU, 2)]
    assert said(made, ev.Computed("t", 4, True)) == [ev.Post(1, "t", LINK, 0, 4, False, (1,))]


def test_a_grant_of_nothing_is_no_grant() -> None:
    made = endpoint()
    bare = heard(msg.Register(YOU, ME, 1, "t", 4, 1, False, 1))
    made.step([ev.Begin("t", 4), bare, ev.Computed("t", 4, True)], 0.0, [])
    assert said(made, heard(msg.Grant(YOU, ME, 1, None))) == []
    assert said(made, heard(msg.Grant(YOU, ME, 1, (1,)))) == [ev.Post(1, "t", LINK, 0, 4, False, (1,))]


def test_a_shard_is_quiet_when_all_its_writes_are() -> None:
    """F05, E1: the first of two says nothing of the second."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1, True), register(1, packed=True), ev.Computed("t", 2, False)], 0.0, [])
    made.step([ev.Packed(1), ev.Computed("t", 4, True), ev.Packed(2)], 0.0, [])
    assert made.sender.claim(1, 0.0) and made.sender.claim(2, 0.0)
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t"))) == [ev.Abandon(1), ev.Abandon(2)]
    assert said(made, ev.WriteQuiet(2)) == []
    assert said(made, ev.WriteQuiet(1))[0] == msg.Cancelled(ME, YOU, 1)


def test_a_cancel_of_what_was_never_registered_ends_its_own_prefill() -> None:
    """Not another's; and not when it gives way, for then it will be registered."""
    made = endpoint(("D", 0), ("E", 0))
    made.step([ev.Begin("t", 4), ev.Begin("u", 4), register(1)], 0.0, [])
    other = heard(msg.Cancel(YOU, ME, 1, "t"), ("E", 0))
    assert said(made, other) == [msg.Cancelled(ME, YOU, 1)]
    for word in (msg.Cancel(YOU, ME, 2, "u", True), msg.Cancel(YOU, ME, 3, "v", True)):
        assert said(made, heard(word)) == [msg.Cancelled(ME, YOU, word.attempt)]
    assert said(made, ev.Begin("v", 4)) == []
    assert said(made, heard(msg.Cancel(YOU, ME, 4, "u"))) == (
        [msg.Cancelled(ME, YOU, 4), ev.Sent("u", False, "cancelled"), ev.Released("u")]
    )


def test_what_gave_way_is_still_to_be_read() -> None:
    """Rule 8 and 3: its registration is closed, another will come, and the source waits for it."""
    made = endpoint()
    made.step([ev.Begin("t", 4), register(1)], 0.0, [])
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t", True))) == [msg.Cancelled(ME, YOU, 1)]
    assert said(made, ev.Computed("t", 4, True)) == []
    assert said(made, register(2)) == [ev.Post(1, "t", LINK, 0, 4, False, (1,))]


def test_what_gave_way_on_one_rank_is_not_released_by_the_other() -> None:
    """Rule 3: the other has read all that it wants; the one registers anew, and reads then."""
    made = endpoint(("D", 0), ("D", 1))
    both = [heard(msg.Register(YOU, ME, 1, "t", 4, 2, False, 1, (1,)), ("D", rank)) for rank in (0, 1)]
    made.step([ev.Begin("t", 4), *both], 0.0, [])
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t", True), ("D", 0))) == [msg.Cancelled(ME, YOU, 1)]
    made.step([ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert said(made, ev.WriteDone(1)) == [msg.Written(ME, YOU, 1, 0, 4, True)]
    again = heard(msg.Register(YOU, ME, 2, "t", 4, 2, False, 2, (1,)), ("D", 0))
    assert said(made, again) == [ev.Post(2, "t", ("D", 0), 0, 4, False, (1,))]
    assert made.sender.claim(2, 0.0)
    assert said(made, ev.WriteDone(2))[1:] == [ev.Sent("t", True, ""), ev.Released("t")]


def test_nobody_gives_way_where_nothing_is_gained() -> None:
    """Rule 8 at P: what has no memory, what sends already, what wants nothing, and nobody at all when none waits."""
    bare = [msg.Register(YOU, ME, n, name, 4, 1, False, 1) for n, name in ((1, "waits"), (5, "young"))]
    made = endpoint()
    made.step([ev.Begin("waits", 4), heard(bare[0]), ev.Computed("waits", 4, True), register(3, "gives")], 0.0, [])
    made.step([ev.Begin("sends", 4, 1, True), register(4, "sends", packed=True)], 0.0, [])
    made.step([ev.Computed("sends", 2, False), ev.Begin("young", 4), heard(bare[1])], 0.0, [])
    assert said(made, ev.GiveWay()) == [msg.Failed(ME, YOU, 3, GAVE_WAY)]
    assert said(made, ev.GiveWay()) == []
    assert made.sender.counters == {"gave_way": 1}
    nothing = heard(msg.Register(YOU, ME, 6, "nothing", 0, 1, False, 1, ()))
    assert said(made, nothing, ev.GiveWay()) == []
    made = endpoint()
    made.step([ev.Begin("ready", 4), register(1, "ready"), ev.Computed("ready", 4, True)], 0.0, [])
    made.step([ev.Begin("young", 4), register(2, "young")], 0.0, [])
    assert said(made, ev.GiveWay()) == []
    assert made.sender.counters == {}


def test_what_is_finished_does_not_give_way() -> None:
    """Rule 8 at P: also when it has sent nothing yet, because another's parts fill the staging memory."""
    made = endpoint(staging_bytes=4, staging_share=1.0)
    for attempt, name in ((1, "sends"), (2, "waits")):
        made.step([ev.Begin(name, 4, 1), register(attempt, name, packed=True), ev.Computed(name, 4, True)], 0.0, [])
    assert made.sender.staged_bytes == 4 and len(made.sender.short) == 1
    hungry = heard(msg.Register(YOU, ME, 3, "hungry", 4, 1, False, 1))
    made.step([ev.Begin("hungry", 4), hungry, ev.Computed("hungry", 4, True)], 0.0, [])
    assert said(made, ev.GiveWay()) == []


def test_one_rank_that_sends_keeps_its_transfer_from_giving_way() -> None:
    """Rule 8 at P: the other rank waits for memory."""
    made = endpoint(("D", 0), ("D", 1))
    for rank, memory in ((0, (1,)), (1, None)):
        word = msg.Register(YOU, ME, 1, "young", 4, 2, True, 1, memory)
        made.step([heard(word, ("D", rank))], 0.0, [])
    ready = msg.Register(YOU, ME, 2, "ready", 4, 1, False, 1)
    made.step([ev.Begin("young", 4, 1, True), ev.Computed("young", 2, False)], 0.0, [])
    made.step([ev.Begin("ready", 4), heard(ready, ("D", 0)), ev.Computed("ready", 4, True)], 0.0, [])
    assert said(made, ev.GiveWay()) == []


def test_who_waits_for_staging_waits_once() -> None:
    made = endpoint(staging_bytes=4, staging_share=1.0)
    for attempt, name in ((1, "sends"), (2, "waits")):
        made.step([ev.Begin(name, 4, 1, True), register(attempt, name, packed=True)], 0.0, [])
    made.step([ev.Computed("sends", 4, True), ev.Computed("waits", 2, False)], 0.0, [])
    made.step([ev.Computed("waits", 3, False), ev.Computed("waits", 4, True)], 0.0, [])
    assert len(made.sender.short) == 1


def test_nothing_wanted_is_handed_over_by_a_word() -> None:
    """A prefix hit: the count is closed at once, and the source is free when the prefill is."""
    made = endpoint()
    none = heard(msg.Register(YOU, ME, 1, "t", 0, 1, False, 1, ()))
    assert said(made, ev.Begin("t", 4), none) == [
        msg.Written(ME, YOU, 1, 0, 0, True), ev.Sent("t", True, ""), ev.Released("t")
    ]  # fmt: skip


def test_what_a_host_says_of_what_is_being_stopped_is_let_be() -> None:
    """It has not heard of the end yet."""
    made = endpoint()
    made.step([ev.Begin("t", 4), register(1), ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    made.step([heard(msg.Cancel(YOU, ME, 1, "t"))], 0.0, [])
    assert said(made, ev.Preempted("t"), ev.Computed("t", 4, True)) == []


def test_what_does_not_come_in_chunks_is_packed_when_it_is_finished() -> None:
    made = endpoint()
    made.step([ev.Begin("t", 4, 1), register(1, packed=True)], 0.0, [])
    assert said(made, ev.Computed("t", 2, False)) == []
    assert said(made, ev.Computed("t", 4, True)) == [ev.Pack(1, "t", LINK, 0, 4)]
