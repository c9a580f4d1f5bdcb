"""A stream on its way from a decode server to the client: whole events only, in the callback that brings them.

Decides where an event ends. What follows a stream that breaks must be readable, so no part of an event leaves alone.
"""

from __future__ import annotations

from pushkv.router.client import Client
from pushkv.router.exchange import Exchange

EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
HELD_BYTES = 1 << 20
"""An event that is not complete is held back up to this size."""


class Passing:
    """`take` is the sink of the leg."""

    __slots__ = ("_client", "_leg", "_rest")

    def __init__(self, client: Client, leg: Exchange) -> None:
        self._client, self._leg = client, leg
        self._rest = b""

    def take(self, data: bytes, last: bool) -> None:
        """More of the stream; last: that is all of it."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if last:
            self._client.finish(data)
            return
        if not data.endswith(EVENT_ENDS):
            whole = max((data.rfind(end) + len(end) for end in EVENT_ENDS if end in data), default=0)
            data, self._rest = data[:whole], data[whole:]
            if len(self._rest) > HELD_BYTES:  # no stream of events
                data, self._rest = data + self._rest, b""
        if data and self._client.write(data):
            self._leg.pause()
