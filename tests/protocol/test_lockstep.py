"""A group of ranks in lockstep is one endpoint: the host sees the same history as with explicit ranks.

Two engines, P and D, once with two ranks each and once with one endpoint each that stands for both ranks. Everything
takes the same time on every rank (a steady world), so what the ledgers say must be the same, in the same order, at the
same times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pushkv.model.protocol import events as ev
from pushkv.sim.explore.profiles import Config
from pushkv.sim.explore.world import SETTINGS, World
from tests.protocol.transcripts import STEADY

Script = Callable[[World], None]


def _calm(world: World) -> None:
    for number, mode in enumerate(("packed", "early", "late", "pull")):
        world.request(mode, "P", "D", 8 + number, 8, chunked=number % 2 == 0)
        world.run(0.3)
    world.request("packed", "P", "D", 8, 0)
    world.run(1.0)


def _aborts(world: World) -> None:
    for number, mode in enumerate(("packed", "early", "late", "pull")):
        world.fabric.fates.extend([(0.5, False)] * world.ranks["P"])
        request = world.request(mode, "P", "D", 12, 8, delays=(0.2 * number, 0.0))
        world.run(0.25)
        world.abort(request, "D")
        world.run(1.5)


def _breaks(world: World) -> None:
    world.fabric.fates.extend([(0.5, True)] * world.ranks["P"])
    world.request("late", "P", "D", 12, 8)
    world.request("packed", "P", "D", 12, 8, delays=(None, 0.0))
    world.request("packed", "P", "D", 12, 8, delays=(0.0, None))
    world.run(60.0)


def _kill(world: World) -> None:
    world.fabric.fates.extend([(2.0, False)] * world.ranks["P"])
    world.request("early", "P", "D", 12, 8)
    world.run(0.5)
    world.kill("P")
    world.run(8.0)
    world.start("P")
    world.run(8.0)
    world.request("late", "P", "D", 12, 8)
    world.run(2.0)


def _partition(world: World) -> None:
    world.request("packed", "P", "D", 12, 12, chunked=True)
    world.run(0.05)
    world.cut("P", "D")
    world.run(8.0)
    world.heal()
    world.run(8.0)
    world.request("packed", "P", "D", 12, 12, chunked=True)
    world.run(2.0)


def _history(ranks: int, script: Script) -> list[Any]:
    world = World(1, STEADY, Config({"P": ranks}, {"D": ranks}), SETTINGS)
    seen: list[Any] = []

    def log(who: Any, text: str, record: Any) -> None:
        if who[1] == "ledger" and record is not None and not isinstance(record, ev.FromRank):
            if isinstance(record, ev.Arrived):
                record = (record.transfer_id, record.tokens, record.memory)
            seen.append((round(world.now, 6), who[0], record))

    world.log = log
    script(world)
    world.drain()
    return seen


@pytest.mark.parametrize("script", [_calm, _aborts, _breaks, _kill, _partition])
def test_two_ranks_and_one_lockstep_endpoint_have_the_same_history(script: Script) -> None:
    alone, explicit = _history(1, script), _history(2, script)
    assert len(alone) > 5
    assert explicit == alone
