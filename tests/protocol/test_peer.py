"""Single decisions about a link: who is asked, who is believed, when silence is suspicion, what is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pushkv.model.protocol import Endpoint
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import NEVER
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.test_contract import LINK, ME, YOU, endpoint, heard, said

OLD, OTHER = 5, ("E", 0)
WANTED = ev.Expect("t", (LINK,), 4, False, 1, (1,))
NOTHING = msg.Beat(YOU, ME, 0, 0, 0, 1)
BEAT_S, SUSPECT_S = SETTINGS.beat_s, SETTINGS.suspect_after_s


def kinds(made: Endpoint, *events: ev.Record, now: float = 0.0) -> list[str]:
    return [type(action).__name__ for action in said(made, *events, now=now)]


# ---------------------------------------------------------------- who is there


def test_an_answer_to_an_earlier_question_proves_nothing() -> None:
    """E2: the predecessor of whoever is connected now had answered it."""
    made = Endpoint(ME, SETTINGS)
    made.step([ev.Greet(LINK)], 0.0, [])
    made.step([heard(msg.Hello(YOU, 0, 1)), ev.Connected(LINK, YOU), WANTED], 0.0, [])
    assert said(made, heard(msg.Welcome(OLD, ME, 1))) == []
    assert made.peers[LINK].incarnation == YOU
    assert said(made, heard(msg.Grant(9, ME, 1, ()))) == [msg.Hello(ME, YOU, 2)]
    assert made.peers[LINK].state == "up"
    assert said(made, heard(msg.Welcome(9, ME, 2))) == []
    assert made.peers[LINK].state == "draining"


def test_an_answer_to_a_question_of_a_forgotten_link_proves_nothing() -> None:
    """E2: an engine was asked and forgotten; its successor is here when the answer comes. (It was once believed: memory
    went back under the successor's writes.)
    """
    made = Endpoint(ME, SETTINGS)
    made.step([ev.Greet(LINK)], 0.0, [])
    made.step([], SETTINGS.greet_s, [])
    assert made.peers == {}
    made.step([heard(msg.Hello(YOU, 0, 1)), ev.Connected(LINK, YOU), WANTED], 1.0, [])
    late = heard(msg.Welcome(OLD, ME, 1))
    assert said(made, late, now=1.0) == []
    assert said(made, heard(msg.Grant(9, ME, 1, ())), now=1.0) == [msg.Hello(ME, YOU, 2)]
    assert said(made, late, now=1.0) == []
    assert made.peers[LINK].state == "up"


def test_nothing_is_said_while_the_transport_is_made() -> None:
    """Neither the next greeting nor a beat, though something waits."""
    made = Endpoint(ME, SETTINGS)
    made.step([WANTED], 0.0, [])
    assert said(made, heard(msg.Welcome(YOU, ME, 1))) == [ev.Connect(LINK, YOU, b"")]
    assert said(made, now=SETTINGS.greet_s) == said(made, now=SUSPECT_S) == []
    assert made.wake_at == SETTINGS.wait_s


def test_a_greeting_that_was_given_up_is_not_answered_any_more() -> None:
    made = Endpoint(ME, SETTINGS)
    assert said(made, ev.Greet(LINK)) == [msg.Hello(ME, 0, 1)]
    assert said(made, now=SETTINGS.greet_s) == []
    assert made.peers == {} and made.wake_at == NEVER
    assert said(made, WANTED, now=1.0) == [msg.Hello(ME, 0, 2)]
    assert said(made, heard(msg.Welcome(OLD, ME, 1)), now=1.0) == []
    assert said(made, heard(msg.Welcome(YOU, ME, 2)), now=1.0) == [ev.Connect(LINK, YOU, b"")]


def test_greetings_go_on_while_something_waits() -> None:
    """Whenever they have begun."""
    made, begun = Endpoint(ME, SETTINGS), 1000.0
    made.step([WANTED], begun, [])
    told: list[tuple[float, list[str]]] = []
    while made.wake_at < NEVER:
        at = made.wake_at
        told.append((at - begun, kinds(made, now=at)))
        assert made.wake_at > at
    first = SETTINGS.greet_s
    assert told == [
        (first, ["Hello"]),
        (3 * first, ["Hello"]),
        (7 * first, ["Hello"]),
        (7 * first + SUSPECT_S, ["Hello", "Broken", "Settled"]),
        (7 * first + 2 * SUSPECT_S, []),
    ]
    assert made.peers == {}


def test_whoever_does_not_answer_in_time_is_out_of_reach() -> None:
    """Rule 5: at that moment, and again for whatever is wanted after it."""
    made = Endpoint(ME, replace(SETTINGS, greet_s=SUSPECT_S))
    made.step([WANTED], 0.0, [])
    assert kinds(made, now=SUSPECT_S) == ["Hello", "Broken", "Settled"]
    made.step([ev.Expect("u", (LINK,), 4, False)], SUSPECT_S + 1.0, [])
    assert kinds(made, now=2 * SUSPECT_S) == ["Hello", "Broken", "Settled"]


def test_an_answer_to_the_first_of_several_greetings_is_an_answer() -> None:
    """The way may take longer than the wait between two."""
    made = Endpoint(ME, SETTINGS)
    made.step([WANTED], 0.0, [])
    assert said(made, now=SETTINGS.greet_s) == [msg.Hello(ME, 0, 2)]
    assert said(made, heard(msg.Welcome(YOU, ME, 1)), now=SETTINGS.greet_s) == [ev.Connect(LINK, YOU, b"")]


def test_a_word_for_a_predecessor_is_answered_by_a_question() -> None:
    """F40: that tells its writer who is here now."""
    assert said(endpoint(), heard(msg.Grant(YOU, 99, 1, ())), now=1.0) == [msg.Hello(ME, YOU, 1)]


def test_nobody_is_asked_while_the_fabric_drains() -> None:
    made = endpoint()
    made.step([ev.ProcessGone(LINK, YOU)], 1.0, [])
    assert said(made, heard(msg.Grant(9, ME, 1, ())), now=1.0) == []


def test_doubt_asks_once_a_beat() -> None:
    made = endpoint()
    stranger = heard(msg.Grant(9, ME, 1, ()))
    assert kinds(made, stranger, now=1.0) == ["Hello"]
    assert kinds(made, stranger, now=1.0) == []
    made.step([heard(NOTHING)], 1.0, [])
    assert kinds(made, stranger, now=1.0 + BEAT_S / 2) == []
    assert kinds(made, stranger, now=1.0 + BEAT_S) == ["Hello"]


def test_a_successor_is_taken_up_once() -> None:
    """It answered in the place of the dead; when it dies as well nobody is there."""
    made = endpoint()
    made.step([heard(msg.Hello(9, 0, 1))], 0.0, [])
    made.step([heard(msg.Welcome(9, ME, 1))], 0.0, [])
    at = SETTINGS.drain_s
    assert said(made, now=at) == [ev.Disconnect(LINK, YOU), ev.Connect(LINK, 9, b"")]
    made.step([ev.Connected(LINK, 9), ev.ProcessGone(LINK, 9)], at, [])
    assert said(made, now=2 * at) == [ev.Disconnect(LINK, 9)]


def test_a_late_answer_does_not_bring_back_an_earlier_successor() -> None:
    """E2: two came after the process that was known; the answer that proved its death was the second one's."""
    made = endpoint()
    for at in (1.0, 1.0 + BEAT_S):
        assert kinds(made, heard(msg.Grant(9, ME, 1, ())), now=at)[-1] == "Hello"
        made.step([heard(NOTHING)], at, [])
    now = 1.0 + BEAT_S
    assert said(made, heard(msg.Welcome(10, ME, 2)), now=now) == []
    assert said(made, heard(msg.Welcome(9, ME, 1)), now=now) == []
    assert said(made, now=now + SETTINGS.drain_s)[-1] == ev.Connect(LINK, 10, b"")


def test_a_greeting_of_the_refused_that_comes_after_its_death_is_answered() -> None:
    """It was told why by ourselves never, for it was its own word; then the operating system told of its end."""
    made = Endpoint(ME, SETTINGS)
    made.step(
        [ev.Greet(LINK), heard(msg.Welcome(YOU, ME, 1, 0, b"", "block sizes")), ev.ProcessGone(LINK, YOU)], 0.0, []
    )
    assert made.peers[LINK].state == "draining"
    assert said(made, heard(msg.Hello(YOU, 0, 4))) == [msg.Welcome(ME, YOU, 4, 0, b"", "block sizes")]
    assert said(made, now=SETTINGS.drain_s) == [ev.Disconnect(LINK, YOU)]
    assert made.peers == {}


def test_word_of_another_death_or_connection_is_not_heard() -> None:
    """The host speaks of processes, and another is here by now."""
    made = endpoint()
    made.step([ev.ProcessGone(LINK, OLD)], 0.0, [])
    assert made.peers[LINK].state == "up"
    made.step([ev.ProcessGone(LINK, YOU)], 0.0, [])
    made.step([], SETTINGS.drain_s, [])
    made.step([heard(msg.Hello(9, 0, 1)), WANTED], SETTINGS.drain_s, [])
    assert said(made, ev.Connected(LINK, YOU), ev.Unfit(LINK, YOU, "no"), now=SETTINGS.drain_s) == []
    assert made.peers[LINK].state == "connecting"


def test_who_is_asked_anew_is_not_answered_by_the_dead() -> None:
    """E2: something waited for the successor while the fabric drained."""
    made = endpoint()
    assert said(made, heard(msg.Grant(9, ME, 1, ()))) == [msg.Hello(ME, YOU, 1)]
    made.step([ev.ProcessGone(LINK, YOU), WANTED], 0.0, [])
    assert said(made, now=SETTINGS.drain_s)[-1] == msg.Hello(ME, 0, 2)
    assert said(made, heard(msg.Welcome(YOU, ME, 1)), now=SETTINGS.drain_s) == []
    assert said(made, heard(msg.Welcome(9, ME, 2)), now=SETTINGS.drain_s) == [ev.Connect(LINK, 9, b"")]


def test_a_second_proof_does_not_lengthen_the_drain() -> None:
    made = endpoint()
    made.step([ev.ProcessGone(LINK, YOU)], 0.0, [])
    made.step([ev.ProcessGone(LINK, YOU)], SETTINGS.drain_s / 2, [])
    assert kinds(made, now=SETTINGS.drain_s) == ["Disconnect"]


def test_a_refusal_does_not_outlive_the_refused() -> None:
    """Whoever is there may try again, and is not told what was wrong with another try, or with another process."""
    for gone in (False, True):
        made = Endpoint(ME, SETTINGS)
        made.step([heard(msg.Hello(YOU, 0, 1))], 0.0, [])
        assert said(made, ev.Unfit(LINK, YOU, "no")) == [msg.Welcome(ME, YOU, 1, 0, b"", "no")]
        if gone:
            made.step([ev.ProcessGone(LINK, YOU)], 0.0, [])
            assert kinds(made, now=SETTINGS.drain_s) == ["Disconnect"]
        made.step([heard(msg.Hello(9, 0, 4))], 2.0, [])
        assert said(made, ev.Connected(LINK, 9), now=2.0) == [msg.Welcome(ME, 9, 4)]


def test_a_refusal_is_as_long_as_a_message_may_be() -> None:
    made = Endpoint(ME, SETTINGS)
    made.step([heard(msg.Hello(YOU, 0, 1))], 0.0, [])
    (told,) = said(made, ev.Unfit(LINK, YOU, "x" * 10_000))
    assert msg.decode(msg.encode(told)).refusal == "x" * 4096


def test_a_floor_only_rises() -> None:
    """E4: an old greeting that comes late does not lower it."""
    made = endpoint()
    for floor, known in ((5, 5), (3, 5), (6, 6)):
        made.step([heard(msg.Hello(YOU, ME, 9, floor))], 0.0, [])
        assert made.peers[LINK].floor == known
        made.step([heard(msg.Welcome(YOU, ME, 1, floor - 1))], 0.0, [])
        assert made.peers[LINK].floor == known


def test_a_word_on_a_refused_link_leads_to_a_greeting() -> None:
    made = Endpoint(ME, SETTINGS)
    made.step([heard(msg.Hello(YOU, 0, 1)), ev.Unfit(LINK, YOU, "no")], 0.0, [])
    assert said(made, heard(NOTHING), now=1.0) == [msg.Hello(ME, YOU, 1)]


# ---------------------------------------------------------------- silence


def test_silence_is_counted_from_the_last_word() -> None:
    made = endpoint()
    at = 100.0
    made.step([heard(NOTHING)], at, [])
    made.step([WANTED], at, [])
    told: list[tuple[float, str]] = []
    while not told:
        assert made.wake_at <= at + SUSPECT_S + BEAT_S
        now = made.wake_at
        told = [(now, name) for name in kinds(made, now=now) if name == "Broken"]
    assert told == [(at + SUSPECT_S, "Broken")]


def test_the_time_that_connecting_takes_is_no_silence() -> None:
    made = Endpoint(ME, SETTINGS)
    made.step([WANTED, heard(msg.Hello(YOU, 0, 1))], 0.0, [])
    at = SUSPECT_S + 3.0
    assert kinds(made, ev.Connected(LINK, YOU), now=at) == ["Welcome", "Register"]
    assert kinds(made, now=at + BEAT_S) == ["Beat"]


def test_a_pause_is_excused_once() -> None:
    """Rule 9: silence counts again from the end of the pause, and from no later."""
    made = endpoint()
    made.step([WANTED], 0.0, [])
    at = BEAT_S + 20.0
    assert "Broken" not in kinds(made, now=at)
    broken = [now for now in range(int(at) + 1, int(at) + 12) if "Broken" in kinds(made, now=float(now))]
    assert broken == [at + SUSPECT_S - BEAT_S]


def test_a_pause_is_excused_by_each_links_own_deadline() -> None:
    """Rule 6: a timer of another link that is long due excuses no silence here."""
    made = endpoint(LINK, OTHER)
    made.step([WANTED, ev.Expect("u", (OTHER,), 4, False, 1, (1,))], 0.0, [])
    made.step([heard(NOTHING, OTHER)], 0.9, [])
    made.peers[OTHER].wake_at = 9.0
    made._rearm(made.peers[OTHER])
    made.step([], 10.0, [])
    assert (made.peers[LINK].heard_at, made.peers[OTHER].heard_at) == (9.0, 0.9)


def test_a_greeting_is_a_sign_of_life() -> None:
    made = endpoint()
    made.step([WANTED], 0.0, [])
    made.step([heard(msg.Hello(YOU, ME, 9))], SUSPECT_S - 0.5, [])
    broken = [now for now in range(int(SUSPECT_S), 12) if "Broken" in kinds(made, now=float(now))]
    assert broken == [2 * SUSPECT_S]


def _suspected() -> tuple[Endpoint, float]:
    made = endpoint()
    made.step([WANTED], 0.0, [])
    now = 0.0
    while now < SUSPECT_S:
        now += BEAT_S
        made.step([], now, [])
    return made, now


def test_who_is_heard_again_gets_new_registrations() -> None:
    made, now = _suspected()
    made.step([heard(NOTHING)], now, [])
    assert kinds(made, ev.Expect("u", (LINK,), 4, False), now=now) == ["Register"]


def test_a_strangers_greeting_is_no_sign_of_life() -> None:
    made, now = _suspected()
    made.step([heard(msg.Hello(9, 0, 1))], now, [])
    assert made.peers[LINK].state == "suspect"
    assert kinds(made, ev.Expect("u", (LINK,), 4, False), now=now) == ["Broken", "Settled"], "it is silent as before"


def test_a_greeting_ends_suspicion() -> None:
    for word in (msg.Hello(YOU, ME, 7), msg.Welcome(YOU, ME, 1)):
        made, now = _suspected()
        assert made.peers[LINK].state == "suspect"
        made.step([heard(word)], now, [])
        assert made.peers[LINK].state == "up"
        assert kinds(made, ev.Expect("u", (LINK,), 4, False), now=now) == ["Register"]


def test_suspicion_lapses_when_nothing_is_open() -> None:
    """Nobody asks any more, so silence says nothing: the next transfer is tried."""
    made, now = _suspected()
    made.step([ev.Revoked("t")], now, [])
    assert made.wake_at == now + BEAT_S
    now += BEAT_S
    made.step([], now, [])
    assert made.wake_at == NEVER and made.peers[LINK].state == "up"
    assert kinds(made, ev.Expect("u", (LINK,), 4, False), now=now) == ["Register"]
    assert kinds(made, now=now + BEAT_S) == ["Beat"], "and it is looked at as any other"


def test_an_idle_link_wakes_nobody() -> None:
    made = endpoint()
    assert made.wake_at == BEAT_S
    assert said(made, now=BEAT_S) == []
    assert made.wake_at == NEVER
    assert made.steps == 3 - 1


# ---------------------------------------------------------------- what is forgotten


def test_the_idle_link_that_was_heard_least_recently_is_forgotten() -> None:
    """And its transport with it; not one with something open, nor one whose fabric drains."""
    made = Endpoint(ME, SETTINGS)
    links: list[tuple[str, int]] = [("A", 0), ("B", 0), ("C", 0), ("D", 0)]
    made = endpoint(*links, links=4)
    made.step([ev.Expect("t", (links[0],), 4, False, 1, (1,))], 0.0, [])
    made.step([ev.ProcessGone(links[1], YOU)], 0.1, [])
    made.step([heard(NOTHING, links[2])], 0.2, [])
    assert said(made, ev.Greet(OTHER), now=0.3) == [msg.Hello(ME, 0, 1), ev.Disconnect(links[3], YOU)]
    assert list(made.peers) == [links[0], links[1], links[2], OTHER]
    assert kinds(made, ev.Greet(("F", 0)), now=0.4) == ["Hello", "Disconnect"]
    assert kinds(made, ev.Greet(("G", 0)), now=0.4) == ["Hello"]
    assert links[0] in made.peers and links[1] in made.peers


def test_a_greeting_is_the_last_that_was_heard() -> None:
    """Of whoever is not connected yet: a link that was quiet for longer is forgotten before it."""
    made = endpoint(LINK, links=2)
    made.step([heard(NOTHING)], BEAT_S, [])
    made.step([heard(msg.Hello(YOU, 0, 1), OTHER)], 5.0, [])
    assert said(made, ev.Greet(("F", 0)), now=6.0) == [msg.Hello(ME, 0, 1), ev.Disconnect(LINK, YOU)]
    assert list(made.peers) == [OTHER, ("F", 0)]


def test_what_a_forgotten_link_has_registered_stays_seen() -> None:
    """F11, E4: the highest number of all that were forgotten, also for who comes anew."""
    made = endpoint(links=1)
    registered: dict[str, Any] = {"fanout": 1, "packed": False, "memory": (1,)}
    for link, attempt in ((LINK, 7), (OTHER, 3)):
        if link == OTHER:
            made.step([heard(msg.Hello(YOU, 0, 1), link), ev.Connected(link, YOU)], 0.0, [])
        made.step([heard(msg.Cancel(YOU, ME, attempt, "t"), link)], 0.0, [])
    assert list(made.peers) == [OTHER]
    made.step([heard(msg.Hello(YOU, 0, 5))], 0.0, [])
    assert list(made.peers) == [LINK]
    assert said(made, ev.Connected(LINK, YOU))[0] == msg.Welcome(ME, YOU, 5, 7)
    late = msg.Register(YOU, ME, 7, "t", 4, lowest=1, **registered)
    assert said(made, ev.Begin("u", 4), heard(late)) == [msg.Failed(ME, YOU, 7, msg.FORGOTTEN)]
    assert said(made, heard(msg.Register(YOU, ME, 8, "u", 4, lowest=1, **registered))) == []
