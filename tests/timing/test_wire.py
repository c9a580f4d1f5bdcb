"""Posting, the wire, the passes over memory, and fair shares."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.model.timing import (
    Op,
    ProfileError,
    device_bytes_per_s,
    flow_bytes_per_s,
    gather_s,
    max_min_rates,
    post_s,
    profiles,
    scatter_s,
    tail_s,
    transfer_s,
)

from .conftest import Table

FABRIC = st.sampled_from([profiles.fabric(name) for name in profiles.names("fabric")])
OP = st.sampled_from(["WRITE", "READ"])
MOONCAKE_MS = {128: 0.54, 256: 0.61, 512: 0.92, 2048: 2.51, 4096: 4.75, 16384: 16.43}  # the page's rows not in the CSV


@given(FABRIC, OP, st.booleans(), st.booleans(), st.integers(1, 10**6), st.integers(1, 10**6))
def test_posting_grows_with_descriptors(f: Any, op: Any, contiguous: bool, busy: bool, a: int, b: int) -> None:
    few, many = sorted((a, b))
    few_s = post_s(f, few, few * 4096, op, contiguous, busy)
    assert 0 < few_s <= post_s(f, many, many * 4096, op, contiguous, busy)
    assert few_s <= post_s(f, few, few * 4096, op, False, busy)
    assert post_s(f, few, few * 4096, op, contiguous, False) <= post_s(f, few, few * 4096, op, contiguous, True)


@given(FABRIC, OP, st.booleans(), st.integers(1, 10**5), st.integers(0, 10**8), st.integers(0, 10**8))
def test_transfers_grow_with_bytes_and_are_never_faster_than_wire_or_host(
    f: Any, op: Any, contiguous: bool, descriptors: int, a: int, b: int
) -> None:
    small, large = descriptors + min(a, b), descriptors + max(a, b)
    small_s = transfer_s(f, small, descriptors, op, contiguous)
    if not small < f.stripe_threshold_bytes * descriptors <= large:  # striping makes the larger one faster
        assert small_s <= transfer_s(f, large, descriptors, op, contiguous)
    assert small_s >= small / device_bytes_per_s(f, op)
    assert small_s >= post_s(f, descriptors, small, op, contiguous)


def test_nothing_to_send_costs_nothing_and_nonsense_is_refused() -> None:
    fabric = profiles.fabric("nvlink-ucx")
    assert post_s(fabric, 0, 0) == transfer_s(fabric, 0, 0) == transfer_s(fabric, 0, 4) == 0.0
    with pytest.raises(ValueError, match="must be 0 or more"):
        post_s(fabric, -1, 10)
    with pytest.raises(ValueError, match="descriptor order is 'sorted'"):
        post_s(fabric, 1, 10, order="sorted")  # type: ignore[arg-type]
    copy: Any = "COPY"
    with pytest.raises(ProfileError, match="operation is 'COPY', expected WRITE or READ"):
        post_s(fabric, 1, 10, copy)
    with pytest.raises(ProfileError, match="operation is 'COPY', expected WRITE or READ"):
        device_bytes_per_s(fabric, copy)


def test_small_descriptors_take_one_efa_nic_each_and_large_ones_all() -> None:
    efa = profiles.fabric("efa-p5en")
    one, both = efa.nic_bytes_per_s * efa.write_efficiency, device_bytes_per_s(efa)
    assert both == 2 * one
    assert flow_bytes_per_s(efa, 1, 131071) == one
    assert flow_bytes_per_s(efa, 1, 131072) == both
    assert flow_bytes_per_s(efa, 2, 2 * 4096) == both


def test_efa_posting_meets_the_published_times(table: Table) -> None:
    efa = profiles.fabric("efa-p5en")
    rows = [row for row in table("published.csv") if row["metric"].startswith("post_time")]
    assert len(rows) == 2
    for row in rows:
        descriptors = int(row["metric"].split("_")[2])
        assert post_s(efa, descriptors, descriptors * 4096) * 1e3 == pytest.approx(float(row["value"]), rel=0.02)


def test_roce_meets_all_nine_transfer_times_of_mooncake(table: Table) -> None:
    roce, shape = profiles.fabric("roce-8x200"), profiles.model("qwen3-8b")
    rows = [row for row in table("published.csv") if row["metric"] == "kv_transfer"]
    times = MOONCAKE_MS | {int(row["input_len"]): float(row["value"]) for row in rows}
    assert len(times) == 9
    for tokens, ms in times.items():
        share = (tokens + 16) * shape.kv_bytes_per_token_rank(8)  # one of eight ranks, one block more than the prompt
        assert transfer_s(roce, share, 2 * shape.layers) * 1e3 == pytest.approx(ms, rel=0.15), tokens


def test_posting_over_nvlink_meets_the_prototype_and_what_vllm_logged(table: Table) -> None:
    nvlink = profiles.fabric("nvlink-ucx")
    rows = [row for row in table("h200_packed_vs_direct.csv") if row["path"] == "direct"]
    for busy in (False, True):
        runs = [row for row in rows if row["engine_busy"] == str(busy).lower()]
        times = [float(row["make_ms"]) + float(row["post_ms"]) for row in runs]
        model_ms = post_s(nvlink, 128_000, 128_000 * 32768, busy=busy) * 1e3
        assert model_ms == pytest.approx(statistics.mean(times), rel=0.15)


@pytest.mark.parametrize(
    ("mode", "op", "n", "here", "longer"),
    [("pull", "READ", "33", 1.051, 1.172), ("push", "WRITE", "42", 0.960, 1.457)],
)
def test_posting_in_allocated_order_is_fitted_to_one_window_per_mode_and_too_slow_for_longer_prompts(
    table: Table, mode: str, op: Op, n: str, here: float, longer: float
) -> None:
    nvlink = profiles.fabric("nvlink-ucx")

    def ratio(row: dict[str, str]) -> float:
        descriptors = round(float(row["avg_descs"]))
        model_s = post_s(nvlink, descriptors, descriptors * 65536, op, order="allocated")
        return model_s * 1e3 / float(row["avg_post_ms"])

    rows = [row for row in table("h200_transfer_windows.csv") if row["mode"] == mode]
    (fitted,) = (row for row in rows if row["n"] == n and float(row["avg_MB"]) < 150)
    assert ratio(fitted) == pytest.approx(here, abs=0.005)
    held_out = [ratio(row) for row in rows if float(row["avg_descs"]) > 10_000]
    assert statistics.median(held_out) == pytest.approx(longer, abs=0.01)


def test_tails_are_what_nixl_alone_waits_for_scattered_descriptors(table: Table) -> None:
    nvlink = profiles.fabric("nvlink-ucx")
    waits: dict[str, list[tuple[int, float]]] = {"READ": [], "WRITE": []}
    for row in table("h200_nixl_ucx_nvlink.csv"):
        if row["pattern"] == "random" and row["desc_bytes"] == "32768" and int(row["descs"]) >= 256:
            waits[row["op"]].append((int(row["descs"]), float(row["wait_us"]) * 1e-6))
    slope_s, start_s = statistics.linear_regression(*zip(*waits["READ"], strict=True))
    assert nvlink.read.tail_s == pytest.approx(start_s, rel=0.02)
    assert nvlink.read.tail_per_descriptor_s == pytest.approx(slope_s, rel=0.02)
    assert nvlink.write.tail_s == pytest.approx(statistics.mean(wait for _, wait in waits["WRITE"]), rel=0.03)
    assert tail_s(nvlink, 2000, "READ") == pytest.approx(0.95e-3 + 0.14e-3)
    assert tail_s(nvlink, 0, "READ") == 0.0 == tail_s(profiles.fabric("efa-p5en"), 2000)
    size = 2000 * 65536
    apart_s = transfer_s(nvlink, size, 2000, "READ", contiguous=False, order="allocated")
    assert apart_s == pytest.approx(post_s(nvlink, 2000, size, "READ", order="allocated") + 15e-6 + 1.09e-3)


def test_large_contiguous_transfers_over_nvlink_meet_the_table(table: Table) -> None:
    nvlink = profiles.fabric("nvlink-ucx")
    for row in table("h200_nixl_ucx_nvlink.csv"):
        size, descriptors = int(row["desc_bytes"]), int(row["descs"])
        if row["pattern"] == "contig" and size * descriptors > 500e6:
            op: Op = "WRITE" if row["op"] == "WRITE" else "READ"
            model_us = transfer_s(nvlink, size * descriptors, descriptors, op) * 1e6
            assert model_us == pytest.approx(float(row["total_us"]), rel=0.2), row


def test_packed_path_meets_the_prototype(table: Table) -> None:
    hardware, nvlink, size = profiles.hardware("h200"), profiles.fabric("nvlink-ucx"), 128_000 * 32768
    rows = [row for row in table("h200_packed_vs_direct.csv") if row["path"] == "packed"]
    for busy in (False, True):
        warm = [row for row in rows if row["engine_busy"] == str(busy).lower() and row["rep"] != "1"]

        def mean(key: str, warm: list[dict[str, str]] = warm) -> float:
            return statistics.mean(float(row[key]) for row in warm)

        assert gather_s(hardware, size, busy) * 1e3 == pytest.approx(mean("gather_ms"), rel=0.03)
        assert scatter_s(hardware, size, busy) * 1e3 == pytest.approx(mean("scatter_ms"), rel=0.03)
        assert transfer_s(nvlink, size, 16) * 1e3 == pytest.approx(mean("wait_ms"), rel=0.06)
    assert gather_s(hardware, size, fused=True) * 1e3 == pytest.approx(3.8, rel=0.05)  # the connector's one kernel
    assert gather_s(hardware, 0) == scatter_s(hardware, 0) == 0.0
    with pytest.raises(ValueError, match="must be 0 or more"):
        gather_s(hardware, -1)


@st.composite
def _networks(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[float]]:
    capacities = draw(st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=8))
    path = st.lists(st.integers(0, len(capacities) - 1), min_size=1, max_size=4).map(tuple)
    return draw(st.lists(path, max_size=20)), capacities


@given(_networks())
def test_max_min_rates_fill_links_fairly(network: tuple[list[tuple[int, ...]], list[float]]) -> None:
    paths, capacities = network
    rates = max_min_rates(paths, capacities)
    assert len(rates) == len(paths)
    assert all(rate > 0 for rate in rates)
    flows = list(zip(rates, paths, strict=True))
    load = [math.fsum(rate for rate, path in flows if link in path) for link in range(len(capacities))]
    for used, capacity in zip(load, capacities, strict=True):
        assert used <= capacity * (1 + 1e-9)
    for rate, path in flows:
        bottlenecks = [
            link
            for link in path
            if load[link] >= capacities[link] * (1 - 1e-9)
            and all(other <= rate * (1 + 1e-9) for other, p in flows if link in p)
        ]
        assert bottlenecks, "no full link on which this flow has the largest rate"


def test_max_min_rates_of_a_known_network() -> None:
    assert max_min_rates([(0,), (0, 1), (1,), ()], [10.0, 4.0]) == [8.0, 2.0, 2.0, math.inf]
    assert max_min_rates([], []) == []
    assert max_min_rates([(0, 0), (0,)], [4.0]) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("paths", "capacities", "says"),
    [([(2,)], [1.0, 1.0], "crosses link 2"), ([(0,)], [0.0], "capacity of link 0"), ([], [math.nan], "is nan")],
)
def test_impossible_networks_are_refused(paths: Any, capacities: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        max_min_rates(paths, capacities)
