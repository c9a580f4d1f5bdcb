"""vLLM's own two connectors, as 0.26 has them, on this project's machines.

Pull (``NixlConnector``): D admits after the prefill leg, posts READs on its engine thread, sees completions once a
step. Push (``NixlPushConnector``): D admits at once and holds its blocks; P's writer thread posts after the whole
prompt, one transfer at a time; NIXL tells D when P's engine looks at the finished handle, so a write that completes
while P launches its next prefill waits for that; D reads its notifications when a step wakes the thread, so it acts
on them one look later. All of this is read from the sources of vLLM 0.26 and NIXL 1.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.connector import Prefill, Receiving, Sending
from pushkv.sim.request import Flight, Request

if TYPE_CHECKING:
    from pushkv.sim.engine import Engine
    from pushkv.sim.world import World

NOTIFIED: Final = (msg.Written, msg.Failed, msg.Cancelled)
"""What NIXL tells of its transfers: a connector looks at it only in ``poll``."""


class PushPrefill(Sending):
    """P of vLLM's push."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.watched = self._under_way = dict[int, None]()
        self._landed: list[int] = []
        self._writer_free = 0

    def received(self, request: Request) -> None:
        super().received(request)
        self._hold(request, 0, chunked=False)

    def prefilled(self, request: Request, now: int) -> None:
        super().prefilled(request, now)
        flight = request.flight
        if flight.id in self._at_work:
            self.host.feed(ev.Computed(flight.id, flight.input_len, True))

    def post(self, action: ev.Post) -> None:
        """The writer thread gets its work with the next step."""
        self.fresh.append(action)
        self.engine.kick()

    def pre_forward(self, t: int) -> int:
        fresh, self.fresh = self.fresh, []
        for action in fresh:
            flight = self.world.flights[action.transfer_id]
            pieces = self.world.transfers.pieces(flight)
            start = max(t, self._writer_free)
            self._writer_free = start + self.world.transfers.post(flight, pieces)
            self._under_way[action.handle] = None
            self.world.later(start, self._write, (action, flight, pieces, self._writer_free))
        return t

    def _write(self, what: tuple[ev.Post, Flight, int, int]) -> None:
        host = self.host
        if host.stopped(self._write, what):
            return
        action, flight, pieces, posted = what
        if host.claim(action.handle):
            self.world.transfers.move(
                flight, flight.input_len, pieces, posted, 0, self._arrived, action.handle, packed=False
            )
        else:
            del self._under_way[action.handle]

    def _arrived(self, handle: int) -> None:
        self._landed.append(handle)
        self.news += 1
        self.engine.kick()

    def poll(self, now: int) -> list[Request]:
        landed, self._landed = self._landed, []
        for handle in landed:
            del self._under_way[handle]
            self.host.feed(ev.WriteDone(handle))
        return super().poll(now)


class PushDecode(Receiving):
    """D of vLLM's push: admits early. What it cannot admit is announced without memory, so that the give-way of rule
    8 can work."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.kept = NOTIFIED
        self._seen: list[Request] = []
        self._announced: set[str] = set()
        self._wanted: set[str] = set()
        self._told: set[str] = set()

    def allocate(self, request: Request, now: int) -> bool:
        flight = request.flight
        if not self.take_blocks(request, now):
            stuck = not self.engine.running and bool(self.remote)
            if stuck and flight.id not in self._announced:
                self._announced.add(flight.id)
                self.register(flight, self.world.prefill_name(flight))
            elif stuck and flight.id in self._wanted and flight.id not in self._told:
                self._told.add(flight.id)
                self.host.book(ev.Starved(flight.id))
            return False
        self.remote[flight.id] = request
        if flight.id in self._announced:
            self._announced.discard(flight.id)
            self._told.clear()
            self.host.book(ev.Allocated(flight.id, flight.id))
        else:
            self.register(flight, self.world.prefill_name(flight), memory=flight.id)
        return True

    def admitted(self, action: ev.Admit) -> None:
        self._wanted.add(action.transfer_id)
        self.engine.kick()

    def take_back(self, action: ev.TakeBack) -> None:
        request = self.taken_back(action.transfer_id)
        self._announced.add(action.transfer_id)
        self.queue.append(request)

    def poll(self, now: int) -> list[Request]:
        report, self._seen = self._seen, []
        self.hear()
        self.news = len(self._seen)
        return report

    def ready_to_load(self, action: ev.Ready) -> None:
        self._seen.append(self.remote[action.transfer_id])
        self.news += 1
        self.host.book(ev.Loaded(action.transfer_id))

    def abort(self, flight: Flight) -> None:
        super().abort(flight)
        for ids in (self._announced, self._wanted, self._told):
            ids.discard(flight.id)


class PullPrefill(Prefill):
    """P of vLLM's pull: exposes a finished prompt's blocks through the router and holds them until D says that it has
    read them."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self.kept = NOTIFIED
        self._read: list[Request] = []

    def prefilled(self, request: Request, now: int) -> None:
        flight = request.flight
        flight.held_p = now
        self.held[flight.id] = request
        self.register(flight, self.world.decode_name(flight), memory=flight.id)
        self.world.prefilled(flight, now)

    def carries(self, message: msg.Register) -> bool:
        """The registration goes with the answer of the prefill leg."""
        if message.transfer_id in self.held:
            flight = self.world.flights[message.transfer_id]
            if flight.register is None:
                flight.register = message
                return True
        return False

    def poll(self, now: int) -> list[Request]:
        self.hear()
        report, self._read = self._read, []
        self.news = 0
        return report

    def ready_to_load(self, action: ev.Ready) -> None:
        """All of it has been read."""
        self.host.book(ev.Loaded(action.transfer_id))
        self._read.append(self.held[action.transfer_id])

    def failed(self, action: ev.Fail) -> None:
        """The lease is over: the blocks come back with ``Free``, when D cannot read them any more.

        A registration that could not leave goes with no answer either: nobody will read for this request.
        """
        flight = self.world.flights.get(action.transfer_id)
        if flight is not None and flight.register is None:
            self.world.failed(flight)

    def free(self, action: ev.Free) -> None:
        self._read.append(self.held[action.transfer_id])
        self.news += 1
        self.engine.kick()


class PullDecode(Receiving):
    """D of vLLM's pull: its engine thread posts, every rank one READ per run of blocks and layer."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, engine)
        self._landed: list[tuple[int, Flight]] = []
        self._seen: list[Request] = []

    def received(self, request: Request) -> None:
        flight = request.flight
        super().received(request)
        if flight.register is not None:  # else P had no link when it answered; the registration comes by itself
            self.host.receive(self.world.prefill_name(flight), flight.register)

    def allocate(self, request: Request, now: int) -> bool:
        flight = request.flight
        if not self.take_blocks(request, now):
            return False
        self.remote[flight.id] = request
        self.host.book(ev.Hold(flight.id, flight.input_len))
        self.host.feed(ev.Computed(flight.id, flight.input_len, True))
        return True

    def post(self, action: ev.Post) -> None:
        self.fresh.append(action)
        self.engine.kick()

    def pre_forward(self, t: int) -> int:
        """vLLM posts once a step's inputs are prepared and looks after the launch: a READ is seen a step on.

        Read from 0.26's ``execute_model``: inputs, ``start_load_kv``, forward, ``get_finished``.
        """
        prepare = self.engine.costs.decode_launch if self.engine.active else 0
        t += prepare
        fresh, self.fresh = self.fresh, []
        for action in fresh:
            if not self.host.claim(action.handle):
                continue
            flight = self.remote[action.transfer_id].flight
            if flight.p is None:  # P has died with the cache
                self._arrived((action.handle, flight))
                continue
            pieces = self.world.transfers.pieces(flight)
            start, t = t, t + self.world.transfers.post(flight, pieces)
            self.world.later(start, self._read, (action.handle, flight, pieces, t))
        return t - prepare

    def _read(self, what: tuple[int, Flight, int, int]) -> None:
        handle, flight, pieces, posted = what
        self.world.transfers.move(
            flight, flight.input_len, pieces, posted, 0, self._arrived, (handle, flight), packed=False
        )

    def _arrived(self, what: tuple[int, Flight]) -> None:
        self._landed.append(what)
        self.news += 1
        self.engine.kick()

    def poll(self, now: int) -> list[Request]:
        landed, self._landed = self._landed, []
        for handle, flight in landed:
            if flight.p is not None:
                self.host.feed(ev.WriteDone(handle))
            else:  # a READ from a process that has died breaks
                self.host.feed(ev.WriteBroken(handle))
                self.host.feed(ev.WriteQuiet(handle))
        report, self._seen = self._seen, []
        self.news = 0
        return report

    def sent(self, action: ev.Finished) -> None:
        if not action.ok:
            self.world.failed(self.world.flights.get(action.transfer_id))

    def release(self, action: ev.Release) -> None:
        """Nothing writes into the blocks any more: the cache is here, or the blocks are free."""
        request = self.remote.get(action.transfer_id)
        if request is None:
            return
        if request.flight.failed:
            self.engine.kick()
            self.remote.pop(action.transfer_id)
            self.engine.open -= 1
            self.engine.pool.give_back(request.blocks)
        else:
            self._seen.append(request)
            self.news += 1
