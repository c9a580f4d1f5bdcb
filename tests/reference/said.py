"""Words of a scheduler side to an office, about transfers whose request id is their key, unless they name another."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event
from typing import Any

from pushkv.reference.ports import Address, BlockIds, Chunk, Held, Wanted


@dataclass
class Named:
    """An `Identity` whose key is its request id or ``known_as``, and takes until ``ready`` to be made."""

    request_id: str
    known_as: str = ""
    ready: Event | None = None

    def key(self) -> str:
        if self.ready is not None:
            self.ready.wait()
        return self.known_as or self.request_id


def held(request_id: str, tokens: int, *, chunked: bool = False, key: str = "", ready: Event | None = None) -> Held:
    return Held(Named(request_id, key, ready), tokens, chunked)  # type: ignore[arg-type]


def chunk(transfer_id: str, blocks: BlockIds, tokens: int, step: int) -> Chunk:
    return Chunk(transfer_id, lambda: blocks, tokens, step)


def wanted(transfer_id: str, peer: Address, tokens: int, total: int, packed: bool | None, *, key: str = "") -> Wanted:
    params: dict[str, Any] = {
        "remote_engine_id": peer.engine_id, "remote_host": peer.host, "remote_port": peer.port, "tp_size": peer.tp_size,
    }  # fmt: skip
    return Wanted(transfer_id, lambda: Named(transfer_id, key), params, tokens, total, packed)  # type: ignore[arg-type, return-value]
