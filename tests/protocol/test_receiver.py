"""Single decisions of a receiver, which long runs seldom come to."""

from __future__ import annotations

from typing import Any

import pytest

from pushkv.model.protocol import GAVE_WAY, Endpoint
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.test_contract import LINK, ME, YOU, endpoint, heard, said

OTHER = ("E", 0)
WANTED = ev.Expect("t", (LINK,), 4, False, 1, (1,))


def written(part: int, tokens: int, last: bool, attempt: int = 1) -> ev.Received:
    return heard(msg.Written(YOU, ME, attempt, part, tokens, last))


def failed(reason: str, attempt: int = 1, link: ev.Link = LINK) -> ev.Received:
    return heard(msg.Failed(YOU, ME, attempt, reason), link)


def expecting(*expected: ev.Record, links: tuple[ev.Link, ...] = (LINK,), **settings: Any) -> Endpoint:
    made = endpoint(*links, **settings)
    made.step(expected or (WANTED,), 0.0, [])
    return made


def kinds(made: Endpoint, *events: ev.Record, now: float = 0.0) -> list[str]:
    return [type(action).__name__ for action in said(made, *events, now=now)]


# ---------------------------------------------------------------- arrivals


def test_more_than_was_wanted_is_not_believed() -> None:
    made = expecting()
    assert said(made, written(0, 5, True)) == []
    assert made.receiver.counters == {"written_refused": 1}
    assert said(made, written(0, 4, True)) == [ev.Landed("t")]


def test_what_has_no_memory_cannot_have_been_written() -> None:
    """F27: whoever says so."""
    made = expecting(ev.Expect("t", (LINK,), 4, False))
    assert said(made, written(0, 4, True)) == []
    assert made.receiver.counters == {"written_refused": 1}


def test_a_part_of_nothing_is_not_believed() -> None:
    made = expecting(ev.Expect("t", (LINK,), 1, False, 1, (1,)))
    assert said(made, written(0, 0, True)) == []
    assert said(made, written(0, 1, True)) == [ev.Landed("t")]


def test_fewer_than_wanted_are_a_failure() -> None:
    """I3: all parts are there, and they do not make up the prompt."""
    made = expecting()
    assert said(made, written(0, 2, False), written(1, 1, True)) == [
        ev.Broken("t", "fewer tokens than wanted"), ev.Settled("t")
    ]  # fmt: skip


def test_a_part_that_comes_twice_counts_once() -> None:
    made = expecting()
    assert said(made, written(0, 2, False), written(0, 2, False)) == []
    assert said(made, written(1, 2, True)) == [ev.Landed("t")]
    assert said(made, written(1, 2, True), failed("late")) == []
    assert made.receiver.counters == {"written_again": 1, "written_late": 1, "closing_late": 1}


def test_what_landed_for_a_forgotten_attempt_does_not_count_for_the_next() -> None:
    """Rule 7: the sender wrote one part, failed, and has forgotten that it did."""
    made = expecting()
    assert kinds(made, written(0, 2, False), failed(msg.FORGOTTEN)) == ["Hello"]
    again = heard(msg.Welcome(YOU, ME, 1, 6))
    assert said(made, again) == [msg.Register(ME, YOU, 7, "t", 4, 1, False, 7, (1,))]
    assert said(made, written(1, 2, True, attempt=7)) == []
    assert said(made, written(0, 2, False, attempt=7)) == [ev.Landed("t")]


def test_whoever_has_forgotten_is_asked_until_it_answers() -> None:
    made = expecting()
    assert kinds(made, failed(msg.FORGOTTEN)) == ["Hello"]
    assert kinds(made, now=SETTINGS.beat_s) == ["Beat", "Hello"]


def test_what_was_offered_and_is_forgotten_has_failed() -> None:
    """Somebody had answered it: that it is asked again is for its client to say."""
    made = expecting(ev.Expect("t", (LINK,), 4, False))
    offer = heard(msg.Offer(YOU, ME, 1, 4, True))
    assert said(made, offer) == [ev.Offered("t", True)]
    assert said(made, failed(msg.FORGOTTEN))[:2] == [ev.Broken("t", msg.FORGOTTEN), ev.Settled("t")]


def test_what_arrives_with_the_deadline_has_arrived() -> None:
    """Rule 9: events first, then what is due."""
    made = expecting()
    late = SETTINGS.wait_s + 1.0
    assert kinds(made, written(0, 4, True), now=late)[0] == "Landed"
    made = expecting()
    assert kinds(made, now=late)[0] == "Broken"


# ---------------------------------------------------------------- offers


def test_an_offer_is_told_when_all_senders_have_made_theirs() -> None:
    """Once as begun and once as finished, whatever comes again or out of order."""
    made = expecting(ev.Expect("t", (LINK, OTHER), 4, False), links=(LINK, OTHER))

    def offer(link: ev.Link, finished: bool) -> list[Any]:
        return said(made, heard(msg.Offer(YOU, ME, 1, 4, finished), link))

    assert offer(LINK, True) == []
    assert offer(OTHER, False) == [ev.Offered("t", False)]
    assert offer(LINK, False) == []
    assert offer(OTHER, False) == []
    assert offer(OTHER, True) == [ev.Offered("t", True)]
    assert offer(OTHER, True) == []


def test_the_last_of_several_senders_says_that_all_have_begun() -> None:
    made = expecting(ev.Expect("t", (LINK, OTHER), 4, False), links=(LINK, OTHER))
    assert said(made, heard(msg.Offer(YOU, ME, 1, 4, True), OTHER)) == []
    assert said(made, heard(msg.Offer(YOU, ME, 1, 4, False), LINK)) == [ev.Offered("t", False)]


def test_a_prompt_that_is_too_short_is_not_offered() -> None:
    made = expecting(ev.Expect("t", (LINK,), 4, False))
    short = "the prompt is shorter than what is wanted"
    assert said(made, heard(msg.Offer(YOU, ME, 1, 3, True))) == (
        [ev.Broken("t", short), msg.Cancel(ME, YOU, 1, "t"), ev.Settled("t")]
    )
    assert said(made, heard(msg.Offer(YOU, ME, 1, 4, True))) == []
    assert made.receiver.counters == {"offer_ignored": 1}


# ---------------------------------------------------------------- the verdict, and what is settled


def test_the_verdict_falls_once_and_memory_follows() -> None:
    made = expecting()
    at = SETTINGS.wait_s
    made.step([heard(msg.Beat(YOU, ME, 0, 0, 0, 1))], at - 1.0, [])
    assert [action for action in said(made, now=at) if not isinstance(action, msg.Beat)] == (
        [ev.Broken("t", "deadline"), msg.Cancel(ME, YOU, 1, "t")]
    )
    assert said(made, heard(msg.Cancelled(YOU, ME, 1)), now=at) == [ev.Settled("t")]


def test_a_deadline_is_the_end_also_of_what_gives_way() -> None:
    made = expecting()
    assert said(made, ev.Withdraw("t", GAVE_WAY, True)) == [msg.Cancel(ME, YOU, 1, "t", True)]
    made.step([heard(msg.Beat(YOU, ME, 0, 0, 0, 1))], SETTINGS.wait_s - 1.0, [])
    told = [action for action in said(made, now=SETTINGS.wait_s) if not isinstance(action, msg.Beat)]
    assert told == [ev.Broken("t", "deadline"), msg.Cancel(ME, YOU, 1, "t")]


def test_one_that_has_landed_stops_nobody() -> None:
    """F04: the others go on."""
    made = expecting(ev.Expect("t", (LINK, OTHER), 4, False, 1, (1,)), links=(LINK, OTHER))
    assert said(made, written(0, 4, True)) == []
    assert said(made, heard(msg.Written(YOU, ME, 1, 0, 4, True), OTHER)) == [ev.Landed("t")]


def test_one_token_is_enough_to_be_written() -> None:
    """Rule 2: its memory waits for the writer's word."""
    made = expecting(ev.Expect("t", (LINK,), 1, False, 1, (1,)))
    assert said(made, ev.Withdraw("t", "aborted")) == [msg.Cancel(ME, YOU, 1, "t")]
    assert said(made, heard(msg.Cancelled(YOU, ME, 1))) == [ev.Settled("t")]


def test_what_was_never_sent_is_waited_for_by_nobody() -> None:
    """One of two senders was never greeted; the other's word is enough."""
    made = expecting(ev.Expect("t", (LINK, OTHER), 4, False, 1, (1,)))
    assert said(made, ev.Withdraw("t", "aborted")) == [msg.Cancel(ME, YOU, 1, "t")]
    assert said(made, heard(msg.Cancelled(YOU, ME, 1))) == [ev.Settled("t")]


def test_the_first_reason_is_the_reason() -> None:
    made = expecting(ev.Expect("t", (LINK, OTHER), 4, False, 1, (1,)), links=(LINK, OTHER))
    assert said(made, failed("write failed")) == [msg.Cancel(ME, YOU, 1, "t")]
    assert said(made, failed("aborted", link=OTHER)) == [ev.Broken("t", "write failed"), ev.Settled("t")]


def test_nothing_wanted_is_nothing_exposed() -> None:
    """A prefix hit has no memory that anybody could write to: it is settled with its verdict."""
    made = expecting(ev.Expect("t", (LINK,), 0, False))
    assert said(made, ev.Expose("t", ())) == []
    assert said(made, ev.Withdraw("t", "aborted")) == [msg.Cancel(ME, YOU, 1, "t"), ev.Settled("t")]


def test_what_is_to_give_way_can_still_be_given_up() -> None:
    """The second cancel says so: the sender may have kept on writing after the first."""
    made = expecting()
    assert said(made, ev.Withdraw("t", GAVE_WAY, True)) == [msg.Cancel(ME, YOU, 1, "t", True)]
    assert said(made, ev.Withdraw("t", GAVE_WAY, True)) == []
    assert said(made, ev.Withdraw("t", "aborted")) == [msg.Cancel(ME, YOU, 1, "t")]
    assert said(made, ev.Withdraw("t", "aborted")) == []


def test_what_one_sender_gives_back_all_must() -> None:
    """Rule 8: said upwards once; the ledger's own word for it changes nothing more."""
    made = expecting(ev.Expect("t", (LINK, OTHER), 4, False, 1, (1,)), links=(LINK, OTHER))
    assert said(made, failed(GAVE_WAY)) == [ev.Broken("t", GAVE_WAY), msg.Cancel(ME, YOU, 1, "t", True)]
    assert said(made, ev.Withdraw("t", GAVE_WAY, True)) == []
    assert said(made, failed(GAVE_WAY, link=OTHER)) == [ev.Settled("t")]


def test_what_was_given_up_is_not_given_back_as_well() -> None:
    """The abort here and P's giving way cross: one verdict, and the memory is settled by P's word."""
    made = expecting()
    assert said(made, ev.Withdraw("t", "aborted")) == [msg.Cancel(ME, YOU, 1, "t")]
    assert said(made, failed(GAVE_WAY)) == [ev.Settled("t")]


def test_what_has_no_memory_cannot_be_given_back() -> None:
    """F27: whoever says so has failed; the verdict waits for the other's word (rule 4)."""
    made = expecting(ev.Expect("t", (LINK, OTHER), 4, False), links=(LINK, OTHER))
    assert said(made, failed(GAVE_WAY)) == [msg.Cancel(ME, YOU, 1, "t")]
    assert said(made, heard(msg.Cancelled(YOU, ME, 1), OTHER)) == [ev.Broken("t", GAVE_WAY), ev.Settled("t")]


def test_what_wants_nothing_shows_no_memory() -> None:
    """Whatever its host has."""
    made = endpoint()
    assert said(made, ev.Expect("t", (LINK,), 0, False, 1, (1,))) == [msg.Register(ME, YOU, 1, "t", 0, 1, False, 1, ())]


# ---------------------------------------------------------------- gave way too late: some of it has landed


def _one_of_two_gives_way(*links: ev.Link, room: int = 8) -> Endpoint:
    """Two senders of one transfer, of which those at ``links`` are known, are asked to give way."""
    made = endpoint(*links, links=room)
    made.step([ev.Expect("t", (LINK, OTHER), 4, False, 1, (1,))], 0.0, [])
    told = said(made, ev.Withdraw("t", GAVE_WAY, True))
    assert told == [msg.Cancel(ME, YOU, 1, "t", True) for _ in links]
    return made


def test_what_was_never_registered_is_registered_when_it_can_be() -> None:
    """Rule 8: it waited for a handshake when it was to give way, and still does when the other has landed. (It was once
    registered at once, at a link that was not up: neither heard there nor ended with it.)
    """
    made = _one_of_two_gives_way(LINK)
    assert said(made, written(0, 4, True)) == []
    up = said(made, heard(msg.Hello(YOU, 0, 1), OTHER), ev.Connected(OTHER, YOU))
    assert up[-1] == msg.Register(ME, YOU, 1, "t", 4, 1, False, 1, (1,))
    assert said(made, heard(msg.Written(YOU, ME, 1, 0, 4, True), OTHER)) == [ev.Landed("t")]


def test_what_was_never_registered_ends_with_its_peer() -> None:
    made = _one_of_two_gives_way(LINK)
    made.step([written(0, 4, True), heard(msg.Welcome(YOU, ME, 1, 0, b"", "no"), OTHER)], 0.0, [])
    assert made.receiver.sizes()["transfers"] == 0, "its verdict has fallen, and all of it is settled"


def test_what_was_never_registered_may_be_registered_later_by_another_word() -> None:
    """The link came up while it gave way."""
    made = _one_of_two_gives_way(LINK)
    made.step([heard(msg.Hello(YOU, 0, 1), OTHER), ev.Connected(OTHER, YOU)], 0.0, [])
    assert said(made, written(0, 4, True)) == [msg.Register(ME, YOU, 1, "t", 4, 1, False, 1, (1,))]


def test_a_link_that_was_forgotten_meanwhile_is_made_again() -> None:
    """Rule 8: nothing was open on it. (What was registered there was once known to nobody, and its memory lost.)"""
    made = _one_of_two_gives_way(LINK, OTHER, room=2)
    made.step([heard(msg.Cancelled(YOU, ME, 1), OTHER)], 0.0, [])
    assert said(made, ev.Greet(("F", 0))) == [msg.Hello(ME, 0, 1), ev.Disconnect(OTHER, YOU)]
    assert said(made, written(0, 4, True)) == [msg.Hello(ME, 0, 2), ev.Disconnect(LINK, YOU)]
    made.step([heard(msg.Welcome(YOU, ME, 2), OTHER)], 0.0, [])
    assert said(made, ev.Connected(OTHER, YOU)) == [msg.Register(ME, YOU, 2, "t", 4, 1, False, 2, (1,))]
    assert said(made, heard(msg.Written(YOU, ME, 2, 0, 4, True), OTHER)) == [ev.Landed("t")]


def test_a_link_that_slept_meanwhile_is_looked_at_again() -> None:
    """Rule 5: the new registration may be lost, and its sender dead."""
    made = _one_of_two_gives_way(LINK, OTHER)
    made.step([heard(msg.Cancelled(YOU, ME, 1), OTHER)], 0.0, [])
    now = SETTINGS.beat_s
    made.step([], now, [])
    assert said(made, written(0, 4, True), now=now) == [msg.Register(ME, YOU, 2, "t", 4, 1, False, 2, (1,))]
    broken = [at for at in range(2, 12) if "Broken" in kinds(made, now=float(at))]
    assert broken == [now + SETTINGS.suspect_after_s]


def test_a_link_that_fell_silent_meanwhile_is_a_verdict() -> None:
    """Rule 5: not after ``wait_s`` only."""
    made = _one_of_two_gives_way(LINK, OTHER)
    made.step([heard(msg.Cancelled(YOU, ME, 1), OTHER), ev.Expect("u", (OTHER,), 4, False)], 0.0, [])
    now = 0.0
    while made.peers[OTHER].state != "suspect":
        now += SETTINGS.beat_s
        made.step([heard(msg.Beat(YOU, ME, 0, 0, 0, 1))], now, [])
    assert said(made, written(0, 4, True), now=now) == [ev.Broken("t", "peer silent"), ev.Settled("t")]


def test_what_gave_way_too_late_and_is_given_up_at_once_asks_nobody() -> None:
    made = _one_of_two_gives_way(LINK, OTHER, room=2)
    made.step([heard(msg.Cancelled(YOU, ME, 1), OTHER), ev.Greet(("F", 0))], 0.0, [])
    assert OTHER not in made.peers
    assert said(made, written(0, 4, True), ev.Withdraw("t", "aborted")) == [ev.Settled("t")]
    assert OTHER not in made.peers


# ---------------------------------------------------------------- beats


def test_what_a_sender_lacks_is_said_again_and_counted() -> None:
    made = expecting(WANTED, ev.Expect("u", (LINK,), 4, False), ev.Expect("v", (LINK,), 4, False))
    made.step([ev.Withdraw("v", "aborted")], 0.0, [])
    lacking = heard(msg.Beat(YOU, ME, 0, 0, 0, 1, (), (1, 2, 3, 9)))
    assert said(made, lacking) == [
        msg.Register(ME, YOU, 1, "t", 4, 1, False, 1, (1,)),
        msg.Grant(ME, YOU, 1, (1,)),
        msg.Register(ME, YOU, 2, "u", 4, 1, False, 1),
        msg.Cancel(ME, YOU, 3, "v"),
    ]
    assert made.receiver.counters == {"sent_again": 3}


# ---------------------------------------------------------------- links that come, go and forget


def test_numbers_begin_above_what_counts_as_seen() -> None:
    """E4: a lower one would be taken for a duplicate."""
    made = Endpoint(ME, SETTINGS)
    made.step([ev.Expect("t", (LINK,), 4, False), heard(msg.Hello(YOU, 0, 1, 5))], 0.0, [])
    registered = said(made, ev.Connected(LINK, YOU))[-1]
    assert isinstance(registered, msg.Register) and registered.attempt == 6


def test_numbers_of_a_forgotten_link_are_not_used_again() -> None:
    made = endpoint(links=1)
    made.step([WANTED, written(0, 4, True)], 0.0, [])
    made.step([], 2 * SETTINGS.beat_s, [])
    made.step([ev.Greet(OTHER)], 2 * SETTINGS.beat_s, [])
    assert list(made.peers) == [OTHER]
    made.step([heard(msg.Hello(YOU, 0, 1), OTHER), ev.Connected(OTHER, YOU)], 2 * SETTINGS.beat_s, [])
    registered = said(made, ev.Expect("u", (OTHER,), 4, False), now=2 * SETTINGS.beat_s)[0]
    assert registered.attempt == 2


def test_the_proof_of_a_death_is_a_verdict() -> None:
    """E2: at once; memory after the drain."""
    made = expecting()
    made.step([heard(msg.Beat(YOU, ME, 0, 0, 0, 1))], 0.5, [])
    assert said(made, ev.ProcessGone(LINK, YOU), now=0.6) == [ev.Broken("t", "peer gone"), msg.Cancel(ME, YOU, 1, "t")]
    assert said(made, now=0.6 + SETTINGS.drain_s / 2) == []
    assert said(made, ev.Expect("u", (LINK,), 4, False), now=0.6 + SETTINGS.drain_s / 2) == [], "it is for a successor"
    assert made.receiver.waits(LINK)
    made.step([ev.Withdraw("u", "aborted")], 0.6 + SETTINGS.drain_s / 2, [])
    assert said(made, now=0.6 + SETTINGS.drain_s) == [ev.Disconnect(LINK, YOU), ev.Settled("t")]


def test_what_is_wanted_of_the_successor_of_a_silent_process_waits_for_it() -> None:
    """E2: the proof of a death is the end of suspicion as well."""
    made = expecting()
    now = 0.0
    while made.peers[LINK].state != "suspect":
        now += SETTINGS.beat_s
        made.step([], now, [])
    assert kinds(made, ev.ProcessGone(LINK, YOU), now=now) == []
    assert kinds(made, ev.Expect("u", (LINK,), 4, False), now=now) == []
    assert made.receiver.waits(LINK)


def test_what_was_registered_after_the_last_word_is_for_the_successor() -> None:
    """E2: the dead may never have heard of it. At the same moment it may have."""
    for later, told in ((0.5, []), (0.0, []), (-0.5, [ev.Broken("t", "peer gone"), msg.Cancel(ME, YOU, 1, "t")])):
        made = endpoint()
        for at, event in sorted(
            [(3.0, heard(msg.Beat(YOU, ME, 0, 0, 0, 1))), (3.0 + later, WANTED)], key=lambda e: e[0]
        ):
            made.step([event], at, [])
        assert said(made, ev.ProcessGone(LINK, YOU), now=3.6) == told
        assert made.receiver.sizes()["live"] == 1


def test_what_was_forgotten_counts_from_its_new_registration() -> None:
    """E2: the sender had lost the first one, and has not been heard since the second."""
    made = endpoint()
    made.step([WANTED], 0.1, [])
    made.step([failed(msg.FORGOTTEN)], 0.5, [])
    assert said(made, heard(msg.Welcome(YOU, ME, 1, 6)), now=0.6) == [
        msg.Register(ME, YOU, 7, "t", 4, 1, False, 7, (1,))
    ]
    assert said(made, ev.ProcessGone(LINK, YOU), now=0.7) == []


def test_what_goes_on_after_giving_way_was_known_to_the_dead() -> None:
    """E2: its first registration was heard, so its successor cannot have any of it."""
    made = endpoint(LINK, OTHER)
    made.step([ev.Expect("t", (LINK, OTHER), 4, False, 1, (1,)), ev.Withdraw("t", GAVE_WAY, True)], 0.1, [])
    made.step([heard(msg.Cancelled(YOU, ME, 1), OTHER)], 0.2, [])
    made.step([written(0, 4, True)], 0.3, [])
    assert said(made, ev.ProcessGone(OTHER, YOU), now=0.4)[0] == ev.Broken("t", "peer gone")


def test_what_waits_for_a_link_counts_as_open() -> None:
    made = endpoint()
    made.step([WANTED, ev.Expect("u", (OTHER,), 4, False), ev.Expect("v", (OTHER,), 4, False)], 0.0, [])
    assert made.receiver.sizes() == {"transfers": 3, "live": 3, "armed": 3, "deadlines": 3}


def test_what_was_to_give_way_to_the_dead_is_over() -> None:
    """It was registered after the last word of that process, but its successor is not asked for it."""
    made = expecting()
    made.step([ev.Withdraw("t", GAVE_WAY, True)], 0.0, [])
    assert said(made, ev.ProcessGone(LINK, YOU))[0] == ev.Broken("t", "peer gone")


def test_what_a_living_sender_has_forgotten_is_registered_again() -> None:
    """E4: it was suspected meanwhile, and greets with a floor above what is open."""
    made = expecting()
    welcome = msg.Welcome(YOU, ME, 1, 3)
    assert said(made, heard(welcome)) == [msg.Register(ME, YOU, 4, "t", 4, 1, False, 4, (1,))]
    assert said(made, heard(msg.Welcome(YOU, ME, 1, 3))) == []


def test_a_silent_peer_gets_nothing_new() -> None:
    """Rule 5: the verdict on it would be as late as the deadline."""
    made = expecting()
    told: list[str] = []
    for beat in range(1, 8):
        told += kinds(made, now=beat * SETTINGS.beat_s)
    assert told.count("Broken") == 1
    at = 7 * SETTINGS.beat_s
    assert said(made, ev.Expect("u", (LINK,), 4, False), now=at) == [ev.Broken("u", "peer silent"), ev.Settled("u")]
    made.step([heard(msg.Cancelled(YOU, ME, 1))], at, [])
    assert kinds(made, ev.Expect("v", (LINK,), 4, False), now=at) == ["Register"]


def test_a_peer_that_cannot_be_reached_is_a_verdict() -> None:
    """Rule 5: also where nobody has ever answered."""
    made = Endpoint(ME, SETTINGS)
    assert kinds(made, WANTED) == ["Hello"]
    told: list[Any] = []
    while made.wake_at <= SETTINGS.suspect_after_s + SETTINGS.greet_s * 8 and not told:
        told = [action for action in said(made, now=made.wake_at) if not isinstance(action, msg.Hello)]
    assert told == [ev.Broken("t", "peer unreachable"), ev.Settled("t")]


@pytest.mark.parametrize("unfit", [False, True])
def test_a_peer_that_does_not_fit_is_a_verdict(unfit: bool) -> None:
    made = Endpoint(ME, SETTINGS)
    made.step([WANTED], 0.0, [])
    if unfit:
        made.step([heard(msg.Welcome(YOU, ME, 1))], 0.0, [])
        assert said(made, ev.Unfit(LINK, YOU, "block sizes")) == [ev.Broken("t", "block sizes"), ev.Settled("t")]
    else:
        refusal = heard(msg.Welcome(YOU, ME, 1, 0, b"", "block sizes"))
        assert said(made, refusal) == [ev.Broken("t", "block sizes"), ev.Settled("t")]
    assert kinds(made, ev.Expect("u", (LINK,), 4, False), now=1.0) == ["Hello"], "it is tried again"
    assert made.wake_at == 1.0 + SETTINGS.greet_s
