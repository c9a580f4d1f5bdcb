"""The simulated cluster: clients, engines, wires, and the two programs' common machines between them.

Decides how the parts are put together and what a request passes on its way. ``run`` is the entry point. Time is in
whole ticks (``ticks``); what is reported is in seconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pushkv.model.protocol import Settings
from pushkv.model.protocol import events as ev
from pushkv.model.routing import LeastTokens
from pushkv.model.timing import EngineCost
from pushkv.sim import catalog, workload
from pushkv.sim.baselines import PullDecode, PullPrefill, PushDecode, PushPrefill
from pushkv.sim.blocks import BlockPool
from pushkv.sim.clock import Clock
from pushkv.sim.connector import Connector
from pushkv.sim.costs import StepCosts
from pushkv.sim.engine import Engine
from pushkv.sim.faults import Faults
from pushkv.sim.host import Host
from pushkv.sim.metrics import COMPLETED, FAILED, RequestLog, Totals
from pushkv.sim.network import Network
from pushkv.sim.pushkv import PushkvDecode, PushkvPrefill
from pushkv.sim.request import Flight, Request
from pushkv.sim.scenario import Scenario
from pushkv.sim.scheduler import Batch
from pushkv.sim.ticks import S_PER_TICK, ticks
from pushkv.sim.trace import ENGINE, FIRST_TOKEN, MEMORY, PREFILL, QUEUE, STEPS, TraceWriter
from pushkv.sim.transfers import Transfers

_HALVES: dict[str, tuple[type[Connector], type[Connector]]] = {
    "pull": (PullPrefill, PullDecode),
    "push": (PushPrefill, PushDecode),
    "pushkv": (PushkvPrefill, PushkvDecode),
}
PAUSE_S = 1.0
"""Between two loads that follow each other."""
_PROGRESS_EVERY = 1024
_COLLECT_EVERY = 50_000
"""Objects between two looks for cycles. A request's records die young: looking every 700 objects, as Python does, finds
little and costs a tenth of the run."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has shown. ``wall_s``: real seconds that it took."""

    scenario: Scenario
    log: RequestLog
    totals: Totals
    wall_s: float


def run(
    scenario: Scenario,
    *,
    progress: Callable[[int, int], None] | None = None,
    trace: TraceWriter | None = None,
    log: RequestLog | None = None,
    fast: bool = True,
    arrivals: workload.Workload | Sequence[workload.Workload] | None = None,
    settings: Settings | None = None,
    encoded: bool = False,
    stages: list[tuple[float, ...]] | None = None,
) -> Result:
    """Simulate ``scenario`` to its last request.

    ``arrivals`` replaces the scenario's own; of several loads each begins `PAUSE_S` after everything of the one
    before. ``fast=False`` takes every step one by one, with the same result; ``encoded`` sends every message through
    its real encoding. ``stages`` gets, of each request in the order of the log, when its last part was gathered,
    posted, written, had landed, was asked for and launched: seconds, NaN for what was not. Raises ``BadInput`` for what
    cannot be simulated.
    """
    started = time.perf_counter()
    loads = workload.generate(scenario) if arrivals is None else arrivals
    world = World(
        scenario, loads, RequestLog() if log is None else log, progress, trace, fast, settings, encoded, stages
    )
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT_EVERY, 10, 1000)
    try:
        world.go()
    finally:
        gc.set_threshold(*thresholds)
    return Result(scenario, world.log, world.totals(), time.perf_counter() - started)


class World:
    """One run. The engines' connectors call back here for all that is not an engine's own business."""

    def __init__(
        self,
        scenario: Scenario,
        loads: workload.Workload | Sequence[workload.Workload],
        log: RequestLog,
        progress: Callable[[int, int], None] | None = None,
        trace: TraceWriter | None = None,
        fast: bool = True,
        settings: Settings | None = None,
        encoded: bool = False,
        stages: list[tuple[float, ...]] | None = None,
    ) -> None:
        self._stages = stages
        self.scenario, self.log, self.trace = scenario, log, trace
        self.env = Clock(initial_time=0)
        self._loads = loads = [loads] if isinstance(loads, workload.Workload) else loads
        self._progress = progress
        parts = catalog.resolve(scenario)
        shape, hardware, fabric = parts.shape, parts.hardware, parts.fabric
        self.hardware, self.fabric, self.serving = hardware, fabric, hardware.serving
        self.transfers = Transfers(self.env, scenario, parts, self._names, trace)
        self.chunked = scenario.overlap == "chunk"
        self.transfer_poll = ticks(self.serving.transfer_poll_s)
        self.settings = settings or Settings(
            landing_segments=self.transfers.landing_segments,
            staging_bytes=int(scenario.staging_gib * (1 << 30)),
            drain_s=fabric.drain_s,
        )
        self.network = Network(self.env, fabric.message_s, encoded=encoded)
        self.flights: dict[str, Flight] = {}
        self.engines: dict[str, Engine] = {}
        self.hosts: dict[str, Host] = {}
        self.held_p = self.held_d = 0
        costs = {tp: StepCosts(EngineCost(shape, hardware, tp)) for tp in {scenario.prefill_tp, scenario.decode_tp}}
        halves = _HALVES[scenario.mode]
        self.prefills = [f"P{i}" for i in range(scenario.prefill)]
        self.decodes = [f"D{i}" for i in range(scenario.decode)]
        for number, name in enumerate(self.prefills + self.decodes):
            decode = name in self.decodes
            tp = scenario.decode_tp if decode else scenario.prefill_tp
            engine = Engine(
                self.env,
                name,
                costs[tp],
                BlockPool(
                    catalog.kv_blocks(scenario, parts, "decode" if decode else "prefill"),
                    cached=not decode and scenario.prefill_cached_fraction > 0,
                ),
                block_size=scenario.block_size,
                token_budget=scenario.token_budget,
                max_num_seqs=scenario.max_num_seqs,
                fast=fast and trace is None,
            )
            if trace is not None:
                engine.on_step = partial(self._step_span, name)
            self.engines[name] = engine
            self.pair(engine, halves[decode], number + 1)
        self._pick_p = LeastTokens(scenario.prefill)
        self._pick_d = LeastTokens(scenario.decode)
        self._requests = sum(len(load) for load in loads)
        self._done = self._before = self._next = self._sent = 0
        self._last_finish = 0
        self._alone = self._alone_open = 0
        self._client_in = (ticks(self.serving.client_in_s), ticks(self.serving.client_in_per_token_s))
        self._client_out = (ticks(self.serving.client_out_s), ticks(self.serving.client_out_per_token_s))
        self._answer = ticks(hardware.calibration.answer_per_token_s) or self._client_out[1]
        self._take_up(workload.NONE)
        self.faults = Faults(self)

    def pair(self, engine: Engine, half: type[Connector], incarnation: int) -> None:
        """Give ``engine`` its connector and its host; also after a restart, as another incarnation."""
        connector = half(self, engine)
        host = Host(self.env, engine.name, incarnation, self.settings, self.network, connector)
        connector.host = host
        self.hosts[engine.name] = self.network.hosts[engine.name] = host

    def go(self) -> None:
        """Run until every request has ended."""
        for d in self.decodes:
            for p in self.prefills:
                self.hosts[d].feed(ev.Greet((p, 0)))
        self.env.run(until=ticks(1.0))  # links are warm before the first request, as after a warm-up request
        self._start = self.env.ticks
        self.faults.schedule(self._start)
        for number, load in enumerate(self._loads):
            while number and (self.env.ticks <= self._last_finish or self._alone_open):
                self.env.run(until=self.env.ticks + ticks(PAUSE_S))
            self._take_up(load)
            if len(load):
                self._begin()
                self.env.run(until=self._all)
        if self._progress is not None:
            self._progress(self._done, self._requests)

    def _take_up(self, load: workload.Workload) -> None:
        """The next requests are those of ``load``, counted from now."""
        # Through a view an element comes as Python's own number, in half the time that numpy takes for one of its own.
        self._arrival_s: memoryview[float] = memoryview(load.arrival_s)  # type: ignore[arg-type]
        self._input_len, self._output_len = memoryview(load.input_len), memoryview(load.output_len)  # type: ignore[arg-type]
        self._width, self._beside = load.width, load.beside
        self._echo, self._echo_leg = (self._client_out[1], self._answer) if load.ids else (0, 0)
        self._before += self._next
        self._next = self._sent = 0
        self._origin = self.env.ticks
        self._all = self.env.event()

    def _begin(self) -> None:
        for d in self.decodes:
            for _ in range(self._beside[0]):
                self._reach_beside(d)
        for _ in range(min(self._width, len(self._input_len)) or 1):
            self._schedule_arrival()

    @property
    def remaining(self) -> int:
        """Requests that have not ended."""
        return self._requests - self._done

    # ------------------------------------------------------------ clients

    def _schedule_arrival(self) -> None:
        at = self._origin + ticks(self._arrival_s[self._sent])
        self._sent += 1
        self.later(max(at, self.env.ticks), self._arrive, None)

    def _arrive(self, _: None) -> None:
        index = self._next
        self._next += 1
        if not self._width and self._next < len(self._input_len):
            self._schedule_arrival()
        n, out = self._input_len[index], self._output_len[index]
        index += self._before
        now = self.env.ticks
        packed = self.scenario.mode == "pushkv" and self.transfers.packed(n)
        name = str(index)
        flight = Flight(index, name, now, n, out, self._pick_p.pick(n), self._pick_d.pick(n + out), packed)
        self.flights[name] = flight
        flight.p = p = Request(flight, 1, prefill_only=True)
        cached = int(n * self.scenario.prefill_cached_fraction)
        p.computed = cached - cached % self.scenario.block_size if cached < n else n - 1
        flight.d = Request(flight, out, prefill_only=False)
        fixed, each = self._client_in
        self.later(now + fixed + each * n, self._reach, flight)

    def _reach(self, flight: Flight) -> None:
        """The prefill leg is in its engine's inbox, and the decode leg in its own when both are sent at once."""
        p = self.prefills[flight.prefill]
        if flight.p is not None and (flight.over or self.hosts[p].dead):
            self.done_at_p(flight)
        if flight.p is None:  # P has died, or D and the router gave up
            self.failed(flight)
            return
        self.engines[p].deliver(flight.p)
        if self.scenario.router == "concurrent":
            self._reach_d(flight)

    def _reach_d(self, flight: Flight) -> None:
        if flight.d is None:  # it has failed meanwhile
            return
        d = self.decodes[flight.decode]
        if self.hosts[d].dead:
            self.failed(flight)
        else:
            self.engines[d].deliver(flight.d)

    def _reach_beside(self, d: str) -> None:
        """A request that the engine ``d`` computes by itself is there. Nobody counts it: its number is below 0."""
        many, n, out = self._beside
        if not many:  # the load ended while it was on its way
            return
        self._alone -= 1
        self._alone_open += 1
        flight = Flight(self._alone, d, self.env.ticks, n, out, 0, 0, False)
        engine = self.engines[d]
        engine.kick()
        engine.waiting.append(Request(flight, out, prefill_only=False))
        engine.open += 1

    def prefilled(self, flight: Flight, now: int) -> None:
        """P's answer is on its way to the client, and the decode leg follows it where the router goes one by one."""
        flight.leg_end = now + self._client_out[0] + self._echo_leg * flight.input_len
        if self.trace is not None:
            p = self.prefill_name(flight)
            self.span(flight, p, QUEUE, "HTTP, queue", flight.arrival, flight.prefill_start)
            self.span(flight, p, ENGINE, PREFILL, flight.prefill_start, now)
        if self.scenario.router == "sequential" and not flight.failed:
            enter, per_token = self._client_in
            self.later(flight.leg_end + enter + per_token * flight.input_len, self._reach_d, flight)
        elif flight.end >= 0:
            self._end(flight, flight.end, COMPLETED)

    def first_token(self, flight: Flight, now: int) -> None:
        """The first token is on its way to the client."""
        if flight.first_token < 0:
            flight.first_token = now + self._client_out[0] + self._echo * flight.input_len
            if self.trace is not None:
                at_s = flight.first_token * S_PER_TICK
                d = self.decode_name(flight)
                track = f"{d}/{ENGINE}"
                if not flight.packed:
                    asked = flight.arrival if self.scenario.router == "concurrent" else flight.leg_end
                    self.span(flight, d, QUEUE, "HTTP, queue", asked, flight.held_d)
                self.span(flight, d, QUEUE, "into batch", flight.landed, now)
                self.trace.instant(track, FIRST_TOKEN, at_s, {"request": flight.index})
                self.trace.flow(flight.index, track, now * S_PER_TICK, "f")

    def finished(self, flight: Flight, now: int) -> None:
        """The last token is on its way to the client."""
        if flight.failed:
            return
        end = now + self._client_out[0]
        if flight.index < 0:
            self._alone_open -= 1
            if self._beside[0]:
                fixed, each = self._client_in
                self.later(end + fixed + each * flight.input_len, self._reach_beside, flight.id)
            return
        if self.trace is not None:
            self.span(flight, self.decode_name(flight), ENGINE, "decode", flight.first_token, end)
        if flight.leg_end < 0 and flight.p is not None:
            flight.end = end  # the client waits for P's answer, too
        else:
            self._end(flight, end, COMPLETED)

    def failed(self, flight: Flight | None) -> None:
        """The client gets an error."""
        if flight is not None and not flight.failed and flight.end < 0:
            flight.failed = True
            self._end(flight, self.env.ticks, FAILED)

    def _end(self, flight: Flight, end: int, status: int) -> None:
        n, out = flight.input_len, flight.output_len
        self._pick_d.finished(flight.decode, n + out)
        nan = math.nan
        start = self._start
        self.log.add(
            (flight.arrival - start) * S_PER_TICK,
            n,
            out,
            (flight.first_token - start) * S_PER_TICK if flight.first_token >= 0 else nan,
            (end - start) * S_PER_TICK,
            (flight.leg_end - flight.arrival) * S_PER_TICK if flight.leg_end >= 0 else nan,
            status,
            flight.bytes,
            flight.descriptors,
            flight.post * S_PER_TICK,
            flight.wire * S_PER_TICK,
        )
        if self._stages is not None:
            seen = flight.gathered, flight.posted, flight.written, flight.landed, flight.asked, flight.launched
            self._stages.append(tuple((at - start) * S_PER_TICK if at >= 0 else nan for at in seen))
        if end > self._last_finish:
            self._last_finish = end
        flight.over = True
        if flight.p is None:
            del self.flights[flight.id]
        if status == FAILED:
            d = self.decode_name(flight)
            if not self.hosts[d].dead:
                self.engines[d].connector.abort(flight)
        flight.d = None
        self._done += 1
        if self._progress is not None and self._done % _PROGRESS_EVERY == 0:
            self._progress(self._done, self._requests)
        if self._done == self._before + len(self._input_len):
            self._beside = workload.NONE.beside
            self._all.succeed()
        elif self._width and self._sent < len(self._input_len):
            self._sent += 1
            self.later(max(end, self.env.ticks), self._arrive, None)

    def done_at_p(self, flight: Flight) -> None:
        """P has freed the prompt's blocks, or is gone."""
        flight.p = None
        if flight.end >= 0 and not flight.over:
            self._end(flight, flight.end, COMPLETED)
        self._pick_p.finished(flight.prefill, flight.input_len)
        if flight.over:
            self.flights.pop(flight.id, None)

    def mark(self, engine: str, dead: bool) -> None:
        """The router's health check of ``engine``."""
        (self._pick_p if engine in self.prefills else self._pick_d).mark(int(engine[1:]), dead)

    # ------------------------------------------------------------ whose request it is

    def _names(self, flight: Flight) -> tuple[str, str]:
        return self.prefills[flight.prefill], self.decodes[flight.decode]

    def prefill_name(self, flight: Flight) -> str:
        """The engine of the prefill leg."""
        return self.prefills[flight.prefill]

    def decode_name(self, flight: Flight) -> str:
        """The engine of the decode leg."""
        return self.decodes[flight.decode]

    # ------------------------------------------------------------ things that take time

    def later(self, when: int, then: Callable[[Any], None], what: Any) -> None:
        """Call ``then(what)`` at ``when``."""
        self.env.call(when, then, what)

    def span(self, flight: Flight, engine: str, thread: str, name: str, start: int, end: int) -> None:
        """Record what was done for ``flight``, when somebody asked for a trace."""
        if self.trace is not None:
            self.trace.span(f"{engine}/{thread}", name, start * S_PER_TICK, end * S_PER_TICK, {"request": flight.index})

    def _step_span(self, engine: str, start: int, batch: Batch) -> None:
        assert self.trace is not None
        held = {"decodes": batch.count, "prompt_tokens": sum(new for _, new, _ in batch.parts)}
        end = self.engines[engine].gpu_free
        self.trace.span(f"{engine}/{STEPS}", "step", start * S_PER_TICK, end * S_PER_TICK, held)

    def registered(self, flight: Flight, engine: str) -> None:
        """The transfer of ``flight`` begins: ``engine`` registers it with its peer."""
        if self.trace is not None:
            track, at_s = f"{engine}/{QUEUE}", self.env.ticks * S_PER_TICK
            self.trace.span(track, "registers", at_s, at_s + self.fabric.message_s, {"transfer": flight.index})
            self.trace.flow(flight.index, track, at_s, "s")

    def memory_span(self, flight: Flight, engine: str, start: int, end: int) -> None:
        """KV blocks were held for the network."""
        self.span(flight, engine, MEMORY, "KV blocks", start, end)

    # ------------------------------------------------------------ the end

    def totals(self) -> Totals:
        """Sums over the run. ``events`` counts what happened in the cluster, steps that were jumped over included."""
        pairs = [*self.faults.gone, *((engine, self.hosts[name]) for name, engine in self.engines.items())]
        p = [engine for engine, _ in pairs if engine.name in self.prefills]
        d = [engine for engine, _ in pairs if engine.name in self.decodes]
        steps = sum(host.machine_steps for _, host in pairs)
        return Totals(
            duration_s=max(0, self._last_finish - self._start) * S_PER_TICK,
            events=sum(engine.steps for engine, _ in pairs) + self.network.messages + steps + 4 * self._done,
            machine_steps=steps,
            preemptions_prefill=sum(engine.preemptions for engine in p),
            preemptions_decode=sum(engine.preemptions for engine in d),
            kv_peak_prefill=max(engine.pool.peak_fraction for engine in p),
            kv_peak_decode=max(engine.pool.peak_fraction for engine in d),
            held_block_s_prefill=self.held_p * S_PER_TICK,
            held_block_s_decode=self.held_d * S_PER_TICK,
        )
