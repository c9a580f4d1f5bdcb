"""This project's connector: land first, admit later.

P packs what a step computed in that step's shadow, its transfer thread writes it into landing memory, and D's
scheduler admits the request when everything is there and scatters just before its first step. Direct, for what does
not fit: D is admitted when P offers, P's thread posts block by block. Neither engine's thread posts or polls for it:
the transfer threads drive themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pushkv.model.protocol import events as ev
from pushkv.sim.connector import Receiving, Sending
from pushkv.sim.request import Flight, Request
from pushkv.sim.ticks import ticks
from pushkv.sim.trace import MEMORY, TRANSFER

if TYPE_CHECKING:
    from pushkv.sim.engine import Engine
    from pushkv.sim.scheduler import Part
    from pushkv.sim.world import World


def _line(fixed_s: float, per_token_s: float) -> tuple[int, int]:
    """Ticks, and ticks per token."""
    return ticks(fixed_s), ticks(per_token_s)


class PushkvPrefill(Sending):
    """P: gather on the device, write from the transfer thread."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        serving = world.serving
        self._thread_free = self._copies_free = 0
        self._poll, self._beside = world.transfer_poll, world.transfers.beside
        self._begin = _line(serving.transfer_start_s, serving.transfer_start_per_token_s)
        self._ready = ticks(serving.part_s)
        self._steps: dict[str, list[tuple[int, int]]] = {}
        """Of prompts under way that leave by chunks: so many tokens are computed when a step has ended on the
        device."""

    def received(self, request: Request) -> None:
        super().received(request)
        self._hold(request, self.world.transfers.bytes_per_token, chunked=self.world.chunked)

    def started(self, request: Request, now: int) -> None:
        """What leaves whole is offered when its prefill starts, what leaves by chunks with the first, in this pass."""
        flight = request.flight
        if flight.prefill_start < 0 and not (flight.packed and self.world.chunked):
            self.host.feed(ev.Computed(flight.id, 0, False))
        super().started(request, now)

    def preempted(self, request: Request) -> None:
        self._steps.pop(request.flight.id, None)
        super().preempted(request)

    def launched(self, parts: Sequence[Part], t: int) -> None:
        """By chunks: the gather of what this step computes is enqueued behind it; the next forward waits for it on the
        device."""
        end = self.engine.gpu_free
        for request, new, before in parts:
            flight = request.flight
            if flight.packed and flight.id in self._at_work:
                if flight.landing < 0:
                    flight.landing = self.env.ticks  # D grants within two messages
                if self.world.chunked:
                    done = before + new
                    self._steps.setdefault(flight.id, []).append((done, end))
                    self.host.feed(ev.Computed(flight.id, done, False))

    def prefilled(self, request: Request, now: int) -> None:
        """No preemption can come any more: what leaves whole leaves now."""
        super().prefilled(request, now)
        flight = request.flight
        if flight.id not in self._at_work:
            return
        if flight.packed and self.world.chunked:
            self.host.feed(ev.Computed(flight.id, flight.input_len, True))
        else:
            fixed, each = self._begin
            self.world.later(now + fixed + each * request.input_len, self._leaves, flight)

    def _leaves(self, flight: Flight) -> None:
        if not self.host.stopped(self._leaves, flight) and flight.id in self._at_work:
            self.host.feed(ev.Computed(flight.id, flight.input_len, True))

    def release(self, action: ev.Release) -> None:
        self._steps.pop(action.transfer_id, None)
        super().release(action)

    def pack(self, action: ev.Pack) -> None:
        """Gather on a stream of its own, when the tokens are computed. Where that is the step that was launched last,
        the next one waits for it; what comes later passes beside what the device computes, behind the kernel that runs
        there."""
        engine, world = self.engine, self.world
        steps = self._steps.get(action.transfer_id, ())
        computed = next((end for tokens, end in steps if action.stop <= tokens), 0)
        start = max(self.env.ticks, computed, self._copies_free)
        if engine.gpu_free > start:
            start += round((engine.gpu_free - engine.gpu_began) * self._beside)
        self._copies_free = end = start + world.transfers.gather(action.stop - action.start)
        if computed and engine.gpu_free <= start:
            engine.gpu_free = end
        if world.trace is not None:
            world.span(world.flights[action.transfer_id], engine.name, TRANSFER, "gather", start, end)
        self.env.call(end + self._poll, self._gathered, (action.handle, action.transfer_id))

    def _posting(self, then: Callable[[Any], None], what: Any) -> bool:
        """Whether the transfer thread is at work on a post; then it looks at ``what`` after it."""
        busy = self._thread_free > self.env.ticks
        if busy:
            self.env.call(self._thread_free, then, what)
        return busy

    def _gathered(self, what: tuple[int, str]) -> None:
        host = self.host
        if not (host.stopped(self._gathered, what) or self._posting(self._gathered, what)):
            flight = self.world.flights.get(what[1])
            if flight is not None:
                flight.gathered = self.env.ticks
            host.feed(ev.Packed(what[0]))

    def post(self, action: ev.Post) -> None:
        """The transfer thread posts as soon as it is free; a packed part must be made ready first."""
        world = self.world
        flight = world.flights[action.transfer_id]
        transfers = world.transfers
        pieces = transfers.parcels(action.stop - action.start) if action.packed else transfers.pieces(flight)
        now = self.env.ticks
        start = max(now, self._thread_free)
        if action.packed:
            start += self._ready
        flight.posted = self._thread_free = start + transfers.post(flight, pieces)
        what = (action, flight, pieces, self._thread_free)
        if start == now:
            self._write(what)
        else:
            world.later(start, self._write, what)

    def _write(self, what: tuple[ev.Post, Flight, int, int]) -> None:
        host = self.host
        if host.stopped(self._write, what):
            return
        action, flight, pieces, posted = what
        if host.claim(action.handle):
            tokens = action.stop - action.start
            done = (flight, action.handle)
            self.world.transfers.move(
                flight, tokens, pieces, posted, self._poll, self._done, done, packed=action.packed
            )

    def _done(self, what: tuple[Flight, int]) -> None:
        host = self.host
        if not (host.stopped(self._done, what) or self._posting(self._done, what)):
            flight, handle = what
            flight.written = self.env.ticks
            host.feed(ev.WriteDone(handle))


class PushkvDecode(Receiving):
    """D: no KV block before everything has landed (packed), or before P offers (direct)."""

    registers_only = True

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.expecting: dict[str, Request] = {}
        self._heard, self._load = (
            ticks(world.serving.landed_s),
            _line(world.serving.load_s, world.serving.load_per_token_s),
        )
        self._prepare = _line(world.serving.prepare_s, world.serving.prepare_per_token_s)
        self._landed: deque[Request] = deque()
        self._seen: list[Request] = []
        self._told: set[str] = set()

    def received(self, request: Request) -> None:
        flight = request.flight
        if flight.failed:
            return
        world = self.world
        self.expecting[flight.id] = request
        self.engine.open += 1
        segments = world.transfers.segments(flight.input_len) if flight.packed else 0
        self.register(flight, world.prefill_name(flight), packed=flight.packed, segments=segments)

    def ready_to_load(self, action: ev.Ready) -> None:
        """Packed: the scheduler may admit it at its next pass. Direct: the cache is in its blocks; the worker reports
        it with a step."""
        if action.transfer_id in self.remote:
            self._seen.append(self.remote[action.transfer_id])
            self.news += 1
            self.host.book(ev.Loaded(action.transfer_id))
            self.engine.kick()
        else:
            self.world.later(self.env.ticks + self._heard, self._complete, action.transfer_id)

    def _complete(self, transfer_id: str) -> None:
        if not self.host.stopped(self._complete, transfer_id) and transfer_id in self.expecting:
            request = self.expecting.pop(transfer_id)
            request.flight.landed = self.env.ticks
            self._landed.append(request)
            self.engine.kick()

    def admitted(self, action: ev.Admit) -> None:
        self.queue.append(self.expecting.pop(action.transfer_id))
        self.engine.kick()

    def take_back(self, action: ev.TakeBack) -> None:
        self.expecting[action.transfer_id] = self.taken_back(action.transfer_id)

    def admit(self, now: int) -> None:
        landed, engine = self._landed, self.engine
        while landed and engine.running < engine.max_num_seqs and self.take_blocks(landed[0], now):
            engine.start(landed.popleft())
        if self.loaded or self.queue:
            super().admit(now)

    def blocked(self) -> bool:
        return bool(self._landed or self.queue or self.loaded)

    def allocate(self, request: Request, now: int) -> bool:
        flight = request.flight
        if not self.take_blocks(request, now):
            if not self.engine.running and flight.id not in self._told:
                self._told.add(flight.id)
                self.host.book(ev.Starved(flight.id))
            return False
        self._told.clear()
        self.remote[flight.id] = request
        self.host.book(ev.Allocated(flight.id, flight.id))
        return True

    def before_step(self, starting: Sequence[Request], t: int, start: int) -> tuple[int, int]:
        """The scatter is asked for at the end of the pass, launched by the transfer thread while the engine's prepares
        the step, and runs on a stream of its own when the device is free; the step waits for it on the device."""
        for request in starting:
            flight, n = request.flight, request.input_len
            if flight.packed and request.first_step == self.engine.steps:
                flight.asked = t
                flight.launched = t + self._load[0] + self._load[1] * n
                begin = max(start, flight.launched)
                start = begin + self.world.transfers.scatter(n)
                self.world.span(flight, self.engine.name, TRANSFER, "scatter", begin, start)
                t += self._prepare[0] + self._prepare[1] * n
        return t, start

    def first_token(self, request: Request, now: int) -> None:
        flight = request.flight
        if flight.packed and flight.first_token < 0:
            self.host.book(ev.Loaded(flight.id))
            if self.world.trace is not None:
                self.world.span(flight, self.engine.name, MEMORY, "landing memory", flight.landing, now)
        super().first_token(request, now)

    def poll(self, now: int) -> list[Request]:
        report, self._seen = self._seen, []
        self.news = 0
        return report

    def abort(self, flight: Flight) -> None:
        self._told.discard(flight.id)
        if self.expecting.pop(flight.id, None) is not None:
            self.engine.kick()
            self.engine.open -= 1
        super().abort(flight)
