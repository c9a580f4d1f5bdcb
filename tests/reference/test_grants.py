"""How memory is named; whatever else a peer names is refused, by `GrantError` or the layout's own error, before an
address is made of it.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.model.layout import LayoutError, Part, block_table, dense_layout, pair, plan
from pushkv.model.protocol import MessageError, decode, encode
from pushkv.model.protocol import messages as msg
from pushkv.reference.grants import (
    DIRECT,
    PACKED,
    GrantError,
    aligned,
    check_inside,
    name_blocks,
    name_segments,
    notice_of,
    part_offset,
    read_blocks,
    read_notice,
    read_segments,
    request_bytes,
    token_bytes,
)
from pushkv.reference.pools import spread

COUNT, SEGMENT = 8, 100
BLOCKS, TOKENS, BLOCK = 6, 40, 16

WHOLE = st.one_of(st.integers(-2, 12), st.sampled_from([1 << 31, (1 << 62) - 1, 1 << 62, 1 << 63, (1 << 64) - 1]))
LEAF = st.one_of(
    WHOLE, st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(WHOLE, max_size=9), st.dictionaries(st.text(max_size=2), WHOLE, max_size=2),
)  # fmt: skip
ANYTHING = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=6), max_leaves=12)
NEARLY_SEGMENTS = st.builds(
    lambda head, base, segments: [head, base, *segments],
    st.sampled_from([PACKED, PACKED, PACKED, DIRECT, 0.0, False]),
    st.one_of(st.integers(0, 300), WHOLE),
    st.one_of(st.lists(st.integers(0, COUNT - 1), max_size=8, unique=True), st.lists(WHOLE, max_size=8)),
)
NEARLY_BLOCKS = st.builds(
    lambda head, first, tables: [head, first, *tables],
    st.sampled_from([DIRECT, DIRECT, DIRECT, PACKED, 1.0, True]),
    st.one_of(st.integers(0, TOKENS), WHOLE),
    st.lists(
        st.one_of(st.lists(st.integers(0, BLOCKS - 1), max_size=4, unique=True), st.lists(WHOLE, max_size=4), LEAF),
        min_size=1,
        max_size=2,
    ),
)


def sent(memory: Any) -> Any:
    """As the other side reads it."""
    message = decode(encode(msg.Grant(1, 2, 3, memory)))
    assert isinstance(message, msg.Grant)
    return message.memory


def cache(name: str) -> Any:
    return dense_layout(name, "nhd_apart", ["a", "b"], num_blocks=BLOCKS, block_tokens=BLOCK, kv_heads=2, head_dim=8)


SHARD = pair([cache("P")], [cache("D")])[0]


def test_segments_come_back() -> None:
    base, segments = read_segments(sent(name_segments(256, (5, 0, 7))), COUNT)
    assert base == 256 and segments.tolist() == [5, 0, 7] and segments.dtype == np.int64
    base, segments = read_segments(sent(name_segments(0, ())), COUNT)
    assert base == 0 and segments.tolist() == [] and segments.dtype == np.int64


def test_blocks_come_back() -> None:
    assert read_blocks(sent(name_blocks(32, ([3, 1], []))), 2) == (32, [[3, 1], []])
    assert read_blocks(sent(name_blocks(0, ((7,),))), 1) == (0, [[7]])


@pytest.mark.parametrize(
    "memory",
    [
        None, 0, "01", b"\0\1", {}, [], [PACKED], [DIRECT, 0, 1], [PACKED, -1, 1], [PACKED, 0, -1], [PACKED, 0, COUNT],
        [PACKED, 0, 1, 1], [PACKED, 0, 1.0], [PACKED, 0, True], [False, 0, 1], [0.0, 0, 1], [PACKED, None, 1],
        [PACKED, 0, [1]], [PACKED, 1 << 62, 1], [PACKED, 0, 1 << 63], [PACKED, 0, (1 << 64) - 1], [PACKED, "0", 1],
    ],
    ids=repr,
)  # fmt: skip
def test_other_segments_are_refused(memory: Any) -> None:
    with pytest.raises(GrantError):
        read_segments(sent(memory), COUNT)


@pytest.mark.parametrize(
    "memory",
    [
        None, 1, "10", {}, [], [DIRECT], [DIRECT, 0], [DIRECT, 0, [1], [2]], [PACKED, 0, [1]], [DIRECT, -1, [1]],
        [DIRECT, 0, 1], [DIRECT, 0, [-1]], [DIRECT, 0, [1.0]], [DIRECT, 0, [True]], [DIRECT, 0, [[1]]],
        [DIRECT, 0, {"1": 1}], [DIRECT, 0, b"\1"], [DIRECT, 0, [1 << 62]], [DIRECT, 1 << 62, [1]], [True, 0, [1]],
        [1.0, 0, [1]], [DIRECT, None, [1]], [DIRECT, 0, None],
    ],
    ids=repr,
)  # fmt: skip
def test_other_blocks_are_refused(memory: Any) -> None:
    with pytest.raises(GrantError):
        read_blocks(sent(memory), 1)


def test_bytes_beyond_the_segments_are_refused() -> None:
    segments = np.array([1, 2], np.int64)
    check_inside(segments, SEGMENT, 2 * SEGMENT)
    for stop in (2 * SEGMENT + 1, 1 << 62, 1 << 70):
        with pytest.raises(GrantError, match="do not fit into 2 segments of 100"):
            check_inside(segments, SEGMENT, stop)


@given(st.one_of(ANYTHING, NEARLY_SEGMENTS), st.integers(0, 300), st.integers(1, 900))
def test_no_segment_is_written_that_is_not_the_peers(memory: Any, offset: int, size: int) -> None:
    """As a packed part is posted."""
    pool = 1 << 20
    try:
        memory = sent(memory)
        base, segments = read_segments(memory, COUNT)
        check_inside(segments, SEGMENT, base + offset + size)
    except (GrantError, MessageError):
        return
    starts, sizes = spread(pool, COUNT, SEGMENT, segments, base + offset, size)
    assert int(sizes.sum()) == size and int(sizes.min()) > 0
    assert int(starts.min()) >= pool and int((starts + sizes).max()) <= pool + COUNT * SEGMENT
    named = {pool + segment * SEGMENT for segment in memory[2:]}
    for start, length in zip(starts.tolist(), sizes.tolist(), strict=True):
        for at in (start, start + length - 1):
            assert at - (at - pool) % SEGMENT in named


@given(st.one_of(ANYTHING, NEARLY_BLOCKS), st.integers(0, TOKENS - 1), st.integers(1, TOKENS))
def test_no_block_is_written_that_is_not_the_peers(memory: Any, first: int, tokens: int) -> None:
    """As a direct part is posted."""
    stop = min(TOKENS, first + tokens)
    try:
        begin, tables = read_blocks(sent(memory), 1)
        there = [block_table(ids, begin) for ids in tables]
        spans = plan(SHARD, [block_table([4, 0, 2])], there, Part(first, stop, first, True)).spans()
    except (LayoutError, GrantError, MessageError):
        return
    regions = np.array(cache("D").regions)
    assert int(spans.length.sum()) == (stop - first) * token_bytes(cache("D"))
    assert (spans.dst_offset >= 0).all() and (spans.dst_offset + spans.length <= regions[spans.dst_region]).all()
    blocks = set(((spans.dst_offset) // (regions[spans.dst_region] // BLOCKS)).tolist())
    assert blocks <= set(tables[0])


@given(*[st.integers(0, (1 << 64) - 1)] * 3)
def test_notices_come_back(incarnation: int, attempt: int, part: int) -> None:
    assert read_notice(notice_of(incarnation, attempt, part)) == (incarnation, attempt, part)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_notice_or_none(raw: bytes) -> None:
    found = read_notice(raw)
    assert (found is None) == (len(raw) != struct.calcsize("<QQQ"))
    assert found is None or notice_of(*found) == raw


def test_sizes() -> None:
    layout = cache("D")
    assert [aligned(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert token_bytes(layout) == 2 * 2 * 2 * 8 * 2 and request_bytes(layout) == 0
    assert part_offset(SHARD, Part(0, 8, 0, False)) == 0
    assert part_offset(SHARD, Part(24, 32, 8, True)) == 16 * token_bytes(layout)
