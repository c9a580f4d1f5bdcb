"""The router's answers to clients: which path gets what.

Decides paths, and what is refused before anything is dispatched. Reading and writing is `downstream`'s, everything
behind a dispatch `core`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine
from typing import Any

from pushkv.router.attempt import ClientGone, Failed
from pushkv.router.client import Client
from pushkv.router.core import Router
from pushkv.router.downstream import Downstream
from pushkv.router.request import PATHS, Refusal, error_body, parse
from pushkv.router.settings import RouterSettings

FORWARDED = {(b"GET", b"/v1/models"), (b"GET", b"/version"), (b"POST", b"/tokenize"), (b"POST", b"/detokenize")}
_JSON = b"content-type: application/json\r\n"
_TEXT = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
log = logging.getLogger("pushkv.router")


class Application:
    """The handler of all clients' requests."""

    def __init__(self, settings: RouterSettings) -> None:
        self.router = Router(settings)
        self.settings = settings
        self.downstream = Downstream(settings, self, self.router.held)
        self._prefixes = settings.policy == "prefix"

    @property
    def draining(self) -> bool:
        """Told to stop; what is under way goes on."""
        return self.downstream.draining

    @property
    def open(self) -> int:
        """Requests that are not answered, and answers that have not been taken."""
        downstream = self.downstream
        unsent = downstream.unsent_bytes
        return downstream.open + (len(downstream.behind) if unsent else 0)

    def drain(self) -> None:
        self.downstream.draining = True

    def handle(self, client: Client) -> None:
        try:
            waited = self._completion(client) if client.path in PATHS else self._route(client)
        except Exception as error:
            self._failed(client, error)
        else:
            if waited is not None:
                client.run(self._answered(client, waited))

    def refuse(self, client: Client, refusal: Refusal) -> None:
        self.router.metrics.count("refused", str(refusal.status))
        self.router.metrics.count("requests", str(refusal.status))
        lines = _JSON
        if refusal.retry_after_s:
            lines += b"retry-after: %d\r\n" % refusal.retry_after_s
        client.answer(refusal.status, lines, error_body(refusal.status, str(refusal), refusal.kind))

    def _completion(self, client: Client) -> Coroutine[Any, Any, int] | None:
        """The legs leave now if they can. What is left is waiting, if anything but the first attempt's end is waited
        for.
        """
        if client.method != b"POST":
            raise Refusal(405, "use POST")
        if self.draining:
            raise Refusal(503, "the router is stopping", "upstream_error", 1)
        arrived = time.perf_counter()
        headers, body, router = client.headers, client.body, self.router
        ask = parse(client.path, headers, body, router.session_header, prefixes=self._prefixes)
        client.body = b""  # `ask` has it
        ask.arrived = arrived
        ask.own_s = time.perf_counter() - arrived
        attempt = router.start(ask, client)
        if attempt is None or attempt.sequential:
            return router.serve(ask, client, attempt)

        def settled() -> None:
            try:
                if router.done(attempt, client):
                    router.metrics.count("requests", str(attempt.decode.status))
                else:
                    client.run(self._answered(client, router.serve(ask, client, attempt)))
            except Exception as error:
                self._failed(client, error)

        attempt.when_settled(settled)
        return None

    async def _answered(self, client: Client, waited: Coroutine[Any, Any, int]) -> None:
        try:
            status = await waited
        except Exception as error:
            self._failed(client, error)
        else:
            self.router.metrics.count("requests", str(status))
        finally:
            client.task = None

    def _failed(self, client: Client, error: Exception) -> None:
        """Tell the client, if it is still there."""
        status = 500
        if isinstance(error, Refusal):
            self.refuse(client, error)
            return
        if isinstance(error, ClientGone):
            self.router.metrics.count("clients_gone")
            status = 499
        elif isinstance(error, Failed):
            status, lines, body = self.router.failed(error)
            client.answer(status, lines, body)
        else:  # What went wrong may quote a prompt: only its kind is written down.
            log.error("a request failed in the router itself: %s", type(error).__name__)
            if client.started:
                client.break_off()
            else:
                client.answer(500, _JSON, error_body(500, "the router failed", "internal_error"))
        self.router.metrics.count("requests", str(status))

    async def _route(self, client: Client) -> int:
        path, method = client.path, client.method
        if path == b"/metrics" and method == b"GET":
            client.answer(200, _TEXT, self.router.exposition(self.draining, self.downstream.all_held_bytes))
            return 200
        if path in (b"/health", b"/ready") and method == b"GET":
            ready = not self.draining and self.router.prefill.alive and self.router.decode.alive
            status = 200 if ready or (path == b"/health" and not self.draining) else 503
            client.answer(status, b"", b"")
            return status
        if (method, path) in FORWARDED:
            return await self.router.forward(client)
        raise Refusal(404, "no such path: this router serves /v1/completions and /v1/chat/completions")
