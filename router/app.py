"""The router's answers to clients: which path gets what.

Decides paths, and what is refused before anything is dispatched. Reading and writing is `downstream`'s, everything
behind a dispatch `core`'s.
"""

from __future__ import annotations

import logging
import time

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
        self.downstream = Downstream(settings, self)
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
        client.run(self._answer(client))

    def refuse(self, client: Client, refusal: Refusal) -> None:
        self.router.metrics.count("refused", str(refusal.status))
        self.router.metrics.count("requests", str(refusal.status))
        lines = _JSON
        if refusal.retry_after_s:
            lines += b"retry-after: %d\r\n" % refusal.retry_after_s
        client.answer(refusal.status, lines, error_body(refusal.status, str(refusal), refusal.kind))

    async def _answer(self, client: Client) -> None:
        status = 500
        try:
            status = await self._route(client)
        except ClientGone:
            self.router.metrics.count("clients_gone")
            status = 499
        except Refusal as refusal:
            self.refuse(client, refusal)
            return
        except Failed as failed:
            status, lines, body = self.router.failed(failed)
            client.answer(status, lines, body)
        except Exception as error:
            # What went wrong may quote a prompt: only its kind is written down.
            log.error("a request failed in the router itself: %s", type(error).__name__)
            if client.started:
                client.break_off()
            else:
                client.answer(500, _JSON, error_body(500, "the router failed", "internal_error"))
        finally:
            client.task = None
        self.router.metrics.count("requests", str(status))

    async def _route(self, client: Client) -> int:
        path, method = client.path, client.method
        if path in PATHS:
            if method != b"POST":
                raise Refusal(405, "use POST")
            if self.draining:
                raise Refusal(503, "the router is stopping", "upstream_error", 1)
            arrived = time.perf_counter()
            ask = parse(path, client.headers, client.body, self.router.session_header, prefixes=self._prefixes)
            client.body = b""  # `ask` has it
            return await self.router.serve(ask, client, arrived)
        if path == b"/metrics" and method == b"GET":
            client.answer(200, _TEXT, self.router.exposition(self.draining))
            return 200
        if path in (b"/health", b"/ready") and method == b"GET":
            ready = not self.draining and self.router.prefill.alive and self.router.decode.alive
            status = 200 if ready or (path == b"/health" and not self.draining) else 503
            client.answer(status, b"", b"")
            return status
        if (method, path) in FORWARDED:
            return await self.router.forward(client)
        raise Refusal(404, "no such path: this router serves /v1/completions and /v1/chat/completions")
