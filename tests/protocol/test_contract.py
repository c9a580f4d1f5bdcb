"""What a host must not do, and what a machine answers when a peer does what it must not, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pushkv.model.protocol import GAVE_WAY, Endpoint, Ledger, LocalProtocolError
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.deadlines import Alarm
from pushkv.model.protocol.incoming import Expected
from pushkv.model.protocol.incoming import ReceiverLink as Link
from pushkv.model.protocol.incoming import Shard as Incoming
from pushkv.model.protocol.outgoing import SenderLink, Transfer
from pushkv.model.protocol.outgoing import Shard as Outgoing
from pushkv.model.protocol.peer import Peer
from pushkv.model.protocol.receiver import Receiver
from pushkv.sim.explore.world import SETTINGS

ME, YOU, LINK = 7, 8, ("D", 0)
REGISTER = msg.Register(YOU, ME, 1, "t", 4, 1, False, 1)


def endpoint(*links: ev.Link, **settings: Any) -> Endpoint:
    """One that knows ``links``."""
    made = Endpoint(ME, replace(SETTINGS, **settings))
    for link in links or (LINK,):
        made.step([ev.Received(link, msg.Hello(YOU, 0, 1)), ev.Connected(link, YOU)], 0.0, [])
    return made


def said(made: Endpoint, *events: ev.Record, now: float = 0.0) -> list[Any]:
    """What follows from ``events``, messages bare."""
    out: list[Any] = []
    made.step(events, now, out)
    return [action.message if isinstance(action, ev.Send) else action for action in out]


def heard(message: msg.Message, link: ev.Link = LINK) -> ev.Received:
    return ev.Received(link, message)


def refused(made: Any, *events: ev.Record, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        made.step(events, 0.0, [])


# ---------------------------------------------------------------- hosts


def test_a_rank_says_what_its_host_did_wrong() -> None:
    refused(endpoint(), ev.Loaded("t"), match="Loaded is not an event of a rank")
    refused(endpoint(), ev.Begin("t", 4), ev.Begin("t", 4), match="t began before")
    refused(endpoint(), ev.Begin("t", 4), ev.Computed("t", 4, True), ev.Preempted("t"), match="held, not preempted")
    refused(endpoint(), ev.Begin("t", 4), ev.Computed("t", 4, True), ev.Computed("t", 4, True), match="4 of 4, final")
    refused(endpoint(), ev.Begin("t", 4), ev.Computed("t", 3, True), match="computed 3 of 4, final True")
    wanted = ev.Expect("t", (LINK,), 4, False, 1, (1,))
    refused(endpoint(), wanted, wanted, match="settle one attempt before the next")
    refused(endpoint(), ev.Expect("t", (LINK, LINK), 4, False), match="each once")
    refused(endpoint(), ev.Expect("t", (), 4, False), match="one or more")
    refused(endpoint(), wanted, ev.Expose("t", (2,)), match="granted once per attempt")
    with pytest.raises(LocalProtocolError, match="incarnation"):
        Endpoint(0, SETTINGS)
    Endpoint(1, SETTINGS)


def test_a_write_has_its_order() -> None:
    """Post, claim, an end: no step twice, none left out."""
    made = endpoint()
    granted = msg.Register(YOU, ME, 1, "t", 4, 1, False, 1, (1,))
    made.step([ev.Begin("t", 4), heard(granted), ev.Computed("t", 4, True)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    with pytest.raises(LocalProtocolError, match="claimed before"):
        made.sender.claim(1, 0.0)
    refused(made, ev.WriteQuiet(1), match="neither broken nor abandoned")
    refused(made, ev.Packed(1), match="not packing")
    made = endpoint()
    packed = msg.Register(YOU, ME, 1, "t", 4, 1, True, 1, (1,))
    made.step([ev.Begin("t", 4, 1), heard(packed), ev.Computed("t", 4, True)], 0.0, [])
    for event in (ev.WriteDone(1), ev.WriteBroken(1), ev.WriteQuiet(1)):
        refused(made, event, match="was not claimed")
    refused(made, ev.Unpacked(2), match="not packing")
    with pytest.raises(LocalProtocolError, match="packing"):
        made.sender.claim(1, 0.0)
    made.step([ev.Packed(1)], 0.0, [])
    refused(made, ev.Unpacked(1), match="not packing")


def test_a_ledger_says_what_its_host_did_wrong() -> None:
    arrived = ev.Arrived("t", "P", ((("P", 0),),), 4, True, 1)
    refused(Ledger(SETTINGS), ev.Begin("t", 4), match="Begin is not an event of a ledger")
    refused(Ledger(SETTINGS), arrived, arrived, match="t arrived before")
    refused(Ledger(SETTINGS, 2), arrived, match="links for 1 ranks, this engine has 2")
    refused(Ledger(SETTINGS), arrived, ev.Allocated("t", (1,)), match="it lands in landing memory")
    refused(Ledger(SETTINGS), arrived, ev.FromRank(1, ev.Offered("t", False)), match="rank 1 of 1")
    refused(Ledger(SETTINGS), arrived, ev.FromRank(0, ev.Settled("t")), match="settle of t in state waiting")
    refused(Ledger(SETTINGS), ev.Loaded("t"), match="t is not known")
    refused(Ledger(SETTINGS), arrived, ev.Loaded("t"), match="loaded of t in state waiting")


def test_a_machine_that_takes_a_wrong_turn_says_where() -> None:
    """The tables are checked at every step."""
    transfer = Expected("t", 4, False, 1, None, 1)
    with pytest.raises(LocalProtocolError, match="landed of t in state unsent"):
        Incoming(Link(LINK, 0), transfer).move("landed")
    with pytest.raises(LocalProtocolError, match="claim of t in state registered"):
        Outgoing(SenderLink(LINK, YOU, 0, 8), Transfer("t"), REGISTER).move("claim")
    with pytest.raises(LocalProtocolError, match=r"heard of link .* in state cold"):
        Peer(LINK, ME, b"", SETTINGS, lambda link: 0, iter(())).move("heard")


def test_answers_of_the_host_that_come_too_late_are_dropped() -> None:
    made = endpoint()
    made.step([ev.Begin("u", 4), heard(msg.Register(YOU, ME, 1, "u", 4, 1, False, 1))], 0.0, [])
    assert said(made, ev.Connected(LINK, YOU), ev.Connected(("X", 0), 1), ev.Unfit(LINK, YOU, "no")) == []
    assert made.busy(LINK), "what was registered is still known"
    assert said(made, ev.Unfit(("X", 0), 1, "no"), ev.ProcessGone(("X", 0), 1), ev.ProcessGone(LINK, 9)) == []
    assert said(made, ev.Expose("t", (1,)), ev.Withdraw("t", "aborted"), ev.Revoked("t")) == []
    assert made.receiver.counters == {"expose_late": 1, "withdraw_late": 1}


def test_greet_asks_before_a_transfer_needs_it() -> None:
    made = Endpoint(ME, SETTINGS)
    assert said(made, ev.Greet(LINK)) == [msg.Hello(ME, 0, 1)]
    assert made.wake_at == SETTINGS.greet_s


# ---------------------------------------------------------------- the ledger


def test_what_cannot_be_served_fails_at_once() -> None:
    """Larger than all landing memory; too much in quarantine. Memory that came with it goes back."""
    links = ((("P", 0),),)
    ledger = Ledger(replace(SETTINGS, landing_segments=4, quarantine_per_peer=1))
    out: list[ev.Record] = []
    ledger.step([ev.Arrived("large", "P", links, 20, True, 5)], 0.0, out)
    assert out == [ev.Fail("large", "larger than the landing memory", True)]
    ledger.step([ev.Arrived("fits", "P", links, 16, True, 4)], 0.0, [])
    out.clear()
    ledger.step([ev.Arrived("a", "P", links, 4, False, memory=(1,)), ev.Aborted("a")], 0.0, [])
    assert ledger.quarantined("P") == 1
    ledger.step([ev.Arrived("b", "P", links, 4, False, memory=(2,)), ev.Arrived("c", "P", links, 4, False)], 0.0, out)
    refusal = "too much in quarantine with this peer"
    assert out == [ev.Fail("b", refusal, True), ev.Free("b", (2,)), ev.Fail("c", refusal, True)]
    out.clear()
    ledger.step([ev.Arrived("d", "Q", links, 4, False)], 0.0, out)
    assert [type(action) for action in out] == [ev.ToRank]


def test_memory_that_comes_too_late_goes_back() -> None:
    ledger, out = Ledger(SETTINGS), list[ev.Record]()
    ledger.step([ev.Arrived("t", "P", ((("P", 0),),), 4, False), ev.Aborted("t")], 0.0, [])
    ledger.step([ev.Allocated("t", (1,)), ev.Allocated("unknown", (2,))], 0.0, out)
    assert out == [ev.Free("t", (1,)), ev.Free("unknown", (2,))]
    assert ledger.counters == {"allocated_late": 2}


def test_a_peer_has_its_share_of_the_landing_memory() -> None:
    """Rule 6: whoever would take more waits for his own, and holds up no other peer, also when memory is short (the
    share was once looked at after the room). Nor is he overtaken by his own.
    """
    ledger, out = Ledger(replace(SETTINGS, landing_segments=8, landing_share=0.5)), list[ev.Record]()
    for name, peer, segments in (("a", "P", 3), ("b", "P", 2), ("c", "Q", 3), ("d", "P", 1), ("e", "P", 0)):
        ledger.step([ev.Arrived(name, peer, (((peer, 0),),), 4 * segments, True, segments)], 0.0, [])
        ledger.step([ev.FromRank(0, ev.Offered(name, name == "b"))], 0.0, out)
    commands = [action.command for action in out if isinstance(action, ev.ToRanks)]
    yielded = [command.transfer_id for command in commands if isinstance(command, ev.Withdraw)]
    exposed = [command for command in commands if isinstance(command, ev.Expose)]
    assert exposed[0] == ev.Expose("a", (2, 1, 0))
    assert [command.transfer_id for command in exposed] == ["a", "c"]
    assert yielded == ["a"]
    assert ledger.landing_free == 2
    out.clear()
    ledger.step([ev.FromRank(0, ev.Settled("a"))], 0.0, out)
    assert [a.command.transfer_id for a in out if isinstance(a, ev.ToRanks)] == ["b", "d", "e"]
    assert ledger.landing_free == 2


# ---------------------------------------------------------------- peers


def test_registrations_that_cannot_be_served_are_refused_with_a_reason() -> None:
    made = endpoint(LINK, ("E", 0))
    made.step([ev.Begin("t", 4), heard(REGISTER)], 0.0, [])
    other = msg.Register(YOU, ME, 1, "t", 4, 1, False, 1)
    assert said(made, heard(other, ("E", 0))) == [msg.Failed(ME, YOU, 1, "transfer is registered by another engine")]
    made.step([ev.Begin("u", 4)], 0.0, [])
    long = msg.Register(YOU, ME, 2, "u", 5, 1, False, 1)
    assert said(made, heard(long)) == [
        msg.Failed(ME, YOU, 2, "more tokens than the prompt has"),
        ev.Sent("u", False, "more tokens than the prompt has"),
        ev.Released("u"),
    ]
    early = msg.Register(YOU, ME, 3, "v", 5, 1, False, 1)
    assert said(made, heard(early), ev.Begin("v", 4)) == [
        msg.Failed(ME, YOU, 3, "more tokens than the prompt has"),
        ev.Sent("v", False, "more tokens than the prompt has"),
        ev.Released("v"),
    ]


def test_a_link_has_so_many_open_registrations() -> None:
    made = endpoint(open_per_link=1)
    made.step([heard(REGISTER)], 0.0, [])
    more = [msg.Register(YOU, ME, attempt, name, 4, 1, False, 1) for attempt, name in ((2, "u"), (3, "v"))]
    made.step([ev.Begin("v", 4)], 0.0, [])
    assert said(made, heard(more[0]), heard(more[1])) == [
        msg.Failed(ME, YOU, 2, "too many open registrations"),
        msg.Failed(ME, YOU, 3, "too many open registrations"),
        ev.Sent("v", False, "too many open registrations"),
        ev.Released("v"),
    ]
    assert said(made, ev.Begin("u", 4))[0] == ev.Sent("u", False, "too many open registrations")


def test_an_older_or_a_second_registration_of_one_transfer_is_refused() -> None:
    made = endpoint()
    newer = msg.Register(YOU, ME, 5, "t", 4, 1, False, 1)
    made.step([heard(newer)], 0.0, [])
    assert said(made, heard(REGISTER)) == [msg.Failed(ME, YOU, 1, "superseded")]
    none = msg.Register(YOU, ME, 6, "z", 0, 2, False, 1, ())
    made.step([ev.Begin("z", 4), heard(none), ev.Computed("z", 0, False)], 0.0, [])
    again = msg.Register(YOU, ME, 7, "z", 0, 2, False, 1, ())
    assert said(made, heard(again)) == [msg.Failed(ME, YOU, 7, "handed over before")]


def test_a_full_link_ends_nobody_elses_transfer() -> None:
    """Rule 6: an engine that has too much open names a transfer of another's."""
    made = endpoint(LINK, ("E", 0), open_per_link=1)
    made.step([ev.Begin("t", 4), heard(REGISTER)], 0.0, [])
    full = [heard(msg.Register(YOU, ME, n, name, 4, 1, False, 1), ("E", 0)) for n, name in ((1, "u"), (2, "t"))]
    assert said(made, *full) == [msg.Failed(ME, YOU, 2, "too many open registrations")]
    assert made.sender.counters == {"refused": 1}
    assert said(made, ev.Computed("t", 4, True)) == [msg.Offer(ME, YOU, 1, 4, True)]


def test_only_granted_ranks_give_way() -> None:
    """Rule 8 at P: one of two ranks was granted memory; it gives that back, the other keeps waiting."""
    made = endpoint(("D", 0), ("D", 1))
    for rank, memory in ((0, (1,)), (1, None)):
        register = msg.Register(YOU, ME, 1, "young", 4, 2, False, 1, memory)
        made.step([heard(register, ("D", rank))], 0.0, [])
    ready = msg.Register(YOU, ME, 2, "ready", 4, 1, False, 1)
    made.step([ev.Begin("young", 4), ev.Begin("ready", 4), heard(ready), ev.Computed("ready", 4, True)], 0.0, [])
    assert said(made, ev.GiveWay()) == [msg.Failed(ME, YOU, 1, GAVE_WAY)]


def test_a_beat_names_no_more_than_it_may() -> None:
    receiver = Receiver(ME, replace(SETTINGS, open_per_link=1 << 20), Alarm())
    receiver.link_up(LINK, YOU, 0, 0.0, [])
    for number in range(msg.MAX_OPEN + 5):
        receiver.expect(ev.Expect(f"t{number}", (LINK,), 4, False), 0.0, [])
    highest, lowest, asks = receiver.beat(LINK)
    assert (highest, lowest, len(asks)) == (msg.MAX_OPEN + 5, 1, msg.MAX_OPEN)
    msg.encode(msg.Beat(ME, YOU, 1, 0, highest, lowest, asks))


def test_revoked_rights_settle_what_is_open() -> None:
    """E3: the verdict, and the memory with it; what P says after that changes nothing."""
    made = endpoint()
    made.step([ev.Expect("t", (LINK,), 4, False, 1, (1,))], 0.0, [])
    assert said(made, ev.Revoked("t")) == [ev.Broken("t", "revoked"), ev.Settled("t")]
    assert said(made, heard(msg.Written(YOU, ME, 1, 0, 4, True))) == []
    assert made.receiver.counters == {"written_late": 1}


def test_revoked_rights_leave_what_has_landed() -> None:
    made = endpoint(("D", 0), ("E", 0))
    made.step([ev.Expect("t", (("D", 0), ("E", 0)), 4, False, 1, (1,))], 0.0, [])
    made.step([heard(msg.Written(YOU, ME, 1, 0, 4, True))], 0.0, [])
    assert said(made, ev.Revoked("t")) == [ev.Broken("t", "revoked"), ev.Settled("t")]


def test_the_bounds_are_formulas_of_the_settings() -> None:
    assert SETTINGS.receiver_verdict_s == (SETTINGS.yields + 1) * SETTINGS.wait_s
    assert SETTINGS.dead_peer_verdict_s == SETTINGS.suspect_after_s + SETTINGS.beat_s
    assert SETTINGS.sender_verdict_s == SETTINGS.lease_s + SETTINGS.write_s


def test_a_process_that_is_gone_before_the_link_is_up_leaves_nothing() -> None:
    """E2: it has greeted, the transport is being made, and the operating system tells of its death."""
    made = Endpoint(ME, SETTINGS)
    assert said(made, heard(msg.Hello(YOU, 0, 1))) == [ev.Connect(LINK, YOU, b"")]
    assert said(made, ev.ProcessGone(LINK, YOU)) == []
    assert said(made, ev.Connected(LINK, YOU), now=SETTINGS.drain_s / 2) == []
    assert said(made, now=SETTINGS.drain_s) == [ev.Disconnect(LINK, YOU)]
    assert made.peers == {} and made.wake_at == float("inf")
