"""The kernel of ``device_copies``: rows between the cache's regions and segments of a pool. Needs Triton.

Decides tile shapes. A row's two addresses are worked out on the device, from an origin (one per layer and part), a run
(one per block) and the list of segments, so that what the host makes and sends grows with layers plus blocks, not with
their product. ``TRITON_INTERPRET=1`` runs the same kernel on a host, for tests.
"""

# no `from __future__ import annotations`: Triton reads the annotations of a kernel

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pushkv.reference.device_copies import Rows

_KINDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_WIDE, _NARROW = (1, 1024), (16, 64)
"""(rows, words) of a tile: for long rows, and for short ones. No more shapes, as each is compiled when first used."""
_PINNED = range(9, 18)
"""Powers of two: sizes of the lists that are sent to the device, in words."""


@triton.jit(do_not_specialize=["offset", "origins", "runs", "segments", "words"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    lists,
    offset,
    origins,
    runs,
    segments,
    words,
    SEGMENT: tl.constexpr,
    KIND: tl.constexpr,
    BYTES: tl.constexpr,
    GATHER: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    # lists, from `offset` on: cache addresses of the origins, their places in the packed bytes, the same of the runs,
    # and then the addresses of the segments
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < origins.to(tl.int64) * runs
    origin, run = row // runs, row % runs
    lists += offset
    cache = tl.load(lists + origin, mask=live, other=0) + tl.load(lists + 2 * origins + run, mask=live, other=0)
    packed = tl.load(lists + origins + origin, mask=live, other=0)
    packed += tl.load(lists + 2 * origins + runs + run, mask=live, other=0)
    number, within = packed // SEGMENT, packed % SEGMENT
    table = lists + 2 * origins + 2 * runs
    here = tl.load(table + number, mask=live, other=0) + within
    # a row is no longer than a segment, so it passes from one to the next once at the most
    left = (SEGMENT - within) // BYTES
    there = tl.load(table + number + 1, mask=live & (number + 1 < segments) & (left < words), other=0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = live[:, None] & (word[None, :] < words)
    beyond = word[None, :] >= left[:, None]
    place = tl.where(beyond, there[:, None] - left[:, None] * BYTES, here[:, None]) + word[None, :] * BYTES
    pool = place.to(tl.pointer_type(KIND))
    kept = cache.to(tl.pointer_type(KIND))[:, None] + word[None, :]
    if GATHER:
        tl.store(pool, tl.load(kept, mask=mask), mask=mask)
    else:
        tl.store(kept, tl.load(pool, mask=mask), mask=mask)


def run(
    batches: "Iterable[Rows]",
    segments: Any,
    segment_bytes: int,
    device: torch.device,
    stream: Any,
    after: Any,
    *,
    gather: bool,
) -> tuple[Any, Any]:
    """Enqueue ``batches`` on ``stream``, behind ``after``: (event behind them, what must live until then).

    ``segments``: their addresses. The host does not wait: the lists go to the device from pinned memory, before
    ``after`` is waited for there.
    """
    found = list(batches)
    if not found:
        return None, None
    lists = [np.concatenate((*rows.lists, segments)) for rows in found]
    sizes = [len(one) for one in lists]
    if device.type != "cuda":
        words = torch.from_numpy(np.concatenate(lists))
        _launch(words, found, sizes, len(segments), segment_bytes, gather)
        return None, words
    with torch.cuda.device(device), torch.cuda.stream(stream):
        pinned = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
        np.concatenate(lists, out=pinned.numpy())
        words = pinned.to(device, non_blocking=True)
        if after is not None:
            torch.cuda.current_stream().wait_event(after)
        _launch(words, found, sizes, len(segments), segment_bytes, gather)
        event = torch.cuda.Event(blocking=True)
        event.record()
    return event, (pinned, words)


def _launch(
    words: torch.Tensor, batches: "list[Rows]", sizes: list[int], segments: int, segment_bytes: int, gather: bool
) -> None:
    offset = 0
    for rows, size in zip(batches, sizes, strict=True):
        _tile(words, offset, len(rows.origins), len(rows.runs), segments, rows, segment_bytes, gather)
        offset += size


def _tile(
    words: torch.Tensor, offset: int, origins: int, runs: int, segments: int, rows: "Rows", segment: int, gather: bool
) -> None:
    count = rows.row_bytes // rows.word_bytes
    tall, wide = _WIDE if count > _NARROW[1] else _NARROW
    grid = (triton.cdiv(max(1, origins * runs), tall), triton.cdiv(count, wide))
    kind = _KINDS[rows.word_bytes]
    _move[grid](
        words, offset, origins, runs, segments, count,
        SEGMENT=segment, KIND=kind, BYTES=rows.word_bytes, GATHER=gather, ROWS=tall, WORDS=wide,
    )  # fmt: skip


def warm(device: torch.device, segment_bytes: int, stream: Any, shapes: "Iterable[Rows]", *, gather: bool) -> None:
    """Compile for ``shapes``, of which nothing is copied, and get the pinned memory that lists will need."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        kept = [torch.empty(1 << power, dtype=torch.int64, pin_memory=True) for power in _PINNED for _ in range(4)]
        words = torch.zeros(1, dtype=torch.int64, device=device)
        for rows in shapes:
            _tile(words, 0, 0, 1, 0, rows, segment_bytes, gather)
        torch.cuda.current_stream().synchronize()
        del kept
