"""Whose fault it is. A host that breaks the contract gets an exception; a peer that breaks it never does."""

from __future__ import annotations


class LocalProtocolError(Exception):
    """The host asked a machine for something that its state does not allow. A bug in the host, never a peer's doing."""


class MessageError(Exception):
    """The only error that :func:`pushkv.model.protocol.messages.decode` raises.

    ``kind`` is one of ``oversized``, ``truncated``, ``version``, ``unknown`` and ``malformed``: the counter it goes to.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
