"""What a greeting tells of an engine's rank (``Hello.facts``), and whether two of them can exchange caches.

Decides the encoding, its bounds, and the sentence with which a peer is refused. Does not decide what the values are,
nor which bytes move: that is the layout's. Facts come from the network: ``decode`` bounds every count before anything
of that size is made, and builds the layout, which checks itself.

Layouts are packed by columns: names and strides that repeat over layers are told once, so 64 layers are a few KB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Final, Literal

import msgspec

from pushkv.model.layout import Group, GroupKind, Layout, LayoutError, View, head_range, pair
from pushkv.reference.cpu_formats import head_part, read_head_part
from pushkv.reference.evidence import Process

FACTS_VERSION: Final = 1
MAX_FACTS_BYTES: Final = 1 << 19
MAX_VIEWS: Final = 8192
MAX_HEADS: Final = 1 << 17
"""Heads over all views and ranks: pairing walks over them."""

_MAX_RANKS: Final = 1024
_SENTENCE: Final = 4000

Name = Annotated[str, msgspec.Meta(max_length=256)]
Word = Annotated[str, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 61)]
Small = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Mode = Literal["push", "pull"]
Role = Literal["prefill", "decode", "both"]
Arrival = Literal["completion", "notification"]


class FactsError(ValueError):
    """Bytes that are no facts of this version, or facts that cannot be told."""


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """Memory into which a peer may be told to write: ``count`` segments, one after the other."""

    address: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    segment_bytes: Count = 0
    count: Small = 0
    device: Small = 0


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One registered range of the cache, in the order of the layout's regions."""

    address: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    size_bytes: Count
    device: Small


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one engine. ``arrival``: how the receiver learns that bytes are there; ``agent``: the transport's
    own description; ``stages``: pipeline stages of the engine; ``process``: where it runs and listens.
    """

    engine_id: str
    rank: int
    tp_size: int
    model: str
    dtype: str
    block_tokens: int
    mode: Mode
    backend: str
    arrival: Arrival
    layout: Layout
    role: Role = "both"
    dp_rank: int = 0
    stages: int = 1
    abilities: tuple[str, ...] = ()
    agent: bytes = b""
    landing: Landing = Landing()
    regions: tuple[Region, ...] = ()
    vllm: str = ""
    process: Process = Process("", 0, 0)


class _Group(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["full", "window", "state"]
    block_tokens: Count
    num_blocks: Count
    window_tokens: Count
    pool: Small
    null_block: Count | None


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    """What the views of many layers have in common."""

    part: Word
    group: Small
    dtype: Word
    element_bytes: Small
    head_dim: Count
    kv_heads: Small
    head_start: Small
    head_stop: Small
    block_tokens: Count
    block_stride: Count
    head_stride: Count
    token_stride: Count


class _Layout(msgspec.Struct, frozen=True, array_like=True):
    """Columns: view i is layer ``names[layer[i]]`` with ``shapes[shape[i]]``."""

    name: Name
    rank: Small
    stage: Small
    regions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_VIEWS)]
    groups: Annotated[tuple[_Group, ...], msgspec.Meta(max_length=256)]
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_VIEWS)]
    shapes: Annotated[tuple[_Shape, ...], msgspec.Meta(max_length=MAX_VIEWS)]
    layer: Annotated[tuple[Small, ...], msgspec.Meta(max_length=MAX_VIEWS)]
    shape: Annotated[tuple[Small, ...], msgspec.Meta(max_length=MAX_VIEWS)]
    region: Annotated[tuple[Small, ...], msgspec.Meta(max_length=MAX_VIEWS)]
    offset: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_VIEWS)]


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    version: int
    engine_id: Name
    rank: Small
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)]
    dp_rank: Small
    stages: Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)]
    model: Annotated[str, msgspec.Meta(max_length=1024)]
    dtype: Word
    block_tokens: Small
    mode: Mode
    role: Role
    backend: Word
    arrival: Arrival
    abilities: Annotated[tuple[Word, ...], msgspec.Meta(max_length=64)]
    vllm: Word
    process: Process
    landing: Landing
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_VIEWS)]
    layout: _Layout
    agent: Annotated[bytes, msgspec.Meta(max_length=MAX_FACTS_BYTES)]


class _Version(msgspec.Struct, frozen=True, array_like=True):
    """The first field alone, of any version."""

    version: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Wire)
_VERSION: Final = msgspec.msgpack.Decoder(_Version)
_ASIDE: Final = ("layout", "version")
_SAME: Final = tuple(name for name in _Wire.__struct_fields__ if name not in _ASIDE)
_SHAPE: Final = _Shape.__struct_fields__


def encode(facts: Facts) -> bytes:
    """The bytes of ``facts``. Raises ``FactsError`` for facts that ``decode`` would refuse."""
    fields = {name: getattr(facts, name) for name in _SAME}
    raw = _ENCODER.encode(_Wire(version=FACTS_VERSION, layout=_pack(facts.layout), **fields))
    decode(raw)  # at the start, and not first at the peer
    return raw


def decode(raw: bytes) -> Facts:
    """The facts in ``raw``; for any other bytes ``FactsError`` and nothing else."""
    if len(raw) > MAX_FACTS_BYTES:
        raise FactsError(f"facts of {len(raw)} bytes, at most {MAX_FACTS_BYTES}")
    try:
        version = _VERSION.decode(raw).version
        if version != FACTS_VERSION:
            raise FactsError(f"facts of version {version}, this side speaks {FACTS_VERSION}")
        wire = _DECODER.decode(raw)
        layout = _unpack(wire.layout)
    except (msgspec.DecodeError, LayoutError, ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, FactsError):
            raise
        raise FactsError(f"facts that cannot be read: {error}"[:_SENTENCE]) from None
    fields = {name: getattr(wire, name) for name in _SAME}
    if wire.rank >= wire.tp_size * wire.stages or wire.rank != layout.rank:
        sizes = f"{wire.tp_size} ranks in {wire.stages} stages"
        raise FactsError(f"facts of rank {wire.rank} of {sizes} with a layout of rank {layout.rank}")
    if len(wire.regions) not in (0, len(layout.regions)):
        raise FactsError(f"facts of {len(wire.regions)} regions with a layout of {len(layout.regions)}")
    if any(region.size_bytes != size for region, size in zip(wire.regions, layout.regions, strict=False)):
        raise FactsError("facts whose regions are not as large as the layout's")
    ends = [wire.landing.address + wire.landing.segment_bytes * wire.landing.count]
    ends += [region.address + region.size_bytes for region in wire.regions]
    if max(ends) >= 1 << 63:
        raise FactsError("facts of memory beyond 63 bits")  # addresses are computed with that many
    return Facts(layout=layout, **fields)


def _pack(layout: Layout) -> _Layout:
    names: dict[str, int] = {}
    shapes: dict[_Shape, int] = {}
    layer, shape = [], []
    for view in layout.views:
        layer.append(names.setdefault(view.layer, len(names)))
        shape.append(shapes.setdefault(_Shape(*(getattr(view, name) for name in _SHAPE)), len(shapes)))
    groups = (
        _Group(
            group.kind.value, group.block_tokens, group.num_blocks, group.window_tokens, group.pool, group.null_block
        )
        for group in layout.groups
    )
    return _Layout(
        name=layout.name,
        rank=layout.rank,
        stage=layout.stage,
        regions=layout.regions,
        groups=tuple(groups),
        names=tuple(names),
        shapes=tuple(shapes),
        layer=tuple(layer),
        shape=tuple(shape),
        region=tuple(view.region for view in layout.views),
        offset=tuple(view.offset_bytes for view in layout.views),
    )


def _unpack(wire: _Layout) -> Layout:
    """Raises ``FactsError`` or ``LayoutError``."""
    if not len(wire.layer) == len(wire.shape) == len(wire.region) == len(wire.offset):
        raise FactsError("columns of different lengths in a layout")
    if max(wire.layer, default=-1) >= len(wire.names) or max(wire.shape, default=-1) >= len(wire.shapes):
        raise FactsError("a layout that refers to names or shapes it does not have")
    if sum(max(0, wire.shapes[one].head_stop - wire.shapes[one].head_start) for one in wire.shape) > MAX_HEADS:
        raise FactsError(f"a layout of more than {MAX_HEADS} heads over all layers")
    views = tuple(
        View(
            layer=wire.names[layer],
            region=region,
            offset_bytes=offset,
            **{name: getattr(wire.shapes[shape], name) for name in _SHAPE},
        )
        for layer, shape, region, offset in zip(wire.layer, wire.shape, wire.region, wire.offset, strict=True)
    )
    groups = tuple(
        Group(GroupKind(one.kind), one.block_tokens, one.num_blocks, one.window_tokens, one.pool, one.null_block)
        for one in wire.groups
    )
    return Layout(wire.name, wire.rank, wire.regions, groups, views, wire.stage)


# ---------------------------------------------------------------- fitting


def siblings(facts: Facts) -> tuple[Layout, ...]:
    """The layouts of all tensor-parallel ranks of the engine (of this pipeline stage), from the one that is known: the
    ranks differ in nothing but their heads, whether a view says which it holds or a part's name does (``head_part``).
    Raises ``FactsError`` if this rank's heads are not such a share, ``LayoutError`` if there is none.
    """
    own = facts.rank % facts.tp_size
    first = facts.layout.rank - own
    return tuple(
        replace(
            facts.layout, rank=first + rank, views=tuple(_of_rank(facts, view, rank) for view in facts.layout.views)
        )
        for rank in range(facts.tp_size)
    )


def _of_rank(facts: Facts, view: View, rank: int) -> View:
    """What ``view`` of this rank is on ``rank``."""
    tp, own = facts.tp_size, facts.rank % facts.tp_size
    named = read_head_part(view.part)
    if named is not None:
        part, head, heads = named
        share = head_range(heads, tp, own)
        if not share[0] <= head < share[1]:
            raise _no_share(facts, view, f"head {head} of {heads}")
        return replace(view, part=head_part(part, head - share[0] + head_range(heads, tp, rank)[0], heads))
    if (view.head_start, view.head_stop) == (0, view.kv_heads):
        return view
    if (view.head_start, view.head_stop) != head_range(view.kv_heads, tp, own):
        raise _no_share(facts, view, f"heads {view.head_start} to {view.head_stop - 1} of {view.kv_heads}")
    start, stop = head_range(view.kv_heads, tp, rank)
    return replace(view, head_start=start, head_stop=stop)


def _no_share(facts: Facts, view: View, heads: str) -> FactsError:
    own, tp = facts.rank % facts.tp_size, facts.tp_size
    return FactsError(f"rank {own} of {tp} holds {heads} of layer {view.layer!r}, which is not its share")


def refusal(mine: Facts, theirs: Facts) -> str:
    """``""`` if the two can hand over caches, or the sentence that says why not and names both sides' values."""
    for what, one, other in (
        ("model", mine.model, theirs.model),
        ("cache dtype", mine.dtype, theirs.dtype),
        ("transfer mode", mine.mode, theirs.mode),
        ("transport backend", mine.backend, theirs.backend),
        ("notice of arrival", mine.arrival, theirs.arrival),
    ):
        if one != other:
            return _sentence(mine, theirs, what, repr(one), repr(other))
    if mine.role == theirs.role != "both":
        return _sentence(mine, theirs, "role", repr(mine.role), repr(theirs.role), "one must prefill and one decode")
    sizes = mine.tp_size, theirs.tp_size
    if max(sizes) % min(sizes):
        why = "neither divides the other"
        return _sentence(mine, theirs, "tensor-parallel size", str(sizes[0]), str(sizes[1]), why)
    return _unpairable(mine, theirs)


def _unpairable(mine: Facts, theirs: Facts) -> str:
    source, target = (theirs, mine) if mine.role == "decode" or theirs.role == "prefill" else (mine, theirs)
    staged = max(mine.stages, theirs.stages) > 1
    try:
        sources, targets = _ranks(source), _ranks(target)
        if staged:  # layers of another stage belong to another rank
            common = _layers(sources) & _layers(targets)
            sources, targets = _only(sources, common), _only(targets, common)
        if not staged or common:
            pair(sources, targets)
    except LayoutError as error:
        return str(error)[:_SENTENCE]
    except FactsError as error:
        return f"{error}\n  P {source.layout.describe()}\n  D {target.layout.describe()}"[:_SENTENCE]
    return ""


def _ranks(facts: Facts) -> tuple[Layout, ...]:
    views = sum(view.head_stop - view.head_start for view in facts.layout.views)
    if views * facts.tp_size > MAX_HEADS:
        raise FactsError(f"more than {MAX_HEADS} heads over the {facts.tp_size} ranks of {facts.engine_id!r}")
    return siblings(facts)


def _layers(layouts: Iterable[Layout]) -> set[str]:
    return {view.layer for layout in layouts for view in layout.views}


def _only(layouts: Iterable[Layout], layers: set[str]) -> tuple[Layout, ...]:
    return tuple(replace(one, views=tuple(view for view in one.views if view.layer in layers)) for one in layouts)


def _sentence(mine: Facts, theirs: Facts, what: str, one: str, other: str, why: str = "") -> str:
    text = f"cannot pair {mine.engine_id!r} and {theirs.engine_id!r}: {what} is {one} here and {other} there"
    return (f"{text}: {why}" if why else text)[:_SENTENCE]
