"""The kernel of ``device_copies``: rows from one list of addresses to another, in words. Needs Triton.

Decides tile sizes. ``TRITON_INTERPRET=1`` runs the same kernel on a host, for tests.
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

_TILE = 1024
_KINDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["rows", "words"])  # type: ignore[untyped-decorator]
def _move(addresses, rows, words, KIND: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    source = tl.load(addresses + row, mask=live, other=0)
    target = tl.load(addresses + rows + row, mask=live, other=0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = live[:, None] & (word[None, :] < words)
    from_ = source.to(tl.pointer_type(KIND))[:, None] + word[None, :]
    to = target.to(tl.pointer_type(KIND))[:, None] + word[None, :]
    tl.store(to, tl.load(from_, mask=mask), mask=mask)


def run(batches: "Iterable[Rows]", device: torch.device, stream: Any, after: Any) -> tuple[Any, Any]:
    """Enqueue ``batches`` on ``stream``, behind ``after``. (event behind them, what must live until then)."""
    if device.type != "cuda":
        return None, [_launch(rows, device) for rows in batches]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        if after is not None:
            torch.cuda.current_stream().wait_event(after)
        keep = [_launch(rows, device) for rows in batches]
        event = torch.cuda.Event()
        event.record()
    return event, keep


def _launch(rows: "Rows", device: torch.device) -> torch.Tensor:
    count, words = len(rows.source), rows.row_bytes // rows.word_bytes
    addresses = torch.from_numpy(np.concatenate((rows.source, rows.target))).to(device)
    wide = min(_TILE, triton.next_power_of_2(words))
    tall = _TILE // wide
    grid = (triton.cdiv(count, tall), triton.cdiv(words, wide))
    _move[grid](addresses, count, words, KIND=_KINDS[rows.word_bytes], ROWS=tall, WORDS=wide)
    return addresses
