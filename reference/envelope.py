"""Who speaks to whom: the first frame of every message of the side channel.

Decides its encoding and bounds, and the routing id under which a link is known to the other side's ROUTER. Does not
decide whom to believe.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

from pushkv.model.protocol.events import Link

VERSION: Final = 1
VERSION_BYTE: Final = bytes((VERSION,))
MAX_ENGINE_BYTES: Final = 256
MAX_RANK: Final = (1 << 16) - 1

_HEAD: Final = struct.Struct(">BHHH")  # version, bytes of the addressee's engine id, the two ranks


class SideChannelError(ValueError):
    """The channel cannot be set up as asked; the message is a sentence that names the setting."""


def head(to: Link, by: Link) -> bytes:
    """The first frame of what ``by`` says to ``to``. Raises ``SideChannelError`` for a link that is none."""
    names = []
    for engine, rank in (to, by):
        raw = engine.encode(errors="replace")
        if not 0 < len(raw) <= MAX_ENGINE_BYTES or not 0 <= rank <= MAX_RANK:
            raise SideChannelError(
                f"engine id {engine[:64]!r} rank {rank}: an engine id has 1 to {MAX_ENGINE_BYTES} bytes, a rank is "
                f"0 to {MAX_RANK}"
            )
        names.append(raw)
    return _HEAD.pack(VERSION, len(names[0]), to[1], by[1]) + names[0] + names[1]


def links(raw: bytes) -> tuple[Link, Link] | None:
    """(for whom, from whom), or ``None`` for anything that ``head`` does not make."""
    if len(raw) <= _HEAD.size or raw[:1] != VERSION_BYTE:
        return None
    _, length, to_rank, by_rank = _HEAD.unpack_from(raw)
    cut = _HEAD.size + length
    if not 0 < length <= MAX_ENGINE_BYTES or not cut < len(raw) <= cut + MAX_ENGINE_BYTES:
        return None
    try:
        return (raw[_HEAD.size : cut].decode(), to_rank), (raw[cut:].decode(), by_rank)
    except UnicodeDecodeError:
        return None


def routing_id(to: Link, by: Link) -> bytes:
    """Under which name the ROUTER of ``to`` knows the connection that ``by`` made to reach it. Both are part of it:
    whoever takes the place of ``to`` must not mistake a connection meant for its predecessor for its own.

    Never begins with a zero byte, which ZMQ keeps for itself.
    """
    return b"L" + hashlib.blake2b(head(to, by), digest_size=16).digest()
