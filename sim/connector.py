"""What a connector does for an engine, as vLLM and the protocol's host see it: the hooks of one and the actions of
the other.

The base does nothing at every hook; each mode's two halves stand in ``baselines`` (vLLM's pull and push) and
``pushkv``.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.request import Flight, Request

if TYPE_CHECKING:
    from pushkv.sim.engine import Engine
    from pushkv.sim.host import Host
    from pushkv.sim.scheduler import Part
    from pushkv.sim.world import World


class Connector:
    """Hooks are called by the engine's loop at the simulated time; actions by the host while it carries out a step."""

    registers_only: bool = False
    """Whether ``received`` can make nothing schedulable, so that the engine need not look up for it."""
    news: int = 0
    """How many things ``poll`` would find now."""

    def __init__(self, world: World, engine: Engine) -> None:
        self.fresh: list[ev.Post] = []
        """What ``pre_forward`` has to do."""
        self.watched: Collection[object] = ()
        """What ``poll`` may have something to say about: the engine's loop stops there only when this is not empty."""
        self.kept: Collection[type[msg.Message]] = ()
        """Messages that the machines get only when ``hear`` is called."""
        self._inbox: list[ev.Received] = []
        self.world, self.engine, self.env = world, engine, world.env
        self.host: Host
        engine.connector = self

    def register(
        self, flight: Flight, peer: str, *, packed: bool = False, segments: int = 0, memory: str | None = None
    ) -> None:
        """Have the transfer of ``flight`` registered with the engine ``peer``."""
        self.world.registered(flight, self.engine.name)
        self.host.book(ev.Arrived(flight.id, peer, (((peer, 0),),), flight.input_len, packed, segments, memory=memory))

    # ------------------------------------------------------------ hooks of the engine

    def received(self, request: Request) -> None:
        """The scheduler has taken ``request`` from its inbox."""
        self.engine.waiting.append(request)
        self.engine.open += 1

    def started(self, request: Request, now: int) -> None:
        """``request`` is scheduled for the first time, or again after a preemption."""

    def starved(self, request: Request, now: int) -> None:
        """There are no blocks for ``request``, the first in the queue."""

    def preempted(self, request: Request) -> None:
        """The blocks of ``request`` were taken; it will be computed again."""

    def admit(self, now: int) -> None:
        """Before scheduling: let in what has arrived, allocate for what may now wait for its cache."""

    def blocked(self) -> bool:
        """Whether somebody waits for blocks or for a place in the batch."""
        return False

    def pre_forward(self, t: int) -> int:
        """On the engine's thread at ``t``, before the launch; returns when it has the thread again."""
        return t

    def before_step(self, starting: Sequence[Request], t: int, start: int) -> tuple[int, int]:
        """The step in which ``starting`` begin: when the engine's thread, at ``t`` now, can launch it, and when the
        device, free at ``start``, can begin it."""
        return t, start

    def launched(self, parts: Sequence[Part], t: int) -> None:
        """A step with chunks of prompts was launched; its end on the device is ``engine.gpu_free``."""

    def poll(self, now: int) -> list[Request]:
        """After the launch: what has been sent or has come, to be reported with this step's output."""
        return []

    def apply(self, report: Sequence[Request], now: int) -> bool:
        """The scheduler learns of ``report``. ``True``: requests ended, so vLLM makes one more pass."""
        return False

    def prefilled(self, request: Request, now: int) -> None:
        """The last chunk of a prompt that is not decoded here is done."""

    def first_token(self, request: Request, now: int) -> None:
        """The first token of ``request`` leaves the engine (also after a recompute)."""
        self.world.first_token(request.flight, now)

    def finished(self, request: Request, now: int) -> None:
        """The last token of ``request`` leaves the engine; its blocks are free."""
        self.world.finished(request.flight, now)

    # ------------------------------------------------------------ actions of the protocol

    def carries(self, message: msg.Register) -> bool:
        """Whether this connector sends ``message`` itself (pull: through the router)."""
        return False

    def keep(self, event: ev.Received) -> None:
        """A message of ``kept`` has come."""
        self._inbox.append(event)
        self.news += 1
        self.engine.kick()

    def hear(self) -> None:
        """The machines get what has come of ``kept`` since the last time."""
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self.host.feed(event)

    def pack(self, action: ev.Pack) -> None:
        """Gather into staging."""
        raise NotImplementedError

    def post(self, action: ev.Post) -> None:
        """Post a write (pull: a read)."""
        raise NotImplementedError

    def abandon(self, action: ev.Abandon) -> None:
        """No simulated fabric can stop a write: it is quiet when it is done."""

    def admitted(self, action: ev.Admit) -> None:
        """Allocate: the sender has begun."""
        raise NotImplementedError

    def ready_to_load(self, action: ev.Ready) -> None:
        """Everything has landed."""
        raise NotImplementedError

    def failed(self, action: ev.Fail) -> None:
        """The transfer has failed at this receiving engine."""
        self.world.failed(self.world.flights.get(action.transfer_id))

    def abort(self, flight: Flight) -> None:
        """The client of ``flight`` is gone."""

    def free(self, action: ev.Free) -> None:
        """Blocks of a failed transfer are settled."""

    def take_back(self, action: ev.TakeBack) -> None:
        """Blocks of a transfer that gave way are ours again."""
        raise NotImplementedError

    def sent(self, action: ev.Finished) -> None:
        """The transfer's verdict at this sending engine."""

    def release(self, action: ev.Release) -> None:
        """Nothing reads the source any more."""
        raise NotImplementedError


class Prefill(Connector):
    """The prefill side of every mode: holds finished prompts' blocks until a poll reports that nothing reads them."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.held: dict[str, Request] = {}
        self.watched = self.held

    def started(self, request: Request, now: int) -> None:
        flight = request.flight
        if flight.prefill_start < 0:
            flight.prefill_start = now

    def apply(self, report: Sequence[Request], now: int) -> bool:
        for request in report:
            del self.held[request.flight.id]
            self._free(request, now)
        return True

    def _free(self, request: Request, now: int) -> None:
        self._free_blocks(request, now)
        self.world.done_at_p(request.flight)

    def _free_blocks(self, request: Request, now: int) -> None:
        flight = request.flight
        request.freed = True
        self.engine.open -= 1
        self.engine.pool.give_back(request.blocks)
        self.world.held_p += len(request.blocks) * (now - flight.held_p)
        if self.world.trace is not None:
            self.world.memory_span(flight, self.engine.name, flight.held_p, now)


class Sending(Prefill):
    """The prefill side of push: hears from its own rank when nothing reads a prompt's blocks any more."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.freeable: list[Request] = []
        self._at_work: dict[str, Request] = {}
        self._stuck: tuple[str, int] = ("", 0)

    def _hold(self, request: Request, bytes_per_token: int, *, chunked: bool) -> None:
        flight = request.flight
        self._at_work[flight.id] = request
        self.host.book(ev.Hold(flight.id, flight.input_len, bytes_per_token, chunked))

    def starved(self, request: Request, now: int) -> None:
        """The cache is full of finished prompts that wait for memory over there: who has some and has not begun gives
        way (rule 8). Said once for every change in what is held.
        """
        stuck = (request.flight.id, len(self.held))
        if self.held and not self.engine.running and stuck != self._stuck:
            self._stuck = stuck
            self.host.feed(ev.GiveWay())

    def preempted(self, request: Request) -> None:
        self.host.feed(ev.Preempted(request.flight.id))

    def prefilled(self, request: Request, now: int) -> None:
        flight = request.flight
        flight.held_p = now
        self.world.prefilled(flight, now)
        if flight.id in self._at_work:
            self.held[flight.id] = request
        else:
            self._free(request, now)

    def release(self, action: ev.Release) -> None:
        """Before the prompt is done (all packed), the blocks go when it is; after, at the next poll."""
        request = self._at_work.pop(action.transfer_id)
        if action.transfer_id in self.held:
            self.freeable.append(request)
            self.news += 1
            self.engine.kick()
        elif request.freed:
            self.world.done_at_p(request.flight)

    def poll(self, now: int) -> list[Request]:
        self.news = 0
        report, self.freeable = self.freeable, []
        return report


class Receiving(Connector):
    """The decode side: requests whose cache is elsewhere, then loaded ones, then those that decode."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.queue: deque[Request] = deque()
        self.remote: dict[str, Request] = {}
        self.loaded: deque[Request] = deque()
        self.watched = self.remote

    def received(self, request: Request) -> None:
        if not request.flight.failed:
            self.queue.append(request)
            self.engine.open += 1

    def apply(self, report: Sequence[Request], now: int) -> bool:
        for request in report:
            flight = request.flight
            if self.remote.pop(flight.id, None) is not None:
                self.world.held_d += len(request.blocks) * (now - flight.held_d)
                if self.world.trace is not None:
                    self.world.memory_span(flight, self.engine.name, flight.held_d, now)
                flight.landed = now
                self.loaded.append(request)
        return False

    def admit(self, now: int) -> None:
        """Loaded requests first; then, while a place in the batch is free, everybody who waits (vLLM 0.26: waiting
        for KV takes no place)."""
        engine = self.engine
        while self.loaded and engine.running < engine.max_num_seqs:
            engine.start(self.loaded.popleft())
        while self.queue and engine.running < engine.max_num_seqs:
            request = self.queue.popleft()  # before anything can fail for it, and take it out of the queue
            if not self.allocate(request, now):
                if request.flight.failed:
                    engine.open -= 1
                    continue
                self.queue.appendleft(request)
                break

    def free(self, action: ev.Free) -> None:
        request = self.remote.pop(action.transfer_id, None)
        if request is not None:
            self.engine.kick()  # first: steps that were jumped over have taken their blocks
            self.engine.open -= 1
            self.engine.pool.give_back(request.blocks)

    def taken_back(self, transfer_id: str) -> Request:
        """The request of a transfer that gave way, without the blocks that it had."""
        self.engine.kick()
        request = self.remote.pop(transfer_id)
        self.engine.pool.give_back(request.blocks)
        request.blocks = array("i")
        return request

    def blocked(self) -> bool:
        return bool(self.queue or self.loaded)

    def allocate(self, request: Request, now: int) -> bool:
        """Blocks for the prompt, and the start of whatever brings its cache. ``False``: there are none."""
        raise NotImplementedError

    def take_blocks(self, request: Request, now: int) -> bool:
        """Allocate for the whole prompt, or not at all."""
        need = -(-request.input_len // self.engine.block_size)
        if need > self.engine.pool.free:
            return False
        request.blocks = self.engine.pool.take(need)
        request.flight.held_d = now
        return True

    def abort(self, flight: Flight) -> None:
        """The request is over for its client: it does not wait here any more. Blocks that a peer may write come back
        with ``free``."""
        request = flight.d
        for queue in (self.queue, self.engine.waiting):  # the other holds those that were preempted
            if request is not None and request in queue:
                self.engine.kick()
                queue.remove(request)
                self.engine.open -= 1
