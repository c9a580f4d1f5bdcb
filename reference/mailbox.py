"""Between the office and ranks in other processes of the same engine: host records over a local socket, in order.

Decides nothing. Used when an engine has several ranks; with one, office and rank share a thread and call each other.
The socket's file lies in a folder that only this user can enter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from pushkv.reference.office import Office
from pushkv.reference.wire import plain, record

log = logging.getLogger(__name__)

LOOK_MS = 1000
"""The desk looks by itself this often; words and reports wake it."""


def _socket(context: zmq.Context[Any]) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)  # nothing between an engine's own parts may be lost
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    return socket


def _receive(socket: zmq.Socket[Any]) -> list[Any]:
    records = []
    with contextlib.suppress(zmq.Again):
        while True:
            records.append(record(*msgspec.msgpack.decode(socket.recv(zmq.NOBLOCK))))
    return records


class Door:
    """A rank's end. ``address`` is what the office connects to."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pushkv-")
        self.address = f"ipc://{self._folder}/door"
        self._context = zmq.Context()
        self.socket = _socket(self._context)
        self.socket.bind(self.address)

    def receive(self) -> list[Any]:
        """Commands of the office."""
        return _receive(self.socket)

    def send(self, report: msgspec.Struct) -> None:
        """A report to the office."""
        self.socket.send(msgspec.msgpack.encode(plain(report)))

    def close(self) -> None:
        """Nobody knocks any more."""
        self.socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


class Desk:
    """The office's end and its thread. ``make(deliver, wake, stop)`` makes the office."""

    def __init__(self, doors: Sequence[str], make: Callable[..., Office]) -> None:
        self._context = zmq.Context()
        self._sockets = [_socket(self._context) for _ in doors]
        for socket, door in zip(self._sockets, doors, strict=True):
            socket.connect(door)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self.office = make(deliver=self._deliver, wake=self._wake, stop=self._stop)
        self._thread = threading.Thread(target=self._run, name="pushkv-office", daemon=True)
        self._thread.start()

    def _deliver(self, rank: int, command: Any) -> None:
        self._sockets[rank].send(msgspec.msgpack.encode(plain(command)))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_write(self._wake_fd, 1)

    def _stop(self, drain_s: float) -> None:
        deadline = time.monotonic() + drain_s
        while any(self.office.ledger.open()) and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping.set()
        self._wake()
        self._thread.join(5.0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                poller.poll(LOOK_MS)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                now = time.monotonic()
                for rank, socket in enumerate(self._sockets):
                    for report in _receive(socket):
                        self.office.report(rank, report, now)
                self.office.turn(now)
        except Exception:
            log.exception("the office's thread has ended")
        finally:
            for socket in self._sockets:
                socket.close()
            self._context.term()
            os.close(self._wake_fd)
