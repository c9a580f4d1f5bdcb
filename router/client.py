"""One request of a client, whole, and its answer.

Decides how an answer is framed. It is written at once, from whatever callback has it; nothing is awaited.
"""

from __future__ import annotations

import http
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from pushkv.router.headers import Headers

if TYPE_CHECKING:
    from pushkv.router.downstream import Connection

CLOSE, _CHUNKED = b"connection: close\r\n", b"transfer-encoding: chunked\r\n"
_STATUS = {one.value: b"HTTP/1.1 %d %b\r\n" % (one.value, one.phrase.encode()) for one in http.HTTPStatus}


class Client:
    """One request, and its answer. path: without the query. headers: names in lower case. keep: whether the connection
    is used again. gone: it has closed its connection, or takes nothing any more: nothing can be written.
    """

    __slots__ = (
        "_chunked", "_connection", "_head", "body", "gone", "headers", "held", "keep", "method", "on_gone", "on_room",
        "path", "started", "task",
    )  # fmt: skip

    def __init__(self, connection: Connection, method: bytes, path: bytes, headers: Headers, keep: bool) -> None:
        self._connection = connection
        self.method, self.path, self.headers, self.keep = method, path, headers, keep
        self.body = self._head = b""
        self.held = 0
        self.gone = self.started = self._chunked = False
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.task: object = None

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """All of it. lines: header lines, without the framing."""
        self.started = True
        self._settle()
        close = b"" if self.keep else CLOSE
        if status in (204, 304):
            head, body = b"%b%b%b\r\n" % (status_line(status), lines, close), b""
        else:
            head = b"%b%bcontent-length: %d\r\n%b\r\n" % (status_line(status), lines, len(body), close)
            if self.method == b"HEAD":
                body = b""
        self._connection.write(head, body)
        self._connection.answered(self)

    def start(self, status: int, lines: bytes) -> None:
        """An answer that comes in pieces; its head leaves with the first of them."""
        self.started = True
        self._settle()
        self._chunked = not self._connection.old
        self._head = b"%b%b%b%b\r\n" % (
            status_line(status), lines, _CHUNKED if self._chunked else b"", b"" if self.keep else CLOSE,
        )  # fmt: skip

    def write(self, data: bytes) -> bool:
        """A piece; not empty. Returns whether the client takes no more just now: wait for `on_room`."""
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        else:
            data = self._head + data
        self._head = b""
        connection = self._connection
        connection.write(data)
        return connection.paused

    def finish(self, data: bytes = b"") -> None:
        """The last piece, or that there is no more."""
        if self._chunked:
            data = b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._head, len(data), data) if data else self._head + b"0\r\n\r\n"
        else:
            data = self._head + data
        self._connection.write(data)
        self._connection.answered(self)

    def break_off(self) -> None:
        """The answer will not be completed: the connection says so."""
        self._connection.broken(self)

    def forget_body(self) -> None:
        """It is not needed any more."""
        self.body = b""
        self._connection.house.held.bytes -= self.held
        self.held = 0

    def run(self, answering: Coroutine[Any, Any, None]) -> None:
        """A task, which lives as long as the request does."""
        self.task = self._connection.loop.create_task(answering)

    def leave(self) -> None:
        if not self.gone:
            self.gone = True
            if self.on_gone is not None:
                self.on_gone()

    def _settle(self) -> None:
        """The last moment to say whether the connection is used again."""
        if self._connection.house.draining or self._connection.old:
            self.keep = False


def status_line(status: int) -> bytes:
    return _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
