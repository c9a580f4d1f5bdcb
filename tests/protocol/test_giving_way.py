"""Rule 8 where a part has been sent already: what was preempted cannot go on before the finished prefills are gone."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import GAVE_WAY, Endpoint
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.case import case_of, play_case
from pushkv.sim.explore.profiles import CONFIGS, PROFILES
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.test_contract import LINK, ME, YOU, endpoint, heard, said

ASKED = heard(msg.Cancel(YOU, ME, 1, "t", True))
STOPPED = heard(msg.Cancel(YOU, ME, 1, "t"))


def preempted(computed: int = 4, *, preempt: bool = True, alone: bool = False) -> Endpoint:
    """Of the 8 tokens of ``t`` so many are computed, all of these are being written, and it is preempted; ``u`` is
    finished and waits for memory of the same peer.
    """
    made = endpoint()
    wanted = msg.Register(YOU, ME, 1, "t", 8, 1, True, 1, (1,))
    made.step(
        [ev.Begin("t", 8, 1, True, alone), heard(wanted), ev.Computed("t", computed, False), ev.Packed(1)], 0.0, []
    )
    assert made.sender.claim(1, 0.0)
    bare = msg.Register(YOU, ME, 2, "u", 4, 1, True, 1)
    made.step([ev.Begin("u", 4, 1), heard(bare), ev.Computed("u", 4, True)], 0.0, [])
    made.step([ev.Preempted("t")] if preempt else [], 0.0, [])
    return made


@pytest.mark.parametrize(
    ("word", "answer"),
    [(ev.GiveWay(), msg.Failed(ME, YOU, 1, GAVE_WAY)), (ASKED, msg.Cancelled(ME, YOU, 1))],
    ids=["P is full", "D is full"],
)
@pytest.mark.parametrize("end", [ev.WriteDone(1), ev.WriteQuiet(1)])
def test_what_was_preempted_gives_way_when_it_is_quiet_and_is_sent_again(
    word: ev.Record, answer: msg.Message, end: ev.Record
) -> None:
    """From its first token; its source is not let go meanwhile."""
    made = preempted()
    assert said(made, word) == [ev.Abandon(1)]
    assert said(made, word) == []
    assert said(made, end) == [answer]
    again = msg.Register(YOU, ME, 3, "t", 8, 1, True, 1, (2,))
    assert said(made, heard(again), ev.Computed("t", 8, True)) == [ev.Pack(2, "t", LINK, 0, 8)]
    assert said(made, ev.Packed(2)) == [ev.Post(2, "t", LINK, 0, 8, True, (2,)), ev.Released("t")]
    assert made.sender.claim(2, 0.0)
    assert said(made, ev.WriteDone(2)) == [msg.Written(ME, YOU, 3, 0, 8, True), ev.Sent("t", True, "")]


@pytest.mark.parametrize("word", [ev.GiveWay(), ASKED])
@pytest.mark.parametrize("alone", [False, True])
def test_its_source_is_not_let_go_while_one_of_its_writes_goes_on(word: ev.Record, alone: bool) -> None:
    """F21: what has been gathered of it is gathered again."""
    made = preempted(4, preempt=False, alone=alone)
    made.step([ev.Computed("t", 6, False), ev.Packed(2)], 0.0, [])
    assert made.sender.claim(2, 0.0)
    assert said(made, ev.Preempted("t"), word) == [ev.Abandon(1), ev.Abandon(2)]
    assert said(made, ev.WriteDone(1)) == []
    (answer,) = said(made, ev.WriteQuiet(2))
    assert isinstance(answer, msg.Failed | msg.Cancelled)


@pytest.mark.parametrize("word", [ev.GiveWay(), ASKED])
@pytest.mark.parametrize(
    "made",
    [preempted(preempt=False), preempted(8, alone=True)],
    ids=["it runs", "all of it is packed, and no other rank sends any: it lands without its source"],
)
def test_what_can_go_on_does_not(made: Endpoint, word: ev.Record) -> None:
    assert said(made, word) == []


@pytest.mark.parametrize("word", [ev.GiveWay(), ASKED])
def test_what_lacks_a_part_gives_way_whoever_else_sends(word: ev.Record) -> None:
    assert said(preempted(alone=True), word) == [ev.Abandon(1)]


def test_where_no_other_rank_sends_the_last_part_is_told_of_at_once() -> None:
    """Its engine may learn much later that the prefill has ended, if it launches the next one first."""
    made = preempted(8, alone=True)
    assert said(made, ev.WriteDone(1)) == [msg.Written(ME, YOU, 1, 0, 8, True), ev.Sent("t", True, "")]


def test_the_last_part_is_not_kept_for_one_before_it() -> None:
    """Once nothing else can be lost."""
    made = preempted(4, preempt=False, alone=True)
    made.step([ev.Computed("t", 8, True), ev.Packed(2)], 0.0, [])
    assert made.sender.claim(2, 0.0)
    assert said(made, ev.WriteDone(2)) == [msg.Written(ME, YOU, 1, 1, 4, True)]
    assert said(made, ev.WriteDone(1)) == [msg.Written(ME, YOU, 1, 0, 4, False), ev.Sent("t", True, "")]


def test_a_rank_that_sends_to_two_waits_for_the_end() -> None:
    """One of the two may lose what the other has."""
    made = endpoint()
    wanted = heard(msg.Register(YOU, ME, 1, "t", 8, 2, True, 1, (1,)))
    made.step([ev.Begin("t", 8, 1, True, True), wanted, ev.Computed("t", 8, False), ev.Packed(1)], 0.0, [])
    assert made.sender.claim(1, 0.0)
    assert said(made, ev.WriteDone(1)) == []


@pytest.mark.parametrize("word", [ev.GiveWay(), ASKED])
def test_what_was_preempted_with_all_of_it_written_gives_way(word: ev.Record) -> None:
    """Another rank may have written less, and all begin anew together."""
    made = preempted(8, preempt=False)
    assert said(made, ev.WriteDone(1)) == []
    (answer,) = said(made, ev.Preempted("t"), word)
    assert isinstance(answer, msg.Failed | msg.Cancelled)
    again = heard(msg.Register(YOU, ME, 3, "t", 8, 1, True, 1, (2,)))
    assert said(made, again, ev.Computed("t", 8, False)) == [ev.Pack(2, "t", LINK, 0, 8)]
    assert said(made, ev.Packed(2)) == [ev.Post(2, "t", LINK, 0, 8, True, (2,))]
    assert made.sender.claim(2, 0.0)
    assert said(made, ev.WriteDone(2)) == []
    assert said(made, ev.Computed("t", 8, True)) == [
        msg.Written(ME, YOU, 3, 0, 8, True),
        ev.Sent("t", True, ""),
        ev.Released("t"),
    ]


@pytest.mark.parametrize("preempt", [False, True])
def test_the_last_part_is_told_of_when_no_preemption_can_come(preempt: bool) -> None:
    """Also where one has come: what was written is not written again."""
    made = preempted(8, preempt=preempt)
    assert said(made, ev.WriteDone(1)) == []
    assert said(made, ev.Computed("t", 8, False)) == []
    assert said(made, ev.Computed("t", 8, True)) == [
        msg.Written(ME, YOU, 1, 0, 8, True),
        ev.Sent("t", True, ""),
        ev.Released("t"),
    ]


def test_what_runs_again_goes_on() -> None:
    made = preempted()
    assert said(made, ev.Computed("t", 0, False), ASKED, ev.GiveWay()) == []


def test_one_after_the_other() -> None:
    """Rule 8 at P: while one gives its memory back nobody else of that peer must."""
    made = preempted()
    young = msg.Register(YOU, ME, 3, "v", 4, 1, True, 1, (2,))
    made.step([ev.Begin("v", 4, 1, True), heard(young)], 0.0, [])
    assert said(made, ev.GiveWay()) == [msg.Failed(ME, YOU, 3, GAVE_WAY)]  # the youngest
    assert said(made, ev.GiveWay()) == [ev.Abandon(1)]
    made.step([heard(msg.Register(YOU, ME, 4, "v", 4, 1, True, 1, (2,)))], 0.0, [])
    assert said(made, ev.GiveWay()) == []
    assert made.sender.counters == {"gave_way": 2}
    made.step([ev.WriteQuiet(1)], 0.0, [])
    assert said(made, ev.GiveWay()) == [msg.Failed(ME, YOU, 4, GAVE_WAY)]


@pytest.mark.parametrize("word", [ev.GiveWay(), ASKED])
def test_what_gives_way_can_still_be_given_up(word: ev.Record) -> None:
    """D does not want it any more: it is not registered again, and P need not wait for that."""
    made = preempted()
    assert said(made, word) == [ev.Abandon(1)]
    assert said(made, STOPPED) == [ev.Released("t")]
    answer, *verdict = said(made, ev.WriteQuiet(1))
    assert isinstance(answer, msg.Failed | msg.Cancelled) and verdict == [ev.Sent("t", False, "cancelled")]


def test_a_write_that_never_ends_is_the_end_of_what_gives_way() -> None:
    """Rule 5: the verdict comes in time, with its reason; D hears of it when it registers again."""
    made = preempted()
    assert said(made, ASKED) == [ev.Abandon(1)]
    out: list[ev.Record] = []
    made.step([], SETTINGS.write_s + 1.0, out)
    assert ev.Sent("t", False, "write took too long") in out
    assert ev.Released("t") in out
    again = heard(msg.Register(YOU, ME, 3, "t", 8, 1, True, 1))
    assert said(made, ev.WriteQuiet(1), again)[-1] == msg.Failed(ME, YOU, 3, "write took too long")


def test_an_older_shard_does_not_take_a_newer_with_it() -> None:
    """A peer that registers again before it was answered."""
    made = preempted()
    assert said(made, ASKED) == [ev.Abandon(1)]
    again = heard(msg.Register(YOU, ME, 3, "t", 8, 1, True, 1, (2,)))
    made.step([again, ev.WriteQuiet(1)], 0.0, [])
    assert said(made, ev.Computed("t", 8, True)) == [ev.Pack(2, "t", LINK, 0, 8)]


@pytest.mark.parametrize(
    ("seed", "profile", "shape"),
    [(510857, "churn", "both-parts"), (666442, "calm", "tp2"), (711344, "churn", "plain")],
)
def test_seeds_that_waited_for_a_lease(seed: int, profile: str, shape: str) -> None:
    """V1: P's cache was full of finished prefills that waited for the landing memory of one that was preempted."""
    played = play_case(case_of(seed, PROFILES[profile], CONFIGS[shape], 8))
    assert played.violation == ""
