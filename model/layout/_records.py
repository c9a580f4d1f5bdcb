"""How the KV cache of one rank lies in memory: frozen records, nothing derived from a request.

Decides: what a layout may say, and that it is consistent (every view stays inside its region and does not overlap
itself). Does not decide: which layouts fit each other (`_pair`), which bytes move (`_plan`), where the numbers come
from (the host).

A *region* is one registered memory range; a layout knows only its size. A *view* is one layer's K, V, latent or state
in a region, as four byte strides:

    address(block, head, token)
        = offset_bytes + block * block_stride + (head - head_start) * head_stride + token * token_stride

and `row_bytes` bytes lie there. Every style of cache (NHD, HND, K and V apart, stacked, side by side, cross-layer
rows, padded rows, two names in one buffer) is a choice of offsets and strides; `_axes` has the constructors. K and V
are always two views.

A *group* is a set of layers that share one block list per request (vLLM's KV cache group). Its blocks are *logical*;
a view whose `block_tokens` is smaller holds several *kernel* blocks per logical block, numbered `logical * ratio +
i`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._errors import BlockError, LayoutError, RangeError

IntArray = npt.NDArray[np.int64]

_MAX_REGION_BYTES = 1 << 61  # offsets stay exact in int64, sums of two included
_MAX_HEADS = 1 << 16  # a layout may come from the network, and pairing walks over heads


class GroupKind(enum.Enum):
    """Which tokens of a request a group keeps."""

    FULL = "full"  # every token
    WINDOW = "window"  # the tokens that the next one still attends to
    STATE = "state"  # no tokens: one state per request, copied whole


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group.

    block_tokens: tokens per logical block (any positive number for STATE). num_blocks: logical blocks in the pool;
    ids are below it. window_tokens: the model's sliding window, WINDOW only; before token `t` the tokens from `t -
    window_tokens + 1` on are alive, as `t` is itself in its window. pool: groups with the same pool number draw their
    ids from one allocator, so one id never serves two of them in one request. null_block: id that fills list places
    without memory (vLLM: 0); it may repeat, and is never read or written.
    """

    kind: GroupKind
    block_tokens: int
    num_blocks: int
    window_tokens: int = 0
    pool: int = 0
    null_block: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """One part of one layer, as this rank holds it.

    layer, part: the name by which the two sides are paired; part is "k", "v", "latent" or a state's name. group,
    region: indices into the layout. offset_bytes: of (block 0, head_start, token 0) in the region. dtype: compared by
    name. head_dim: elements per row. kv_heads: heads of the whole model, of which this rank holds [head_start,
    head_stop). block_tokens: per kernel block (rows of a state). Strides are in bytes.
    """

    layer: str
    part: str
    group: int
    region: int
    offset_bytes: int
    dtype: str
    element_bytes: int
    head_dim: int
    kv_heads: int
    head_start: int
    head_stop: int
    block_tokens: int
    block_stride: int
    head_stride: int
    token_stride: int

    @property
    def key(self) -> tuple[str, str]:
        return (self.layer, self.part)

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.head_dim * self.element_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The cache of one rank of one engine.

    name: for messages. rank: unique within the engine. stage: pipeline stage. regions: bytes of each registered
    range. Raises `LayoutError` if anything in it contradicts the rest.
    """

    name: str
    rank: int
    regions: tuple[int, ...]
    groups: tuple[Group, ...]
    views: tuple[View, ...]
    stage: int = 0

    def __post_init__(self) -> None:
        for size in self.regions:
            if not 0 <= size <= _MAX_REGION_BYTES:
                raise LayoutError(f"layout {self.name!r}: a region of {size} bytes")
        for number, group in enumerate(self.groups):
            if group.block_tokens < 1 or group.num_blocks < 1:
                raise LayoutError(
                    f"layout {self.name!r}: group {number} has {group.num_blocks} blocks of {group.block_tokens} tokens"
                )
            if (group.kind is GroupKind.WINDOW) != (group.window_tokens > 0):
                raise LayoutError(
                    f"layout {self.name!r}: group {number} is {group.kind.value} with a window of {group.window_tokens}"
                )
        seen: set[tuple[str, str]] = set()
        extents: list[tuple[int, int, int, View]] = []
        places: set[tuple[int, int, int]] = set()
        for view in self.views:
            if view.key in seen:
                raise LayoutError(f"layout {self.name!r}: layer {view.layer!r} has two views called {view.part!r}")
            seen.add(view.key)
            extents.append((view.region, view.offset_bytes, self._end(view), view))
            place = (view.group, view.region, view.offset_bytes)
            if place in places:
                raise LayoutError(
                    f"layout {self.name!r}: layer {view.layer!r} {view.part!r} lies where another layer of its group "
                    "lies; list a cache that two layers share only once"
                )
            places.add(place)
        self._check_sharing(extents)

    def ratio(self, view: View) -> int:
        """Kernel blocks per logical block of `view`."""
        group = self.groups[view.group]
        return 1 if group.kind is GroupKind.STATE else group.block_tokens // view.block_tokens

    def describe(self) -> str:
        """One line for error messages."""
        layers = list(dict.fromkeys(view.layer for view in self.views))
        shapes = dict.fromkeys(
            f"{view.part} heads {view.head_start}-{view.head_stop - 1} of {view.kv_heads}, "
            f"head_dim {view.head_dim} {view.dtype}, blocks of {view.block_tokens}, "
            f"strides b{view.block_stride} h{view.head_stride} t{view.token_stride}"
            for view in self.views
        )
        few = "; ".join(list(shapes)[:4]) + ("; ..." if len(shapes) > 4 else "")
        named = f" {layers[0]!r}..{layers[-1]!r}" if layers else ""
        groups = ", ".join(
            f"{group.kind.value}({group.block_tokens}x{group.num_blocks}"
            + (f", window {group.window_tokens})" if group.window_tokens else ")")
            for group in self.groups
        )
        return (
            f"{self.name!r} rank {self.rank} stage {self.stage}: {len(layers)} layers{named} in groups {groups}: {few}"
        )

    def _check_sharing(self, extents: list[tuple[int, int, int, View]]) -> None:
        """Groups whose memory overlaps can only be kept apart by block ids: one pool, and pages of one size."""
        high, owner = 0, None
        for region, begin, end, view in sorted(extents, key=lambda extent: extent[:3]):
            if owner is None or region != owner.region or begin >= high:
                high, owner = end, view
                continue
            high = max(high, end)
            if view.group == owner.group:
                continue
            pools = [self.groups[one.group].pool for one in (owner, view)]
            pages = [one.block_stride * self.ratio(one) for one in (owner, view)]
            if len(set(pools)) > 1 or len(set(pages)) > 1:
                raise LayoutError(
                    f"layout {self.name!r}: layers {owner.layer!r} and {view.layer!r} share memory in region {region}, "
                    f"but their groups' pools are {pools} and their pages have {pages} bytes"
                )

    def _end(self, view: View) -> int:
        """The first byte after `view` in its region, once the view is known to be sound."""
        where = f"layout {self.name!r}: layer {view.layer!r} {view.part!r}"
        if not 0 <= view.group < len(self.groups) or not 0 <= view.region < len(self.regions):
            raise LayoutError(f"{where}: group {view.group} or region {view.region} does not exist")
        if not 0 <= view.head_start < view.head_stop <= view.kv_heads <= _MAX_HEADS:
            raise LayoutError(f"{where}: heads {view.head_start} to {view.head_stop} of {view.kv_heads}")
        if min(view.element_bytes, view.head_dim, view.block_tokens) < 1 or view.offset_bytes < 0:
            raise LayoutError(
                f"{where}: element_bytes, head_dim and block_tokens must be positive, offset_bytes not negative"
            )
        group = self.groups[view.group]
        if group.kind is not GroupKind.STATE and group.block_tokens % view.block_tokens:
            raise LayoutError(
                f"{where}: kernel blocks of {view.block_tokens} tokens do not divide blocks of {group.block_tokens}"
            )
        dims = sorted(
            (stride, extent)
            for stride, extent in (
                (view.token_stride, view.block_tokens),
                (view.head_stride, view.head_stop - view.head_start),
                (view.block_stride, group.num_blocks * self.ratio(view)),
            )
            if extent > 1
        )
        footprint = view.row_bytes
        for stride, extent in dims:
            if stride < footprint:
                raise LayoutError(
                    f"{where}: overlaps itself, a stride of {stride} bytes is less than the {footprint} it steps over"
                )
            footprint += stride * (extent - 1)
        end, size = view.offset_bytes + footprint, self.regions[view.region]
        if end > size:
            raise LayoutError(f"{where}: ends at byte {end} of region {view.region}, which has {size}")
        return end


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The blocks of one request in one group: slot s of logical block `ids[i]` holds token `first_token + i *
    block_tokens + s`.

    Make it with `block_table`. A STATE group has exactly one id.
    """

    ids: IntArray
    first_token: int = 0


def block_table(ids: Sequence[int] | npt.NDArray[np.integer], first_token: int = 0) -> BlockTable:
    """A table from any sequence of integers. Raises `BlockError` for anything else; ranges are checked where the pool
    is known.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:  # ragged, or integers beyond 64 bits
        raise BlockError("block ids are not a flat list of integers") from error
    if array.size == 0:
        array = np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BlockError(f"block ids are not a flat list of integers but {array.ndim}-d {array.dtype}")
    if array.dtype.kind == "u" and int(array.max()) >= 1 << 63:
        raise BlockError(f"block id {int(array.max())} is beyond any pool")
    if first_token < 0:
        raise RangeError(f"a block table that begins at token {first_token}")
    return BlockTable(array.astype(np.int64), first_token)


@dataclass(frozen=True, slots=True)
class Part:
    """Which tokens move together: [start, stop) of the full-attention groups, in tokens of the prompt.

    first: where the whole transfer begins. last: this part also carries the window and state groups, whose content is
    only right after token `stop - 1`. A transfer that is not cut is `Part.whole(start, stop)`; start == stop == first
    moves nothing.
    """

    start: int
    stop: int
    first: int
    last: bool

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.start <= self.stop:
            raise RangeError(f"tokens {self.start} to {self.stop} of a transfer that begins at {self.first}")

    @classmethod
    def whole(cls, start: int, stop: int) -> Part:
        return cls(start, stop, start, True)

    @classmethod
    def tail(cls, src_tokens: int, wanted: int) -> Part:
        """D's last `wanted` tokens of the `src_tokens` that P holds. The tails align: D's first slot gets P's token
        `src_tokens - wanted`. Raises `RangeError` if P holds fewer than D wants."""
        if wanted < 0:
            raise RangeError(f"{wanted} tokens wanted of {src_tokens}")
        if wanted > src_tokens:
            raise RangeError(f"P holds {src_tokens} tokens, D wants the last {wanted}")
        return cls.whole(src_tokens - wanted, src_tokens)
