"""Evidence that a peer's process is gone, from the operating system (E2 of the protocol).

Decides what proves the death of a process and what does not; false evidence would hand memory back while somebody can
still write into it, so every doubt is silence. Does not decide when to ask, or what follows. Runs on one thread of its
own, as looking up and connecting may take time.

* *Same machine and process namespace*: the process number is free, or belongs to a process that started at another
  time, or to a zombie without threads. Nothing else: a stopped process is not gone.
* *Elsewhere*: the process listens on an endpoint of its own from before its first transfer until after its last. If
  that endpoint has accepted a connection and later refuses two, some time apart, nobody listens there any more. A
  time-out proves nothing. Where something in front of the endpoint may refuse in its stead, switch this off.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from pushkv.model.protocol.events import Link

_PROC: Final = "/proc"
_SIDE_BY_SIDE: Final = 64
_PORT: Final = msgspec.Meta(ge=0, le=65535)


class Process(msgspec.Struct, frozen=True, array_like=True):
    """Where a process runs and listens. ``started``: clock ticks from boot; ``host`` is empty when that is unknown."""

    host: Annotated[str, msgspec.Meta(max_length=256)]
    pid: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    started: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    address: Annotated[str, msgspec.Meta(max_length=256)] = ""
    port: Annotated[int, _PORT] = 0


def host_id() -> str:
    """Equal for two processes that see each other's numbers: one boot of one machine and one process namespace. The
    machine's name is part of it, as copies of a virtual machine share the rest.
    """
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink(f'{_PROC}/self/ns/pid')} {os.uname().nodename}"[:256]
    except OSError:
        return ""


def process_id() -> tuple[int, int]:
    """(process number, start time in clock ticks) of this process; (0, 0) when it cannot be told."""
    found = _stat(os.getpid())
    return (os.getpid(), found[1]) if found else (0, 0)


def here(address: str, port: int) -> Process:
    """This process, which listens on ``address`` and ``port``."""
    return Process(host_id(), *process_id(), address, port)


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, start time, threads) of a process, or ``None`` if it does not show itself."""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19]), int(fields[17])
    except (OSError, IndexError, ValueError):
        return None


def vanished(pid: int, started: int) -> bool:
    """Whether process ``pid`` of this namespace that started then is gone for certain."""
    if pid <= 0 or started <= 0:
        return False
    found = _stat(pid)
    if found is None:
        try:
            os.kill(pid, 0)  # /proc may hide what belongs to others
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False
    state, since, threads = found
    return since != started or (state in "ZX" and threads <= 1)  # the first thread may end before the others


class Evidence:
    """Questions in, proofs out; all methods return at once and may be called from one thread.

    ``refusal_counts``: whether a refused connection is evidence. At most ``waiting`` questions wait; the oldest gives
    way, as the asker asks again.
    """

    def __init__(
        self, *, refusal_counts: bool = True, apart_s: float = 0.25, timeout_s: float = 1.0, waiting: int = 1024
    ) -> None:
        self._refusal_counts, self._apart_s, self._timeout_s = refusal_counts, apart_s, timeout_s
        self._waiting = waiting
        self._host = host_id()
        self._changed = threading.Condition()
        self._met: dict[Link, tuple[int, Process]] = {}
        self._open: set[tuple[Link, int]] = set()  # whose endpoint has accepted
        self._asked: dict[tuple[Link, int], Process] = {}
        self._proven: deque[tuple[Link, int]] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="pushkv-evidence", daemon=True)
        self._thread.start()

    def meet(self, link: Link, incarnation: int, process: Process) -> None:
        """A process has been connected: remember it, and see whether its endpoint accepts."""
        with self._changed:
            self._forget(link)
            self._met[link] = (incarnation, process)
            self._ask(link, incarnation, process)

    def ask(self, link: Link, incarnation: int) -> None:
        """Look whether the process that was met is gone. Nothing comes of it unless it is proven."""
        with self._changed:
            met = self._met.get(link)
            if met is not None and met[0] == incarnation:
                self._ask(link, incarnation, met[1])

    def forget(self, link: Link) -> None:
        """The link is closed."""
        with self._changed:
            self._forget(link)

    def answers(self) -> list[tuple[Link, int]]:
        """Those of whom it was proven since the last call that they are gone: (link, incarnation)."""
        if not self._proven:
            return []
        with self._changed:
            found = list(self._proven)
            self._proven.clear()
            return found

    def close(self) -> None:
        """Stop the thread; it ends within a time-out."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(5 * self._timeout_s)

    def _forget(self, link: Link) -> None:
        met = self._met.pop(link, None)
        if met is not None:
            self._open.discard((link, met[0]))
            self._asked.pop((link, met[0]), None)

    def _ask(self, link: Link, incarnation: int, process: Process) -> None:
        self._asked.setdefault((link, incarnation), process)
        while len(self._asked) > self._waiting:
            del self._asked[next(iter(self._asked))]
        self._changed.notify()

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._asked and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                asked, self._asked = self._asked, {}
            apart: dict[tuple[Link, int], Process] = {}
            for who, process in asked.items():
                if self._host and process.host == self._host:
                    if vanished(process.pid, process.started):
                        self._prove([who])
                elif self._refusal_counts and _askable(process.address) and process.port:
                    apart[who] = process
            queue = list(apart.items())
            while queue and not self._stopped:
                few, queue = queue[:_SIDE_BY_SIDE], queue[_SIDE_BY_SIDE:]
                self._connect(dict(few))

    def _connect(self, asked: dict[tuple[Link, int], Process]) -> None:
        accepted, refused = knock(asked, self._timeout_s)
        with self._changed:
            # Only who is still met: a link may have been closed in the meantime.
            self._open |= {who for who in accepted if self._met.get(who[0], (0,))[0] == who[1]}
            again = {who: asked[who] for who in refused if who in self._open}
        if again:
            time.sleep(self._apart_s)
            self._prove(knock(again, self._timeout_s)[1])

    def _prove(self, gone: Iterable[tuple[Link, int]]) -> None:
        with self._changed:
            for who in gone:
                if self._met.get(who[0], (0,))[0] == who[1]:
                    self._proven.append(who)
                    self._forget(who[0])


def _askable(address: str) -> bool:
    """Whether the address means the same machine to this process as to the one that named it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address not in ("", "*", "localhost")
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)


def knock(
    asked: dict[tuple[Link, int], Process], timeout_s: float
) -> tuple[set[tuple[Link, int]], set[tuple[Link, int]]]:
    """Connect to all endpoints side by side: (who accepted, who refused). All else is neither."""
    accepted: set[tuple[Link, int]] = set()
    refused: set[tuple[Link, int]] = set()

    def settle(who: tuple[Link, int], code: int) -> None:
        if code == 0:
            accepted.add(who)
        elif code == errno.ECONNREFUSED:
            refused.add(who)

    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as sockets:
        for who, process in asked.items():
            try:
                found = socket.getaddrinfo(process.address, process.port, type=socket.SOCK_STREAM)
                family, kind, number, _, where = found[0]
                one = sockets.enter_context(socket.socket(family, kind, number))
                one.setblocking(False)
                code = one.connect_ex(where)
            except (OSError, ValueError, UnicodeError):
                continue
            if code == errno.EINPROGRESS:
                waiting.register(one, selectors.EVENT_WRITE, who)
            else:
                settle(who, code)
        until = time.monotonic() + timeout_s
        while waiting.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                settle(key.data, key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    return accepted, refused
