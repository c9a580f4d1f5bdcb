"""Bounds for what a client sends before its request is known: uvicorn has none for a head, nor for a silent connection.

Decides when a head is too long or too late; the body's bounds are `app`'s.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""A head may be so long; one that comes in a single read may be as long as that."""


class BoundedHeads(HttpToolsProtocol):
    """head_s: from a new connection, or the first bytes of a later request, to the end of the head."""

    head_s = 30.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_head:
            super().data_received(data)
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head or not self._head_bytes or self.transport.is_closing():
            return
        if self._head_bytes > HEAD_BYTES:
            self._refuse("The request's head is too long.")
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_s, self._late)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def _late(self) -> None:
        self._timer = None
        if self._answering:  # a later request's head, behind one that is being answered: look again
            self._timer = self.loop.call_later(self.head_s, self._late)
        elif self._head_bytes:
            self._refuse("The request's head did not come in time.")
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, says: str) -> None:
        if self._answering:  # nothing may be written into that answer
            self.transport.abort()
        else:
            self.send_400_response(says)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded(seconds: float) -> type[BoundedHeads]:
    """For `uvicorn.Config(http=...)`."""
    return type("BoundedHeads", (BoundedHeads,), {"head_s": seconds})
