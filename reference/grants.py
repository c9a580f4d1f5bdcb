"""How memory is named between two connectors, and how much of it a transfer needs.

A ``Grant`` (or an exposed ``Register``) carries ``memory`` as a flat list. ``[PACKED, offset, segment, ...]``: the
shard's bytes begin ``offset`` bytes into these landing segments, one after the other. ``[DIRECT, first_token, blocks,
...]``: one list of block ids per cache group, of which slot 0 of the first block holds token ``first_token``. Whatever
comes from the network is checked here before an address is made of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import GroupKind, Layout, Part, Shard

Longs = npt.NDArray[np.int64]

PACKED: Final = 0
DIRECT: Final = 1
ALIGN: Final = 256
"""Each link's bytes begin at a multiple of it, so that copies on a device stay aligned."""


class GrantError(ValueError):
    """A peer names memory that it cannot have."""


def aligned(size: int) -> int:
    """``size`` bytes, rounded up to ``ALIGN``."""
    return -(-size // ALIGN) * ALIGN


def token_bytes(layout: Layout) -> int:
    """Bytes of one token in this rank's full-attention groups."""
    return sum(
        view.row_bytes * (view.head_stop - view.head_start)
        for view in layout.views
        if layout.groups[view.group].kind is GroupKind.FULL
    )


def request_bytes(layout: Layout) -> int:
    """Upper bound on the bytes that a request brings besides its tokens' in the full-attention groups: windows, states.

    A bound, as windows are cut on the grid of both sides' blocks, and the peer's is known only after the handshake: a
    window brings at most two blocks more than its tokens, and no block has more than 128 tokens or this side's number.
    """
    total = 0
    for view in layout.views:
        group = layout.groups[view.group]
        row = view.row_bytes * (view.head_stop - view.head_start)
        if group.kind is GroupKind.WINDOW:
            total += row * (group.window_tokens + 2 * max(128, group.block_tokens))
        elif group.kind is GroupKind.STATE:
            total += row * view.block_tokens
    return total


def part_offset(shard: Shard, part: Part) -> int:
    """Where ``part`` lies in its shard's packed bytes: parts lie one after the other in token order."""
    return shard.part_bytes(Part(part.first, part.start, part.first, False)) if part.start > part.first else 0


def name_segments(offset: int, segments: Sequence[int]) -> list[Any]:
    """The wire name of packed memory."""
    return [PACKED, offset, *segments]


def name_blocks(first_token: int, tables: Sequence[Sequence[int]]) -> list[Any]:
    """The wire name of KV blocks."""
    return [DIRECT, first_token, *(list(table) for table in tables)]


def notice_of(incarnation: int, attempt: int, part: int) -> bytes:
    """What a write carries where only a notification shows that it has arrived: for whom and what it is."""
    return struct.pack("<QQQ", incarnation, attempt, part)


def read_notice(notice: bytes) -> tuple[int, int, int] | None:
    """(incarnation, attempt, part), or ``None`` for anything else."""
    return struct.unpack("<QQQ", notice) if len(notice) == 24 else None


def read_segments(memory: Any, count: int) -> tuple[int, Longs]:
    """(offset in bytes, segments) of a packed grant, checked: every segment below ``count`` and named once. Raises
    ``GrantError``.
    """
    if not _is_numbers(memory) or len(memory) < 2 or memory[0] != PACKED:
        raise GrantError("not the name of landing memory")
    base, segments = memory[1], list(memory[2:])
    if any(segment >= count for segment in segments) or len(set(segments)) != len(segments):
        raise GrantError(f"segments outside the {count} of this peer, or named twice")
    return base, np.asarray(segments, np.int64)


def check_inside(segments: Longs, segment_bytes: int, stop: int) -> None:
    """Raises ``GrantError`` unless bytes up to ``stop`` lie in ``segments``."""
    if stop > len(segments) * segment_bytes:
        raise GrantError(f"{stop} bytes do not fit into {len(segments)} segments of {segment_bytes}")


def read_blocks(memory: Any, groups: int) -> tuple[int, list[list[int]]]:
    """(first token, block ids per group) of a direct grant, not yet checked for ranges. Raises ``GrantError``."""
    if not isinstance(memory, (list, tuple)) or len(memory) != 2 + groups or memory[0] != DIRECT:
        raise GrantError(f"not the name of blocks in {groups} groups")
    tables = list(memory[2:])
    if not _is_numbers(memory[:2]) or not all(_is_numbers(table) for table in tables):
        raise GrantError("block ids that are not numbers")
    return memory[1], tables


def _is_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(number) is int and 0 <= number < 1 << 62 for number in value)
