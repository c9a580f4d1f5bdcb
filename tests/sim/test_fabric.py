"""The wires: every flow gets its max-min fair share, from the tick at which another joins to the one at which it
leaves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.sim.clock import Clock
from pushkv.sim.fabric import Wires
from pushkv.sim.ticks import ticks

Started = tuple[float, tuple[int, ...], float, float]
"""When (s), over which links, bytes, cap (bytes/s)."""


def carry(capacities: list[float], flows: list[Started]) -> list[float]:
    """When each flow's last byte has arrived (s), by the simulator."""
    clock = Clock(initial_time=0)
    wires = Wires(clock, capacities)
    ends = [-1.0] * len(flows)

    def start(number: int) -> None:
        _, path, size, cap = flows[number]

        def done() -> None:
            assert ends[number] < 0, "arrived twice"
            ends[number] = clock.ticks * 1e-12

        wires.send(path, size, cap, done)

    for number, flow in enumerate(flows):
        clock.call(ticks(flow[0]), start, number)
    clock.run()
    return ends


def fair(capacities: list[float], flows: dict[int, Started]) -> dict[int, float]:
    """Max-min rates by raising all of them in small steps: slow, and written without looking at the real one."""
    rates = dict.fromkeys(flows, 0.0)
    growing = set(flows)
    while growing:
        room = []
        for link, capacity in enumerate(capacities):
            here = [n for n in growing if link in flows[n][1]]
            if here:
                room.append((capacity - sum(rates[n] for n in flows if link in flows[n][1])) / len(here))
        step = min(room + [flows[n][3] - rates[n] for n in growing])
        for n in growing:
            rates[n] += step
        for n in list(growing):
            full = any(
                capacities[link] - sum(rates[m] for m in flows if link in flows[m][1]) <= 1e-9 * capacities[link]
                for link in flows[n][1]
            )
            if full or flows[n][3] - rates[n] <= 1e-9 * flows[n][3]:
                growing.discard(n)
    return rates


def integrate(capacities: list[float], flows: list[Started]) -> list[float]:
    """The same by hand: constant rates from one event to the next."""
    now, left = 0.0, {}
    coming = sorted(range(len(flows)), key=lambda n: (flows[n][0], n))
    ends = [0.0] * len(flows)
    while coming or left:
        rates = fair(capacities, {n: flows[n] for n in left})
        leave = min((now + left[n] / rates[n] for n in left), default=float("inf"))
        join = flows[coming[0]][0] if coming else float("inf")
        then = min(leave, join)
        for n in left:
            left[n] -= rates[n] * (then - now)
        now = then
        for n in [n for n in left if left[n] <= 1e-6 * flows[n][2] or (leave <= join and left[n] / rates[n] <= 1e-11)]:
            ends[n] = now
            del left[n]
        while coming and flows[coming[0]][0] <= now:
            left[coming[0]] = flows[coming[0]][2]
            del coming[0]
    return ends


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[float], list[Started]]:
    links = draw(st.integers(1, 5))
    capacities = [draw(st.sampled_from([1e9, 2.5e9, 7e9, 4e10])) for _ in range(links)]
    flows = []
    for _ in range(draw(st.integers(1, 9))):
        path = tuple(draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True)))
        flows.append(
            (
                draw(st.sampled_from([0.0, 0.0, 0.01, 0.05]) | st.floats(0, 0.2)),
                path,
                draw(st.floats(1e5, 3e8)),
                draw(st.sampled_from([3e8, 2e9, 1e12])),
            )
        )
    return capacities, flows


@settings(deadline=None, max_examples=150)
@given(traffic())
def test_arrivals_match_an_integration_by_hand(case: tuple[list[float], list[Started]]) -> None:
    capacities, flows = case
    assert carry(capacities, flows) == pytest.approx(integrate(capacities, flows), rel=1e-5, abs=1e-9)


def test_one_flow_alone_takes_size_over_the_narrowest() -> None:
    assert carry([4e9, 1e9], [(0.5, (0, 1), 1e8, 5e9)]) == [pytest.approx(0.6, abs=1e-12)]
    assert carry([4e9, 1e9], [(0.5, (0, 1), 1e8, 5e8)]) == [pytest.approx(0.7, abs=1e-12)]


def test_two_flows_share_from_the_tick_the_second_joins_to_the_tick_the_first_leaves() -> None:
    """1 GB/s. A: 100 MB from 0. B: 50 MB from 60 ms. A has 40 MB left, both get half: A ends at 140 ms, B with 10 MB
    left ends at 150 ms."""
    assert carry([1e9], [(0, (0,), 1e8, 1e12), (0.06, (0,), 5e7, 1e12)]) == pytest.approx([0.14, 0.15], abs=1e-11)


def test_what_a_capped_flow_leaves_goes_to_the_other() -> None:
    assert carry([1e9], [(0, (0,), 2e7, 2e8), (0, (0,), 8e7, 1e12)]) == pytest.approx([0.1, 0.1], abs=1e-11)


@settings(deadline=None, max_examples=100)
@given(traffic())
def test_no_byte_is_won_or_lost(case: tuple[list[float], list[Started]]) -> None:
    """Over a busy link that all cross, the last byte arrives when all bytes are through, in whatever shares."""
    _, flows = case
    flows = [(0.0, (0,), size, 1e12) for _, _, size, _ in flows]
    ends = carry([1e9], flows)
    assert max(ends) == pytest.approx(sum(size for _, _, size, _ in flows) / 1e9, rel=1e-9)
    by_size = sorted(range(len(flows)), key=lambda n: flows[n][2])
    assert [ends[n] for n in by_size] == sorted(ends)
