"""This project's connector: land first, admit later.

P packs what a step computed in that step's shadow, its transfer thread writes it into landing memory, and D's
scheduler admits the request when everything is there and scatters just before its first step. Direct, for what does
not fit: D is admitted when P offers, P's thread posts block by block. Neither engine's thread posts or polls for it:
the transfer threads drive themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pushkv.model.protocol import events as ev
from pushkv.sim.connector import Receiving, Sending
from pushkv.sim.request import Flight, Request
from pushkv.sim.trace import MEMORY, TRANSFER

if TYPE_CHECKING:
    from pushkv.sim.engine import Engine
    from pushkv.sim.scheduler import Part
    from pushkv.sim.world import World


class PushkvPrefill(Sending):
    """P: gather on the device, write from the transfer thread."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self._thread_free = 0
        self._poll = world.transfer_poll
        self._enqueued: dict[str, int] = {}
        """Of prompts under way: tokens whose gather is enqueued."""

    def received(self, request: Request) -> None:
        super().received(request)
        self._hold(request, self.world.transfers.bytes_per_token, chunked=self.world.chunked)

    def started(self, request: Request, now: int) -> None:
        """A direct transfer is offered when its prefill starts, a packed one with its first chunk, in this pass."""
        flight = request.flight
        if flight.prefill_start < 0 and not flight.packed:
            self.host.feed(ev.Computed(flight.id, 0, False))
        super().started(request, now)

    def launched(self, parts: Sequence[Part], t: int) -> None:
        """The gather of what this step computes is enqueued behind it; the next forward waits for it on the device."""
        for request, new, before in parts:
            flight = request.flight
            if flight.packed and flight.id in self._at_work:
                done = before + new
                if flight.landing < 0:
                    flight.landing = self.env.ticks  # D grants within two messages
                self.host.feed(ev.Computed(flight.id, done, done == flight.input_len))

    def prefilled(self, request: Request, now: int) -> None:
        """Packed, with every gather enqueued: the device runs them before whatever is written into the blocks next, so
        vLLM frees them at once. Else they are held.
        """
        flight = request.flight
        enqueued = self._enqueued.pop(flight.id, 0)
        if flight.id in self._at_work and enqueued == flight.input_len:
            flight.held_p = now
            self.world.prefilled(flight, now)
            self._free_blocks(request, now)
            return
        super().prefilled(request, now)
        if not flight.packed and flight.id in self._at_work:
            self.host.feed(ev.Computed(flight.id, flight.input_len, True))

    def pack(self, action: ev.Pack) -> None:
        engine, world = self.engine, self.world
        start = max(self.env.ticks, engine.gpu_free)
        if action.transfer_id not in self.held:
            self._enqueued[action.transfer_id] = action.stop
        engine.gpu_free = start + world.transfers.gather(action.stop - action.start)
        if world.trace is not None:
            world.span(world.flights[action.transfer_id], engine.name, TRANSFER, "gather", start, engine.gpu_free)
        self.env.call(engine.gpu_free + self._poll, self._gathered, action.handle)

    def _gathered(self, handle: int) -> None:
        host = self.host
        if not host.stopped(self._gathered, handle):
            host.feed(ev.Packed(handle))

    def post(self, action: ev.Post) -> None:
        """The transfer thread posts as soon as it is free."""
        world = self.world
        flight = world.flights[action.transfer_id]
        transfers = world.transfers
        pieces = transfers.parcels(action.stop - action.start) if action.packed else transfers.pieces(flight)
        now = self.env.ticks
        start = max(now, self._thread_free)
        self._thread_free = start + transfers.post(flight, pieces)
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
            self.world.transfers.move(
                flight, tokens, pieces, posted, self._poll, self._done, action.handle, packed=action.packed
            )

    def _done(self, handle: int) -> None:
        host = self.host
        if not host.stopped(self._done, handle):
            host.feed(ev.WriteDone(handle))


class PushkvDecode(Receiving):
    """D: no KV block before everything has landed (packed), or before P offers (direct)."""

    registers_only = True

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.expecting: dict[str, Request] = {}
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
        else:
            request = self.expecting.pop(action.transfer_id)
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

    def before_step(self, starting: Sequence[Request]) -> int:
        """Landing memory is scattered into the fresh blocks before the step, in ``start_load_kv``."""
        total = 0
        for request in starting:
            if request.flight.packed and request.first_step == self.engine.steps:
                start = max(self.engine.gpu_free, self.env.ticks) + total
                cost = self.world.transfers.scatter(request.input_len)
                self.world.span(request.flight, self.engine.name, TRANSFER, "scatter", start, start + cost)
                total += cost
        return total

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
