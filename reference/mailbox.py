"""Between the office and ranks in other processes of the same engine: host records over a local socket, in order.

Decides nothing. Used when an engine has several ranks; with one, office and rank share a thread and call each other.
The socket's file lies in a folder that only this user can enter. Whichever end goes first, the other does not wait for
it: a rank says goodbye with an empty frame, and what is said to an office that has left is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import zmq

from pushkv.reference.office import Office
from pushkv.reference.wire import plain, record

log = logging.getLogger(__name__)

LOOK_MS = 1000
"""The desk looks by itself this often; words and reports wake it."""

GOODBYE_MS = 200
"""A closing rank's last reports get this long to leave."""


def _socket(context: zmq.Context[Any]) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)  # nothing between an engine's own parts may be lost
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    return socket


def _receive(socket: zmq.Socket[Any]) -> Iterator[Any]:
    """The records that have come; ``None`` for a goodbye. One by one, so that a bad one costs no other."""
    while True:
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield record(*msgspec.msgpack.decode(frame)) if frame else None


class Door:
    """A rank's end. ``address`` is what the office connects to."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pushkv-")
        self.address = f"ipc://{self._folder}/door"
        self._context = zmq.Context()
        self.socket = _socket(self._context)
        self.socket.bind(self.address)

    def receive(self) -> Iterator[Any]:
        """Commands of the office."""
        return _receive(self.socket)

    def send(self, report: msgspec.Struct) -> None:
        """A report to the office."""
        self._say(msgspec.msgpack.encode(plain(report)))

    def _say(self, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the office has not come, or has left
            self.socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Nobody knocks any more."""
        self._say(b"")
        self.socket.close(GOODBYE_MS)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


class Desk:
    """The office's end and its thread. ``make(deliver, wake, stop)`` makes the office."""

    def __init__(self, doors: Sequence[str], make: Callable[..., Office]) -> None:
        self._context = zmq.Context()
        self._sockets = [_socket(self._context) for _ in doors]
        self._poller = zmq.Poller()
        for socket, door in zip(self._sockets, doors, strict=True):
            socket.connect(door)
            self._poller.register(socket, zmq.POLLIN)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._gone: set[int] = set()
        self._stopping = threading.Event()
        self.office = make(deliver=self._deliver, wake=self._wake, stop=self._stop)
        self._thread = threading.Thread(target=self._run, name="pushkv-office", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the engine thread

    def _wake(self) -> None:
        if not self._stopping.is_set():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake_fd, 1)

    def _stop(self, drain_s: float) -> None:
        if self._stopping.is_set():
            return
        deadline = time.monotonic() + drain_s
        while any(self.office.ledger.open()) and not self._gone and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    # ------------------------------------------------------------ the office's thread

    def _deliver(self, rank: int, command: Any) -> None:
        self._sockets[rank].send(msgspec.msgpack.encode(plain(command)))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:  # one bad word must not end the transfers of all others
                log.exception("a turn of the office")
                time.sleep(0.05)
        for socket in self._sockets:
            socket.close()
        self._context.term()
        if self.office.trace is not None:
            self.office.trace.close()

    def _turn(self) -> None:
        self._poller.poll(LOOK_MS)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        now = time.monotonic()
        for rank, socket in enumerate(self._sockets):
            for report in _receive(socket):
                if report is None:
                    self._gone.add(rank)
                else:
                    self.office.report(rank, report, now)
        self.office.turn(now)
