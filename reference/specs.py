"""What vLLM's cache specifications say of a layer, in a form that does not change with its version.

Decides which kinds of caches can be moved; every other is refused with a sentence. Reads attributes only, and classes
by name: the classes move between modules from version to version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pushkv.model.layout import GroupKind


class CacheError(ValueError):
    """A KV cache that pushkv cannot move. One sentence that says which layer and why."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's cache on this rank.

    latent: MLA, one vector for all heads. opaque: quantised with its scales between the elements: bytes per head and
    token are all that is known. tp_shards: different shards over the ranks, 0 when the version does not say.
    """

    block_tokens: int
    heads: int
    k_elements: int
    v_elements: int
    dtype: str
    element_bytes: int
    latent: bool = False
    opaque: bool = False
    tp_shards: int = 0


_REFUSED = {
    "MambaSpec": "a state-space model's state",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "encoder-only attention",
    "SinkFullAttentionSpec": "attention with sink blocks of its own",
    "CircularBufferSpec": "a circular buffer",
    "HiSparseHotSpec": "a sparse cache in host memory",
    "HiSparseResidentSpec": "a sparse cache in host memory",
    "HiddenStateCacheSpec": "hidden states",
    "RSWASpec": "windows of several sizes in one group",
}


def _names(spec: Any) -> list[str]:
    return [kind.__name__ for kind in type(spec).__mro__]


def group_of(spec: Any, layers: Sequence[str]) -> tuple[GroupKind, int]:
    """The kind of a cache group and its window in tokens. Raises `CacheError`."""
    inner = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: layers of one kind, of different sizes
    if inner:
        found = {group_of(one, layers) for one in inner.values()}
        if len(found) != 1:
            raise CacheError(f"layer {layers[0]!r} is in a group of different kinds of caches: not supported.")
        return found.pop()
    names = _names(spec)
    for name in names:
        if name in _REFUSED:
            raise CacheError(f"layer {layers[0]!r} keeps {_REFUSED[name]}: pushkv cannot hand that over.")
    if "SlidingWindowSpec" in names:
        return GroupKind.WINDOW, int(spec.sliding_window)
    if "AttentionSpec" in names:
        return GroupKind.FULL, 0
    raise CacheError(f"layer {layers[0]!r} has a cache of an unknown kind, {names[0]}: not supported.")


def layer_spec(spec: Any, layer: str) -> LayerSpec:
    """The specification of one layer of a group. Raises `CacheError`."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner:
        spec = inner[layer]
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise CacheError(f"layer {layer!r} keeps one state for {spec.tokens_per_state} tokens: not supported.")
    if getattr(spec, "num_head_slots", None) is not None:
        raise CacheError(
            f"layer {layer!r}: its attention backend packs heads in an order of its own; choose another one with "
            "--attention-backend (FLASH_ATTN, TRITON_ATTN)."
        )
    latent = any("MLA" in name for name in _names(spec))
    dtype = str(spec.dtype).removeprefix("torch.")
    mode = getattr(spec, "kv_quant_mode", None)
    scaled = getattr(spec, "state_content_bytes", None) is not None or bool(getattr(mode, "is_per_token_head", False))
    if mode is not None and getattr(mode, "name", "NONE") != "NONE":
        dtype += f"/{mode.name.lower()}"
    cache_dtype = getattr(spec, "cache_dtype_str", None)
    if cache_dtype not in (None, "auto"):
        dtype += f"/{cache_dtype}"
    size = int(spec.dtype.itemsize)
    head = int(spec.head_size)
    second = getattr(spec, "head_size_v", None)
    return LayerSpec(
        block_tokens=int(spec.block_size),
        heads=1 if latent else int(spec.num_kv_heads),
        k_elements=head,
        v_elements=0 if latent else int(head if second is None else second),
        dtype=dtype,
        element_bytes=size,
        latent=latent and not scaled,
        opaque=scaled,
        tp_shards=int(getattr(spec, "max_tp_shards", None) or 0),
    )
