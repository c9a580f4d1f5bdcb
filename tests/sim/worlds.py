"""Small simulated clusters for the tests, and what must be true of one that has come to rest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st
from simpy.core import StopSimulation

from pushkv.model.protocol import Settings
from pushkv.sim import report
from pushkv.sim.connector import Receiving
from pushkv.sim.fault_file import Kind
from pushkv.sim.metrics import COMPLETED, RequestLog
from pushkv.sim.scenario import Fault, Scenario, load
from pushkv.sim.ticks import ticks
from pushkv.sim.trace import TraceWriter
from pushkv.sim.workload import Workload, generate
from pushkv.sim.world import Result, World, run

Row = tuple[float, int, int]
"""Arrival (s), prompt tokens, output tokens."""

LONG_S = 3000.0
"""Past every deadline of the protocol, lease and write one after the other included."""


def hasty(plan: Scenario) -> Settings:
    """Deadlines so short that a run of a few simulated seconds meets all of them."""
    transfers = World(plan, arrivals([(0.0, 1, 1)]), RequestLog(), None, None, True, None, False).transfers
    return Settings(
        beat_s=0.2, suspect_after_s=1.0, wait_s=8, lease_s=8, orphan_s=3, write_s=3, drain_s=0.2, greet_s=0.1,
        pause_s=0.4, landing_segments=transfers.landing_segments, staging_bytes=int(plan.staging_gib * (1 << 30)),
        staging_share=1.0,
    )  # fmt: skip


WAYS: tuple[dict[str, Any], ...] = (
    {"mode": "pull"},
    {"mode": "push"},
    {"mode": "pushkv", "path": "packed", "overlap": "chunk"},
    {"mode": "pushkv", "path": "packed", "overlap": "none"},
    {"mode": "pushkv", "path": "direct"},
)
"""Every way for the bytes to get from P to D."""


def way_name(way: dict[str, str]) -> str:
    return "-".join(way.values())


def scenario(*, faults: Sequence[Fault] = (), **flags: Any) -> Scenario:
    made = load(None, {"requests": 1, **flags})
    return dataclasses.replace(made, fault_list=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def arrivals(rows: Sequence[Row]) -> Workload:
    at, n, out = zip(*rows, strict=True) if rows else ((), (), ())
    return Workload(np.array(at, np.float64), np.array(n, np.int32), np.array(out, np.int32))


def world(
    plan: Scenario,
    rows: Sequence[Row] | None = None,
    *,
    fast: bool = True,
    settings: Settings | None = None,
    encoded: bool = False,
    trace: TraceWriter | None = None,
) -> World:
    """A world that has not started: ``go`` runs it."""
    load_ = generate(plan) if rows is None else arrivals(rows)
    return World(plan, load_, RequestLog(), None, trace, fast, settings, encoded)


def simulate(plan: Scenario, rows: Sequence[Row] | None = None, **options: Any) -> Result:
    return run(plan, arrivals=None if rows is None else arrivals(rows), **options)


def text(result: Result) -> str:
    """All that a run says, but for how long it took: the report, and every request to the last bit."""
    document = report.document(result)
    del document["wall_s"]
    return json.dumps(document) + result.log._cells.tobytes().hex()


def rest(made: World, seconds: float = LONG_S) -> None:
    """Let everything that is still open come to its end."""
    end = made.env.ticks + ticks(seconds)
    while made.env.ticks < end:  # the end of the last request may stop the first of these
        made.env.run(until=end)


def start(made: World, seconds: float) -> None:
    """The run's first ``seconds``, whether all requests have ended or not; ``rest`` goes on from there."""

    def stop(_: None) -> None:
        raise StopSimulation(None)

    end = ticks(1.0 + seconds)
    made.later(end, stop, None)
    made.go()
    rest(made, (end - made.env.ticks) * 1e-12)


def leaks(made: World) -> list[str]:
    """What is not back where it belongs, on every engine that lives."""
    found = []

    def look(where: str, value: object, want: object) -> None:
        if value != want:
            found.append(f"{where}: {value}, not {want}")

    for name, engine in made.engines.items():
        host = made.hosts[name]
        if host.dead:
            continue
        free = sorted(engine.pool._free)
        look(f"{name} blocks", free == list(range(1, engine.pool.blocks + 1)), True)
        for what in ("active", "waiting", "prefilling", "inbox", "_starting"):
            look(f"{name} {what}", len(getattr(engine, what)), 0)
        look(f"{name} running", engine.running, 0)
        look(f"{name} open", engine.open, 0)
        look(f"{name} books", host.ledger.open(), (0, 0))
        look(f"{name} landing", host.ledger.landing_free, made.settings.landing_segments)
        look(f"{name} quarantine", host.ledger.quarantined(), 0)
        sender, receiver = host.endpoint.sender, host.endpoint.receiver
        look(f"{name} staging", sender.staged_bytes, 0)
        for table in ("transfers", "writes", "live", "short"):
            look(f"{name} sender {table}", sender.sizes()[table], 0)
        for table in ("transfers", "live"):
            look(f"{name} receiver {table}", receiver.sizes()[table], 0)
        connector = engine.connector
        tables = ["queue", "remote", "loaded"] if isinstance(connector, Receiving) else ["held"]
        tables += ["_fresh", "_landed", "_seen", "_inbox", "_read", "freeable", "expecting", "_at_work", "_under_way"]
        tables += ["_announced", "_told"]
        for table in tables:
            content = getattr(connector, table, None)
            if callable(content):
                continue  # one half's table is another half's method
            size = content if isinstance(content, int) else len(content or ())
            look(f"{name} connector {table}", size, 0)
    look("flights", len(made.flights), 0)
    for picker in (made._pick_p, made._pick_d):
        look("tokens that the router counts", sum(map(abs, picker._outstanding)), 0)
    return found


def completed(made: World) -> int:
    return int((made.log.column("status") == COMPLETED).sum())


def small(draw: st.DrawFn) -> tuple[dict[str, Any], list[Row]]:
    """A random small cluster and its requests: memory and places are short, so that preemption, give-way and queues
    happen."""
    way = draw(st.sampled_from(WAYS))
    block = draw(st.sampled_from([16, 32]))
    count = draw(st.integers(1, 24))
    gap = draw(st.sampled_from([0.0, 0.004, 0.03, 0.3]))
    rows: list[Row] = []
    at = 0.0
    for _ in range(count):
        at += draw(st.floats(0, 2 * gap)) if gap else 0.0
        rows.append((at, draw(st.integers(1, 1500)), draw(st.integers(1, 120))))
    longest = max(-(-(n + out) // block) for _, n, out in rows)
    flags: dict[str, Any] = {
        **way,
        "block_size": block,
        "num_blocks": longest + draw(st.sampled_from([0, 3, 20, 200])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 5, 128])),
        "token_budget": draw(st.sampled_from([256, 2048, 8192])),
        "prefill": draw(st.integers(1, 3)),
        "decode": draw(st.integers(1, 3)),
        "prefill_tp": draw(st.sampled_from([1, 2, 4])),
        "decode_tp": draw(st.sampled_from([1, 2, 4])),
        "fabric": draw(st.sampled_from(["nvlink-ucx", "efa-p5en", "tcp"])),
        "router": draw(st.sampled_from(["concurrent", "sequential"])),
        "prefill_cached_fraction": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        "landing_gib": draw(st.sampled_from([0.25, 8.0])),
        "staging_gib": draw(st.sampled_from([0.02, 0.1, 8.0])),
    }
    if way["mode"] == "pull":
        flags["router"] = "sequential"
    return flags, rows


clusters = st.composite(small)()


@st.composite
def faulty_clusters(draw: st.DrawFn, *, for_good: bool = False) -> tuple[dict[str, Any], list[Row], list[Fault]]:
    """A random small cluster, its requests, and up to four faults while they are under way."""
    flags, rows = small(draw)
    faults: list[Fault] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(get_args(Kind)))
        p, d = f"P{draw(st.integers(0, flags['prefill'] - 1))}", f"D{draw(st.integers(0, flags['decode'] - 1))}"
        either = draw(st.sampled_from([p, d]))
        target = {"prefill-kill": p, "decode-kill": d, "partition": f"{p}-{d}", "pause": either}[kind]
        lasting = [0.01, 0.3, 1.5, 5.0] + [None] * (for_good and kind.endswith("kill"))
        faults.append(Fault(kind, target, draw(st.floats(0, 1.5)), draw(st.sampled_from(lasting))))
    return flags, rows, faults
