"""The servers that the router knows: whether they live, who they are, what they have to do.

Decides when a server is taken for dead (it refused a connection, or failed two health checks) and when an identity is
in doubt. Does not pick: the policy of `model/routing` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from pushkv.model.routing import POLICIES, Dispatcher
from pushkv.router.exchange import Exchange, UpstreamError
from pushkv.router.identity import Identity
from pushkv.router.request import Ask
from pushkv.router.settings import RouterSettings, ServerSettings, target
from pushkv.router.upstream import Pool

FAILS = 2
"""Failed health checks in a row that make a server dead."""
CHANGES_S, SEQUENTIAL_S = 300.0, 600.0
"""A restart changes an identity once. One that changes again so soon belongs to several engines behind one address
(data parallelism): it is asked first for so long.
"""
log = logging.getLogger("pushkv.router")


class Server:
    """One server. number: its own in the policy. identity: None until known; doubtful: it may be another by now."""

    def __init__(self, role: str, settings: ServerSettings, number: int, common: RouterSettings) -> None:
        host, port, secure = target(role, settings.url)
        tls: ssl.SSLContext | None = common.server_tls() if secure else None
        self.role, self.settings, self.number = role, settings, number
        self.name = settings.url.rstrip("/").partition("://")[2]
        self.pool = Pool(host, port, tls, connect_s=common.connect_s, idle_s=common.upstream_idle_s)
        self.identity: Identity | None = settings.identity
        self.doubtful = False
        self._changed = self._sequential_until = -math.inf
        self.up = True
        self.fails = 0

    def lost(self) -> None:
        """It cannot be reached: nothing new until a health check succeeds, and whoever answers then may be new."""
        if self.up:
            log.warning("%s server %s cannot be reached", self.role, self.name)
        self.up = False
        self.doubtful = True

    def learn(self, said: Identity, now: float) -> None:
        """What its last prefill says; now: in seconds, of any clock that only goes forward."""
        if self.identity != said:
            log.info("prefill server %s is engine %s at %s:%d", self.name, said.engine_id, said.host, said.port)
            if self.identity is not None:
                if now - self._changed < CHANGES_S:
                    self._sequential_until = now + SEQUENTIAL_S
                self._changed = now
        self.identity, self.doubtful = said, False

    def unsettled(self, now: float) -> bool:
        """Whether it changes its identity too often for anybody to be told beforehand."""
        return now < self._sequential_until


class Fleet:
    """All servers of one role, and the policy that picks among them."""

    def __init__(self, role: str, servers: Sequence[ServerSettings], common: RouterSettings) -> None:
        self.role = role
        self._common = common
        self._policy: Dispatcher = POLICIES[common.policy](len(servers))
        self._servers = [Server(role, one, number, common) for number, one in enumerate(servers)]
        self._here = dict.fromkeys(range(len(servers)))
        for server in self._servers:
            if server.settings.drain:
                self._policy.remove(server.number)

    def __iter__(self) -> Iterator[Server]:
        """Those that are in the settings."""
        return iter([self._servers[number] for number in self._here])

    @property
    def alive(self) -> bool:
        return any(server.up and not server.settings.drain for server in self)

    def pick(self, ask: Ask, tokens: int, exclude: Collection[int]) -> Server:
        return self._servers[self._policy.pick(tokens, exclude=exclude, session=ask.session, prefix=ask.prefix)]

    def finished(self, server: Server, tokens: int) -> None:
        self._policy.finished(server.number, tokens)

    def outstanding(self, server: Server) -> int:
        return self._policy.outstanding(server.number)

    def lost(self, server: Server) -> None:
        """Called for every leg that breaks: only the first one changes what the policy knows."""
        was_up = server.up
        server.lost()
        if was_up:
            self._policy.mark(server.number, True)

    def found(self, server: Server) -> None:
        if not server.up:
            log.info("%s server %s answers again", self.role, server.name)
        server.up, server.fails = True, 0
        self._policy.mark(server.number, False)

    def new(self, wanted: Sequence[ServerSettings]) -> dict[str, Server]:
        """The servers of the list that are not here, by URL, for `update`; nothing has changed. Raises `BadInput`."""
        there = {server.settings.url: server for server in self}
        made: dict[str, Server] = {}
        for one in wanted:
            server = there.get(one.url)
            if server is None or (server.settings.drain and not one.drain):  # a removed number is never used again
                made[one.url] = Server(self.role, one, len(self._servers) + len(made), self._common)
        return made

    def update(self, wanted: Sequence[ServerSettings], new: Mapping[str, Server]) -> None:
        """The server list has changed. What a server that has gone is doing goes on; one that comes back is new."""
        there = {server.settings.url: server for server in self}
        added = []
        for one in wanted:
            server = new.get(one.url)
            if server is not None:
                number = self._policy.add()
                assert number == server.number == len(self._servers)
                self._servers.append(server)
                self._here[number] = None
                if one.drain:
                    added.append(server)
            else:
                server = there.pop(one.url)
                if one.drain and not server.settings.drain:
                    added.append(server)
                if one.identity is not None and one.identity != server.settings.identity:
                    server.identity = one.identity
                server.settings = one
        for server in (*there.values(), *added):
            self._policy.remove(server.number)
        for server in there.values():
            del self._here[server.number]
            server.pool.retire()


class HealthChecks:
    """Asks every server for its health, each in a task of its own, so that a slow one delays no other."""

    def __init__(self, fleets: Sequence[Fleet], settings: RouterSettings) -> None:
        self._fleets, self._settings = fleets, settings
        self._asked: dict[Server, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                for fleet in self._fleets:
                    for server in fleet:
                        server.pool.trim()
                        if server not in self._asked:
                            task = asyncio.create_task(self._ask(fleet, server))
                            self._asked[server] = task
                            task.add_done_callback(self._forgets(server))
                await asyncio.sleep(self._settings.health_every_s)
        finally:
            for task in list(self._asked.values()):
                task.cancel()

    def _forgets(self, server: Server) -> Callable[[asyncio.Task[None]], None]:
        def forget(_: asyncio.Task[None]) -> None:
            self._asked.pop(server, None)

        return forget

    async def _ask(self, fleet: Fleet, server: Server) -> None:
        head = b"GET /health HTTP/1.1\r\n" + server.pool.host_header + b"\r\n"
        exchange: Exchange = server.pool.start(head, b"")
        exchange.limit(self._settings.health_s)
        well = False
        with contextlib.suppress(UpstreamError):
            await exchange.head()
            await exchange.whole(1 << 20)
            well = exchange.status == 200
        exchange.let_go()
        reason = exchange.error.reason if isinstance(exchange.error, UpstreamError) else ""
        if well:
            fleet.found(server)
        elif reason not in ("stale", "no descriptors"):
            server.fails += 1
            if server.fails >= FAILS or reason == "connect":
                fleet.lost(server)
