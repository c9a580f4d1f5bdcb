"""Who holds KV blocks for the network, and whose thread posts: what tells pull, push and pushkv apart."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from pushkv.model.timing import gather_s, profiles
from pushkv.sim.scenario import Fault
from pushkv.sim.ticks import ticks
from pushkv.sim.world import World

from .worlds import Row, completed, hasty, leaks, rest, scenario, simulate, start, world

N = 8000
BLOCKS = N // 16
SERVING = profiles.hardware("h200").serving
PERIOD_S = SERVING.schedule_s + SERVING.idle_poll_s
HTTP_S = SERVING.client_in_s + SERVING.client_out_s


def held(mode: str, *, n: int = N, **flags: object) -> tuple[float, float]:
    """KV blocks times seconds that a lone request held on P and on D."""
    totals = simulate(scenario(mode=mode, input_len=n, output_len=20, **flags)).totals
    return totals.held_block_s_prefill, totals.held_block_s_decode


# ---- the cache of P ------------------------------------------------------------------------------------------------


def test_pulls_p_holds_from_its_answer_until_d_has_read() -> None:
    """At least while the answer goes back, the decode leg comes, and D posts; the longer the wire, the longer."""
    on_p, on_d = held("pull")
    assert on_p > BLOCKS * HTTP_S
    assert on_d > 0
    slow_p, slow_d = held("pull", fabric="tcp")
    bytes_s = N * profiles.model("qwen3-8b").kv_bytes_per_token / profiles.fabric("tcp").nic_bytes_per_s
    assert slow_p > BLOCKS * (HTTP_S + bytes_s)
    assert slow_d > BLOCKS * bytes_s


def test_pushs_p_holds_until_written_and_d_from_the_start() -> None:
    on_p, on_d = held("push")
    slow_p, _ = held("push", fabric="tcp")
    bytes_s = N * profiles.model("qwen3-8b").kv_bytes_per_token / profiles.fabric("tcp").nic_bytes_per_s
    assert 0 < on_p < held("pull")[0], "no way over the client"
    assert slow_p > BLOCKS * bytes_s
    prefill_s = simulate(scenario(mode="push", input_len=N)).log.column("prefill_s")[0] - HTTP_S
    assert on_d > BLOCKS * 0.9 * prefill_s


@pytest.mark.parametrize("overlap", ["chunk", "none"])
def test_packed_holds_nothing_on_d_and_nothing_on_p_past_the_gather(overlap: str) -> None:
    """However slow the wire is: staging waits for it, the cache does not. An idle P frees at its next look."""
    size = N * profiles.model("qwen3-8b").kv_bytes_per_token
    gather = gather_s(profiles.hardware("h200"), size, busy=True)
    bound = BLOCKS * (gather + SERVING.transfer_poll_s + 2 * PERIOD_S)
    values = {
        fabric: held("pushkv", path="packed", overlap=overlap, fabric=fabric)
        for fabric in ("nvlink-ucx", "efa-p5en", "tcp")
    }
    for on_p, on_d in values.values():
        assert on_d == 0
        assert on_p <= bound
    assert len(set(values.values())) == 1


def test_direct_holds_on_d_from_the_offer_on() -> None:
    """Later than push, which admits at arrival: here the prompt queues at P for seconds before D gives it anything."""
    rows: list[Row] = [(0.0, N, 5)] * 10
    totals = {
        mode: simulate(scenario(mode=mode, **flags), rows).totals.held_block_s_decode
        for mode, flags in (("push", {}), ("pushkv", {"path": "direct"}))
    }
    assert totals["pushkv"] < 0.5 * totals["push"]


def test_packed_without_a_grant_holds_on_p() -> None:
    """Landing memory for one prompt at a time and a slow wire: the next ones wait in P's cache."""
    rows: list[Row] = [(0.0, N, 5)] * 12
    flags = {"mode": "pushkv", "path": "packed", "overlap": "none", "fabric": "tcp"}
    wide = simulate(scenario(**flags), rows).totals
    narrow = simulate(scenario(**flags, landing_gib=1.2), rows).totals
    assert narrow.held_block_s_prefill > 1.5 * wide.held_block_s_prefill
    assert narrow.held_block_s_decode == 0


# ---- a lease ends with evidence, not with time ---------------------------------------------------------------------


def stuck(*faults: Fault) -> World:
    """A pull whose D is out of reach from just after P's answer on, with short deadlines."""
    plan = scenario(mode="pull", input_len=N, output_len=5, faults=faults)
    return world(plan, [(0.0, N, 5)], settings=hasty(plan))


def answer_s() -> float:
    log = simulate(scenario(mode="pull", input_len=N, output_len=5)).log
    return float(log.column("prefill_s")[0])


@pytest.mark.parametrize(
    ("kind", "target"), [("pause", "D0"), ("partition", "P0-D0"), ("decode-kill", "D0")], ids=["pause", "cut", "kill"]
)
def test_pulls_lease_keeps_the_blocks_past_every_deadline_until_there_is_evidence(kind: str, target: str) -> None:
    """Verdicts fall in time (``wait_s`` is 8 here); blocks come back when D says it has read, or is proven gone."""
    at_s = answer_s() - SERVING.client_out_s  # P has answered, D has not read
    made = stuck(Fault(kind, target, at_s, 30.0))  # type: ignore[arg-type]
    start(made, 25.0)
    p = made.engines["P0"]
    assert p.pool.blocks - len(p.pool) == BLOCKS, "still there, three deadlines later"
    assert made.hosts["P0"].ledger.quarantined() == 1
    rest(made, 20.0)
    assert leaks(made) == []
    assert len(p.pool) == p.pool.blocks


def test_pulls_blocks_are_never_given_back_without_evidence() -> None:
    made = stuck(Fault("decode-kill", "D0", answer_s() - SERVING.client_out_s, None))
    made.go()
    rest(made)
    p = made.engines["P0"]
    assert p.pool.blocks - len(p.pool) == BLOCKS
    assert made.hosts["P0"].ledger.quarantined() == 1


def test_pushs_d_keeps_its_blocks_while_p_may_still_write() -> None:
    """P is cut off while it computes: D's client has its error in time, D's blocks are in quarantine until P is heard
    again."""
    plan = scenario(mode="push", input_len=N, output_len=5, faults=[Fault("partition", "P0-D0", 0.05, 20.0)])
    made = world(plan, [(0.0, N, 5)], settings=hasty(plan))
    made.go()
    settings = made.settings
    assert completed(made) == 0
    assert made.log.column("finish_s")[0] < 0.05 + settings.dead_peer_verdict_s + settings.beat_s
    d = made.engines["D0"]
    go_on = 15.0
    made.env.run(until=made.env.ticks + ticks(go_on))
    assert d.pool.blocks - len(d.pool) == BLOCKS
    rest(made, 30.0)
    assert leaks(made) == []


# ---- the thread of D -----------------------------------------------------------------------------------------------


def fabric_with_posting(folder: Path, times: float) -> str:
    """The NVLink profile with ``times`` the cost per descriptor."""
    text = (files("pushkv.model.timing") / "profiles" / "fabric" / "nvlink-ucx.toml").read_text(encoding="utf-8")
    text, count = re.subn(
        r"^(allocated_s = \{ value = )([0-9.e-]+)", lambda m: f"{m[1]}{float(m[2]) * times:.9g}", text, flags=re.M
    )
    assert count == 2
    path = folder / f"posting-{times}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("mode", ["pull", "push", "pushkv"])
def test_only_pull_posts_on_the_thread_of_d(mode: str, tmp_path: Path) -> None:
    """Somebody decodes on D while prompts come in. With pull each of his tokens waits for D's posting, the more
    descriptors the longer; with push and pushkv P's threads post, and he does not notice.
    """
    rows: list[Row] = [(0.0, 16, 1200)] + [(0.2 + 0.5 * i, N, 1) for i in range(8)]
    flags = {"path": "direct"} if mode == "pushkv" else {}
    tpot_ms, post_s = [], []
    for times in (0.0, 1.0, 3.0):
        log = simulate(scenario(mode=mode, fabric=fabric_with_posting(tmp_path, times), **flags), rows).log
        first = log.column("input_len") == 16
        tpot_ms.append(float(log.milliseconds("tpot")[first][0]))
        post_s.append(float(log.column("post_s")[~first].sum()))
    assert post_s[0] < 1e-3
    assert post_s[1] > 0.2, "one descriptor per block and layer, once the pool has been used"
    lost_ms = [1199 * (value - tpot_ms[0]) for value in tpot_ms]
    if mode == "pull":
        assert 0.5 * 1e3 * post_s[1] < lost_ms[1] <= 1.02e3 * post_s[1]
        assert 0.9 * 1e3 * post_s[2] < lost_ms[2] <= 1.02e3 * post_s[2]
    else:
        assert abs(lost_ms[1]) < 1e-2 * 1e3 * post_s[1]
        assert abs(lost_ms[2]) < 1e-2 * 1e3 * post_s[2]
