"""Flows on shared links: each gets its max-min fair share, computed anew whenever one joins or leaves.

Decides when the last byte of a transfer arrives. The share itself is ``pushkv.model.timing.max_min_rates``; what
posting costs on the host is the engine's business. A link is one direction of one engine's device; ranks in lockstep
move alike, so one stands for all.
"""

from __future__ import annotations

from collections.abc import Callable

from pushkv.model.timing import max_min_rates
from pushkv.sim.clock import Clock
from pushkv.sim.ticks import S_PER_TICK, TICKS_PER_S


class Flow:
    """Bytes on their way, ``left`` of them now, at ``cap`` per second at most; ``done`` is called when they have
    arrived."""

    rate: float = 0.0

    def __init__(self, path: tuple[int, ...], left: float, cap: float, done: Callable[[], None]) -> None:
        self.path, self.left, self.cap, self.done = path, left, cap, done


class Wires:
    """All links of the cluster. ``capacities``: bytes per second of each."""

    def __init__(self, env: Clock, capacities: list[float]) -> None:
        self._env = env
        self._capacities = capacities
        self._flows: list[Flow] = []
        self._since = 0
        self._turn = 0

    def send(self, path: tuple[int, ...], size: float, cap: float, done: Callable[[], None]) -> None:
        """Start ``size`` bytes over the links ``path``, at ``cap`` bytes per second at most."""
        flow = Flow(path, size, cap, done)
        if self._flows:
            self._progress()
            self._flows.append(flow)
            self._share()
        else:
            self._since = self._env.ticks
            self._flows.append(flow)
            self._alone(flow)

    def _alone(self, flow: Flow) -> None:
        self._turn += 1
        rate = flow.cap
        for link in flow.path:
            if self._capacities[link] < rate:
                rate = self._capacities[link]
        flow.rate = rate
        self._env.call(self._since + round(flow.left / rate * TICKS_PER_S), self._arrive, self._turn)

    def _progress(self) -> None:
        now = self._env.ticks
        passed = (now - self._since) * S_PER_TICK
        if passed > 0:
            for flow in self._flows:
                flow.left -= flow.rate * passed
        self._since = now

    def _share(self) -> None:
        flows = self._flows
        if len(flows) == 1:
            self._alone(flows[0])
            return
        self._turn += 1
        first = len(self._capacities)
        paths = [(*flow.path, first + i) for i, flow in enumerate(flows)]
        rates = max_min_rates(paths, self._capacities + [flow.cap for flow in flows])
        for flow, rate in zip(flows, rates, strict=True):
            flow.rate = rate
        soonest = min(flow.left / flow.rate for flow in flows)
        self._env.call(self._since + max(0, round(soonest * TICKS_PER_S)), self._arrive, self._turn)

    def _arrive(self, turn: int) -> None:
        if turn != self._turn:
            return
        if len(self._flows) == 1:
            self._flows.pop().done()
            return
        self._progress()
        arrived = [flow for flow in self._flows if flow.left <= flow.rate * 2 * S_PER_TICK]
        self._flows = [flow for flow in self._flows if flow.left > flow.rate * 2 * S_PER_TICK]
        if self._flows:
            self._share()
        for flow in arrived:
            flow.done()
