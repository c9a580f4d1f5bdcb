"""The handshake: who writes what, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pushkv.model.layout import GroupKind, Layout, LayoutError, PairingError, Shard, dense_layout, head_range, pair


def _engine(name: str, tp: int = 1, *, layers: tuple[str, ...] = ("a", "b"), **changes: Any) -> list[Layout]:
    settings: dict[str, Any] = {"num_blocks": 10, "block_tokens": 16, "kv_heads": 4, "head_dim": 8}
    axes = changes.pop("axes", "interleaved")
    return [dense_layout(name, axes, layers, tp_size=tp, tp_rank=rank, **settings | changes) for rank in range(tp)]


def _routes(shards: tuple[Shard, ...]) -> list[tuple[int, int]]:
    return [(shard.src_rank, shard.dst_rank) for shard in shards]


@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "routes"),
    [
        (1, 1, [(0, 0)]),
        (1, 2, [(0, 0), (0, 1)]),
        (2, 1, [(0, 0), (1, 0)]),
        (4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (2, 8, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]),  # D's heads are doubled
        (8, 4, [(0, 0), (2, 1), (4, 2), (6, 3)]),  # P's heads are doubled, one of each pair writes
        (8, 8, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]),  # and both, if both are wanted
    ],
)
def test_heads_are_split_joined_and_replicated(src_tp: int, dst_tp: int, routes: list[tuple[int, int]]) -> None:
    shards = pair(_engine("P", src_tp), _engine("D", dst_tp))
    assert _routes(shards) == routes
    total = sum(shard.token_bytes for shard in shards)
    assert total == 2 * 2 * 8 * 2 * max(4, dst_tp)  # layers x K/V x head_dim x bf16 x heads that D ranks hold


def test_mla_writes_every_rank_and_spreads_the_work() -> None:
    """The latent is replicated: every D rank is written (fault F30), by different P ranks."""
    latent: dict[str, Any] = {"kv_heads": 1, "head_dim": 576, "parts": ("latent",), "axes": "BNH"}
    assert _routes(pair(_engine("P", 2, **latent), _engine("D", 4, **latent))) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert _routes(pair(_engine("P", 4, **latent), _engine("D", 2, **latent))) == [(0, 0), (1, 1)]
    assert _routes(pair(_engine("P", 1, **latent), _engine("D", 2, **latent))) == [(0, 0), (0, 1)]


def test_pipeline_stages_pair_by_name() -> None:
    first, second = _engine("P0", layers=("a", "b")), _engine("P1", layers=("c", "d"))
    p = [*first, replace(second[0], rank=1, stage=1)]
    d = _engine("D", layers=("d", "b", "c", "a"))
    shards = pair(p, d)
    assert _routes(shards) == [(0, 0), (1, 0)]
    assert [bundle.dst.region.tolist() for shard in shards for bundle in shard.bundles] == [[1, 3], [0, 2]]
    assert [bundle.src.region.tolist() for shard in shards for bundle in shard.bundles] == [[1, 0], [1, 0]]


def test_order_of_the_ranks_does_not_matter() -> None:
    p, d = _engine("P", 8), _engine("D", 4)
    assert _routes(pair(p[::-1], d[::-1])) == _routes(pair(p, d))


def test_layers_of_equal_shape_are_one_bundle() -> None:
    (shard,) = pair(_engine("P", layers=tuple("abcdefgh")), _engine("D", layers=tuple("abcdefgh")))
    assert len(shard.bundles) == 1 and shard.bundles[0].row_bytes == 2 * 8 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float8_e4m3"}, "dtype of layer 'a' 'k': bfloat16 in 'P', float8_e4m3 in 'D'"),
        ({"element_bytes": 1}, "element bytes"),
        ({"head_dim": 16}, "head_dim of layer 'a' 'k': 8 in 'P', 16 in 'D'"),
        ({"kv_heads": 8}, "KV heads"),
        ({"layers": ("a", "c")}, "only D has c k, c v, only P has b k, b v"),
        ({"layers": ("a",)}, "only D has nothing, only P has b k, b v"),
        ({"layers": ("a", "b", "c")}, "only D has c k, c v, only P has nothing"),
        ({"layers": ("a", "b", "c", "d")}, "only D has c k, c v, d k, d v, only"),
        ({"layers": ("a", "b", "c", "d", "e")}, "only D has c k, c v, d k, d v and 2 more, only"),
        ({"parts": ("latent",)}, "only D has a latent, b latent"),
        ({"kind": GroupKind.WINDOW, "window_tokens": 64}, "kind of group of layer 'a' 'k': full in 'P', window in 'D'"),
    ],
)
def test_impossible_pairs_are_refused_with_both_described(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PairingError) as caught:
        pair(_engine("P"), _engine("D", **changes))
    text = str(caught.value)
    assert message in text
    assert "\n  P 'P' rank 0 stage 0: 2 layers 'a'..'b'" in text and "\n  D 'D' rank 0 stage 0: " in text


def test_windows_and_states_must_agree() -> None:
    window: dict[str, Any] = {"kind": GroupKind.WINDOW}
    with pytest.raises(PairingError, match="window of layer 'a' 'k': 64 in 'P', 32 in 'D'"):
        pair(_engine("P", window_tokens=64, **window), _engine("D", window_tokens=32, **window))
    state: dict[str, Any] = {"kind": GroupKind.STATE, "parts": ("conv",), "axes": "BNH"}
    with pytest.raises(PairingError, match="rows of the state"):
        pair(_engine("P", kernel_block_tokens=3, **state), _engine("D", kernel_block_tokens=4, **state))


def test_ranks_and_heads_must_be_complete() -> None:
    with pytest.raises(PairingError, match="without ranks"):
        pair([], _engine("D"))
    with pytest.raises(PairingError, match="without ranks"):
        pair(_engine("P"), [])
    with pytest.raises(PairingError, match="nobody on P holds head 2 of layer 'a' 'k'"):
        pair(_engine("P", 2)[:1], _engine("D"))
    with pytest.raises(PairingError, match="two layouts for one rank"):
        pair(_engine("P") * 2, _engine("D"))
    p = _engine("P", 2)
    with pytest.raises(PairingError, match="layer 'a' 'k' is in stages 0 and 1 of 'P'"):
        pair([p[0], replace(p[1], stage=1)], _engine("D"))


def test_ranks_of_one_engine_must_agree() -> None:
    p = _engine("P", 2)
    other = _engine("P'", 2, dtype="float16")
    with pytest.raises(PairingError, match="bfloat16 in 'P', float16 in \"P'\""):
        pair([p[0], other[1]], _engine("D"))


def test_head_ranges() -> None:
    assert [head_range(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert Counter(head_range(2, 4, rank) for rank in range(4)) == {(0, 1): 2, (1, 2): 2}
    for heads, size, rank in ((8, 3, 0), (8, 4, 4), (0, 1, 0), (6, 4, 0)):
        with pytest.raises(LayoutError):
            head_range(heads, size, rank)
