"""One request from its body to its answer: on which pairs it is tried, and what the client gets.

Decides retries and the answer's form. A request is tried again only while no byte of an answer has been sent; what
comes after the first byte is the client's, be it whole or not. Log lines name servers, reasons and transfer ids: never
a header, a prompt, or what an engine said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pushkv.router.attempt import EVENT_ENDS, HELD_BYTES, Attempt, ClientGone, Failed
from pushkv.router.gate import Gate
from pushkv.router.metrics import RouterMetrics
from pushkv.router.request import Ask, Refusal, error_body
from pushkv.router.servers import Fleet
from pushkv.router.settings import RouterSettings
from pushkv.router.upstream import UpstreamError

log = logging.getLogger("pushkv.router")
STALE = 2
"""So many attempts that found a kept connection closed do not count; more are no accident."""
_HOP = frozenset(
    b"connection keep-alive transfer-encoding content-length upgrade trailer date server x-request-id".split()
)
_BROKEN = b"data: %b\n\ndata: [DONE]\n\n" % error_body(502, "the server failed while answering", "upstream_error")
Headers = list[tuple[bytes, bytes]]


class Client(Protocol):
    """Who waits for the answer. Its writes return when it has taken enough for more to be sent."""

    on_gone: Callable[[], None] | None
    gone: bool

    async def start(self, status: int, headers: Headers) -> None: ...

    async def body(self, data: bytes, more: bool) -> None: ...


class Router:
    """Everything but HTTP's server side."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.metrics = RouterMetrics()
        self.gate = Gate(settings.max_active, settings.max_queued, settings.queue_s)
        self.prefill = Fleet("prefill", settings.prefill, settings)
        self.decode = Fleet("decode", settings.decode, settings)
        self.session_header = settings.session_header.encode()

    async def serve(self, ask: Ask, client: Client, arrived: float) -> int:
        """Answer one request; the status that the client got. Raises `ClientGone`, or `Refusal` for the queue."""
        clock = time.perf_counter
        before = clock()
        if not self.gate.free:
            await self._queue(client, before)
        else:
            await self.gate.enter()
        try:
            ask.own_s = before - arrived
            attempt, first = await self._begin(ask, client)
            self.metrics.observe("first_token_seconds", clock() - arrived)
            try:
                return await self._answer(ask, attempt, first, client)
            finally:
                attempt.decode.abort()  # unless it is complete
        finally:
            client.on_gone = None
            self.gate.leave()

    async def _queue(self, client: Client, before: float) -> None:
        task = asyncio.current_task()
        assert task is not None

        def give_up() -> None:
            task.cancel()

        client.on_gone = give_up
        try:
            await self.gate.enter()
        except asyncio.CancelledError:
            if client.gone:
                raise ClientGone from None
            raise
        finally:
            client.on_gone = None
            self.metrics.observe("queue_seconds", time.perf_counter() - before)

    async def _begin(self, ask: Ask, client: Client) -> tuple[Attempt, bytes]:
        """Attempts until one has the first bytes of an answer. Raises `Failed` of the last one, or `ClientGone`."""
        tried: tuple[set[int], set[int]] = (set(), set())
        left, stale = self.settings.attempts, STALE
        while True:
            if client.gone:
                raise ClientGone
            prefill = self.prefill.pick(ask, ask.prompt_tokens, tried[0])
            decode = self.decode.pick(ask, ask.prompt_tokens + ask.answer_tokens, tried[1])
            attempt = Attempt(ask, prefill, decode, (self.prefill, self.decode), self.settings, self.metrics)
            client.on_gone = lambda attempt=attempt: attempt.end(ClientGone())
            try:
                return attempt, await attempt.begin()
            except Failed as failed:
                attempt.end()
                same = failed.same
                if failed.reason == "stale" and stale:
                    stale -= 1
                else:
                    left -= 1
                    same = same and failed.reason != "stale"
                if not failed.again or not left:
                    raise
                self.metrics.count("retries", f"{failed.leg} {failed.reason}")
                log.info(
                    "transfer %s: the %s leg failed (%s), another attempt",
                    attempt.transfer_id,
                    failed.leg,
                    failed.reason,
                )
                if not same:
                    tried[0 if failed.leg == "prefill" else 1].add(
                        (prefill if failed.leg == "prefill" else decode).number
                    )
                    if failed.leg == "decode":  # the hand-over may be P's fault
                        tried[0].add(prefill.number)
            except BaseException:
                attempt.end()
                raise

    async def _answer(self, ask: Ask, attempt: Attempt, first: bytes, client: Client) -> int:
        leg = attempt.decode
        shown = ask.request_id or attempt.transfer_id.encode()
        headers = [*passed_on(leg.headers), (b"x-request-id", shown)]
        if not (ask.stream and leg.status == 200):
            headers.append((b"content-length", b"%d" % len(first)))
            await client.start(leg.status, headers)
            await client.body(first, False)
            return leg.status
        await client.start(200, headers)
        rest = b""
        part = first
        while part:
            if rest:
                part, rest = rest + part, b""
            if not part.endswith(EVENT_ENDS):  # only whole events: what follows a broken stream must be readable
                whole = max((part.rfind(end) + len(end) for end in EVENT_ENDS if end in part), default=0)
                part, rest = part[:whole], part[whole:]
                if len(rest) > HELD_BYTES:  # no stream of events
                    part, rest = part + rest, b""
            if part:
                await client.body(part, True)
            leg.limit(self.settings.token_gap_s)
            try:
                part = await leg.chunk()
            except ClientGone:
                raise
            except Exception as error:  # whatever it is, the client must see that its answer is not whole
                reason = error.reason if isinstance(error, UpstreamError) else "internal"
                self.metrics.count("streams_broken", reason)
                log.warning(
                    "transfer %s: decode server %s failed after its first token (%s)",
                    attempt.transfer_id,
                    attempt.servers[1].name,
                    reason,
                )
                if reason in ("connect", "closed", "stale"):
                    self.decode.lost(attempt.servers[1])
                attempt.end()
                await client.body(_BROKEN, False)
                return 200
            if not part and rest:
                await client.body(rest, True)
        await client.body(b"", False)
        return 200

    def failed(self, failed: Failed) -> tuple[int, Headers, bytes]:
        """The answer to a request whose attempts are over: the last server's, or our own where there was none."""
        if failed.status == 200:  # a stream that began with its error
            line = failed.body.split(b"\n", 1)[0].partition(b":")[2].strip()
            return 500, [(b"content-type", b"application/json")], line
        if failed.status:
            return failed.status, passed_on(failed.headers), failed.body
        status = 504 if failed.reason == "timeout" else 502
        if not self.prefill.alive or not self.decode.alive or failed.reason == "no descriptors":
            status = 503
        headers = [(b"content-type", b"application/json")]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        said = f"no server could answer: the {failed.leg} leg failed ({failed.reason})"
        return status, headers, error_body(status, said, "upstream_error")

    async def forward(self, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> tuple[
        int, Headers, bytes
    ]:  # fmt: skip
        """A request that has no legs (`/v1/models`, `/tokenize`), to any decode server. Raises `Refusal`."""
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        tried: set[int] = set()
        for _ in range(self.settings.attempts + STALE):
            ask = Ask(path, {}, b"", False, 1, 0, None, (), "forwarded", b"")
            server = self.decode.pick(ask, 1, tried)
            head = b"%b %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (
                method,
                path,
                server.pool.host_header,
                lines,
                len(body),
            )
            leg = server.pool.start(head, body)
            leg.limit(self.settings.first_token_s)
            try:
                await leg.head()
                return leg.status, passed_on(leg.headers), await leg.whole(self.settings.max_answer_bytes)
            except UpstreamError as error:
                if error.reason != "stale":
                    tried.add(server.number)
                    if error.reason in ("connect", "closed"):
                        self.decode.lost(server)
                    if len(tried) >= self.settings.attempts:
                        break
            finally:
                leg.abort()
                self.decode.finished(server, 1)
        raise Refusal(503, "no server could answer", "upstream_error", 1)

    def exposition(self, draining: bool) -> bytes:
        """`/metrics`."""
        gauges = self.metrics.gauges
        gauges["active"].set(self.gate.active)
        gauges["queued"].set(self.gate.queued)
        gauges["draining"].set(draining)
        self.metrics.clear_servers()
        for fleet in (self.prefill, self.decode):
            for server in fleet:
                self.metrics.server(
                    fleet.role, server.name, server.up, fleet.outstanding(server), server.pool.connections
                )
        return self.metrics.text()

    def update(self, settings: RouterSettings) -> None:
        """A new server list; the other settings stay as at the start. Raises `BadInput`; then nothing is changed."""
        prefill, decode = self.prefill.new(settings.prefill), self.decode.new(settings.decode)
        self.prefill.update(settings.prefill, prefill)
        self.decode.update(settings.decode, decode)


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """A server's headers for the client."""
    return [(name, value) for name, value in headers if name not in _HOP]
