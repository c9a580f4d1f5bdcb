"""From vLLM's KV caches to a `Layout` and flat byte tensors.

Decides where K, V or the latent of each layer, head and token lies, from the tensors' own addresses and strides and
the cache specs: shapes say which axis is which, never where anything is. Decides what cannot be described, and says so
with a sentence. Does not decide what fits a peer (`model.layout.pair`).

What the tensors of vLLM 0.26 to 0.32 look like, by their logical axes (the memory order is in the strides):

| axes | cache |
|---|---|
| block, head, token, K then V | FlashAttention, Triton, FlexAttention, FlashInfer: K and V side by side |
| 2, block, token, head, element | K and V apart, each with all blocks |
| block, 2, token, head, element | K and V of a block together |
| block, token, latent; block, 1, token, latent | MLA |
| block, head, token, K then V, on a CPU | the shape lies: `cpu_formats.py` |

Block lists are in scheduler blocks; a tensor may be cut into smaller kernel blocks. Layers that share one allocation
share one region; a cache that two names share is listed once. Draft-model layers are layers like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pushkv.model.layout import Group, Layout, LayoutError, View, head_range
from pushkv.reference.cpu_formats import CpuFormat, cpu_parts
from pushkv.reference.specs import CacheError, LayerSpec, group_of, layer_spec

NULL_BLOCK = 0
"""vLLM fills places without memory with block 0, in every group."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which rank this is. kv_heads: of the whole model; 0 when only the layers know."""

    tp_size: int = 1
    tp_rank: int = 0
    kv_heads: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a layer before it is placed: strides and offset in bytes, from the tensor's first element."""

    name: str
    offset: int
    dtype: str
    element_bytes: int
    elements: int
    heads: tuple[int, int, int]  # first, stop, of
    block_tokens: int
    block_stride: int
    head_stride: int
    token_stride: int
    blocks: int

    def end(self) -> int:
        """First byte after the part, from the tensor's first element."""
        first, stop, _ = self.heads
        return (
            self.offset
            + (self.blocks - 1) * self.block_stride
            + (stop - first - 1) * self.head_stride
            + (self.block_tokens - 1) * self.token_stride
            + self.elements * self.element_bytes
        )


def layouts_of(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    *,
    name: str,
    ranks: Ranks,
    cpu: CpuFormat | None = None,
) -> tuple[Layout, list[Any]]:
    """The layout of this rank, and one flat uint8 tensor per region of it, over the same memory.

    cpu: the format of a CPU cache, None on accelerators. Raises `CacheError` with a sentence.
    """
    groups: list[Group] = []
    parts: list[tuple[str, int, Any, _Part]] = []
    seen: dict[tuple[int, ...], str] = {}
    for number, (names, spec) in enumerate(_transferred(kv_cache_config)):
        kind, window = group_of(spec, names)
        groups.append(Group(kind, int(spec.block_size), int(kv_cache_config.num_blocks), window, null_block=NULL_BLOCK))
        for layer in names:
            if layer not in kv_caches:
                raise CacheError(f"layer {layer!r} is in the cache configuration, but its cache was not registered.")
            tensor = kv_caches[layer]
            place = (number, tensor.data_ptr(), *tensor.shape, *tensor.stride())
            if place in seen:
                continue  # reads another layer's cache
            seen[place] = layer
            facts = layer_spec(spec, layer)
            for part in _parts(layer, tensor, facts, int(kv_cache_config.num_blocks), ranks, cpu):
                parts.append((layer, number, tensor, part))
    _check_names(kv_caches, parts, seen)
    regions, placed = _regions([tensor for _, _, tensor, _ in parts], [part for *_, part in parts])
    views = [
        View(
            layer, part.name, group, region, base + part.offset, part.dtype, part.element_bytes, part.elements,
            part.heads[2], part.heads[0], part.heads[1], part.block_tokens,
            part.block_stride, part.head_stride, part.token_stride,
        )
        for (layer, group, _, part), (region, base) in zip(parts, placed, strict=True)
    ]  # fmt: skip
    sizes = tuple(int(region.numel()) for region in regions)
    try:
        layout = Layout(name, ranks.tp_rank, sizes, tuple(groups), tuple(views))
    except LayoutError as error:
        raise CacheError(f"the caches as registered contradict themselves: {error}.") from error
    return layout, regions


def _transferred(kv_cache_config: Any) -> Iterator[tuple[Sequence[str], Any]]:
    for group in kv_cache_config.kv_cache_groups:
        if getattr(group, "enable_kv_transfer", True):
            if getattr(group, "host_resident", False):
                raise CacheError(f"layer {group.layer_names[0]!r} keeps its cache in host memory: not supported.")
            yield group.layer_names, group.kv_cache_spec


def _check_names(kv_caches: Mapping[str, Any], parts: Sequence[Any], seen: Mapping[tuple[int, ...], str]) -> None:
    """A cache that no group knows is somebody's who shares it, or nobody knows whose blocks are in it."""
    if not parts:
        raise CacheError("no KV cache was registered: a model without one has nothing to hand over.")
    listed = {kv_caches[layer].data_ptr() for layer in seen.values()}
    for layer, tensor in kv_caches.items():
        if hasattr(tensor, "data_ptr") and tensor.data_ptr() not in listed and layer not in seen.values():
            raise CacheError(f"layer {layer!r} has a cache that is in no group of the cache configuration.")


# ---------------------------------------------------------------- one layer


def _parts(
    layer: str, tensor: Any, spec: LayerSpec, num_blocks: int, ranks: Ranks, cpu: CpuFormat | None
) -> Iterator[_Part]:
    if not hasattr(tensor, "stride"):
        raise CacheError(f"layer {layer!r} has several tensors for its cache: not supported.")
    size, shape = int(tensor.element_size()), tuple(int(extent) for extent in tensor.shape)
    strides = tuple(int(stride) * size for stride in tensor.stride())
    axes = _axes(layer, shape, spec, num_blocks)
    blocks, heads, tokens = (shape[axes[axis]] if axis in axes else 1 for axis in "BHN")
    ratio, rest = divmod(blocks, num_blocks)
    if rest or ratio < 1 or tokens * ratio != spec.block_tokens:
        raise CacheError(
            f"layer {layer!r}: a cache of {blocks} blocks of {tokens} tokens cannot hold {num_blocks} blocks of "
            f"{spec.block_tokens} tokens."
        )
    if heads != spec.heads:
        raise CacheError(f"layer {layer!r}: the cache has {heads} heads, its specification {spec.heads}.")
    block, head, token = (strides[axes[axis]] if axis in axes else 0 for axis in "BHN")
    held = (0, 1, 1) if spec.latent else _heads(layer, spec, ranks)
    content = shape[-1] * size
    if strides[-1] != size:
        raise CacheError(f"layer {layer!r}: the elements of one head and token do not lie side by side.")
    if cpu is not None and not spec.latent:
        for piece in cpu_parts(cpu, spec, held, tokens, (block, head), content):
            yield _Part(*piece, blocks)
        return
    dtype, element = spec.dtype, spec.element_bytes
    if spec.opaque:  # quantised with scales inside: the bytes of one head and token as they are
        yield _Part("kv", 0, dtype, 1, content, held, tokens, block, head, token, blocks)
    elif spec.latent:
        yield _Part("latent", 0, dtype, element, content // element, held, tokens, block, head, token, blocks)
    elif "T" in axes:
        apart = strides[axes["T"]]
        for number, (part, elements) in enumerate((("k", spec.k_elements), ("v", spec.v_elements))):
            yield _Part(part, number * apart, dtype, element, elements, held, tokens, block, head, token, blocks)
    else:
        behind = spec.k_elements * element
        if content != behind + spec.v_elements * element:
            raise CacheError(
                f"layer {layer!r}: {content} bytes per head and token, K and V together have "
                f"{behind + spec.v_elements * element}."
            )
        yield _Part("k", 0, dtype, element, spec.k_elements, held, tokens, block, head, token, blocks)
        yield _Part("v", behind, dtype, element, spec.v_elements, held, tokens, block, head, token, blocks)


def _axes(layer: str, shape: tuple[int, ...], spec: LayerSpec, num_blocks: int) -> dict[str, int]:
    """Which axis of the tensor is block (B), head (H), token (N), K or V (T). The last one is the content."""
    found: list[dict[str, int]] = []
    if len(shape) == 3 and spec.latent:
        found = [{"B": 0, "N": 1}]
    elif len(shape) == 4:
        found = [{"B": 0, "H": 1, "N": 2}]
    elif len(shape) == 5 and not spec.latent and not spec.opaque:
        order = {"N": 2, "H": 3} if shape[3] == spec.heads else {"H": 2, "N": 3}
        if shape[2] == shape[3]:
            order = {"N": 2, "H": 3}  # the logical order of all versions that have five axes
        for kv, block in ((0, 1), (1, 0)):
            if shape[kv] == 2 and shape[block] % num_blocks == 0:
                found.append({"T": kv, "B": block, **order})
    if len(found) != 1:
        raise CacheError(
            f"layer {layer!r}: a cache of shape {shape} is not one that pushkv knows "
            f"({num_blocks} blocks of {spec.block_tokens} tokens, {spec.heads} heads)."
        )
    return found[0]


def _heads(layer: str, spec: LayerSpec, ranks: Ranks) -> tuple[int, int, int]:
    """[first, stop) of all KV heads of the layer. Where heads are fewer than ranks they are replicated."""
    tp = ranks.tp_size
    if spec.tp_shards:
        total = spec.heads * min(tp, spec.tp_shards)
    elif ranks.kv_heads and max(1, ranks.kv_heads // tp) == spec.heads:
        total = ranks.kv_heads
    else:
        total = spec.heads * tp
    try:
        first, stop = head_range(total, tp, ranks.tp_rank)
    except LayoutError as error:
        raise CacheError(f"layer {layer!r}: {error}.") from error
    if stop - first != spec.heads:
        raise CacheError(f"layer {layer!r}: {spec.heads} heads on this rank, {stop - first} expected of {total}.")
    return first, stop, total


# ---------------------------------------------------------------- memory


def _regions(tensors: Sequence[Any], parts: Sequence[_Part]) -> tuple[list[Any], list[tuple[int, int]]]:
    """Flat byte tensors over what the parts use of each allocation, and (region, base) of each tensor in them."""
    extents: dict[int, list[int]] = {}
    owners: dict[int, Any] = {}
    for tensor, part in zip(tensors, parts, strict=True):
        storage = tensor.untyped_storage()
        home = int(storage.data_ptr())
        first = int(tensor.data_ptr()) - home
        low, high = first + part.offset, first + part.end()
        if low < 0 or high > int(storage.nbytes()):
            raise CacheError(f"a cache reaches from byte {low} to {high} of an allocation of {storage.nbytes()}.")
        owners[home] = tensor
        known = extents.setdefault(home, [low, high])
        known[0], known[1] = min(known[0], low), max(known[1], high)
    numbers = {home: number for number, home in enumerate(extents)}
    regions = [_flat(owners[home], low, high) for home, (low, high) in extents.items()]
    placed = []
    for tensor in tensors:
        home = int(tensor.untyped_storage().data_ptr())
        placed.append((numbers[home], int(tensor.data_ptr()) - home - extents[home][0]))
    return regions, placed


def _flat(tensor: Any, low: int, high: int) -> Any:
    """Bytes [low, high) of the allocation of `tensor`."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), low, (high - low,), (1,))
    return flat
