"""Layouts read from tensors, against reading the same tensors element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pushkv.model.layout import GroupKind, Layout, View, block_table, pair
from pushkv.reference.caches import Ranks, layouts_of
from pushkv.reference.cpu_formats import CpuFormat, head_part
from pushkv.reference.grants import token_bytes
from pushkv.reference.specs import CacheError

torch = pytest.importorskip("torch")

B, H, N, D = 5, 2, 8, 4
Read = Callable[[int, int, int], Any]
"""(block, head, token) -> the elements there."""


class AttentionSpec(SimpleNamespace):
    pass


class FullAttentionSpec(AttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(SimpleNamespace):
    pass


class UniformTypeKVCacheSpecs(SimpleNamespace):
    pass


def full(kind: type = FullAttentionSpec, **more: Any) -> Any:
    facts = {"block_size": N, "num_kv_heads": H, "head_size": D, "dtype": torch.int16}
    return kind(**{**facts, **more})


def config(*groups: tuple[list[str], Any], blocks: int = B) -> Any:
    made = [SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups]
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=made)


def filled(*shape: int) -> Any:
    size = int(np.prod(shape))
    return torch.arange(1, size + 1, dtype=torch.int32).to(torch.int16).reshape(shape)


def read(layout: Layout, regions: list[Any], view: View, block: int, head: int, token: int) -> list[int]:
    """What the layout says lies there."""
    at = (
        view.offset_bytes
        + block * view.block_stride
        + (head - view.head_start) * view.head_stride
        + token * view.token_stride
    )
    raw = bytes(regions[view.region][at : at + view.row_bytes].tolist())
    return np.frombuffer(raw, np.int16 if view.element_bytes == 2 else np.uint8).tolist()


def the_view(layout: Layout, layer: str, part: str) -> View:
    return next(view for view in layout.views if view.key == (layer, part))


def agrees(layout: Layout, regions: list[Any], layer: str, part: str, wanted: Read) -> None:
    view = the_view(layout, layer, part)
    group = layout.groups[view.group]
    for block in range(group.num_blocks * layout.ratio(view)):
        for head in range(view.head_start, view.head_stop):
            for token in range(view.block_tokens):
                expected = wanted(block, head - view.head_start, token).tolist()
                assert read(layout, regions, view, block, head, token) == expected


def permuted(shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    """A tensor of logical `shape` whose memory is in `order`, as vLLM permutes its allocations."""
    memory = filled(*(shape[axis] for axis in order))
    return memory.permute(*(order.index(axis) for axis in range(len(shape))))


def one(tensor: Any, spec: Any = None, **kw: Any) -> tuple[Layout, list[Any]]:
    return layouts_of({"a": tensor}, config((["a"], spec or full())), name="test", ranks=kw.pop("ranks", Ranks()), **kw)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)], ids=["HND", "NHD", "heads first"])
def test_k_and_v_side_by_side(order: tuple[int, ...]) -> None:
    tensor = permuted((B, H, N, 2 * D), order)
    layout, regions = one(tensor)
    assert len(regions) == 1
    agrees(layout, regions, "a", "k", lambda b, h, t: tensor[b, h, t, :D])
    agrees(layout, regions, "a", "v", lambda b, h, t: tensor[b, h, t, D:])
    assert token_bytes(layout) == 2 * H * D * 2


def test_v_of_another_size_than_k() -> None:
    tensor = filled(B, H, N, D + 2)
    layout, regions = one(tensor, full(head_size_v=2))
    agrees(layout, regions, "a", "k", lambda b, h, t: tensor[b, h, t, :D])
    agrees(layout, regions, "a", "v", lambda b, h, t: tensor[b, h, t, D:])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 2, 3, 4)])
def test_k_and_v_apart(order: tuple[int, ...]) -> None:
    tensor = permuted((2, B, N, H, D), order)
    layout, regions = one(tensor)
    agrees(layout, regions, "a", "k", lambda b, h, t: tensor[0, b, t, h])
    agrees(layout, regions, "a", "v", lambda b, h, t: tensor[1, b, t, h])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)])
def test_k_and_v_of_a_block_together(order: tuple[int, ...]) -> None:
    tensor = permuted((B, 2, N, H, D), order)
    layout, regions = one(tensor)
    agrees(layout, regions, "a", "k", lambda b, h, t: tensor[b, 0, t, h])
    agrees(layout, regions, "a", "v", lambda b, h, t: tensor[b, 1, t, h])


def test_two_blocks_and_five_axes_are_ambiguous() -> None:
    with pytest.raises(CacheError, match="not one that pushkv knows"):
        layouts_of({"a": filled(2, 2, N, H, D)}, config((["a"], full()), blocks=2), name="x", ranks=Ranks())


@pytest.mark.parametrize("shape", [(B, N, 6), (B, 1, N, 6)])
def test_mla(shape: tuple[int, ...]) -> None:
    tensor = filled(*shape)
    layout, regions = one(tensor, full(MLAAttentionSpec, num_kv_heads=1, head_size=6), ranks=Ranks(4, 3))
    flat = tensor.reshape(B, N, 6)
    agrees(layout, regions, "a", "latent", lambda b, h, t: flat[b, t])
    view = the_view(layout, "a", "latent")
    assert (view.head_start, view.head_stop, view.kv_heads) == (0, 1, 1)


def test_kernel_blocks_are_smaller_than_blocks() -> None:
    tensor = filled(B * 2, H, N // 2, 2 * D)
    layout, regions = one(tensor)
    assert layout.ratio(layout.views[0]) == 2
    agrees(layout, regions, "a", "k", lambda b, h, t: tensor[b, h, t, :D])


def test_padded_pages() -> None:
    page = H * N * 2 * D + 24
    memory = filled(B * page)
    tensor = memory.as_strided((B, H, N, 2 * D), (page, N * 2 * D, 2 * D, 1))
    layout, regions = one(tensor)
    agrees(layout, regions, "a", "v", lambda b, h, t: tensor[b, h, t, D:])
    assert regions[0].numel() == 2 * (B * page - 24)  # not more than is used


@pytest.mark.parametrize("block_outermost", [False, True])
def test_layers_in_one_allocation(block_outermost: bool) -> None:
    """vLLM 0.32: one buffer for all layers, behind some other bytes."""
    page, ahead = H * N * 2 * D, 16
    memory = filled(ahead + 3 * B * page)
    layer_stride, block_stride = (page, 3 * page) if block_outermost else (B * page, page)
    caches = {
        f"l{n}": memory.as_strided((B, H, N, 2 * D), (block_stride, N * 2 * D, 2 * D, 1), ahead + n * layer_stride)
        for n in range(3)
    }
    layout, regions = layouts_of(caches, config((list(caches), full())), name="x", ranks=Ranks())
    assert len(regions) == 1
    assert regions[0].data_ptr() == caches["l0"].data_ptr()
    for name, tensor in caches.items():
        agrees(layout, regions, name, "k", lambda b, h, t, tensor=tensor: tensor[b, h, t, :D])
        agrees(layout, regions, name, "v", lambda b, h, t, tensor=tensor: tensor[b, h, t, D:])


def test_a_cache_that_two_layers_share_is_listed_once() -> None:
    tensor = filled(B, H, N, 2 * D)
    caches = {"a": tensor, "b": filled(B, H, N, 2 * D), "shares a": tensor}
    layout, _ = layouts_of(caches, config((["a", "b", "shares a"], full())), name="x", ranks=Ranks())
    assert {view.layer for view in layout.views} == {"a", "b"}
    layout, _ = layouts_of(caches, config((["a", "b"], full())), name="x", ranks=Ranks())
    assert {view.layer for view in layout.views} == {"a", "b"}


def test_groups_that_overlay_each_other() -> None:
    tensor = filled(B, H, N, 2 * D)
    window = full(SlidingWindowSpec, sliding_window=6)
    caches = {"a": tensor, "w": tensor}
    layout, regions = layouts_of(caches, config((["a"], full()), (["w"], window)), name="x", ranks=Ranks())
    assert [group.kind for group in layout.groups] == [GroupKind.FULL, GroupKind.WINDOW]
    assert layout.groups[1].window_tokens == 6 and layout.groups[1].null_block == 0
    assert len(regions) == 1 and len(layout.views) == 4


def test_groups_that_do_not_move_are_left_out() -> None:
    caches = {"a": filled(B, H, N, 2 * D), "scratch": filled(B, H, N, 2 * D)}
    both = config((["a"], full()), (["scratch"], full()))
    both.kv_cache_groups[1].enable_kv_transfer = False
    with pytest.raises(CacheError, match="in no group"):
        layouts_of({**caches, "stranger": filled(3)}, both, name="x", ranks=Ranks())


@pytest.mark.parametrize(
    ("total", "tp", "rank", "held"),
    [(8, 4, 1, (2, 4)), (2, 4, 3, (1, 2)), (2, 1, 0, (0, 2)), (4, 2, 1, (2, 4))],
)
def test_heads_over_ranks(total: int, tp: int, rank: int, held: tuple[int, int]) -> None:
    heads = max(1, total // tp)
    for kw in ({"kv_heads": total}, {}):
        if not kw and total < tp:
            continue
        spec = full(num_kv_heads=heads)
        layout, _ = one(filled(B, heads, N, 2 * D), spec, ranks=Ranks(tp, rank, **kw))
        assert [(view.head_start, view.head_stop, view.kv_heads) for view in layout.views] == [(*held, total)] * 2
    spec = full(num_kv_heads=heads, max_tp_shards=total if total < tp else tp)
    layout, _ = one(filled(B, heads, N, 2 * D), spec, ranks=Ranks(tp, rank))
    assert (layout.views[0].head_start, layout.views[0].head_stop) == held


def test_quantised_content_with_scales_inside_moves_as_bytes() -> None:
    tensor = (filled(B, H, N, 12) % 251).to(torch.uint8)
    mode = SimpleNamespace(name="INT8_PER_TOKEN_HEAD", is_per_token_head=True)
    spec = full(dtype=torch.uint8, state_content_bytes=12, kv_quant_mode=mode)
    layout, regions = one(tensor, spec)
    agrees(layout, regions, "a", "kv", lambda b, h, t: tensor[b, h, t])
    assert layout.views[0].dtype == "uint8/int8_per_token_head"


def cases() -> Iterator[tuple[str, Any, Any]]:
    yield "state-space model", filled(B, 4), MambaSpec(block_size=N)
    yield "packs heads", filled(B, 2, N, 2 * D), full(num_head_slots=2)
    yield "unknown kind", filled(B, 4), SimpleNamespace(block_size=N)
    yield "one state for 4 tokens", filled(B, 1, N, D), full(MLAAttentionSpec, tokens_per_state=4)
    yield "3 heads", filled(B, 3, N, 2 * D), full()
    yield "cannot hold", filled(B, H, N + 1, 2 * D), full()
    yield "per head and token", filled(B, H, N, 2 * D + 1), full()
    yield "shape", filled(B, H), full()
    yield "several tensors", [filled(B)], full()
    quantised = SimpleNamespace(name="INT8_PER_TOKEN_HEAD", is_per_token_head=True)
    yield "scales apart", filled(B, H, N, 2 * D), full(kv_quant_mode=quantised)
    yield "side by side", filled(B, H, 2 * D, N).transpose(2, 3), full()


@pytest.mark.parametrize(("says", "tensor", "spec"), list(cases()), ids=[case[0] for case in cases()])
def test_what_cannot_be_described_is_refused_with_a_sentence(says: str, tensor: Any, spec: Any) -> None:
    with pytest.raises(CacheError, match=says) as refused:
        one(tensor, spec)
    assert "'a'" in str(refused.value) and str(refused.value).endswith(".")


def test_a_layer_without_a_cache() -> None:
    with pytest.raises(CacheError, match="was not registered"):
        layouts_of({"a": filled(B, H, N, 2 * D)}, config((["a", "b"], full())), name="x", ranks=Ranks())
    with pytest.raises(CacheError, match="no KV cache"):
        layouts_of({}, config(), name="x", ranks=Ranks())


def test_layers_of_different_sizes_in_one_group() -> None:
    caches = {"a": filled(B, H, N, 2 * D), "b": filled(B, 1, N, 2 * D)}
    spec = UniformTypeKVCacheSpecs(block_size=N, kv_cache_specs={"a": full(), "b": full(num_kv_heads=1)})
    layout, regions = layouts_of(caches, config((["a", "b"], spec)), name="x", ranks=Ranks())
    agrees(layout, regions, "b", "k", lambda b, h, t: caches["b"][b, h, t, :D])


# ---------------------------------------------------------------- CPU


def cpu_slab(tensor: Any, block: int, head: int) -> np.ndarray[Any, Any]:
    """The bytes of one block and head as the kernel sees them: first K, (element, token), then V, (token, element)."""
    return np.asarray(tensor[block, head].reshape(-1))


def test_cpu_k_is_transposed() -> None:
    tensor = filled(B, H, N, 2 * D)
    layout, regions = one(tensor, cpu=CpuFormat("vec", N))
    for head in range(H):
        view = the_view(layout, "a", head_part("k", head, H))
        for block in range(B):
            k = cpu_slab(tensor, block, head)[: N * D].reshape(D, N)
            for element in range(D):
                for token in range(N):
                    assert read(layout, regions, view, block, element, token) == [k[element, token]]
    agrees(
        layout, regions, "a", "v",
        lambda b, h, t: cpu_slab(tensor, b, h)[N * D :].reshape(N, D)[t],
    )  # fmt: skip
    assert token_bytes(layout) == 2 * H * D * 2


@pytest.mark.parametrize("isa", ["amx", "", "vec"])
def test_opaque_cpu_blocks_move_whole(isa: str) -> None:
    cpu = CpuFormat(isa, N, plain=isa != "vec")
    assert cpu.unit_tokens == N
    source, target = filled(B, H, N, 2 * D), torch.zeros(B, H, N, 2 * D, dtype=torch.int16)
    p, p_regions = one(source, cpu=cpu)
    d, d_regions = one(target, cpu=cpu)
    copy(p, p_regions, d, d_regions, [3, 1], [4, 2], 2 * N, 2 * N)
    assert torch.equal(target[4], source[3]) and torch.equal(target[2], source[1])
    assert not target[1].any() and not target[3].any()
    other, _ = one(source, cpu=CpuFormat("neon", N))
    with pytest.raises(ValueError, match="dtype"):
        pair([p], [other])


@pytest.mark.parametrize(("p_block", "d_block"), [(8, 8), (4, 8), (8, 4)])
def test_a_prompt_between_cpu_caches_of_different_blocks(p_block: int, d_block: int) -> None:
    """Token by token, through the planner: what D's kernel would read is what P's kernel wrote."""
    tokens, wanted = 13, 9
    made = {}
    for side, block in (("p", p_block), ("d", d_block)):
        blocks = 40 // block
        tensor = torch.zeros(blocks, H, block, 2 * D, dtype=torch.int16)
        caches = {"a": tensor}
        spec = full(block_size=block)
        cpu = CpuFormat("vec", block)
        made[side] = (
            tensor,
            *layouts_of(caches, config((["a"], spec), blocks=blocks), name=side, ranks=Ranks(), cpu=cpu),
        )
    p_ids, d_ids = list(range(40 // p_block))[::-1][:4], list(range(1, 40 // d_block))[:5]

    def cells(tensor: Any, ids: list[int], block: int, token: int, head: int) -> tuple[Any, Any]:
        slab = tensor[ids[token // block], head].reshape(-1)
        k = slab[: block * D].reshape(D, block)[:, token % block]
        return k, slab[block * D :].reshape(block, D)[token % block]

    for token in range(tokens):
        for head in range(H):
            k, v = cells(made["p"][0], p_ids, p_block, token, head)
            for element in range(D):
                k[element], v[element] = (
                    1000 + 100 * token + 10 * head + element,
                    -(100 * token + 10 * head + element) - 1,
                )
    first = (tokens - wanted) // d_block
    copy(made["p"][1], made["p"][2], made["d"][1], made["d"][2], p_ids, d_ids[first:], tokens, wanted, first * d_block)
    for token in range(tokens - wanted, tokens):
        for head in range(H):
            k, v = cells(made["d"][0], d_ids, d_block, token, head)
            assert k.tolist() == [1000 + 100 * token + 10 * head + element for element in range(D)]
            assert v.tolist() == [-(100 * token + 10 * head + element) - 1 for element in range(D)]


def copy(
    p: Layout, p_regions: list[Any], d: Layout, d_regions: list[Any], source: list[int], target: list[int],
    tokens: int, wanted: int, first: int = 0,
) -> None:  # fmt: skip
    from pushkv.model.layout import Part, plan

    (shard,) = pair([p], [d])
    spans = plan(shard, [block_table(source)], [block_table(target, first)], Part.tail(tokens, wanted)).spans()
    for a, b, s, t, size in zip(
        spans.src_region, spans.dst_region, spans.src_offset, spans.dst_offset, spans.length, strict=True
    ):
        d_regions[b][t : t + size] = p_regions[a][s : s + size]


def test_cpu_heads_split_over_ranks() -> None:
    """Heads are named by their number in the model, so two ranks of P feed one of D."""
    made = []
    for rank in range(2):
        tensor = filled(B, 1, N, 2 * D) + 1000 * rank
        layout, _ = layouts_of(
            {"a": tensor},
            config((["a"], full(num_kv_heads=1))),
            name="P",
            ranks=Ranks(2, rank, 2),
            cpu=CpuFormat("vec", N),
        )
        made.append(layout)
    d, _ = one(filled(B, 2, N, 2 * D), ranks=Ranks(1, 0, 2), cpu=CpuFormat("vec", N))
    shards = pair(made, [d])
    assert [(shard.src_rank, shard.dst_rank) for shard in shards] == [(0, 0), (1, 0)]
