"""A sender and time: leases, deadlines of writes, orphans; and what staging and preemptions do to parts."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import GAVE_WAY, Endpoint
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.test_contract import LINK, ME, YOU, endpoint, heard, refused, said
from tests.protocol.test_sender import register


def test_the_lease_has_ended_at_its_end() -> None:
    """F09: looked at in the moment of posting, also when no timer has fired yet."""
    for late, may in ((-0.5, True), (0.0, False), (0.5, False)):
        made = endpoint()
        made.step([ev.Begin("t", 4), register(1), ev.Computed("t", 4, True)], 0.0, [])
        assert made.sender.claim(1, SETTINGS.lease_s + late) is may


def test_the_lease_does_not_part_what_belongs_together() -> None:
    """One part is posted, so the others follow."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1, True), register(1, packed=True), ev.Computed("t", 2, False)], 0.0, [])
    made.step([ev.Packed(1), ev.Computed("t", 4, True), ev.Packed(2)], 0.0, [])
    assert made.sender.claim(1, SETTINGS.lease_s - 0.1)
    assert made.sender.claim(2, SETTINGS.lease_s + 0.1)


def test_the_lease_spares_what_is_posted_and_ends_the_rest() -> None:
    """Rules 3 and 5: one of two ranks is being written, the other never registers. The one has ``write_s`` more."""
    made = endpoint()
    shared = heard(msg.Register(YOU, ME, 1, "t", 4, 2, False, 1, (1,)))
    at = SETTINGS.lease_s
    made.step([ev.Begin("t", 4), shared, ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, at - 0.1)
    made.step([heard(msg.Beat(YOU, ME, 0, 0, 1, 1))], at - 0.1, [])
    assert not [a for a in said(made, now=at) if isinstance(a, (ev.Abandon, ev.Sent, msg.Failed))]
    end = at + SETTINGS.write_s
    told = [a for a in said(made, now=end) if not isinstance(a, (msg.Beat, msg.Hello))]
    assert told == [ev.Abandon(1), ev.Sent("t", False, "lease")]


def test_a_rank_that_gives_up_stops_what_the_lease_has_spared() -> None:
    """The other rank never registered, and says now that it will not: its engine wants none of it any more."""
    made = endpoint(("D", 0), ("D", 1))
    at = SETTINGS.lease_s
    made.step([ev.Begin("t", 4), heard(msg.Register(YOU, ME, 1, "t", 4, 2, False, 1, (1,)), ("D", 0))], 0.0, [])
    made.step([ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, at - 0.1)
    alive = [heard(msg.Beat(YOU, ME, 0, 0, 1, 1), ("D", rank)) for rank in (0, 1)]
    made.step(alive, at - 0.1, [])
    assert ev.Abandon(1) not in said(made, now=at)
    assert said(made, heard(msg.Cancel(YOU, ME, 1, "t"), ("D", 1)), now=at) == [
        msg.Cancelled(ME, YOU, 1),
        ev.Abandon(1),
    ]
    assert said(made, ev.WriteQuiet(1), now=at) == (
        [msg.Cancelled(ME, YOU, 1), ev.Sent("t", False, "lease"), ev.Released("t")]
    )


def test_all_writes_together_have_their_time() -> None:
    """Rule 5: each may be quick, and there is no end of them."""
    made = endpoint()
    made.step([ev.Begin("t", 4, 1, True), register(1, packed=True), ev.Computed("t", 2, False), ev.Packed(1)], 0.0, [])
    made.step([ev.Computed("t", 4, True), ev.Packed(2)], 0.0, [])
    end = SETTINGS.lease_s + SETTINGS.write_s
    assert made.sender.claim(1, SETTINGS.lease_s - 0.1)
    assert made.sender.sizes()["armed"] == made.sender.sizes()["deadlines"] == 2
    made.step([ev.WriteDone(1)], SETTINGS.lease_s, [])
    assert made.sender.claim(2, end - 0.5)
    made.step([heard(msg.Beat(YOU, ME, 0, 0, 1, 1))], end - 0.5, [])
    told = [a for a in said(made, now=end) if not isinstance(a, (msg.Beat, msg.Hello))]
    assert told == [ev.Abandon(2), ev.Sent("t", False, "writes took too long")]


def test_a_write_has_its_time() -> None:
    """From its own posting: one that is done, or one of another part, has no say in it."""
    made = endpoint()
    at = SETTINGS.write_s
    made.step([ev.Begin("t", 4, 1, True), register(1, packed=True), ev.Computed("t", 2, False), ev.Packed(1)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    made.step([ev.WriteDone(1), ev.Computed("t", 4, True), ev.Packed(2)], 1.0, [])
    assert made.sender.claim(2, 1.0)
    for now, over in ((at, False), (at + 0.9, False), (at + 1.0, True)):
        told = said(made, heard(msg.Beat(YOU, ME, 0, 0, 1, 1)), now=now)
        assert (ev.Abandon(2) in told) is over
        assert (ev.Sent("t", False, "write took too long") in told) is over


def test_an_orphan_is_nobodys_business_here() -> None:
    """F12: its receiver is told; this engine's host never began it."""
    made = endpoint()
    made.step([register(1)], 0.0, [])
    told = said(made, heard(msg.Beat(YOU, ME, 0, 0, 1, 1)), now=SETTINGS.orphan_s)
    assert [a for a in told if not isinstance(a, msg.Beat)] == [msg.Failed(ME, YOU, 1, "no prefill here")]
    assert made.sender.sizes()["armed"] == 0


def test_a_prefill_that_has_begun_is_no_orphan() -> None:
    """Rule 1: it may queue and run for longer than a registration waits for one that has not."""
    made = endpoint()
    made.step([register(1), ev.Begin("t", 4)], 0.0, [])
    for now in (SETTINGS.orphan_s, SETTINGS.orphan_s + SETTINGS.write_s):
        told = said(made, heard(msg.Beat(YOU, ME, 0, 0, 1, 1)), now=now)
        assert [a for a in told if not isinstance(a, msg.Beat)] == []
    assert said(made, ev.Computed("t", 4, True), now=now) == [ev.Post(1, "t", LINK, 0, 4, False, (1,))]


def test_the_longest_of_what_ranks_want_must_fit() -> None:
    made = endpoint(("D", 0), ("D", 1))
    for rank, tokens in ((0, 2), (1, 5)):
        made.step([heard(msg.Register(YOU, ME, 1, "t", tokens, 2, False, 1), ("D", rank))], 0.0, [])
    assert ev.Sent("t", False, "more tokens than the prompt has") in said(made, ev.Begin("t", 4))


def test_one_of_two_ranks_is_half_of_it() -> None:
    """F30: the host is told when both are served, and may free the source then."""
    made = endpoint(("D", 0), ("D", 1))
    both = [heard(msg.Register(YOU, ME, 1, "t", 4, 2, False, 1, (1,)), ("D", rank)) for rank in (0, 1)]
    made.step([ev.Begin("t", 4), both[0], ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert said(made, ev.WriteDone(1)) == [msg.Written(ME, YOU, 1, 0, 4, True)]
    assert said(made, both[1]) == [ev.Post(2, "t", ("D", 1), 0, 4, False, (1,))]
    assert made.sender.claim(2, 0.0)
    assert said(made, ev.WriteDone(2))[1:] == [ev.Sent("t", True, ""), ev.Released("t")]


def test_the_ranks_of_one_engine_share_their_end() -> None:
    """A cancel, or a registration that cannot be served, from a rank that had none: it is over for the rest."""
    too_long = "more tokens than the prompt has"
    links = [("D", 4), ("D", 5)]
    for word, answer, reason in (
        (msg.Cancel(YOU, ME, 1, "t"), msg.Cancelled(ME, YOU, 1), "cancelled"),
        (msg.Register(YOU, ME, 1, "t", 9, 2, False, 1), msg.Failed(ME, YOU, 1, too_long), too_long),
    ):
        made = endpoint(*links)
        made.step([ev.Begin("t", 4), heard(msg.Register(YOU, ME, 1, "t", 4, 2, False, 1), links[0])], 0.0, [])
        told = said(made, heard(word, links[1]))
        assert told[0] == answer and ev.Sent("t", False, reason) in told


def test_what_was_replaced_does_not_hide_what_replaced_it() -> None:
    """F11: when the older has ended, the newer is still this transfer's, and ends with it."""
    made = endpoint()
    made.step([ev.Begin("t", 4), register(1), register(2)], 0.0, [])
    assert said(made, ev.Abort("t", "rejected")) == [
        msg.Failed(ME, YOU, 2, "rejected"), ev.Sent("t", False, "rejected"), ev.Released("t")
    ]  # fmt: skip
    assert made.sender.sizes()["armed"] == 0
    made.step([ev.Begin("u", 4), register(3, "u"), ev.Computed("u", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert ev.Sent("u", True, "") in said(made, ev.WriteDone(1))
    assert made.sender.sizes()["armed"] == 0


def test_a_reason_is_as_long_as_a_message_may_be() -> None:
    """Of what is open, and of what comes after the end."""
    made, reason = endpoint(("D", 0), ("D", 1)), "x" * 1000
    made.step([heard(msg.Register(YOU, ME, 1, "t", 4, 2, False, 1), ("D", 0))], 0.0, [])
    told = (
        said(made, ev.Abort("t", reason))[0],
        said(made, heard(msg.Register(YOU, ME, 1, "t", 4, 2, False, 1), ("D", 1)))[0],
    )
    for failed in told:
        assert msg.decode(msg.encode(failed)).reason == reason[:64]


def test_so_many_ends_are_remembered() -> None:
    made = endpoint(remembered_ids=2)
    made.step([ev.Abort(name, "rejected") for name in ("a", "b", "c")], 0.0, [])
    assert said(made, ev.Begin("a", 4)) == []
    for name in ("b", "c"):
        assert said(made, ev.Begin(name, 4))[0] == ev.Sent(name, False, "rejected")


def short(*events: ev.Record) -> Endpoint:
    """A rank whose peer may stage 8 bytes, in parts of 4; ``t`` has 8 tokens of a byte each, and is granted."""
    made = endpoint(staging_bytes=16)
    wanted = msg.Register(YOU, ME, 1, "t", 8, 1, True, 1, (1,))
    made.step([ev.Begin("t", 8, 1, True), heard(wanted), *events], 0.0, [])
    return made


def test_what_is_lost_before_its_gather_gives_its_staging_to_others() -> None:
    """F21, F28: the first two parts of ``t`` fill the peer's share; ``u``, which is finished, gets it."""
    made = short(ev.Computed("t", 8, False), ev.Preempted("t"))
    other = msg.Register(YOU, ME, 2, "u", 8, 1, True, 1, (2,))
    assert said(made, ev.Begin("u", 8, 1), heard(other), ev.Computed("u", 8, True), ev.GiveWay()) == []
    assert made.sender.lost(1) and made.sender.lost(2) and not made.sender.lost(3)
    refused(made, ev.Unpacked(1), match="not the last part")
    assert said(made, ev.Unpacked(2)) == [ev.Pack(3, "u", LINK, 0, 4)]
    assert said(made, ev.Unpacked(1)) == [ev.Pack(4, "u", LINK, 4, 8)]
    assert not made.sender.lost(1) and not made.sender.lost(3)
    refused(made, ev.Unpacked(1), match="not packing")


def test_what_was_taken_back_gives_way() -> None:
    """Rule 8: nothing of it has left, so its memory goes to whom a finished prefill waits for."""
    made = short(ev.Computed("t", 8, False), ev.Preempted("t"), ev.Unpacked(2), ev.Unpacked(1))
    bare = msg.Register(YOU, ME, 2, "u", 8, 1, True, 1)
    made.step([ev.Begin("u", 8, 1), heard(bare), ev.Computed("u", 8, True)], 0.0, [])
    assert said(made, ev.GiveWay()) == [msg.Failed(ME, YOU, 1, GAVE_WAY)]


def test_what_was_taken_back_is_planned_anew() -> None:
    """By what is computed now, which is less or more than before, and under the same numbers."""
    made = short(ev.Computed("t", 4, False), ev.Packed(1), ev.Computed("t", 8, False))
    assert made.sender.claim(1, 0.0)
    made.step([ev.WriteDone(1), ev.Preempted("t"), ev.Computed("t", 6, False)], 0.0, [])
    assert made.sender.lost(2) and not made.sender.lost(1)
    assert said(made, ev.Unpacked(2)) == [ev.Pack(3, "t", LINK, 4, 6)]
    assert said(made, ev.Computed("t", 8, True), ev.Packed(3)) == [
        ev.Pack(4, "t", LINK, 6, 8), ev.Post(3, "t", LINK, 4, 6, True, (1,))
    ]  # fmt: skip
    made.step([ev.Packed(4)], 0.0, [])
    assert made.sender.claim(3, 0.0) and made.sender.claim(4, 0.0)
    assert said(made, ev.WriteDone(3), ev.WriteDone(4)) == [
        msg.Written(ME, YOU, 1, 1, 2, False), msg.Written(ME, YOU, 1, 2, 2, True), ev.Sent("t", True, "")
    ]  # fmt: skip


def test_what_was_computed_again_is_packed() -> None:
    """The host has the blocks again: nothing is lost, and if it gives the part up all the same it is asked anew."""
    made = short(ev.Computed("t", 4, False), ev.Preempted("t"), ev.Computed("t", 4, False))
    assert not made.sender.lost(1)
    assert said(made, ev.Unpacked(1)) == [ev.Pack(2, "t", LINK, 0, 4)]


@pytest.mark.parametrize("first", [ev.Abort("t", "aborted"), heard(msg.Cancel(YOU, ME, 1, "t"))])
def test_what_has_ended_and_lost_its_blocks_is_not_gathered(first: ev.Record) -> None:
    """F21: the source is released with the last answer, and staging is empty."""
    made = short(ev.Computed("t", 8, False))
    assert ev.Released("t") not in said(made, first)
    assert not made.sender.lost(1)
    assert said(made, ev.Preempted("t")) == []
    assert made.sender.lost(1) and made.sender.lost(2)
    assert said(made, ev.Unpacked(2)) == []
    assert said(made, ev.Unpacked(1)) == [ev.Released("t")]
    assert made.sender.staged_bytes == 0 and made.sender.sizes()["transfers"] == 0


def test_a_gather_that_has_begun_outlives_the_preemption() -> None:
    """Rule 7: what is in staging leaves."""
    made = short(ev.Computed("t", 8, False), ev.Preempted("t"), ev.Unpacked(2))
    assert said(made, ev.Packed(1)) == [ev.Post(1, "t", LINK, 0, 4, True, (1,))]
