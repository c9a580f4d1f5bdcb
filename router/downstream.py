"""HTTP/1.1 with the clients: requests as they come, and the connections. The parser is llhttp (httptools).

Decides the bounds of what a client sends before its request is known (how long and how late a head or a body may be,
how much of all of them is kept), and when a client counts as gone. Does not decide what is answered: that is the
`Handler`'s; nor how that is framed: `client` does.

Theory of operation. A `Connection` reads one request and gives it to the handler as a `Client`, which is also where the
answer is written: at once, from whatever callback has it. Nothing is awaited here. A client that does not take what is
written is full: `Client.write` says so, and `on_room` is called when there is room again; when nothing moves for
`client_stall_s` the connection is cut, also when the last byte has been written: what a client has not taken is kept in
memory (`Downstream.unsent`). Requests that are pipelined wait for the answer before theirs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol, cast

import httptools

from pushkv.router.client import CLOSE, Client, status_line
from pushkv.router.deadline import Deadline
from pushkv.router.exchange import Held
from pushkv.router.headers import Headers
from pushkv.router.request import Refusal
from pushkv.router.settings import RouterSettings

HEAD_BYTES = 64 << 10
"""A head may be so long; one that comes in a single read may be as long as that."""
LINGER_S, LINGER_BYTES = 2.0, 1 << 20
"""After a refusal what else comes is read for so long and thrown away: else the client might not see why."""


class Handler(Protocol):
    """Both return at once; the answer may be written later."""

    def handle(self, client: Client) -> None:
        """A whole request."""

    def refuse(self, client: Client, refusal: Refusal) -> None:
        """A request of which the head is here; nothing more is read."""


class Downstream:
    """All connections of clients. held: requests' bodies are counted there. open: requests that are not answered yet.
    draining: no connection is used again.
    """

    def __init__(self, settings: RouterSettings, handler: Handler, held: Held) -> None:
        self.settings, self.handler, self.held = settings, handler, held
        self.connections: set[Connection] = set()
        self.behind: set[Connection] = set()
        self.open = 0
        self.draining = False

    def connection(self) -> Connection:
        """For `loop.create_server`."""
        return Connection(self)

    @property
    def unsent_bytes(self) -> int:
        """Of answers that clients have not taken yet."""
        total = 0
        for connection in list(self.behind):
            unsent = connection.unsent
            total += unsent
            if not unsent:
                self.behind.discard(connection)
        return total

    @property
    def all_held_bytes(self) -> int:
        """What `max_held_bytes` bounds."""
        return self.held.bytes + (self.unsent_bytes if self.behind else 0)

    def crowded(self, more: int) -> bool:
        """Whether so many bytes more are too many."""
        return self.all_held_bytes + more > self.settings.max_held_bytes

    def close(self) -> None:
        """Cut what is under way, close what is idle."""
        for connection in list(self.connections):
            connection.close()


class Connection(asyncio.Protocol):
    """One connection of a client. paused: the client does not take what is written. old: it speaks HTTP/1.0."""

    __slots__ = (
        "_body", "_client", "_deadline", "_ending", "_expects", "_head_bytes", "_headers", "_in_head", "_length",
        "_parser", "_reading", "_thrown_away", "_transport", "_unsent", "_url", "_waiting", "house", "loop", "old",
        "paused",
    )  # fmt: skip

    def __init__(self, house: Downstream) -> None:
        self.house = house
        self.loop = asyncio.get_running_loop()
        self._deadline = Deadline(self.loop, self._late)
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._client: Client | None = None  # whose request is being answered
        self._reading: Client | None = None  # whose body is being read
        self._waiting: deque[Client] = deque()
        self._headers: Headers = []
        self._url = b""
        self._body: list[bytes] = []
        self._length = self._head_bytes = self._unsent = self._thrown_away = 0
        self._in_head = True
        self._expects = False
        self._ending = False  # what comes is thrown away
        self.paused = self.old = False

    # ------------------------------------------------------------ what comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.house.connections.add(self)
        self._deadline.set(self.house.settings.client_idle_s)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._thrown_away += len(data)
            if self._thrown_away > LINGER_BYTES:
                self.cut()
            return
        in_head = self._in_head
        if in_head:
            begins = not self._head_bytes
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # to what we do not speak: the request is served as it is
            last = self._waiting[-1] if self._waiting else self._client
            if last is not None:
                last.keep = False
            self._ending = True
        except httptools.HttpParserError:
            self._malformed("Invalid HTTP request received.")
        else:
            if in_head and (self._head_bytes or self._reading is not None):
                self._more_to_come(begins)

    def on_message_begin(self) -> None:
        self._url, self._headers, self._length, self._expects = b"", [], -1, False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer
            name = name.lower()
            self._headers.append((name, value))
            if name == b"content-length":
                self._length = int(value)
            elif name == b"expect":
                self._expects = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        if self._ending:
            return
        self._in_head = False
        parser, house = self._parser, self.house
        self.old = parser.get_http_version() == "1.0"
        client = Client(self, parser.get_method(), _path(self._url), self._headers, parser.should_keep_alive())
        self._reading = client
        most = house.settings.max_body_bytes
        if self._length > most:
            self._refuse(client, Refusal(413, f"the body is larger than {most} bytes"))
        elif self._length > 0 and house.crowded(self._length):
            self._refuse(client, _crowded())
        else:
            if self._client is None and self._expects and self._length and not self.old:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        client, house = self._reading, self.house
        if client is None or self._ending:
            return
        self._body.append(data)
        client.held += len(data)
        house.held.bytes += len(data)
        if client.held > house.settings.max_body_bytes:
            self._refuse(client, Refusal(413, f"the body is larger than {house.settings.max_body_bytes} bytes"))
        elif len(self._body) > 1 and house.crowded(0):
            self._refuse(client, _crowded())

    def on_message_complete(self) -> None:
        client = self._reading
        if client is None or self._ending:
            return
        self._reading = None
        self._in_head, self._head_bytes = True, 0
        body = self._body
        if body:
            client.body = body[0] if len(body) == 1 else b"".join(body)
            self._body = []
        if self._client is None and not self.paused:
            self._begin(client)
        else:
            self._waiting.append(client)
            if self._transport is not None:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._parser = None
        self._deadline.close()
        self.house.connections.discard(self)
        self.house.behind.discard(self)
        clients = [one for one in (self._client, self._reading, *self._waiting) if one is not None]
        began, self._client, self._reading = self._client, None, None
        self._waiting.clear()
        self._body = []
        if began is not None:
            self.house.open -= 1
        for client in clients:
            client.forget_body()
            client.leave()

    # ------------------------------------------------------------ what is answered

    @property
    def unsent(self) -> int:
        """Bytes that the client has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def write(self, data: bytes, more: bytes = b"") -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not more:
            transport.write(data)
        elif len(more) < 65536:
            transport.write(data + more)
        else:
            transport.writelines((data, more))

    def answered(self, client: Client) -> None:
        """All of the answer has been written."""
        if self._client is not client:
            return
        self._client = None
        self.house.open -= 1
        if client.held:
            client.forget_body()
        transport = self._transport
        if transport is None:
            return
        if transport.get_write_buffer_size():
            self._wait_for_room()
        if not client.keep or self._ending:
            self._end()
        elif self._waiting:
            self.loop.call_soon(self._next)
        elif not self.paused:
            self._deadline.set(self.house.settings.client_idle_s)

    def broken(self, client: Client) -> None:
        """What has been written is not all."""
        if self._client is client:
            self.cut()

    def pause_writing(self) -> None:
        self.paused = True
        self._wait_for_room()

    def resume_writing(self) -> None:
        self.paused = False
        if self._client is not None:
            self._deadline.clear()
            if self._client.on_room is not None:
                self._client.on_room()
        elif self._waiting:
            self._next()
        else:
            self._wait_for_room()

    def close(self) -> None:
        if self._transport is not None and self._client is None and not self.unsent:
            self._transport.close()
        else:
            self.cut()

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ what this decides

    def _more_to_come(self, begins: bool) -> None:
        """A read that began in a head has not brought the whole request. begins: nor anything of it before."""
        if self._in_head and self._head_bytes > HEAD_BYTES:
            self._malformed("The request's head is too long.")
        elif self._client is None and not self._ending:
            if not self._in_head:
                self._deadline.set(self.house.settings.client_body_s)
            elif begins:
                self._deadline.set(self.house.settings.client_idle_s)

    def _begin(self, client: Client) -> None:
        self._client = client
        self._deadline.clear()
        self.house.open += 1
        self.house.handler.handle(client)

    def _next(self) -> None:
        """The next of the requests that were sent without waiting."""
        if self._client is None and self._waiting and not self.paused and self._transport is not None:
            client = self._waiting.popleft()
            if not self._waiting:
                self._transport.resume_reading()
            self._begin(client)

    def _refuse(self, client: Client, refusal: Refusal) -> None:
        """What is left of the body is not looked at."""
        self._reading = None
        self._body = []
        client.forget_body()
        client.keep = False
        self._ending = True
        if self._client is not None:  # nothing may be written into that answer
            self.cut()
            return
        self._client = client
        self.house.open += 1
        self.house.handler.refuse(client, refusal)

    def _malformed(self, says: str) -> None:
        self._ending = True
        if self._client is not None:
            self.cut()
            return
        head = b"%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n%b\r\n"
        self.write(head % (status_line(400), len(says), CLOSE) + says.encode())
        self._end()

    def _end(self) -> None:
        """No more answers: the client gets what is written, and a moment to read why."""
        transport = self._transport
        if transport is None:
            return
        if self._ending and not transport.get_write_buffer_size():
            if transport.can_write_eof():
                transport.write_eof()
            self._deadline.set(LINGER_S)
            return
        self._ending = True
        transport.close()
        if transport.get_write_buffer_size():
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Until the client takes some of it."""
        self._unsent = self.unsent
        if self._unsent:
            self.house.behind.add(self)
            self._deadline.set(self.house.settings.client_stall_s)

    def _late(self) -> None:
        """Nothing has happened for too long: what was it that should have?"""
        unsent = self.unsent
        if unsent and (self.paused or self._client is None):
            if unsent >= self._unsent:
                self.cut()
            else:
                self._wait_for_room()
        elif self._ending:
            self.cut()
        elif self._reading is not None:
            self._refuse(self._reading, Refusal(408, "the body did not come in time"))
        elif self._client is not None or self._waiting:
            pass  # a later head is looked at when this answer is written
        elif self._head_bytes:
            self._malformed("The request's head did not come in time.")
        elif self._transport is not None:
            self._transport.close()


def _path(url: bytes) -> bytes:
    """Without the query; empty where the target is no path."""
    if url[:1] == b"/":
        return url.partition(b"?")[0]
    try:
        return httptools.parse_url(url).path or b""
    except httptools.HttpParserInvalidURLError:
        return b""


def _crowded() -> Refusal:
    return Refusal(429, "too many bytes of requests and answers are held", "rate_limit_error", 1)
