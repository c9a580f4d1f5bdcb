"""How metrics leave an engine that takes no step: from its processes straight to vLLM's API server on the same machine.

vLLM fetches statistics with a step's output, and an engine without requests takes none: a quarantine that ends in an
idle hour would be shown until the next request. Having the engine step on for it is no way out: as long as it has work,
vLLM neither pauses nor stops it, and a quarantine may last for days. So each part of an engine (its office, its ranks)
has an outlet: a thread that looks once in `LOOK_S`, and hands over what has changed while nobody fetches it. The API
server has an intake, which observes what comes as if it had come with a step.

Decides when it is an outlet's turn. Does not decide what is counted. What one way has taken the other does not find
(`Meter.read`); where no API server listens (another machine's), everything waits for the next step.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from pushkv.reference.metric_names import Meter

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks of an outlet; a step is seldom longer."""
RECONNECT_MS = 1000
OFFICE = "office"

Readings = Callable[[], tuple[Mapping[str, float], Mapping[str, float], Sequence[Mapping[str, Any]]]]
"""Counters, gauges and fresh records."""


def rank_name(rank: int) -> str:
    """The part of an engine that is its rank `rank`."""
    return f"rank-{rank}"


def parts_of(tp_size: int) -> list[str]:
    """All parts of an engine that have something to tell."""
    return [OFFICE, *(rank_name(rank) for rank in range(tp_size))]


def address(engine_id: str, part: str, *, folder: str = "") -> str:
    """Where the outlet of `part` is bound: in a folder that only this user can enter. Raises `OSError` if there is one
    that others can, or that has too long a name for a socket.
    """
    folder = folder or os.path.join(tempfile.gettempdir(), f"pushkv-metrics-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of this user alone")
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    path = f"{folder}/{name}-{part}"
    if len(path.encode()) > zmq.IPC_PATH_MAX_LEN:
        raise OSError(f"{path} is too long for the name of a socket: set TMPDIR to a shorter one")
    return f"ipc://{path}"


class Outlet:
    """Of one part of an engine. `where`: its address."""

    def __init__(self, where: str, meter: Meter, readings: Readings, *, look_s: float = LOOK_S) -> None:
        self._meter, self._readings, self._look_s = meter, readings, look_s
        self._frame = b""  # what is read and not sent yet
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(where)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pushkv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """May be called twice."""
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping.wait(self._look_s):
            try:
                self._look()
            except Exception:
                log.exception("metrics outside of a step")
        self._context.destroy(linger=0)

    def _look(self) -> None:
        """Hand over what nobody has fetched, if somebody listens."""
        if not self._meter.forsaken(self._look_s) or not self._socket.poll(0, zmq.POLLOUT):
            return
        if not self._frame:
            with self._meter.lock:
                tally = self._meter.read(*self._readings())
            if tally is None:
                return
            self._frame = msgspec.msgpack.encode(tally.data)
        with contextlib.suppress(zmq.Again):  # whoever listened has just left
            self._socket.send(self._frame, zmq.DONTWAIT)
            self._frame = b""


class Intake:
    """Of an API server. `addresses`: of all parts, by engine. `observe(data, engine)` gets what comes, on a thread of
    its own, which ends with the process.
    """

    def __init__(self, addresses: Mapping[int, Sequence[str]], observe: Callable[[dict[str, Any], int], None]) -> None:
        self._observe = observe
        self._context = zmq.Context()
        self._engines: dict[zmq.Socket[bytes], int] = {}
        for engine, every in addresses.items():
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
            socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            for where in every:
                socket.connect(where)
            self._engines[socket] = engine
        threading.Thread(target=self._run, name="pushkv-metrics", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self._engines:
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                try:
                    self._observe(msgspec.msgpack.decode(socket.recv()), self._engines[socket])
                except Exception:
                    log.exception("metrics outside of a step")
