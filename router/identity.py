"""Who a prefill engine is: what the decode leg must name, and where the router has it from.

Decides when an identity may be relied on. It comes from the settings, or from the answer to a prefill leg
(`kv_transfer_params`); it is in doubt when the server could not be reached, because it may come back as another engine,
until the next prefill confirms or replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

_TRANSFER = "the transfer's id stands here"


def _around(params: Mapping[str, Any]) -> list[bytes]:
    """As JSON, what stands before, between and after the places of the transfer's id: it is written many times."""
    return msgspec.json.encode(params).split(_TRANSFER.encode())


@dataclass(frozen=True, slots=True)
class Identity:
    """host, port: of the connector's side channel."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    _completion: list[bytes] = field(init=False, repr=False, compare=False)
    _chat: list[bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """vLLM's own push meets by request id: both legs carry the transfer's id as theirs, and the engine calls the
        prefill `cmpl-<id>-0` or `chatcmpl-<id>`.
        """
        for name, request in (("_completion", f"cmpl-{_TRANSFER}-0"), ("_chat", f"chatcmpl-{_TRANSFER}")):
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.engine_id,
                "remote_request_id": request,
                "remote_host": self.host,
                "remote_port": self.port,
                "tp_size": self.tp_size,
                "transfer_id": _TRANSFER,
            }
            object.__setattr__(self, name, _around(params))

    def params(self, transfer_id: bytes, *, chat: bool) -> msgspec.Raw:
        """`kv_transfer_params` of the decode leg, as JSON."""
        return msgspec.Raw(transfer_id.join(self._chat if chat else self._completion))


_PREFILL = _around(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": _TRANSFER,
    }
)


def prefill_params(transfer_id: bytes) -> msgspec.Raw:
    """`kv_transfer_params` of the prefill leg, of push and of pull, as JSON."""
    return msgspec.Raw(transfer_id.join(_PREFILL))


def identity_of(params: Mapping[str, Any] | None) -> Identity | None:
    """From the answer to a prefill leg; None where it says nothing that can be used."""
    if not isinstance(params, Mapping):
        return None
    engine_id, host = params.get("remote_engine_id"), params.get("remote_host")
    port, tp_size = params.get("remote_port"), params.get("tp_size", 1)
    if isinstance(port, str) and port.isascii() and port.isdigit() and len(port) <= 5:
        port = int(port)
    if not isinstance(engine_id, str) or not isinstance(host, str) or not engine_id or not host:
        return None
    if type(port) is not int or type(tp_size) is not int or not 1 <= port <= 65535 or not 1 <= tp_size <= 1024:
        return None
    return Identity(engine_id, host, port, tp_size)
