"""What is over is freed when the last word of it is said, and not when the garbage collector comes round: the shards of
a transfer and the transfer name each other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import incoming, outgoing
from pushkv.model.protocol import messages as msg
from tests.protocol.test_contract import LINK, ME, YOU, endpoint, heard

RECORDS = (incoming.Expected, incoming.Shard, outgoing.Transfer, outgoing.Shard, outgoing.Write)
WANTED = ev.Expect("t", (LINK,), 4, False, 1, (1,))
REGISTERED = heard(msg.Register(YOU, ME, 1, "t", 4, 1, False, 1, (1,)))


@contextmanager
def circles() -> Iterator[list[Any]]:
    """The records that nothing but each other named at the end."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [type(each).__name__ for each in gc.garbage if isinstance(each, RECORDS)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_circle_is_found() -> None:
    with circles() as found:
        transfer = incoming.Expected("t", 4, False, 1, None, 1)
        transfer.shards.append(incoming.Shard(incoming.ReceiverLink(LINK, 0), transfer))
        del transfer
    assert sorted(found) == ["Expected", "Shard"]


@pytest.mark.parametrize(
    "script",
    [
        [WANTED, heard(msg.Written(YOU, ME, 1, 0, 4, True))],
        [WANTED, ev.Withdraw("t", "aborted"), heard(msg.Cancelled(YOU, ME, 1))],
        [ev.Expect("t", (LINK,), 4, False), ev.Withdraw("t", "aborted"), heard(msg.Cancelled(YOU, ME, 1))],
        [ev.Begin("t", 4), REGISTERED, ev.Computed("t", 4, True), "claim", ev.WriteDone(1)],
        [ev.Begin("t", 4), REGISTERED, ev.Abort("t", "rejected")],
        [ev.Begin("t", 4), REGISTERED, ev.Computed("t", 4, True), "claim", ev.Abort("t", "no"), ev.WriteQuiet(1)],
    ],
    ids=["landed", "withdrawn", "never exposed", "sent", "rejected", "stopped"],
)
def test_nothing_is_left_for_the_collector(script: list[Any]) -> None:
    made = endpoint()
    with circles() as found:
        for event in script:
            if event == "claim":
                assert made.sender.claim(1, 0.0)
            else:
                made.step([event], 0.0, [])
        made.step([], 1e6, [])  # what was armed for it is forgotten, too
    assert found == []
    assert made.sender.sizes()["transfers"] == made.receiver.sizes()["transfers"] == 0
