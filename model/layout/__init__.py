"""KV cache layouts and the span planner: which bytes of P's cache go where in D's.

Pure functions on numpy arrays. In the order of use:

1. A host describes every rank's cache as a `Layout` (`dense_layout`, `combine`, or `View` by `View` from real
   strides).
2. At the handshake `pair` turns all layouts of P and of D into `Shard`s, or refuses with a sentence that names both.
3. Per transfer (or part of one), `plan` gives the spans from P's blocks to D's blocks; `plan_gather` and
   `plan_scatter` give the same mapping in two halves, through packed bytes. `count_spans` and `Shard.part_bytes` tell
   the cost beforehand.

    >>> cache = dict(num_blocks=100, block_tokens=16, kv_heads=8, head_dim=128)
    >>> p = dense_layout("P", "interleaved", ["layers.0"], **cache)
    >>> d = [dense_layout("D", "nhd_apart", ["layers.0"], tp_size=2, tp_rank=rank, **cache) for rank in (0, 1)]
    >>> shards = pair([p], d)
    >>> plan_tail(shards[1], [[7, 3, 8]], 40, [[5]], wanted=8).count  # K and V of 8 tokens x 4 heads, 256 bytes each
    64

Nothing here knows a clock, a thread, a socket, a device or a request's life; `LayoutError` is the only way to say no.
"""

from ._axes import AXES, combine, dense_layout, head_range
from ._errors import BlockError, LayoutError, PairingError, RangeError, TooManySpans
from ._packed import Slotted, plan_gather, plan_scatter, scatter_ahead
from ._pair import Shard, pair
from ._plan import DEFAULT_SPAN_LIMIT, Plan, Spans, Template, count_spans, plan, plan_tail
from ._records import BlockTable, Group, GroupKind, Layout, Part, View, block_table

__all__ = [
    "AXES",
    "DEFAULT_SPAN_LIMIT",
    "BlockError",
    "BlockTable",
    "Group",
    "GroupKind",
    "Layout",
    "LayoutError",
    "PairingError",
    "Part",
    "Plan",
    "RangeError",
    "Shard",
    "Slotted",
    "Spans",
    "Template",
    "TooManySpans",
    "View",
    "block_table",
    "combine",
    "count_spans",
    "dense_layout",
    "head_range",
    "pair",
    "plan",
    "plan_gather",
    "plan_scatter",
    "plan_tail",
    "scatter_ahead",
]
