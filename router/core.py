"""One request from its body to its answer: on which pairs it is tried, and what the client gets.

Decides retries and the answer's form. A request is tried again only while no byte of an answer has been sent; what
comes after the first byte is the client's, be it whole or not. Log lines name servers, reasons and transfer ids: never
a header, a prompt, or what an engine said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

import msgspec

from pushkv.model.routing.dispatch import NOBODY
from pushkv.router.attempt import Attempt, ClientGone, Failed
from pushkv.router.client import Client
from pushkv.router.exchange import Held, UpstreamError
from pushkv.router.gate import Gate
from pushkv.router.headers import HOP, passed_on
from pushkv.router.metrics import RouterMetrics
from pushkv.router.passing import Passing
from pushkv.router.request import Ask, Refusal, error_body
from pushkv.router.servers import Fleet
from pushkv.router.settings import RouterSettings

log = logging.getLogger("pushkv.router")
STALE = 2
"""So many attempts that found a kept connection closed do not count; more are no accident."""
_NOT_FOR_CLIENT = HOP | {b"date", b"server", b"x-request-id"}
_NOT_FOR_ENGINE = HOP | {b"host", b"accept-encoding", b"expect"}
_JSON = b"content-type: application/json\r\n"
_BROKEN = b"data: %b\n\ndata: [DONE]\n\n" % error_body(502, "the server failed while answering", "upstream_error")


class Router:
    """Everything but HTTP's server side."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.metrics = RouterMetrics()
        self.held = Held()
        self.gate = Gate(settings.max_active, settings.max_queued, settings.queue_s)
        self.prefill = Fleet("prefill", settings.prefill, settings)
        self.decode = Fleet("decode", settings.decode, settings)
        self.session_header = settings.session_header.encode()

    def start(self, ask: Ask, client: Client) -> Attempt | None:
        """The first attempt, if there is a place for it: its legs leave now."""
        if not self.gate.take():
            return None
        try:
            return self._attempt(ask, client, NOBODY, NOBODY)
        except BaseException:
            self.gate.leave()
            raise

    def done(self, attempt: Attempt, client: Client) -> bool:
        """Whether a settled attempt has answered its client; then nothing is left to do. Else it is to be served."""
        if not attempt.answered:
            return False
        client.on_gone = client.on_room = None
        attempt.release()
        attempt.when_over(self.gate.leave)
        return True

    async def serve(self, ask: Ask, client: Client, attempt: Attempt | None) -> int:
        """Answer one request; the status that the client got. attempt: what `start` said. Raises `Failed`,
        `ClientGone`, or `Refusal` for the queue.
        """
        if attempt is None:
            await self._queue(client, time.perf_counter())
        try:
            attempt = await self._begin(ask, client, attempt)
            try:
                return await self._finish(attempt, client)
            finally:
                attempt.decode.abort()  # unless it is complete
        finally:
            client.on_gone = client.on_room = None
            if attempt is None:
                self.gate.leave()
            else:
                attempt.let_go()
                attempt.when_over(self.gate.leave)

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

    def _attempt(self, ask: Ask, client: Client, not_p: Collection[int], not_d: Collection[int]) -> Attempt:
        """Started. not_p, not_d: servers that have failed this request. Raises `ClientGone`."""
        if client.gone:
            raise ClientGone

        def answer(attempt: Attempt, first: bytes, last: bool) -> None:
            self._answer(attempt, client, first, last)

        prefill = self.prefill.pick(ask, ask.prompt_tokens, not_p)
        decode = self.decode.pick(ask, ask.prompt_tokens + ask.answer_tokens, not_d)
        fleets = self.prefill, self.decode
        attempt = Attempt(ask, prefill, decode, fleets, self.settings, self.metrics, self.held, answer)
        client.on_gone = lambda: attempt.end(ClientGone())
        attempt.start()
        return attempt

    async def _begin(self, ask: Ask, client: Client, attempt: Attempt | None) -> Attempt:
        """Attempts until one has the first bytes of an answer. Raises `Failed` of the last one, or `ClientGone`."""
        not_p: set[int] = set()
        not_d: set[int] = set()
        left, stale = self.settings.attempts, STALE
        while True:
            if attempt is None:
                attempt = self._attempt(ask, client, not_p, not_d)
            try:
                await attempt.begin()
                return attempt
            except Failed as failed:
                attempt.end()
                attempt.let_go()
                same = failed.same
                if failed.reason == "stale" and stale:
                    stale -= 1
                else:
                    left -= 1
                    same = same and failed.reason != "stale"
                if not failed.again or not left:
                    raise
                self.metrics.count("retries", f"{failed.leg} {failed.reason}")
                shown = failed.transfer_id, failed.leg, failed.reason
                log.info("transfer %s: the %s leg failed (%s), another attempt", *shown)
                if not same:
                    prefill, decode = attempt.servers
                    not_p.add(prefill.number)  # also where D failed: the hand-over may be P's fault
                    if failed.leg == "decode":
                        not_d.add(decode.number)
                attempt = None
            except BaseException:
                attempt.end()
                attempt.let_go()
                raise

    def _answer(self, attempt: Attempt, client: Client, first: bytes, last: bool) -> None:
        """The first bytes are here, and they are the client's. What follows flows to it without waking anybody."""
        ask, leg = attempt.ask, attempt.decode
        lines = b"%bx-request-id: %b\r\n" % (
            passed_on(leg.headers, _NOT_FOR_CLIENT),
            ask.request_id or attempt.transfer_id,
        )
        if not (ask.stream and leg.status == 200):
            client.answer(leg.status, lines, first)
        else:
            client.start(200, lines)
            passing = Passing(client, leg)
            if not last:
                client.on_room = leg.resume
                leg.flow(passing.take, self.settings.token_gap_s)
            passing.take(first, last)
        self.metrics.observe("first_token_seconds", time.perf_counter() - ask.arrived)
        ask.forget()
        client.forget_body()

    async def _finish(self, attempt: Attempt, client: Client) -> int:
        """Until all of the answer has been written; its status."""
        leg = attempt.decode
        try:
            await leg.over()
        except ClientGone:
            raise
        except Exception as error:  # whatever it is, the client must see that its answer is not whole
            if not (attempt.ask.stream and leg.status == 200):
                raise
            reason = error.reason if isinstance(error, UpstreamError) else "internal"
            self.metrics.count("streams_broken", reason)
            shown = attempt.transfer_id.decode(), attempt.servers[1].name, reason
            log.warning("transfer %s: decode server %s failed after its first token (%s)", *shown)
            if reason in ("connect", "closed", "stale"):
                self.decode.lost(attempt.servers[1])
            attempt.end()
            client.finish(_BROKEN)
        return leg.status

    def failed(self, failed: Failed) -> tuple[int, bytes, bytes]:
        """Status, header lines and body for a request whose attempts are over: the last server's where it was the
        client's mistake, or our own sentence, with what the server said in it.
        """
        if failed.status and failed.status != 200 and failed.status < 500:
            return failed.status, passed_on(failed.headers, _NOT_FOR_CLIENT), failed.body
        said = f"no server could answer: the {failed.leg} leg failed ({failed.reason})"
        if failed.status:
            status = max(500, failed.status)
            said = f"no server could answer: the {failed.leg} server answered {failed.status}"
            if failed.status == 200:
                said = f"no server could answer: the {failed.leg} server's stream began with an error"
            if failed.leg == "decode" and failed.handed_over:
                said += ", as it does when it cannot take the prompt's KV cache over from the prefill server"
            if told := _told(failed):
                said += f"; it said: {told}"
        else:
            status = 504 if failed.reason == "timeout" else 502
            if not self.prefill.alive or not self.decode.alive or failed.reason == "no descriptors":
                status = 503
        if failed.transfer_id:
            said += f" (transfer {failed.transfer_id})"
        lines = _JSON + b"retry-after: 1\r\n" if status == 503 else _JSON
        return status, lines, error_body(status, said, "upstream_error")

    async def forward(self, client: Client) -> int:
        """A request that has no legs (`/v1/models`, `/tokenize`), to any decode server; the status that the client got.
        Raises `Refusal`, or `ClientGone`.
        """
        if not self.gate.take():
            await self._queue(client, time.perf_counter())
        try:
            return await self._forward(client)
        finally:
            client.on_gone = None
            self.gate.leave()

    async def _forward(self, client: Client) -> int:
        lines = passed_on(client.headers, _NOT_FOR_ENGINE)
        tried: set[int] = set()
        for _ in range(self.settings.attempts + STALE):
            if client.gone:
                raise ClientGone
            ask = Ask(client.path, {}, b"", False, 1, 0, None, (), "forwarded", b"")
            server = self.decode.pick(ask, 1, tried)
            head = b"%b %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (
                client.method,
                client.path,
                server.pool.host_header,
                lines,
                len(client.body),
            )
            leg = server.pool.start(head, client.body)
            client.on_gone = lambda leg=leg: leg.abort(ClientGone())
            leg.limit(self.settings.answer_s)
            try:
                await leg.head()
                body = await leg.whole(self.settings.max_answer_bytes, self.held)
                client.answer(leg.status, passed_on(leg.headers, _NOT_FOR_CLIENT), body)
                return leg.status
            except UpstreamError as error:
                if error.reason != "stale":
                    tried.add(server.number)
                    if error.reason in ("connect", "closed"):
                        self.decode.lost(server)
                    if len(tried) >= self.settings.attempts or error.reason == "timeout":
                        break
            finally:
                leg.abort()
                leg.let_go()
                self.decode.finished(server, 1)
        raise Refusal(503, "no server could answer", "upstream_error", 1)

    def exposition(self, draining: bool, held_bytes: int) -> bytes:
        """`/metrics`."""
        gauges = self.metrics.gauges
        gauges.update(active=self.gate.active, queued=self.gate.queued, draining=draining, held_bytes=held_bytes)
        self.metrics.servers(
            (fleet.role, server.name, server.up, fleet.outstanding(server), server.pool.connections)
            for fleet in (self.prefill, self.decode)
            for server in fleet
        )
        return self.metrics.text()

    def update(self, settings: RouterSettings) -> None:
        """A new server list; the other settings stay as at the start. Raises `BadInput`; then nothing is changed."""
        prefill, decode = self.prefill.new(settings.prefill), self.decode.new(settings.decode)
        self.prefill.update(settings.prefill, prefill)
        self.decode.update(settings.decode, decode)


def _told(failed: Failed) -> str:
    """What the engine's error says, if it is one."""
    body = failed.body
    if failed.status == 200:
        body = body.split(b"\n", 1)[0].partition(b":")[2]
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        return ""
    return message[:1000] if isinstance(message, str) else ""
