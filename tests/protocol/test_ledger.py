"""Single decisions of the ledger, which long runs seldom come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pushkv.model.protocol import GAVE_WAY, Ledger
from pushkv.model.protocol import events as ev
from pushkv.sim.explore.world import SETTINGS


def arrived(name: str, peer: str = "P", segments: int = 0, ranks: int = 1, **more: Any) -> ev.Arrived:
    links = tuple(((peer, rank),) for rank in range(ranks))
    return ev.Arrived(name, peer, links, 4, bool(segments), segments, **more)


def offered(name: str, finished: bool = False, rank: int = 0) -> ev.FromRank:
    return ev.FromRank(rank, ev.Offered(name, finished))


def done(ledger: Ledger, *events: ev.Record) -> list[Any]:
    out: list[Any] = []
    ledger.step(events, 0.0, out)
    return out


def exposed(actions: list[Any]) -> list[str]:
    return [a.command.transfer_id for a in actions if isinstance(a, ev.ToRanks) and isinstance(a.command, ev.Expose)]


def yielding(actions: list[Any]) -> list[str]:
    return [a.command.transfer_id for a in actions if isinstance(a, ev.ToRanks) and isinstance(a.command, ev.Withdraw)]


def test_an_abort_that_crosses_the_last_notice_gives_the_memory_back() -> None:
    """F16: the verdict is the abort's; what has landed after it is settled."""
    ledger = Ledger(SETTINGS)
    done(ledger, arrived("t", memory=(1, 2)), ev.Aborted("t"))
    assert done(ledger, ev.Aborted("t")) == []
    assert done(ledger, ev.FromRank(0, ev.Landed("t"))) == [ev.Free("t", (1, 2))]
    assert ledger.open() == (0, 0)
    assert not ledger._quarantine  # a table by peer: nobody stays in it


def test_finished_prefills_are_granted_first() -> None:
    ledger = Ledger(replace(SETTINGS, landing_segments=4))
    done(ledger, arrived("old", segments=4), offered("old"), arrived("a", segments=4), arrived("b", segments=4))
    assert exposed(done(ledger, offered("a"), offered("b", True), ev.Aborted("old"))) == []
    assert exposed(done(ledger, ev.FromRank(0, ev.Settled("old")))) == ["b"]
    assert exposed(done(ledger, ev.FromRank(0, ev.Landed("b")), ev.Loaded("b"))) == ["a"]


def test_one_at_a_time_gives_way() -> None:
    """Rule 8: the youngest; and asked again nobody else before it has."""
    ledger = Ledger(SETTINGS)
    for name in ("v1", "v2", "heir"):
        done(ledger, arrived(name), offered(name, name == "heir"))
    done(ledger, ev.Allocated("v1", (1,)), ev.Allocated("v2", (2,)))
    assert yielding(done(ledger, ev.Starved("heir"))) == ["v2"]
    assert yielding(done(ledger, ev.Starved("heir"))) == []
    back = done(ledger, ev.FromRank(0, ev.Settled("v2")))
    assert back[0] == ev.TakeBack("v2", (2,), "heir")
    assert yielding(done(ledger, ev.Starved("heir"))) == ["v1"]


def test_only_memory_of_the_same_kind_gives_way() -> None:
    ledger = Ledger(SETTINGS)
    done(ledger, arrived("packed", segments=4), offered("packed"))
    done(ledger, arrived("heir"), offered("heir", True))
    assert yielding(done(ledger, ev.Starved("heir"))) == []


def test_what_has_landed_somewhere_does_not_give_way() -> None:
    ledger = Ledger(SETTINGS, 2)
    for name in ("v", "heir"):
        both = [offered(name, name == "heir", rank) for rank in (0, 1)]
        done(ledger, arrived(name, ranks=2), *both)
    done(ledger, ev.Allocated("v", (1,)), ev.FromRank(0, ev.Landed("v")))
    assert yielding(done(ledger, ev.Starved("heir"))) == []


def test_what_was_finished_when_it_got_its_memory_does_not_give_way() -> None:
    """Rule 8: it would be in the heir's place at once. On one of two ranks it is not finished enough."""
    for ranks, gives in (((0, 1), []), ((0,), ["v"])):
        ledger = Ledger(SETTINGS, 2)
        done(ledger, arrived("v", ranks=2), *[offered("v", rank in ranks, rank) for rank in (0, 1)])
        done(ledger, ev.Allocated("v", (1,)), arrived("heir", ranks=2))
        done(ledger, *[offered("heir", True, rank) for rank in (0, 1)])
        assert yielding(done(ledger, ev.Starved("heir"))) == gives


def test_what_a_sender_gave_back_goes_to_a_finished_prefill_of_its() -> None:
    """Rule 8: the heir is the first whose finished prefill waits at that sender; not one that has not finished, nor one
    that has memory.
    """
    ledger = Ledger(SETTINGS)
    done(ledger, arrived("has"), offered("has", True), ev.Allocated("has", (2,)))
    done(ledger, arrived("v"), offered("v"), ev.Allocated("v", (1,)))
    for name, peer, finished in (("waits", "P", False), ("other", "Q", True), ("ready", "P", True)):
        done(ledger, arrived(name, peer), offered(name, finished))
    done(ledger, ev.FromRank(0, ev.Broken("v", GAVE_WAY)))
    assert done(ledger, ev.FromRank(0, ev.Settled("v")))[0] == ev.TakeBack("v", (1,), "ready")


def test_what_is_ready_may_be_aborted() -> None:
    """It has landed everywhere: its memory is the host's, and landing memory comes back."""
    ledger = Ledger(replace(SETTINGS, landing_segments=4))
    assert ledger.segments == 4
    done(ledger, arrived("t", segments=3), offered("t"), arrived("u", memory=(1, 2)))
    assert ledger.landing_free == 1
    ready = done(ledger, ev.FromRank(0, ev.Landed("t")), ev.FromRank(0, ev.Landed("u")))
    assert ready == [ev.Ready("t", (2, 1, 0)), ev.Ready("u", (1, 2))]
    assert ledger.expects("t") and not ledger.expects("v")
    assert done(ledger, ev.Aborted("t"), ev.Aborted("u")) == []
    assert not ledger.expects("t")
    assert ledger.landing_free == 4 and ledger.open() == (0, 0) and ledger.quarantined() == 0
    assert done(ledger, ev.Aborted("t")) == []


def test_starving_is_heard_of_those_that_were_asked() -> None:
    """Rule 8: word that there is no memory, for what is over or has not been offered, makes nobody give way."""
    ledger = Ledger(SETTINGS)
    for name in ("v", "heir"):
        done(ledger, arrived(name), offered(name, name == "heir"))
    done(ledger, ev.Allocated("v", (1,)), arrived("waits"), ev.Aborted("heir"))
    assert done(ledger, ev.Starved("heir"), ev.Starved("waits"), ev.Starved("nobody")) == []
    assert yielding(done(ledger, offered("waits", True), ev.Starved("waits"))) == ["v"]


def test_only_so_often_gives_one_way() -> None:
    """Rule 8: where its host takes memory up again by itself."""
    ledger = Ledger(replace(SETTINGS, yields=1))
    done(ledger, arrived("v"), ev.Allocated("v", (1,)), arrived("heir"), offered("heir", True))
    assert yielding(done(ledger, ev.Starved("heir"))) == ["v"]
    done(ledger, ev.FromRank(0, ev.Settled("v")), ev.Allocated("v", (1,)))
    assert yielding(done(ledger, ev.Starved("heir"))) == []
    out = done(ledger, ev.FromRank(0, ev.Broken("v", GAVE_WAY)))
    assert out[0] == ev.Fail("v", "gave way too often", False)


def test_each_heir_has_its_own() -> None:
    """Rule 8: that another waits for somebody to give way is no reason to wait for him as well."""
    ledger = Ledger(SETTINGS)
    for name in ("v1", "v2"):
        done(ledger, arrived(name), offered(name), ev.Allocated(name, (1,)))
    for name in ("one", "two"):
        done(ledger, arrived(name), offered(name, True))
    assert yielding(done(ledger, ev.Starved("one"))) == ["v2"]
    assert yielding(done(ledger, ev.Starved("two"))) == ["v1"]


def test_what_a_sender_gives_back_may_have_no_heir() -> None:
    """Said by one rank after the other: heard once."""
    ledger = Ledger(SETTINGS, 2)
    done(ledger, arrived("v", ranks=2), *[offered("v", rank=rank) for rank in (0, 1)], ev.Allocated("v", (1,)))
    assert yielding(done(ledger, ev.FromRank(0, ev.Broken("v", GAVE_WAY)))) == ["v"]
    assert done(ledger, ev.FromRank(1, ev.Broken("v", GAVE_WAY))) == []
    settled = done(ledger, *[ev.FromRank(rank, ev.Settled("v")) for rank in (0, 1)])
    assert settled[0] == ev.TakeBack("v", (1,), "")


def test_what_wants_nothing_has_nothing_to_give() -> None:
    ledger = Ledger(SETTINGS)
    links = ((("P", 0),),)
    for name, tokens in (("one", 1), ("none", 0)):
        done(ledger, ev.Arrived(name, "P", links, tokens, False), offered(name), ev.Allocated(name, (tokens,)))
    done(ledger, arrived("heir"), offered("heir", True))
    assert yielding(done(ledger, ev.Starved("heir"))) == ["one"]


def test_hunger_counts_when_the_prefill_is_finished() -> None:
    """Rule 8: one that waited before its prefill had ended has somebody give way when it has."""
    ledger = Ledger(SETTINGS)
    done(ledger, arrived("v"), offered("v"), ev.Allocated("v", (1,)))
    done(ledger, arrived("fed"), offered("fed"))
    assert done(ledger, offered("fed", True)) == [], "it has been asked, and has not said that it starves"
    assert done(ledger, arrived("heir"), offered("heir"))[-1] == ev.Admit("heir")
    assert done(ledger, ev.Starved("heir"), offered("heir")) == []
    assert yielding(done(ledger, offered("heir", True))) == ["v"]


def test_memory_is_asked_for_when_all_ranks_offer() -> None:
    ledger = Ledger(SETTINGS, 2)
    done(ledger, arrived("t", ranks=2))
    assert done(ledger, offered("t"), offered("t")) == []
    assert done(ledger, offered("t", rank=1)) == [ev.Admit("t")]
    done(ledger, ev.Aborted("t"), *[ev.FromRank(rank, ev.Settled("t")) for rank in (0, 1)])
    assert done(ledger, offered("t", True)) == []


def test_who_waits_for_room_is_not_overtaken() -> None:
    """Nor by another peer's, where one peer may have it all."""
    ledger = Ledger(replace(SETTINGS, landing_segments=4, landing_share=1.0))
    done(ledger, arrived("a", segments=3), offered("a"))
    done(ledger, arrived("b", segments=2), offered("b"), arrived("c", "Q", segments=1), offered("c"))
    assert ledger.landing_free == 1
    assert exposed(done(ledger, ev.FromRank(0, ev.Landed("a")), ev.Loaded("a"))) == ["b", "c"]


def test_one_that_is_larger_than_its_peers_share_goes_alone() -> None:
    ledger = Ledger(replace(SETTINGS, landing_segments=8, landing_share=0.5))
    assert exposed(done(ledger, arrived("a", segments=6), offered("a"))) == ["a"]
    assert exposed(done(ledger, arrived("b", segments=1), offered("b"))) == []


def test_a_share_may_be_used_up() -> None:
    ledger = Ledger(replace(SETTINGS, landing_segments=8, landing_share=0.5))
    for name, granted in (("a", ["a"]), ("b", ["b"]), ("c", [])):
        assert exposed(done(ledger, arrived(name, segments=2), offered(name))) == granted
    assert exposed(done(ledger, ev.FromRank(0, ev.Landed("a")), ev.Loaded("a"))) == ["c"]


def test_quarantine_bars_direct_transfers_only() -> None:
    """What lands in landing memory is safe whatever that peer still writes."""
    ledger = Ledger(replace(SETTINGS, quarantine_per_peer=1))
    done(ledger, arrived("a", memory=(1,)), ev.Aborted("a"))
    assert done(ledger, arrived("direct"))[0] == ev.Fail("direct", "too much in quarantine with this peer", True)
    assert isinstance(done(ledger, arrived("packed", segments=1))[0], ev.ToRank)
    assert isinstance(done(ledger, arrived("other", "Q"))[0], ev.ToRank)


def test_all_ranks_must_have_sent_and_let_go() -> None:
    """F30: the host may free the source when the last of its ranks has let go of it."""
    ledger = Ledger(SETTINGS, 2)
    done(ledger, ev.Hold("t", 4))
    sent, released = (
        [ev.FromRank(rank, report) for rank in (0, 1)] for report in (ev.Sent("t", True, ""), ev.Released("t"))
    )
    assert done(ledger, sent[0], released[0]) == []
    assert done(ledger, released[1]) == [ev.Release("t")]
    assert done(ledger, sent[1]) == [ev.Finished("t", True, "")]
    assert ledger.open() == (0, 0) and ledger.steps == 4


def test_what_settled_before_it_went_on_is_not_settled_after() -> None:
    """Rule 2: of three ranks one had landed when the others gave way; those are written again, and both must settle."""
    ledger = Ledger(SETTINGS, 3)
    every = range(3)
    done(ledger, arrived("v", ranks=3), *[offered("v", rank=rank) for rank in every], ev.Allocated("v", (1,)))
    done(ledger, arrived("heir", ranks=3), *[offered("heir", True, rank) for rank in every])
    assert yielding(done(ledger, ev.Starved("heir"))) == ["v"]
    again = done(ledger, ev.FromRank(0, ev.Landed("v")), *[ev.FromRank(rank, ev.Settled("v")) for rank in (1, 2)])
    assert [action.rank for action in again] == [1, 2]
    assert ledger._in["v"].state == "holding" and ledger.counters == {"gave_way": 1}
    done(ledger, ev.Aborted("v"))
    assert done(ledger, ev.FromRank(1, ev.Settled("v"))) == []
    assert done(ledger, ev.FromRank(2, ev.Settled("v"))) == [ev.Free("v", (1,))]
