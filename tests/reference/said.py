"""Words of a scheduler side to an office, about transfers whose request id is their key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pushkv.reference.ports import Address, BlockIds, Chunk, Held, Wanted


@dataclass
class Named:
    """An `Identity` whose key is its name."""

    request_id: str

    def key(self) -> str:
        return self.request_id


def held(transfer_id: str, tokens: int, *, chunked: bool = False) -> Held:
    return Held(Named(transfer_id), tokens, chunked)  # type: ignore[arg-type]


def chunk(transfer_id: str, blocks: BlockIds, tokens: int, step: int) -> Chunk:
    return Chunk(transfer_id, lambda: blocks, tokens, step)


def wanted(transfer_id: str, peer: Address, tokens: int, total: int, packed: bool | None) -> Wanted:
    params: dict[str, Any] = {
        "remote_engine_id": peer.engine_id, "remote_host": peer.host, "remote_port": peer.port, "tp_size": peer.tp_size,
    }  # fmt: skip
    return Wanted(transfer_id, lambda: Named(transfer_id), params, tokens, total, packed)  # type: ignore[arg-type, return-value]
