"""`pushkv router`: flags, start, reload and stop.

Decides what a signal does: SIGTERM and SIGINT drain (a second one stops at once), SIGHUP reads the settings file again,
as does a change of the file. A bad file at start is exit code 2; a bad file later leaves the list as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from pushkv.router.settings import RouterSettings, address, read
from pushkv.sim.errors import BadInput

try:
    import uvloop

    from pushkv.router.app import Application
    from pushkv.router.servers import HealthChecks
except ImportError as _missing:  # pragma: no cover - the refusal is tested in a process of its own
    raise BadInput(f"the router needs {_missing.name}: pip install 'pushkv[router]'") from None

log = logging.getLogger("pushkv.router")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where the settings come from, at the start and at a reload."""

    path: str | None
    flags: Mapping[str, Any]

    def read(self) -> RouterSettings:
        return read(self.path, self.flags)

    def stamp(self) -> tuple[int, int, int] | None:
        """Changes when the file does; None where there is none."""
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def run(source: Source, *, check: bool = False) -> int:
    """Serve until told to stop. check: only look at the settings. Raises `BadInput`."""
    settings = source.read()
    if check:
        settings.client_tls()
        if any(server.url.startswith("https:") for server in (*settings.prefill, *settings.decode)):
            settings.server_tls()
        print(msgspec.json.format(msgspec.json.encode(settings)).decode())
        return 0
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    more_files()
    listening = _listen(settings.listen)
    gc.collect()
    gc.freeze()  # what is here stays: the collector need not look at it
    gc.set_threshold(50_000, 20, 50)  # requests leave few cycles behind; a full collection is a pause
    with listening:
        uvloop.run(Service(settings, source).serve(listening))
    return 0


def more_files() -> None:
    """Open files up to the hard limit: every request takes three, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems have a lower bound of their own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(where: str) -> socket.socket:
    host, port = address(where)
    try:
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found)
        listening.listen(4096)
    except OSError as error:
        raise BadInput(f"listen is {where!r}: it cannot be listened on: {error.strerror}") from None
    return listening


class Service:
    """The application, its listening socket, and what goes on beside requests."""

    def __init__(self, settings: RouterSettings, source: Source) -> None:
        self._settings, self._source = settings, source
        self.application = Application(settings)
        self._stop = asyncio.Event()
        self._at_once = False
        self._reload = asyncio.Event()
        self._tls = settings.client_tls()
        self._listening: asyncio.Server | None = None

    @property
    def started(self) -> bool:
        """Whether requests are taken."""
        return self._listening is not None

    async def serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        router = self.application.router
        beside = [
            asyncio.create_task(HealthChecks((router.prefill, router.decode), self._settings).run()),
            asyncio.create_task(self._reloads()),
        ]
        downstream = self.application.downstream
        self._listening = await loop.create_server(
            downstream.connection, sock=listening, ssl=self._tls, backlog=4096, start_serving=True
        )
        host, port = listening.getsockname()[:2]
        log.info("listening on %s:%d, %d prefill and %d decode servers", host, port, *map(len, self._lists()))
        await self._stop.wait()
        await self._drain()
        self._listening.close()
        downstream.close()  # what is left after the drain is not waited for
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        for fleet in (router.prefill, router.decode):
            for server in fleet:
                server.pool.close()

    def stop(self) -> None:
        """Drain; at the second call, end at once."""
        self._at_once = self._stop.is_set()
        self._stop.set()

    async def _drain(self) -> None:
        """Refuse what is new and wait for what is there: the first moments show load balancers that we are leaving."""
        self.application.drain()
        log.info("draining: %d requests are open", self.application.open)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.drain_s
        while self.application.open and loop.time() < end and not self._at_once:
            await asyncio.sleep(0.05)
        if self.application.open:
            log.warning("stopping with %d requests open", self.application.open)

    def _lists(self) -> tuple[list[Any], list[Any]]:
        router = self.application.router
        return list(router.prefill), list(router.decode)

    async def _reloads(self) -> None:
        """Read the file again at SIGHUP, or when it has changed."""
        seen = self._source.stamp()
        while True:
            try:
                async with asyncio.timeout(self._settings.reload_every_s):
                    await self._reload.wait()
            except TimeoutError:
                stamp = self._source.stamp()
                if stamp == seen or stamp is None:
                    continue
            seen = self._source.stamp()
            self._reload.clear()
            self._read_again()

    def _read_again(self) -> None:
        metrics = self.application.router.metrics
        try:
            self.application.router.update(self._source.read())
        except Exception as error:  # a reload must not end the task that does them
            metrics.count("reloads", "refused")
            said = str(error) if isinstance(error, BadInput) else type(error).__name__
            log.error("the server list stays as it was: %s", said)
            return
        metrics.count("reloads", "done")
        log.info("the server list was read again: %d prefill and %d decode servers", *map(len, self._lists()))
