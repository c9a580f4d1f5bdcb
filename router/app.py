"""The router as an ASGI application; uvicorn speaks HTTP and TLS with the clients.

Decides paths, what is refused before anything is dispatched, and when a client counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pushkv.router.attempt import ClientGone, Failed
from pushkv.router.core import Headers, Router
from pushkv.router.request import PATHS, Refusal, error_body, parse
from pushkv.router.settings import RouterSettings

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
FORWARDED = {("GET", b"/v1/models"), ("GET", b"/version"), ("POST", b"/tokenize"), ("POST", b"/detokenize")}
_NOT_FORWARDED = frozenset(
    b"host connection keep-alive transfer-encoding content-length accept-encoding upgrade expect te trailer".split()
)
_JSON = (b"content-type", b"application/json")
log = logging.getLogger("pushkv.router")


class HttpClient:
    """The client of one request. gone: it has closed its connection, or takes nothing any more."""

    __slots__ = ("_deadline", "_loop", "_send", "_stall_s", "_task", "_timer", "gone", "late", "on_gone", "started")

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send, self._stall_s = send, stall_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.gone = self.started = self.late = False
        self.on_gone: Callable[[], None] | None = None

    def expect(self, seconds: float) -> None:
        """The client must do its part (send, or take) within so many seconds, or `CancelledError` ends what waits for
        it, with `late` set. One timer serves all of a request: it is only looked at when it is due.
        """
        self._deadline = deadline = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._look)

    def done(self) -> None:
        """It has."""
        self._deadline = math.inf

    def close(self) -> None:
        """The request is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._deadline == math.inf:
            return
        if self._loop.time() < self._deadline - 0.002:
            self._timer = self._loop.call_at(self._deadline, self._look)
        elif self._task is not None:
            self.late = True
            self._task.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, more: bool) -> None:
        if self.gone:
            raise ClientGone
        self.expect(self._stall_s)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except asyncio.CancelledError:
            if not self.late:
                raise
            self.leave()
            raise ClientGone from None
        self.done()

    async def watch(self, receive: Receive) -> None:
        """Returns when the client has left."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        if not self.gone:
            self.gone = True
            if self.on_gone is not None:
                self.on_gone()


class Application:
    """What uvicorn calls. draining: told to stop; what is under way goes on."""

    def __init__(self, settings: RouterSettings) -> None:
        self.router = Router(settings)
        self.settings = settings
        self.draining = False
        self.open = 0
        self._prefixes = settings.policy == "prefix"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
            return
        client = HttpClient(send, self.settings.client_stall_s)
        self.open += 1
        status = 500
        try:
            status = await self._route(scope, receive, client)
        except (ClientGone, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not client.late:
                raise
            self.router.metrics.count("clients_gone")
            status = 499
        except Refusal as refusal:
            status = await self._refuse(client, refusal)
        except Failed as failed:
            status, headers, body = self.router.failed(failed)
            await self._whole(client, status, headers, body)
        except Exception as error:
            # What went wrong may quote a prompt: only its kind is written down.
            log.error("a request failed in the router itself: %s", type(error).__name__)
            if not client.started:
                body = error_body(500, "the router failed", "internal_error")
                await self._whole(client, 500, [_JSON], body)
        finally:
            client.close()
            self.open -= 1
            self.router.metrics.count("requests", str(status))

    async def _route(self, scope: Scope, receive: Receive, client: HttpClient) -> int:
        raw_path = scope.get("raw_path") or scope["path"].encode()
        path: bytes = raw_path.partition(b"?")[0]
        method: str = scope["method"]
        if path in PATHS:
            if method != "POST":
                raise Refusal(405, "use POST")
            return await self._completion(scope, path, receive, client)
        if path == b"/metrics" and method == "GET":
            kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
            return await self._whole(client, 200, [kind], self.router.exposition(self.draining))
        if path in (b"/health", b"/ready") and method == "GET":
            ready = not self.draining and self.router.prefill.alive and self.router.decode.alive
            status = 200 if ready or (path == b"/health" and not self.draining) else 503
            return await self._whole(client, status, [], b"")
        if (method, path) in FORWARDED:
            body = await self._body(scope, receive, client)
            headers = [one for one in scope["headers"] if one[0] not in _NOT_FORWARDED]
            return await self._whole(client, *await self.router.forward(method.encode(), path, headers, body))
        raise Refusal(404, "no such path: this router serves /v1/completions and /v1/chat/completions")

    async def _completion(self, scope: Scope, path: bytes, receive: Receive, client: HttpClient) -> int:
        if self.draining:
            raise Refusal(503, "the router is stopping", "upstream_error", 1)
        body = await self._body(scope, receive, client)
        arrived = time.perf_counter()
        ask = parse(path, scope["headers"], body, self.router.session_header, prefixes=self._prefixes)
        del body
        watch = asyncio.get_running_loop().create_task(client.watch(receive))
        try:
            return await self.router.serve(ask, client, arrived)
        finally:
            watch.cancel()

    async def _body(self, scope: Scope, receive: Receive, client: HttpClient) -> bytes:
        most = self.settings.max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > most:
                raise Refusal(413, f"the body is larger than {most} bytes")
        client.expect(self.settings.client_body_s)
        message = await self._received(receive, client)
        if not message.get("more_body"):
            first: bytes = message.get("body", b"")
            if len(first) > most:
                raise Refusal(413, f"the body is larger than {most} bytes")
            client.done()
            return first
        parts = [message.get("body", b"")]
        size = len(parts[0])
        while message.get("more_body"):
            message = await self._received(receive, client)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise Refusal(413, f"the body is larger than {most} bytes")
        client.done()
        return b"".join(parts)

    async def _received(self, receive: Receive, client: HttpClient) -> dict[str, Any]:
        try:
            message = await receive()
        except asyncio.CancelledError:
            if not client.late:
                raise
            client.late = False
            raise Refusal(408, "the body did not come in time") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def _refuse(self, client: HttpClient, refusal: Refusal) -> int:
        self.router.metrics.count("refused", str(refusal.status))
        headers = [_JSON]
        if refusal.retry_after_s:
            headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
        if refusal.status in (408, 413) or self.draining:  # what is left of the body is not read
            headers.append((b"connection", b"close"))
        return await self._whole(
            client, refusal.status, headers, error_body(refusal.status, str(refusal), refusal.kind)
        )

    async def _whole(self, client: HttpClient, status: int, headers: Headers, body: bytes) -> int:
        try:
            await client.start(status, [*headers, (b"content-length", b"%d" % len(body))])
            await client.body(body, False)
        except ClientGone:
            self.router.metrics.count("clients_gone")
        return status
