"""Words that free memory at the receiver wait where what is done may still be on its way; no others do."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.reference.settling import Settling

LINK, OTHER = ("D", 0), ("D", 1)
FAILED, CANCELLED = msg.Failed(1, 2, 5, "aborted"), msg.Cancelled(1, 2, 5)


@pytest.mark.parametrize("word", [FAILED, CANCELLED])
def test_a_word_waits_until_the_fabric_is_quiet(word: msg.Message) -> None:
    settling = Settling(1.0)
    settling.over(LINK, 5, 10.0)
    settling.over(LINK, 5, 10.5)
    assert settling.keep(ev.Send(LINK, word), 10.6) and len(settling) == 1
    assert settling.due(11.4) == [] and settling.keep(ev.Send(LINK, word), 11.4) and len(settling) == 1
    assert settling.due(11.5) == [ev.Send(LINK, word)] and len(settling) == 0
    assert settling.due(11.5) == [] and not settling.keep(ev.Send(LINK, word), 11.5)


def test_other_words_and_other_registrations_do_not_wait() -> None:
    settling = Settling(1.0)
    settling.over(LINK, 5, 10.0)
    for action in (
        ev.Send(OTHER, FAILED),
        ev.Send(LINK, msg.Cancelled(1, 2, 6)),
        ev.Send(LINK, msg.Written(1, 2, 5, 0, 3, True)),
        ev.Send(LINK, msg.Beat(1, 2, 1, 0, 0, 0)),
    ):
        assert not settling.keep(action, 10.0)


def test_where_completion_is_arrival_nothing_waits() -> None:
    settling = Settling(0.0)
    settling.over(LINK, 5, 10.0)
    assert not settling.keep(ev.Send(LINK, FAILED), 10.0) and not settling._over


def test_what_is_quiet_is_forgotten() -> None:
    settling = Settling(1.0)
    for number in range(10_000):
        settling.over(LINK, number, number / 100)
    assert len(settling._over) <= 101
