"""Facts come back as they were told, anything else is refused, and a refusal names both sides' values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.model.layout import AXES, GroupKind, Layout, combine, dense_layout, pair
from pushkv.reference.cpu_formats import head_part, read_head_part
from pushkv.reference.evidence import Process
from pushkv.reference.facts import (
    MAX_FACTS_BYTES,
    Facts,
    FactsError,
    Landing,
    Region,
    decode,
    encode,
    refusal,
    siblings,
)
from pushkv.reference.fellow import Fellow

LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(64)]


def layout(tp: int = 1, rank: int = 0, layers: list[str] = LAYERS[:2], **more: Any) -> Layout:
    shape = {"num_blocks": 1000, "block_tokens": 16, "kv_heads": 8, "head_dim": 128} | more
    return dense_layout("qwen", shape.pop("axes", "nhd_apart"), layers, tp_size=tp, tp_rank=rank, **shape)


def facts(tp: int = 1, rank: int = 0, of: Layout | None = None, **more: Any) -> Facts:
    own = of or layout(tp, rank)
    told = {
        "engine_id": "P",
        "rank": rank,
        "tp_size": tp,
        "model": "Qwen/Qwen3-8B",
        "dtype": "bfloat16",
        "block_tokens": 16,
        "mode": "push",
        "backend": "UCX",
        "arrival": "completion",
        "layout": own,
    }
    return Facts(**told | more)


HYBRID = combine(
    [
        layout(layers=LAYERS[:2], null_block=0),
        layout(layers=["swa.0"], kind=GroupKind.WINDOW, window_tokens=100, null_block=0),
        layout(layers=["m.0"], kind=GroupKind.STATE, parts=("conv", "ssm"), kernel_block_tokens=3, axes="nhd_stacked"),
    ]
)


def test_all_comes_back() -> None:
    told = facts(
        2,
        1,
        role="decode",
        dp_rank=3,
        abilities=("chunk", "direct"),
        agent=b"\0\xff" * 500,
        landing=Landing(1 << 47, 2 << 20, 1024, 3),
        regions=tuple(Region(n << 40, size, 1) for n, size in enumerate(layout(2, 1).regions)),
        vllm="0.32.0",
        process=Process("boot pid", 42, 4242, "10.0.0.1", 5600),
    )
    assert decode(encode(told)) == told


@pytest.mark.parametrize("axes", AXES)
def test_any_layout_comes_back(axes: str) -> None:
    told = facts(of=layout(axes=axes, layers=LAYERS))
    assert decode(encode(told)) == told
    assert len(encode(told)) < 8 << 10


def test_a_hybrid_comes_back() -> None:
    assert decode(encode(facts(of=HYBRID))) == facts(of=HYBRID)


# ---------------------------------------------------------------- what is refused as no facts


@given(raw=st.binary(max_size=400))
def test_any_bytes(raw: bytes) -> None:
    with pytest.raises(FactsError):
        decode(raw)


GOOD = encode(facts(of=HYBRID, agent=b"agent", process=Process("h", 1, 2)))


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_facts(data: st.DataObject) -> None:
    """Cut, with bytes changed, or with pieces repeated: ``FactsError`` or facts that can be told again."""
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        what = data.draw(st.sampled_from(["change", "cut", "repeat", "insert"]))
        if what == "change":
            raw[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0xC0, 0xCF, 0xD3, 0xDD, 0xDF, 0xC6])))
        elif what == "cut":
            del raw[at : at + data.draw(st.integers(1, 9))]
        elif what == "repeat":
            raw[at:at] = raw[at : at + data.draw(st.integers(1, 40))]
        else:
            raw[at:at] = data.draw(st.binary(max_size=9))
        if not raw:
            break
    try:
        found = decode(bytes(raw))
    except FactsError:
        return
    assert decode(encode(found)) == found
    assert isinstance(refusal(facts(of=HYBRID), found), str)


@settings(max_examples=150)
@given(data=st.data())
def test_wrong_values(data: st.DataObject) -> None:
    """Well-formed msgpack whose fields are anything."""
    tree = msgspec.msgpack.decode(GOOD)
    at = tree
    for _ in range(4):
        index = data.draw(st.integers(0, len(at) - 1))
        if not (isinstance(at[index], list) and at[index] and data.draw(st.booleans())):
            break
        at = at[index]
    value = st.one_of(st.none(), st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=5), st.floats(), st.just([]))
    at[index] = data.draw(st.one_of(value, st.lists(value, max_size=5), st.sampled_from([1 << 61, 65536, "x" * 2000])))
    try:
        found = decode(msgspec.msgpack.encode(tree))
    except FactsError:
        return
    assert isinstance(refusal(facts(of=HYBRID), found), str)
    assert isinstance(refusal(found, facts(of=HYBRID)), str)


def test_a_claimed_size_is_not_believed() -> None:
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000):
        with pytest.raises(FactsError):
            decode(head + b"\x01")
    with pytest.raises(FactsError, match="at most"):
        decode(bytes(MAX_FACTS_BYTES + 1))


def test_another_version() -> None:
    with pytest.raises(FactsError, match="facts of version 9, this side speaks 1"):
        decode(msgspec.msgpack.encode([9, "what", "ever"]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rank": 1}, "rank 1 of 1 ranks"),
        ({"tp_size": 0}, "tp_size|>= 1"),
        ({"agent": bytes(MAX_FACTS_BYTES)}, "at most"),
        ({"engine_id": "x" * 257}, "256"),
        ({"regions": (Region(0, 5, 0),)}, "1 regions with a layout of 4"),
        ({"regions": (Region(0, 5, 0),) * 4}, "as large as the layout's"),
        ({"landing": Landing((1 << 63) - 2, 1, 2, 0)}, "beyond 63 bits"),
        ({"landing": Landing(0, 1 << 61, 4, 0)}, "beyond 63 bits"),
        ({"regions": tuple(Region((1 << 63) - 1, size, 0) for size in layout().regions)}, "beyond 63 bits"),
    ],
)
def test_facts_that_cannot_be_told(change: dict[str, Any], why: str) -> None:
    with pytest.raises(FactsError, match=why):
        encode(msgspec.structs.replace(facts(), **change))


def test_more_heads_than_pairing_should_walk() -> None:
    with pytest.raises(FactsError, match="more than 131072 heads"):
        encode(facts(of=layout(kv_heads=1 << 16, head_dim=1)))


# ---------------------------------------------------------------- who fits whom


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (1, 4), (4, 1), (2, 8), (16, 2), (16, 1)])
def test_who_fits(p: int, d: int) -> None:
    for rank in (0, d - 1):
        mine = facts(p, p - 1)
        theirs = facts(d, rank, engine_id="D", of=layout(d, rank, axes="BLHNC", block_tokens=64))
        assert refusal(mine, theirs) == refusal(theirs, mine) == ""


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_siblings_are_the_other_ranks(tp: int) -> None:
    expected = tuple(layout(tp, rank) for rank in range(tp))
    for rank in range(tp):
        assert siblings(facts(tp, rank)) == expected
    assert pair(siblings(facts(tp, 0)), siblings(facts(1)))


def test_latent_is_replicated() -> None:
    mla = [layout(4, rank, parts=("latent",), kv_heads=1, axes="BNH") for rank in range(4)]
    assert siblings(facts(4, 2, of=mla[2])) == tuple(mla)


def of_a_cpu(tp: int, rank: int) -> Layout:
    """Each head's K is a part of its own, named by its number in the model; the heads of V are heads."""
    dense = layout(tp, rank, axes="hnd_apart")
    views = []
    for view in dense.views:
        if view.part == "v":
            views.append(view)
            continue
        for head in range(view.head_start, view.head_stop):
            offset = (head - view.head_start) * view.head_stride
            elements = {"head_dim": 1, "kv_heads": 128, "head_start": 0, "head_stop": 128}
            strides = {"head_stride": 16 * 2, "token_stride": 2}
            views.append(replace(view, part=head_part("k", head, 8), offset_bytes=offset, **elements, **strides))
    return replace(dense, views=tuple(views))


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_siblings_whose_parts_are_named_by_heads(tp: int) -> None:
    expected = tuple(of_a_cpu(tp, rank) for rank in range(tp))
    for rank in range(tp):
        assert siblings(facts(tp, rank, of=of_a_cpu(tp, rank))) == expected
    assert not refusal(facts(tp, 0, of=of_a_cpu(tp, 0)), facts(2, 1, engine_id="D", of=of_a_cpu(2, 1)))


def test_a_part_of_somebody_elses_head() -> None:
    with pytest.raises(FactsError, match=r"rank 0 of 2 holds head 4 of 8 of layer .* not its share"):
        siblings(facts(2, 0, of=replace(of_a_cpu(2, 1), rank=0)))


@pytest.mark.parametrize("name", ["k", "k/8", "k3/", "k3/0", "K3/8", "k3/8 ", "3/8", "k-1/8", "k3/123456", "k\u0663/8"])
def test_names_that_name_no_head(name: str) -> None:
    assert read_head_part(name) is None


@pytest.mark.parametrize(("me", "them"), [((1, 0), (2, 1)), ((2, 1), (1, 0)), ((2, 0), (4, 1)), ((16, 4), (2, 0))])
def test_a_fellow_gets_what_its_rank_holds(me: tuple[int, int], them: tuple[int, int]) -> None:
    """What the sender holds for the receiver's siblings is left out, and both sides come to the same shard."""
    for make in (of_a_cpu, layout):
        p = facts(*me, of=make(*me), role="prefill")
        d = facts(*them, engine_id="D", of=make(*them), role="decode")
        there, here = Fellow(1, p, d).outgoing, Fellow(1, d, p).incoming
        assert there is not None and here is not None
        assert (there.src_rank, there.dst_rank, there.token_bytes) == (here.src_rank, here.dst_rank, here.token_bytes)
        heads = 8 // max(me[0], them[0]) or 1
        assert here.token_bytes == 2 * 2 * heads * 128 * 2


def test_stages_are_compared_where_they_meet() -> None:
    first = facts(of=layout(layers=LAYERS[:2]), stages=2)
    second = facts(of=replace(layout(layers=LAYERS[2:4], rank=0), rank=1, stage=1), rank=1, stages=2)
    whole = facts(engine_id="D", of=layout(layers=LAYERS[:4]))
    assert refusal(first, whole) == refusal(whole, second) == refusal(first, second) == ""
    other = facts(engine_id="D", of=layout(layers=LAYERS[:4], head_dim=64))
    assert "head_dim" in refusal(second, other)


def heads_of_others(f: Facts) -> Facts:
    return msgspec.structs.replace(f, layout=replace(layout(2, 1), rank=0))


@pytest.mark.parametrize(
    ("theirs", "both"),
    [
        (facts(model="Qwen/Qwen3-32B"), ["model", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"]),
        (facts(dtype="fp8_e4m3"), ["cache dtype", "bfloat16", "fp8_e4m3"]),
        (facts(mode="pull"), ["transfer mode", "push", "pull"]),
        (facts(backend="LIBFABRIC"), ["transport backend", "UCX", "LIBFABRIC"]),
        (facts(arrival="notification"), ["notice of arrival", "completion", "notification"]),
        (facts(role="prefill"), ["role", "prefill"]),
        (facts(of=layout(layers=["model.layers.0.self_attn.attn"])), ["layers.1.self_attn.attn k", "nothing"]),
        (facts(of=layout(head_dim=64)), ["head_dim", "128", "64"]),
        (facts(of=layout(kv_heads=4)), ["KV heads", "8", "4"]),
        (facts(of=layout(dtype="fp8", element_bytes=1)), ["dtype", "bfloat16", "fp8"]),
        (facts(of=layout(kind=GroupKind.WINDOW, window_tokens=64)), ["kind of group", "full", "window"]),
        (facts(2, of=replace(layout(4, 1), rank=0)), ["rank 0 of 2", "heads 2 to 3 of 8", "not its share"]),
    ],
)
def test_a_refusal_names_both_sides_values(theirs: Facts, both: list[str]) -> None:
    mine = facts(role=theirs.role)
    theirs = msgspec.structs.replace(theirs, engine_id="D")
    for sentence in (refusal(mine, theirs), refusal(theirs, mine)):
        assert len(sentence) <= 4000
        assert all(word in sentence for word in both), sentence


def test_sizes_that_do_not_divide() -> None:
    mine, theirs = facts(2, of=layout(2, kv_heads=6)), facts(3, engine_id="D", of=layout(3, kv_heads=6))
    assert refusal(mine, theirs) == (
        "cannot pair 'P' and 'D': tensor-parallel size is 2 here and 3 there: neither divides the other"
    )


def test_a_refusal_knows_who_is_p() -> None:
    one = facts(role="decode", of=layout(layers=LAYERS[:1]))
    two = facts(role="prefill", of=layout(layers=LAYERS[:2]))
    expected = f"only D has nothing, only P has {LAYERS[1]} k, {LAYERS[1]} v"
    assert expected in refusal(one, two) and expected in refusal(two, one)


@pytest.mark.parametrize("ask", [encode, lambda told: refusal(told, told)])
def test_it_is_quick(ask: Callable[[Facts], Any]) -> None:
    """126 layers on 8 ranks: a greeting is answered on a thread that moves bytes."""
    ask(facts(8, 3, of=layout(8, 3, layers=[f"model.layers.{n}.self_attn.attn" for n in range(126)])))
