"""The packed bytes: in which order, and what is left of them when D has found more by itself."""

from __future__ import annotations

from typing import Any

from pushkv.model.layout import (
    GroupKind,
    Layout,
    Part,
    block_table,
    combine,
    dense_layout,
    pair,
    plan_gather,
    plan_scatter,
)

SIZE: dict[str, Any] = {"num_blocks": 9, "kv_heads": 2, "head_dim": 1, "element_bytes": 1}


def _latent(name: str, axes: str, block_tokens: int) -> Layout:
    return dense_layout(name, axes, ["a"], block_tokens=block_tokens, parts=("latent",), **SIZE)


def test_packed_bytes_are_cut_at_the_blocks_of_d() -> None:
    """Heads lie outside tokens in D's blocks of 8: tokens 6 to 10 are two stretches, each of both heads."""
    (shard,) = pair([_latent("P", "BNH", 4)], [_latent("D", "BHN", 8)])
    spans = plan_gather(shard, [block_table([0, 1, 2])], Part.whole(6, 10)).spans()
    order = {
        dst + byte: src + byte
        for src, dst, length in zip(
            spans.src_offset.tolist(), spans.dst_offset.tolist(), spans.length.tolist(), strict=True
        )
        for byte in range(length)
    }
    tokens = [(token, head) for stretch in ((6, 7), (8, 9)) for head in (0, 1) for token in stretch]
    assert [order[at] for at in range(8)] == [2 * token + head for token, head in tokens]


def test_a_state_is_scattered_whole_whatever_prefix_d_has_found() -> None:
    """It has no tokens: it is what it is after the last one."""
    state: dict[str, Any] = {"kind": GroupKind.STATE, "parts": ("ssm",), "kernel_block_tokens": 3, **SIZE}
    layouts = [
        combine([_latent(name, "BNH", 4), dense_layout(name, "BNH", ["m"], block_tokens=4, **state)]) for name in "PD"
    ]
    (shard,) = pair(layouts[:1], layouts[1:])
    tables = [block_table([1, 2]), block_table([5])]
    for start in (4, 8):
        found = plan_scatter(shard, tables, Part.whole(0, 8), start)
        assert found.total_bytes == (8 - start) * shard.token_bytes + shard.state_bytes


def test_where_no_window_is_every_block_is_whole() -> None:
    (shard,) = pair([_latent("P", "BNH", 4)], [_latent("D", "BNH", 6)])
    assert shard.whole_windows
