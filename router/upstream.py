"""HTTP/1.1 to one server: kept connections, one request at a time on each, answers as they come.

Decides when a connection may be used again and what counts as a failure; not what is done about one. The parser is
llhttp (httptools, as in uvicorn).

Theory of operation. `Pool.start` writes a request at once if a connection is idle, else as soon as one is made, and
returns an `Exchange`. Its owner awaits `head`, then `chunk` until that is empty, or `whole`. Whatever ends it, `on_end`
is called once. `abort` closes the connection under it: that is how a server is told that nobody wants the answer.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, cast

import httptools

Failure = Literal["connect", "stale", "closed", "malformed", "timeout", "too large", "cancelled", "no descriptors"]
STALE_S = 1.0
"""A kept connection that its server closes later than this has not crossed with the request: the server failed."""
HIGH_WATER = 256 << 10
"""Bytes of an answer that nobody has fetched; more stay in the kernel: a slow client slows its server down."""


class UpstreamError(Exception):
    """An exchange that will not be completed. reason: of a closed list, for metrics and the log.

    `stale`: a kept connection was closed as the request was sent, before any byte of an answer; nothing is wrong with
    the server. Nor with `no descriptors`: this process has as many files open as it may.
    """

    def __init__(self, reason: Failure, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason: Failure = reason


class Exchange:
    """One request and its answer. status: 0 until the head is here. headers: names in lower case."""

    __slots__ = (
        "_chunks", "_connection", "_deadline", "_loop", "_most", "_size", "_timer", "_waiter", "complete", "error",
        "headed", "headers", "on_end", "status",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[Exchange], None] | None) -> None:
        self._loop = loop
        self._chunks: deque[bytes] = deque()
        self._size = self._most = 0
        self._connection: Connection | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self.on_end = on_end
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.headed = self.complete = False
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.complete or self.error is not None

    def limit(self, seconds: float | None) -> None:
        """It fails with `timeout` unless it ends within so many seconds, or the limit is set anew. None: no limit.

        Set for every token: a timer that runs is only looked at when it is due.
        """
        if seconds is None or self.ended:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        self._deadline = deadline = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._late)

    async def head(self) -> None:
        """Returns when `status` and `headers` are here. Raises what ended it before."""
        while not self.headed:
            if self.error is not None:
                raise self.error
            await self._wait()

    async def chunk(self) -> bytes:
        """What has come of the body since the last call; empty at its end. Raises what ended it early."""
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.complete:
                return b""
            await self._wait()
        return self._take()

    async def whole(self, most: int) -> bytes:
        """The rest of the body. Raises `UpstreamError` also where it is longer than `most` bytes."""
        parts: list[bytes] = []
        size = 0
        while part := await self.chunk():
            parts.append(part)
            size += len(part)
            if size > most:
                error = UpstreamError("too large")
                self.abort(error)
                raise error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def hold(self, most: int) -> None:
        """Nobody will fetch the body before it ends: keep all of it. It fails with `too large` above `most` bytes."""
        self._most = most

    def body(self) -> bytes:
        """What of the body is here and has not been fetched."""
        return self._take() if self._chunks else b""

    def abort(self, error: BaseException | None = None) -> None:
        """End it now unless it has ended; its connection is closed."""
        if not self.ended:
            connection = self._connection
            self._fail(error or UpstreamError("cancelled"))
            if connection is not None:
                connection.drop()

    # ------------------------------------------------------------ for the connection

    def attach(self, connection: Connection) -> None:
        self._connection = connection

    def _head(self, status: int) -> None:
        self.status = status
        self.headed = True
        self._wake()

    def _body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._most:
            if self._size > self._most:
                self.abort(UpstreamError("too large"))
                return
        elif self._size > HIGH_WATER and self._connection is not None:
            self._connection.pause()
        self._wake()

    def _finish(self) -> None:
        if not self.ended:
            self.complete = True
            self._end()

    def _fail(self, error: BaseException) -> None:
        if not self.ended:
            self.error = error
            self._end()

    def _end(self) -> None:
        self.limit(None)
        self._connection = None
        self._wake()
        if self.on_end is not None:
            self.on_end(self)

    def _late(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline - 0.002:  # it has been put off
            self._timer = self._loop.call_at(self._deadline, self._late)
        else:
            self.abort(UpstreamError("timeout"))

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._size = 0
        if self._connection is not None:
            self._connection.resume()
        return data


class Connection(asyncio.Protocol):
    """One connection of a pool. used: it has carried an exchange before the present one."""

    __slots__ = ("_exchange", "_parser", "_paused", "_pool", "_sent", "_transport", "heard", "idle_since", "used")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self.heard = self.used = False
        self.idle_since = self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """The connection is idle."""
        assert self._transport is not None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._exchange = exchange
        self.heard = False
        self._sent = exchange._loop.time()
        exchange.attach(self)
        if len(body) < 16384:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:  # nobody has asked
            self.drop()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            exchange = self._exchange
            self.drop()
            if exchange is not None:
                exchange._fail(UpstreamError("malformed"))

    def on_message_begin(self) -> None:
        if self._exchange is None:  # more than was asked for: it would be taken for the next request's answer
            self.drop()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            status = self._parser.get_status_code()
            if not 100 <= status < 600:
                self._exchange.abort(UpstreamError("malformed"))
            elif status < 200:  # "continue" and the like: the answer is still to come
                self._exchange.headers.clear()
            else:
                self._exchange._head(status)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange._body(data)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.headed:
            return
        self._exchange = None
        if self._parser.should_keep_alive():
            self.resume()
            self.used = True
            self._pool.give_back(self)
        else:
            self.drop()
        exchange._finish()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.ended:
            return
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in exchange.headers)
        if exchange.headed and not framed and error is None:  # an answer that ends with its connection
            exchange._finish()
        else:
            crossed = self.used and not self.heard and exchange._loop.time() - self._sent < STALE_S
            exchange._fail(UpstreamError("stale" if crossed else "closed"))

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
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

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
        shown = f"[{host}]" if ":" in host else host
        self.host_header = f"Host: {shown}:{port}\r\n".encode("latin-1")

    @property
    def connections(self) -> int:
        return len(self._all)

    def start(self, head: bytes, body: bytes, on_end: Callable[[Exchange], None] | None = None) -> Exchange:
        """Send one request. head: with the empty line behind it. Never raises; failures are the exchange's."""
        loop = asyncio.get_running_loop()
        exchange = Exchange(loop, on_end)
        oldest = loop.time() - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing and connection.idle_since >= oldest:
                connection.send(exchange, head, body)
                return exchange
            connection.drop()
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
            exchange._fail(UpstreamError("no descriptors" if ours else "connect", type(error).__name__))
            return
        except asyncio.CancelledError:
            exchange._fail(UpstreamError("cancelled"))
            raise
        self._all.add(connection)
        if exchange.ended:
            self.give_back(connection)
        elif connection.closing:
            exchange._fail(UpstreamError("connect", "closed at once"))
        else:
            connection.send(exchange, head, body)

    def give_back(self, connection: Connection) -> None:
        if len(self._idle) >= self._keep:
            connection.drop()
            return
        connection.idle_since = asyncio.get_running_loop().time()
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
                exchange._fail(UpstreamError("cancelled"))
        self._idle.clear()
