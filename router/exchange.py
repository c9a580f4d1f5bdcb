"""One request to a server and its answer, as its owner sees them.

Decides when an answer counts as whole, late or broken, and how much of it is kept for an owner that does not fetch it.
The connection under it (`upstream`) feeds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pushkv.router.deadline import Deadline
from pushkv.router.headers import Headers

if TYPE_CHECKING:
    from pushkv.router.upstream import Connection

Failure = Literal["connect", "stale", "closed", "malformed", "timeout", "too large", "cancelled", "no descriptors"]
Sink = Callable[[bytes, bool], None]
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


class Held:
    """How many bytes are in memory because something is not whole yet: requests, and answers that do not flow."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Exchange:
    """status: 0 until the head is here. headers: names in lower case. on_end: called once, whatever ends it.
    chunks: what has come of the body and was not fetched. sink: where it goes, if it flows.

    Its owner awaits `head`, and then either `chunk` until that is empty, or `whole`, or gives the body a place to
    `flow` to and awaits `over`.
    """

    __slots__ = (
        "_connection", "_deadline", "_gap_s", "_held", "_loop", "_most", "_size", "_waiter", "chunks",
        "complete", "error", "headed", "headers", "on_end", "sink", "status",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[Exchange], None] | None) -> None:
        self._loop = loop
        self.chunks: deque[bytes] = deque()
        self._size = self._most = 0
        self._connection: Connection | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: Deadline | None = None
        self.sink: Sink | None = None
        self._held: Held | None = None
        self._gap_s: float | None = None
        self.on_end = on_end
        self.status = 0
        self.headers: Headers = []
        self.headed = self.complete = False
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.complete or self.error is not None

    def let_go(self) -> None:
        """Whoever was told of `error` has dealt with it: it must not hold the frames that it went through, which hold
        this.
        """
        if self.error is not None:
            self.error.__traceback__ = self.error.__context__ = None

    async def stirs(self) -> None:
        """Returns at the next thing that happens, or at `wake`."""
        await self._wait()

    def limit(self, seconds: float | None) -> None:
        """It fails with `timeout` unless it ends within so many seconds, or the limit is set anew. None: no limit."""
        if self.complete or self.error is not None:
            return
        deadline = self._deadline
        if seconds is None:
            if deadline is not None:
                deadline.clear()
            return
        if deadline is None:
            deadline = self._deadline = Deadline(self._loop, self.late)
        deadline.set(seconds)

    async def head(self) -> None:
        """Returns when `status` and `headers` are here. Raises what ended it before."""
        while not self.headed:
            if self.error is not None:
                raise self.error
            await self._wait()

    async def chunk(self) -> bytes:
        """What has come of the body since the last call; empty at its end. Raises what ended it early."""
        while not self.chunks:
            if self.error is not None:
                raise self.error
            if self.complete:
                return b""
            await self._wait()
        return self._take()

    async def whole(self, most: int, held: Held | None = None) -> bytes:
        """The rest of the body. Raises `UpstreamError` also where it is longer than `most` bytes."""
        self.hold(most, held)
        if self._size > most:
            error = UpstreamError("too large")
            self.abort(error)
            raise error
        if self._connection is not None:
            self._connection.resume()
        await self.over()
        return self.body()

    def hold(self, most: int, held: Held | None = None) -> None:
        """Nobody will fetch the body before it ends: keep all of it, counted in `held`. It fails with `too large` above
        `most` bytes.
        """
        self._most, self._held = most, held
        if held is not None:
            held.bytes += self._size

    def body(self) -> bytes:
        """What of the body is here and has not been fetched."""
        return self._take() if self.chunks else b""

    def flow(self, sink: Sink, gap_s: float | None) -> None:
        """From now on the body goes to `sink(data, last)` as it comes. A silence of so many seconds is a `timeout`
        (None: `limit` stays as it is); what `sink` raises ends the exchange.
        """
        self.sink, self._gap_s = sink, gap_s
        if gap_s is not None:
            self.limit(gap_s)
        if self.complete or self.chunks:
            self.pour()
        if self.complete or self.error is not None:
            self.sink = None

    def pause(self) -> None:
        """The sink is full: no more until `resume`, and no silence is counted."""
        if self._connection is not None:
            self._connection.pause()
            self.limit(None)

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()
            self.limit(self._gap_s)

    async def over(self) -> None:
        """Returns when all of the body is here, or has gone to the sink. Raises what ended it early."""
        while not self.complete and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    def abort(self, error: BaseException | None = None) -> None:
        """End it now unless it has ended; its connection is closed: so the server learns that nobody waits."""
        if not self.complete and self.error is None:
            connection = self._connection
            self.fail(error or UpstreamError("cancelled"))
            if connection is not None:
                connection.drop()

    # ------------------------------------------------------------ for the connection

    def attach(self, connection: Connection) -> None:
        """The deadline is the connection's from now on: it outlives many exchanges."""
        own, self._deadline = self._deadline, connection.deadline
        self._connection = connection
        if own is not None:
            connection.deadline.until(own.at)
            own.close()

    def head_is_here(self, status: int) -> None:
        self.status = status
        self.headed = True
        self.wake()

    def take(self, data: bytes) -> None:
        """More of the body, which does not flow."""
        self.chunks.append(data)
        self._size += len(data)
        if self._most:
            if self._held is not None:
                self._held.bytes += len(data)
            if self._size > self._most:
                self.abort(UpstreamError("too large"))
            return
        if self._size > HIGH_WATER and self._connection is not None:
            self._connection.pause()
        self.wake()

    def pour(self) -> None:
        """What is here into the sink: nothing is counted as kept on that way."""
        assert self.sink is not None
        if self._gap_s is not None and self._deadline is not None:
            self._deadline.set(self._gap_s)
        chunks = self.chunks
        try:
            self.sink(chunks.popleft() if len(chunks) == 1 else self._take(), self.complete)
        except Exception as error:  # our own fault; the answer is not whole
            if self.complete:
                self.error = error
            self.abort(error)

    def finish(self) -> None:
        if not self.ended:
            self.complete = True
            self._detach()
            if self.sink is not None:
                self.pour()
            self._end()

    def fail(self, error: BaseException) -> None:
        if not self.ended:
            self.error = error
            self._forget()
            self._detach()
            self._end()

    def late(self) -> None:
        self.abort(UpstreamError("timeout"))

    def _detach(self) -> None:
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            if self._connection is None:
                deadline.close()
            else:
                deadline.clear()
        self._connection = None

    def _end(self) -> None:
        self.wake()
        on_end, self.on_end, self.sink = self.on_end, None, None
        if on_end is not None:
            on_end(self)

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _forget(self) -> None:
        """What is here is kept no longer."""
        if self._held is not None:
            self._held.bytes -= self._size
        self._size = 0
        self.chunks.clear()

    def _take(self) -> bytes:
        chunks = self.chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        self._forget()
        if self._connection is not None and not self._most and self.sink is None:
            self._connection.resume()
        return data
