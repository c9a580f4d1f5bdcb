"""Engines die, stop and lose each other: every request ends in time, what lives goes on undisturbed, and nothing is
left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from pushkv.model.routing import RoundRobin
from pushkv.sim.faults import PATIENCE_S
from pushkv.sim.metrics import COMPLETED, FAILED
from pushkv.sim.scenario import Fault
from pushkv.sim.ticks import ticks
from pushkv.sim.world import World

from .worlds import WAYS, Row, faulty_clusters, hasty, leaks, rest, scenario, way_name, world

ROUTERS = ("concurrent", "sequential")
WAYS_AND_ROUTERS = [
    {**way, "router": router} for way in WAYS for router in ROUTERS if way["mode"] != "pull" or router == "sequential"
]
ROWS: list[Row] = [(0.05 * i, 300 + 90 * (i % 7), 10 + i % 20) for i in range(100)]
"""Five seconds of requests, a fifth of a second apart for each pair of two."""

AT_S, FOR_S = 1.0, 0.6


def faults(kind: str, for_s: float | None = FOR_S) -> list[Fault]:
    target = {"prefill-kill": "P0", "decode-kill": "D0", "partition": "P0-D0"}.get(kind, kind[-2:])
    return [Fault("pause" if kind.startswith("pause") else kind, target, AT_S, for_s)]  # type: ignore[arg-type]


KINDS = ("prefill-kill", "decode-kill", "partition", "pause P0", "pause D0")


def done(made: World) -> NDArray[np.bool_]:
    """Whether each request was completed, in the order of arrival."""
    order = np.argsort(made.log.column("arrival_s"), kind="stable")
    return np.asarray(made.log.column("status")[order] == COMPLETED)


def ends_s(made: World) -> NDArray[np.float64]:
    order = np.argsort(made.log.column("arrival_s"), kind="stable")
    return made.log.column("finish_s")[order]


def run(flags: dict[str, Any], struck: list[Fault], rows: list[Row] = ROWS, *, quick: bool = True) -> World:
    plan = scenario(faults=struck, **flags)
    made = world(plan, rows, settings=hasty(plan) if quick else None)
    made.go()
    assert len(made.log) == len(rows), "every request has ended"
    return made


@pytest.mark.parametrize("way", WAYS_AND_ROUTERS, ids=way_name)
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_fault_all_is_as_before(way: dict[str, str], kind: str) -> None:
    """Requests in the fault's way may fail, those long before and after it do not, and what was held for the lost ones
    comes back."""
    made = run(way, faults(kind))
    was = done(made)
    arrival = np.array([row[0] for row in ROWS])
    before, after = arrival < AT_S - 0.5, arrival > AT_S + FOR_S + made.settings.dead_peer_verdict_s + 0.5
    assert was[before].all()
    assert was[after].all()
    assert before.sum() > 5 and after.sum() > 20
    rest(made, 30.0)
    assert leaks(made) == []
    if kind.endswith("kill"):
        assert not was.all()
        assert (ends_s(made)[~was] < AT_S + FOR_S + made.settings.receiver_verdict_s).all()


@pytest.mark.parametrize("way", WAYS_AND_ROUTERS, ids=way_name)
@pytest.mark.parametrize("kind", ["partition", "pause P0", "pause D0"])
def test_what_is_over_before_it_is_suspected_costs_time_and_no_request(way: dict[str, str], kind: str) -> None:
    """Nobody is wrongly declared dead: half a second of silence is no verdict when ten are allowed."""
    made = run(way, faults(kind), quick=False)
    assert done(made).all()
    calm = run(way, [], quick=False)
    if kind == "partition" and way["mode"] == "pull":  # D reads on; what it has read, P learns late
        assert made.totals().held_block_s_prefill > 2 * calm.totals().held_block_s_prefill
    else:
        assert ends_s(made).mean() > ends_s(calm).mean()
    rest(made, 5.0)
    assert leaks(made) == []


@pytest.mark.parametrize("way", WAYS_AND_ROUTERS, ids=way_name)
@pytest.mark.parametrize("kind", ["prefill-kill", "decode-kill"])
def test_a_dead_engine_fails_its_requests_within_the_bound(way: dict[str, str], kind: str) -> None:
    """For good, and with the real settings: what waited for it fails by suspicion, what comes later at once."""
    made = run(way, faults(kind, None), quick=False)
    was, ends = done(made), ends_s(made)
    arrival = np.array([row[0] for row in ROWS])
    assert not was[arrival > AT_S].any()
    lost = ~was & (arrival <= AT_S)
    assert lost.any()
    protocol = made.settings
    assert (ends[lost] <= AT_S + protocol.dead_peer_verdict_s + protocol.beat_s).all()
    assert (ends[arrival > AT_S] - arrival[arrival > AT_S] < 0.1).all()


class Alternate(RoundRobin):
    """A router that knows of no health: request i goes to pair i modulo two."""

    def mark(self, engine: int, dead: bool) -> None:
        """Nothing changes."""


@pytest.mark.parametrize("way", WAYS_AND_ROUTERS, ids=way_name)
@pytest.mark.parametrize("kind", KINDS)
def test_the_other_pair_is_not_disturbed(way: dict[str, str], kind: str) -> None:
    """P0 feeds D0 and P1 feeds D1. Whatever befalls the first pair, the second's requests end at the very same tick."""
    ends = []
    for struck in ([], faults(kind, 2.0)):
        plan = scenario(faults=struck, prefill=2, decode=2, **way)
        made = world(plan, ROWS, settings=hasty(plan))
        made._pick_p = made._pick_d = Alternate(2)  # type: ignore[assignment]
        made._pick_d = Alternate(2)  # type: ignore[assignment]
        made.go()
        ends.append(ends_s(made))
        assert done(made)[1::2].all()
    assert (ends[0][1::2] == ends[1][1::2]).all()
    assert (ends[0][::2] != ends[1][::2]).any()


@pytest.mark.parametrize("way", WAYS_AND_ROUTERS, ids=way_name)
def test_the_router_avoids_a_dead_engine(way: dict[str, str]) -> None:
    """Two of each, one P and one D die for good: what arrives later goes to the others and is completed."""
    struck = [Fault("prefill-kill", "P1", AT_S, None), Fault("decode-kill", "D0", AT_S, None)]
    made = run({**way, "prefill": 2, "decode": 2}, struck)
    arrival = np.array([row[0] for row in ROWS])
    assert done(made)[arrival > AT_S + 0.1].all()
    assert not done(made)[arrival > AT_S - 0.2].all()


@pytest.mark.parametrize("way", WAYS_AND_ROUTERS, ids=way_name)
def test_faults_may_overlap(way: dict[str, str]) -> None:
    """Killed twice, cut off while dead, paused after the restart, P and D at once."""
    struck = [
        Fault("prefill-kill", "P0", 0.8, 1.0),
        Fault("prefill-kill", "P0", 1.2, 1.0),
        Fault("partition", "P0-D0", 1.5, 0.7),
        Fault("decode-kill", "D0", 1.6, 0.3),
        Fault("pause", "P0", 2.3, 0.4),
        Fault("pause", "P0", 2.4, 0.1),
    ]
    made = run(way, struck)
    arrival = np.array([row[0] for row in ROWS])
    assert done(made)[arrival > 4.5].all()
    assert [engine.name for engine, _ in made.faults.gone] == ["P0", "D0"], "each came back once"
    rest(made, 30.0)
    assert leaks(made) == []


@pytest.mark.parametrize("at_s", [0.06, 0.16], ids=["before it decodes", "while it decodes"])
def test_a_cluster_that_can_never_go_on_ends_its_requests(at_s: float) -> None:
    """D dies for good while it may still read all of P's cache. Nothing proves that it does not, so no block comes
    back, and P starves: the clients give up, and the run ends. What the dead engine has in its batch does not go on.
    """
    rows: list[Row] = [(0.01 * i, 300, 100) for i in range(12)]
    plan = scenario(
        mode="pull", num_blocks=40, decode=2, router="sequential", faults=[Fault("decode-kill", "D0", at_s, None)]
    )
    made = world(plan, rows, settings=hasty(plan))
    made._pick_d = Alternate(2)  # type: ignore[assignment]
    made.go()
    assert len(made.log) == len(rows)
    assert made.env.ticks < ticks(4 * PATIENCE_S)


@pytest.mark.parametrize("back_s", [None, 0.01], ids=["for good", "back at once"])
def test_nothing_is_read_from_a_dead_engine(back_s: float | None) -> None:
    """P dies while D reads its cache over a slow wire: what D has got is worth nothing, P back by then or not."""
    rows: list[Row] = [(0.0, 8000, 5)]
    flags = {"mode": "pull", "fabric": "tcp"}
    calm = run(flags, [], rows)
    at_s = float(calm.log.column("first_token_s")[0]) - 0.05
    wire_s = float(calm.log.column("wire_s")[0])
    assert wire_s > 0.08, "the read is under way when P dies"
    made = run(flags, [Fault("prefill-kill", "P0", at_s, back_s)], rows)
    assert not done(made).any()
    assert made.log.column("finish_s")[0] < at_s + 0.2, "the read breaks, nobody waits for a verdict"
    rest(made, 20.0)
    assert leaks(made) == []


def test_a_registration_that_cannot_go_with_the_answer_follows_by_itself() -> None:
    """Pull. P has come back and is at work before D has taken note: its answer goes without a registration, which comes
    when they know each other. D, who has nothing else to do, looks up for it at once.
    """
    rows: list[Row] = [(0.0, 100, 5), (0.55, 100, 5)]
    plan = scenario(mode="pull", faults=[Fault("prefill-kill", "P0", 0.5, 0.01)])
    ends = []
    for fast in (True, False):
        made = world(plan, rows, settings=hasty(plan), fast=fast)
        made.go()
        assert done(made).all()
        ends.append(ends_s(made))
    assert (ends[0] == ends[1]).all()
    assert 0.7 < ends[0][1] < 1.0


def test_counters_outlive_the_engine() -> None:
    """What a killed engine had done stays in the totals."""
    calm, struck = (
        run({"mode": "push"}, [], ROWS[:20]),
        run({"mode": "push"}, [Fault("decode-kill", "D0", 1.8, 0.1)], ROWS[:20]),
    )
    assert struck.totals().machine_steps > 0.9 * calm.totals().machine_steps
    assert struck.totals().events > 0.5 * calm.totals().events


LATE_S = 60.0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(faulty_clusters())
def test_small_clusters_survive_anything(case: tuple[dict[str, Any], list[Row], list[Fault]]) -> None:
    """Short of memory and places, up to four faults at any time: all ends, all comes back, and new requests are served
    by everyone."""
    flags, rows, struck = case
    fresh: list[Row] = [(LATE_S + 0.01 * i, 200, 5) for i in range(3 * max(flags["prefill"], flags["decode"]))]
    fresh = [row for row in fresh if -(-205 // flags["block_size"]) <= flags["num_blocks"]]
    made = run(flags, struck, rows + fresh)
    assert done(made)[len(rows) :].all()
    assert (ends_s(made)[: len(rows)] < LATE_S).all()
    rest(made, 20.0)
    assert leaks(made) == []


@pytest.mark.parametrize("way", [{"mode": "push"}, {"mode": "pushkv", "path": "direct"}], ids=way_name)
def test_a_request_that_needs_blocks_which_a_dead_server_may_still_write_fails_in_the_end(
    way: dict[str, str],
) -> None:
    """P0 is killed for good with a write under way, so D's blocks of it stay in quarantine. The other request grows
    until it needs them: D preempts it, and it waits, as in vLLM, until its client has had enough."""
    plan = scenario(
        **way,
        num_blocks=100,
        token_budget=256,
        prefill=2,
        fabric="tcp",
        faults=[Fault("prefill-kill", "P0", 0.1, None)],
    )
    made = world(plan, [(0.0, 600, 4), (0.001, 600, 1000)], settings=hasty(plan))
    made.go()
    d = made.engines["D0"]
    assert made.hosts["D0"].ledger.quarantined() == 1
    assert made.log.column("status").tolist() == [FAILED, FAILED]
    assert d.preemptions < 10
    assert (d.open, d.running, len(d.waiting)) == (1, 0, 0)  # what is in quarantine stays open
    assert made.env.ticks < ticks(4 * PATIENCE_S)
