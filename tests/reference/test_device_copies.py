"""The kernel that gathers and scatters on a device, run by Triton's interpreter, against the oracle of ``Copier``."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.model.layout import Part, block_table, dense_layout, pair, plan_gather, plan_scatter, scatter_ahead
from pushkv.reference import device_copies
from pushkv.reference.copies import NOWHERE, Copier, CopyError
from pushkv.reference.device_copies import DeviceCopier
from pushkv.reference.lists import Lists
from pushkv.reference.pools import SegmentPool
from tests.layout.scenarios import Scenario, dense

torch: Any = pytest.importorskip("torch", reason="copies are torch operations")
pytest.importorskip("triton", reason="the kernel is Triton's")

from .test_copies import CACHE, check  # noqa: E402 - where torch is missing it cannot be imported


@settings(max_examples=12, deadline=None)
@given(dense(), st.sampled_from([16, 64, 1000]), st.integers(0, 20))
def test_dense_layouts(scenario: Scenario, segment_bytes: int, offset: int) -> None:
    check(scenario, segment_bytes, offset, DeviceCopier)


@settings(max_examples=6, deadline=None)
@given(dense(hybrid=True), st.sampled_from([48, 1000]))
def test_hybrid_layouts(scenario: Scenario, segment_bytes: int) -> None:
    check(scenario, segment_bytes, 0, DeviceCopier)


@pytest.mark.parametrize("tokens", [64, 59, 3])
@pytest.mark.parametrize("axes", ["interleaved", "nhd_apart", "hnd_paired"])
@pytest.mark.parametrize("neighbours", [True, False])
def test_the_same_bytes_as_the_copier_of_hosts(axes: str, tokens: int, neighbours: bool) -> None:
    """Real rows, whole blocks and the beginning of one, blocks that are neighbours and that are not, segments that rows
    straddle.
    """
    rng = np.random.default_rng(tokens)
    cache = {**CACHE, "kv_heads": 2, "num_blocks": 8}
    layout = dense_layout("P", axes, ["a", "b"], **cache)
    (shard,) = pair([layout], [layout])
    part = Part.whole(0, tokens)
    blocks = np.arange(2, 6) if neighbours else rng.permutation(8)[:4]
    regions = [torch.from_numpy(rng.integers(0, 256, size, np.uint8)) for size in layout.regions]
    segment = 12288
    pools = [SegmentPool(shard.part_bytes(part) // segment + 4, segment) for _ in range(2)]
    ids = rng.permutation(pools[0].count)[: -(-(shard.part_bytes(part) + 256) // segment)].tolist()
    gather = plan_gather(shard, [block_table(blocks)], part)
    for kind, pool in zip((Copier, DeviceCopier), pools, strict=True):
        pool.tensor.fill_(0)
        kind(regions, pool.tensor, segment).gather(gather, ids, 256)
    assert torch.equal(pools[0].tensor, pools[1].tensor)
    assert pools[0].tensor.any()
    targets = [[torch.zeros_like(region) for region in regions] for _ in range(2)]
    scatter = plan_scatter(shard, [block_table(rng.permutation(8)[:4])], part)
    for kind, target in zip((Copier, DeviceCopier), targets, strict=True):
        kind(target, pools[0].tensor, segment).scatter(scatter, ids, 256)
    assert all(torch.equal(one, other) for one, other in zip(*targets, strict=True))
    assert any(one.any() for one in targets[0])


def test_lists_grow_with_layers_plus_blocks() -> None:
    sizes = []
    for layers, blocks in ((4, 100), (8, 100), (4, 200)):
        names = [f"layers.{number}" for number in range(layers)]
        layout = dense_layout("P", "interleaved", names, **{**CACHE, "num_blocks": 600})
        (shard,) = pair([layout], [layout])
        table = block_table(np.random.default_rng(1).permutation(600)[:blocks])
        gather = plan_gather(shard, [table], Part.whole(0, 16 * blocks))
        bases = np.arange(layers, dtype=np.int64) << 32
        rows = device_copies.rows_of(
            gather, bases, np.asarray(layout.regions), 1 << 21, gather.total_bytes, 1 << 21, 0, gather=True
        )
        sizes.append(sum(len(one) for batch in rows for one in batch.lists))
    few, more_layers, more_blocks = sizes
    assert more_layers - few <= 4
    assert more_blocks - few <= 3 * 100


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    layout = dense_layout("P", "nhd_apart", ["a"], **CACHE)
    (shard,) = pair([layout], [layout])
    gather = plan_gather(shard, [block_table([5, 1, 2, 3])], Part.whole(0, 64))
    regions = [torch.ones(size, dtype=torch.uint8) for size in layout.regions]
    pool = SegmentPool(64, 4096)
    pool.tensor.fill_(0)
    need = gather.total_bytes // 4096
    copier = DeviceCopier(regions, pool.tensor, 4096)
    for segments in (range(need - 1), [*range(need - 1), 64], [*range(need - 1), -1]):
        with pytest.raises(CopyError):
            copier.gather(gather, list(segments))
    with pytest.raises(CopyError):
        DeviceCopier([region[:4096] for region in regions], pool.tensor, 4096).gather(gather, list(range(need)))
    with pytest.raises(CopyError):
        DeviceCopier(regions[:1], pool.tensor, 4096).gather(gather, list(range(need)))
    assert not pool.tensor.any()


class Stream:
    """A stream that writes down what it is asked, in order."""

    def __init__(self) -> None:
        self.did: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.did.append(("wait", event))

    def synchronize(self) -> None:
        self.did.append("synchronize")


class Cuda:
    """`torch.cuda`, as far as the kernel's module uses it: one current stream."""

    def __init__(self) -> None:
        self.current = Stream()
        self.devices: list[Any] = []

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.devices.append(device)
        yield

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self) -> Stream:
        return self.current

    def Event(self, *, blocking: bool) -> Any:
        assert blocking  # whoever waits for it sleeps
        return SimpleNamespace(record=lambda: self.current.did.append("record"))


def test_on_a_device_the_host_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists leave from pinned memory, before the stream waits for the event; the kernel comes behind it, then the event
    that says that it is done.
    """
    from pushkv.reference import device_kernel

    cuda, stream, engine = Cuda(), Stream(), Stream()
    device = SimpleNamespace(type="cuda", index=0)
    real, launched = device_kernel._launch, []

    def send(here: Any, there: Any) -> None:
        cuda.current.did.append("send")
        there.copy_(here)

    def launch(*arguments: Any) -> None:
        cuda.current.did.append("launch")
        launched.append(real(*arguments))

    monkeypatch.setattr(device_kernel, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device_kernel, "_send", send)
    monkeypatch.setattr(device_kernel, "_launch", launch)
    layout = dense_layout("P", "interleaved", ["a", "b"], **CACHE)
    (shard,) = pair([layout], [layout])
    part = Part.whole(0, 50)
    gather = plan_gather(shard, [block_table([5, 1, 2, 3])], part)
    regions = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in layout.regions]
    pools = [SegmentPool(64, 65536) for _ in range(2)]
    segments = list(range(-(-shard.part_bytes(part) // 65536)))
    copier = DeviceCopier(regions, pools[0].tensor, 65536, stream)
    monkeypatch.setattr(copier, "_device", device)
    monkeypatch.setattr(copier, "_lanes", [(stream, Lists(torch.device("cpu")))] * 2)
    cuda.current = engine
    copy = copier.gather(gather, segments, 0, "after")
    assert stream.did == ["send", ("wait", "after"), "launch", "record"]
    assert engine.did == []
    assert cuda.devices == [device]
    Copier(regions, pools[1].tensor, 65536).gather(gather, segments)
    size = shard.part_bytes(part)
    assert torch.equal(pools[0].tensor[:size], pools[1].tensor[:size])
    assert copy._event is not None


def test_copies_that_wait_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no event is not behind what does, and is not kept out by its lists either."""
    layout = dense_layout("P", "interleaved", ["a", "b"], **CACHE)
    (shard,) = pair([layout], [layout])
    gather = plan_gather(shard, [block_table([5, 1])], Part.whole(0, 20))
    regions = [torch.zeros(size, dtype=torch.uint8) for size in layout.regions]
    pool = SegmentPool(64, 65536).tensor
    ran: list[tuple[Any, Any, Any]] = []

    def run(batches: Any, places: Any, size: int, device: Any, stream: Any, after: Any, lists: Any, **_: Any) -> Any:
        ran.append((stream, after, lists))
        return None, None

    for streams in (("at once", "waiting"), ("at once",)):
        copier = DeviceCopier(regions, pool, 65536, *streams)
        monkeypatch.setattr(copier, "_kernel", SimpleNamespace(run=run))
        for lane, after in enumerate((None, "step 7")):
            assert copier.gather(gather, [0, 1, 2], 0, after).lane == lane
            assert copier.scatter_ahead([], [], [0, 1, 2], after).lane == NOWHERE, "it says nothing about the others"
    assert [one[:2] for one in ran[::2]] == [
        ("at once", None), ("waiting", "step 7"), ("at once", None), ("at once", "step 7"),
    ]  # fmt: skip
    two, one = DeviceCopier(regions, pool, 65536, 1, 2), DeviceCopier(regions, pool, 65536, 1)
    assert two._lanes[0] is not two._lanes[1] and one._lanes[0] is one._lanes[1]


@pytest.mark.parametrize("axes", ["interleaved", "nhd_apart", "hnd_paired"])
@pytest.mark.parametrize("tokens", [150, 7])
def test_a_scatter_that_was_prepared(axes: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part, before the blocks are known, and done with as few launches as the whole would need."""
    rng = np.random.default_rng(tokens)
    cache = {**CACHE, "kv_heads": 2, "num_blocks": 24}
    layout = dense_layout("P", axes, ["a", "b", "c"], **cache)
    (shard,) = pair([layout], [layout])
    cuts = [0, *[cut for cut in (32, 80, 131) if cut < tokens], tokens]
    parts = [Part(start, stop, 0, stop == tokens) for start, stop in itertools.pairwise(cuts)]
    segment = 12288
    pool = SegmentPool(shard.part_bytes(Part.whole(0, tokens)) // segment + 4, segment)
    pool.tensor.copy_(torch.from_numpy(rng.integers(0, 256, len(pool.tensor), np.uint8)))
    ids = rng.permutation(pool.count)[: -(-(shard.part_bytes(Part.whole(0, tokens)) + 512) // segment)].tolist()
    targets = [[torch.zeros(size, dtype=torch.uint8) for size in layout.regions] for _ in range(2)]
    table = block_table(rng.permutation(24)[: -(-tokens // 16)])
    copier = DeviceCopier(targets[0], pool.tensor, segment)
    prepared = []
    offset, plain = 512, Copier(targets[1], pool.tensor, segment)
    for part in parts:
        prepared += copier.prepare(scatter_ahead(shard, part), offset)
        plain.scatter(plan_scatter(shard, [table], part), ids, offset)
        offset += shard.part_bytes(part)
    launched = []
    real = copier._kernel._tile
    monkeypatch.setattr(copier._kernel, "_tile", lambda *a: launched.append(1) or real(*a))
    copier.scatter_ahead(prepared, [table], ids)
    assert all(torch.equal(one, other) for one, other in zip(*targets, strict=True))
    assert any(one.any() for one in targets[0])
    assert len(launched) <= len({one.key for one in prepared})
    if axes == "interleaved" and tokens == 150:
        assert len(launched) < len(prepared)
    for few in (table.ids[:-1], np.full(len(table.ids), 24), np.full(len(table.ids), -1)):
        with pytest.raises(CopyError):
            copier.scatter_ahead(prepared, [block_table(few)], ids)
    with pytest.raises(CopyError):
        copier.scatter_ahead(prepared, [table], ids[:1] if len(ids) > 1 else [])
    assert all(torch.equal(one, other) for one, other in zip(*targets, strict=True))
