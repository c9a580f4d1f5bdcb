"""What goes wrong in a run: engines that are killed or paused, pairs that are cut from each other.

Decides what a fault does to the simulated machines. What follows from it is the protocol's business. A killed engine
answers nothing and its clients get errors at once; writes that it had posted still land. It comes back after
``duration_s`` as another incarnation with an empty cache. A cut drops control messages both ways; bytes that are
under way arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pushkv.model.protocol import events as ev
from pushkv.sim.blocks import BlockPool
from pushkv.sim.engine import Engine
from pushkv.sim.fault_file import Fault
from pushkv.sim.ticks import ticks

if TYPE_CHECKING:
    from pushkv.sim.host import Host
    from pushkv.sim.world import World

PATIENCE_S = 1200.0
"""Longer than any verdict of the protocol takes: what has done nothing for so long will do nothing any more."""


class Faults:
    """The scenario's faults on ``world``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._incarnation = 1 << 32
        self._progress = (-1, -1)
        self.gone: list[tuple[Engine, Host]] = []
        """What was killed and has come back as another."""

    def schedule(self, start: int) -> None:
        """Put every fault on the clock, ``at_s`` after ``start``."""
        if self._world.scenario.fault_list:
            self._watch(None)
        for fault in self._world.scenario.fault_list:
            self._world.later(start + ticks(fault.at_s), self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        world = self._world
        end = None if fault.duration_s is None else world.env.ticks + ticks(fault.duration_s)
        if fault.kind == "partition":
            pair = frozenset(fault.target.split("-"))
            world.network.cut.add(pair)
            if end is not None:
                world.later(end, world.network.cut.discard, pair)
        elif fault.kind == "pause":
            assert end is not None
            world.hosts[fault.target].pause(end)
            world.engines[fault.target].pause(end)
        else:
            self._kill(fault.target)
            if end is not None:
                world.later(end, self._restart, fault.target)

    def _kill(self, name: str) -> None:
        world = self._world
        if world.hosts[name].dead:
            return
        world.hosts[name].kill()
        world.engines[name].kill()
        prefill = name in world.prefills
        world.mark(name, dead=True)
        for flight in list(world.flights.values()):
            if prefill and world.prefill_name(flight) == name:
                unanswered = flight.leg_end < 0
                if flight.p is not None:
                    world.done_at_p(flight)
                if unanswered and world.scenario.router == "sequential":
                    world.failed(flight)
            elif not prefill and world.decode_name(flight) == name and not flight.over:
                world.failed(flight)

    def _restart(self, name: str) -> None:
        world = self._world
        if not world.hosts[name].dead:
            return
        old = world.engines[name]
        self.gone.append((old, world.hosts[name]))
        connector = type(old.connector)
        engine = Engine(
            world.env,
            name,
            old.costs,
            BlockPool(old.pool.blocks, cached=old.pool.cached),
            block_size=old.block_size,
            token_budget=old.token_budget,
            max_num_seqs=old.max_num_seqs,
            fast=old.fast,
        )
        engine.on_step = old.on_step
        world.engines[name] = engine
        self._incarnation += 1
        world.pair(engine, connector, self._incarnation)
        prefill = name in world.prefills
        world.mark(name, dead=False)
        for other in world.decodes if prefill else world.prefills:
            if not world.hosts[other].dead:
                world.hosts[name].feed(ev.Greet((other, 0)))

    def _watch(self, _: None) -> None:
        """Memory that a dead peer may still read or write never comes back. Clients of what waits for it do not wait
        for ever."""
        world = self._world
        alive = [engine for engine in world.engines.values() if not engine.dead]
        progress = (world.remaining, sum(engine.steps for engine in alive))
        if progress == self._progress and not any(engine.running for engine in alive):
            for flight in list(world.flights.values()):
                world.failed(flight)
        self._progress = progress
        if world.remaining:
            world.later(world.env.ticks + ticks(PATIENCE_S), self._watch, None)
