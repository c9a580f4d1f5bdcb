"""Flows on shared links: each gets its max-min fair share, computed anew whenever one joins or leaves.

Decides when the last byte of a transfer arrives. The share itself is ``pushkv.model.timing.max_min_rates``; what posting costs on the host
is the engine's business. A link is one direction of one engine's device; ranks in lockstep move alike, so one stands for all.
"""

from __future__ import annotations

from collections.abc import Callable

import simpy

from pushkv.model.timing import max_min_rates
from pushkv.sim.ticks import S_PER_TICK, TICKS_PER_S


class Flow:
    """Bytes on their way; ``done`` is called when they have arrived."""

    __slots__ = ("cap", "done", "left", "path", "rate")

    def __init__(self, path: tuple[int, ...], size: float, cap: float, done: Callable[[], None]) -> None:
        self.path, self.left, self.cap, self.done = path, size, cap, done
        self.rate = 0.0


class Wires:
    """All links of the cluster. ``capacities``: bytes per second of each."""

    def __init__(self, env: simpy.Environment, capacities: list[float]) -> None:
        self._env = env
        self._capacities = capacities
        self._flows: list[Flow] = []
        self._since = 0
        self._turn = 0

    def send(self, path: tuple[int, ...], size: float, cap: float, done: Callable[[], None]) -> None:
        """Start ``size`` bytes over the links ``path``, at ``cap`` bytes per second at most."""
        self._progress()
        self._flows.append(Flow(path, size, cap, done))
        self._share()

    def _progress(self) -> None:
        now = self._env.now
        passed = (now - self._since) * S_PER_TICK
        if passed > 0:
            for flow in self._flows:
                flow.left -= flow.rate * passed
        self._since = int(now)

    def _share(self) -> None:
        flows = self._flows
        self._turn += 1
        if not flows:
            return
        if len(flows) == 1:
            flow = flows[0]
            flow.rate = min(flow.cap, *(self._capacities[link] for link in flow.path))
        else:
            first = len(self._capacities)
            paths = [(*flow.path, first + i) for i, flow in enumerate(flows)]
            rates = max_min_rates(paths, self._capacities + [flow.cap for flow in flows])
            for flow, rate in zip(flows, rates, strict=True):
                flow.rate = rate
        soonest = min(flow.left / flow.rate for flow in flows)
        event = self._env.timeout(max(0, round(soonest * TICKS_PER_S)), self._turn)
        event.callbacks.append(self._arrive)

    def _arrive(self, event: simpy.Event) -> None:
        if event.value != self._turn:
            return
        self._progress()
        arrived = [flow for flow in self._flows if flow.left <= flow.rate * 2 * S_PER_TICK]
        self._flows = [flow for flow in self._flows if flow.left > flow.rate * 2 * S_PER_TICK]
        self._share()
        for flow in arrived:
            flow.done()
