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
    from pushkv.reference.lists import Lists

_KINDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_WIDE, _NARROW = (1, 1024), (16, 64)
"""(rows, words) of a tile: for long rows, and for short ones. No more shapes, as each is compiled when first used."""


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
    # lists, from `offset` on: cache addresses of the origins; of the runs what they add to it, their places in the
    # packed bytes, and how far these are apart from origin to origin; and then the addresses of the segments
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < origins.to(tl.int64) * runs
    origin, run = row // runs, row % runs
    lists += offset
    of_run = lists + origins + run
    cache = tl.load(lists + origin, mask=live, other=0) + tl.load(of_run, mask=live, other=0)
    packed = tl.load(of_run + runs, mask=live, other=0) + origin * tl.load(of_run + 2 * runs, mask=live, other=0)
    number, within = packed // SEGMENT, packed % SEGMENT
    table = lists + origins + 3 * runs
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
    lists: "Lists | None",
    *,
    gather: bool,
) -> tuple[Any, Any]:
    """Enqueue ``batches`` on ``stream``, behind ``after``: (event behind them, what must live until then).

    ``segments``: their addresses. ``lists``: for a device. The host does not wait: the lists go to the device from
    pinned memory that is there already, before ``after`` is waited for there.
    """
    found = list(batches)
    if not found:
        return None, None
    parts = [part for rows in found for part in (*rows.lists, segments)]
    sizes = [sum(map(len, (*rows.lists, segments))) for rows in found]
    if lists is None:
        words = torch.from_numpy(np.concatenate(parts))
        _launch(words, found, sizes, len(segments), segment_bytes, gather)
        return None, words
    with torch.cuda.device(device), torch.cuda.stream(stream):
        whole = sum(sizes)
        here, there = lists.take(whole)
        event = torch.cuda.Event(blocking=True)
        try:
            np.concatenate(parts, out=here.numpy()[:whole])
            _send(here[:whole], there[:whole])
            if after is not None:
                torch.cuda.current_stream().wait_event(after)
            _launch(there, found, sizes, len(segments), segment_bytes, gather)
        finally:
            event.record()
            lists.give(here, there, event)
    return event, (here, there)


def _send(here: torch.Tensor, there: torch.Tensor) -> None:
    there.copy_(here, non_blocking=True)


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
    """Compile for ``shapes``, of which nothing is copied."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        words = torch.zeros(1, dtype=torch.int64, device=device)
        for rows in shapes:
            _tile(words, 0, 0, 1, 0, rows, segment_bytes, gather)
        torch.cuda.current_stream().synchronize()
