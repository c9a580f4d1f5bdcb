"""HTTP/1.1 to one server: kept connections, one request at a time on each, answers as they come.

Decides when a connection may be used again and what counts as a failure; not what is done about one. The parser is
llhttp (httptools).

Theory of operation. `Pool.start` writes a request at once if a connection is idle, else as soon as one is made, and
returns an `Exchange`, which the connection feeds. Aborting that closes the connection: so a server is told that nobody
wants the answer.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import httptools

from pushkv.router.deadline import Deadline
from pushkv.router.exchange import Exchange, UpstreamError

STALE_S = 1.0
"""A kept connection that its server closes later than this has not crossed with the request: the server failed."""


class Connection(asyncio.Protocol):
    """One connection of a pool. used: it has carried an exchange before the present one."""

    __slots__ = (
        "_exchange", "_parser", "_paused", "_pool", "_sent", "_transport", "deadline", "heard", "idle_since", "loop",
        "used",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._paused = False
        self.loop = asyncio.get_running_loop()
        self.heard = self.used = False
        self._sent = 0.0
        self.idle_since = self.loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)  # both hold this: not before, for some are never made
        self.deadline = Deadline(self.loop, self._late)

    def send(self, exchange: Exchange, head: bytes, body: bytes, now: float, limit_s: float | None) -> None:
        """The connection is idle. now: of the loop. limit_s: the exchange's."""
        assert self._transport is not None
        self._exchange = exchange
        self.heard = False
        self._sent = now
        exchange.attach(self)
        if limit_s is not None:
            self.deadline.until(now + limit_s)
        if len(body) < 16384:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody has asked
            self.drop()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            now = self._exchange
            self.drop()
            if now is not None:
                now.fail(UpstreamError("malformed"))
        if exchange.sink is not None and exchange.chunks:
            exchange.pour()

    def on_message_begin(self) -> None:
        if self._exchange is None:  # more than was asked for: it would be taken for the next request's answer
            self.drop()

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and not exchange.headed:  # else it is a trailer
            exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            status = self._parser.get_status_code()
            if not 100 <= status < 600:
                self._exchange.abort(UpstreamError("malformed"))
            elif status < 200:  # "continue" and the like: the answer is still to come
                self._exchange.headers.clear()
            else:
                self._exchange.head_is_here(status)

    def on_body(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.sink is None:
            exchange.take(data)
        else:
            exchange.chunks.append(data)  # `pour` follows

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.headed:
            return
        self._exchange = None
        if self._parser.should_keep_alive():
            self.resume()
            self.used = True
            self.idle_since = self.loop.time()
            self._pool.give_back(self)
        else:
            self.drop()
        exchange.finish()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._parser = None
        exchange, self._exchange = self._exchange, None
        self._forget()
        if exchange is None or exchange.ended:
            return
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in exchange.headers)
        if exchange.headed and not framed and error is None:  # an answer that ends with its connection
            exchange.finish()
        else:
            crossed = self.used and not self.heard and self.loop.time() - self._sent < STALE_S
            exchange.fail(UpstreamError("stale" if crossed else "closed"))

    def pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._forget()

    def _forget(self) -> None:
        self._pool.forget(self)
        self.deadline.close()

    def _late(self) -> None:
        if self._exchange is not None:
            self._exchange.late()

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()


class Pool:
    """The connections to one server."""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, connect_s: float, idle_s: float, keep: int = 1024
    ) -> None:
        self.host, self.port = host, port
        self._tls = tls
        self._connect_s, self._idle_s, self._keep = connect_s, idle_s, keep
        self._idle: deque[Connection] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._all: set[Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # a pool may be made before it runs
        shown = f"[{host}]" if ":" in host else host
        self.host_header = f"Host: {shown}:{port}\r\n".encode("latin-1")

    @property
    def connections(self) -> int:
        return len(self._all)

    def start(
        self,
        head: bytes,
        body: bytes,
        on_end: Callable[[Exchange], None] | None = None,
        limit_s: float | None = None,
    ) -> Exchange:
        """Send one request. head: with the empty line behind it. limit_s: as in `Exchange.limit`. Never raises: what
        fails is the exchange.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        exchange = Exchange(loop, on_end)
        now = loop.time()
        oldest = now - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.closing:
                connection.send(exchange, head, body, now, limit_s)
                return exchange
            connection.drop()
        exchange.limit(limit_s)
        task = loop.create_task(self._open(exchange, head, body))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return exchange

    async def _open(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self._tls
                )
        except (OSError, TimeoutError, UnicodeError) as error:  # TLS errors are OSErrors; a name may not be writable
            ours = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            exchange.fail(UpstreamError("no descriptors" if ours else "connect", type(error).__name__))
            return
        except asyncio.CancelledError:
            exchange.fail(UpstreamError("cancelled"))
            raise
        self._all.add(connection)
        if exchange.ended:
            self.give_back(connection)
        elif connection.closing:
            exchange.fail(UpstreamError("connect", "closed at once"))
        else:
            connection.send(exchange, head, body, loop.time(), None)

    def give_back(self, connection: Connection) -> None:
        if len(self._idle) >= self._keep:
            connection.drop()
            return
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)

    def trim(self) -> None:
        """Close what has been idle for too long."""
        oldest = asyncio.get_running_loop().time() - self._idle_s
        while self._idle and (self._idle[0].closing or self._idle[0].idle_since < oldest):
            self._idle.popleft().drop()

    def retire(self) -> None:
        """Keep no connection from now on; what is under way goes on."""
        self._keep = 0
        while self._idle:
            self._idle.pop().drop()

    def close(self) -> None:
        """Drop everything, what is under way too."""
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._all):
            exchange = connection._exchange
            connection.drop()
            if exchange is not None:
                exchange.fail(UpstreamError("cancelled"))
        self._idle.clear()
