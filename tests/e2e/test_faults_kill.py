"""Servers are killed and frozen, with kill -9 and SIGSTOP, while they owe each other something.

After each: nothing is left in either cache, within a bound, and the next request is right. ``BOUND_S`` is the dead-peer
bound of the settings (3 s), the fabric's drain, one round of beats, and slack for a machine that does other things too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from .answers import right_or_failed, same
from .cluster import Cluster, Oracle, Pair
from .dispatch import Answer, Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, DEATH_S, LONG, Fault, bounded, faulty_pair, started
from .servers import start_all


def under_way(client: Client, pair: Pair, prompt: list[int], when: str) -> list[Coroutine[Any, Any, Answer]]:
    """The legs of a request whose prefill has not come (``waiting``), or whose write stands still (``writing``)."""
    tid = fresh()
    legs = [client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)]
    if when == "writing":
        Fault(pair.prefill).set("hold")
        legs.append(client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid))
    return legs


@pytest.mark.fault("F06")
@pytest.mark.parametrize("when", ["waiting", "writing"])
async def test_prefill_is_killed_while_decode_waits(cluster: Cluster, oracle: Oracle, path: str, when: str) -> None:
    """D fails the request or computes it itself, in bounded time; P comes back under its old name."""
    pair = await faulty_pair(cluster, path)
    fault, prompt = Fault(pair.prefill), words(300, 61)
    async with Client() as client:
        async with started(*under_way(client, pair, prompt, when)) as tasks:
            await asyncio.sleep(1.0)
            assert not tasks[0].done(), tasks[0].result()
            pair.prefill.kill()
            answer = await bounded(tasks[0], BOUND_S, "D")
        right_or_failed(answer, await oracle.answer(prompt, 6))
        await asyncio.to_thread(pair.emptied, pair.decode, limit_s=BOUND_S)
        alone = words(100, 62)
        same(await client.complete(pair.decode, alone, 6), await oracle.answer(alone, 6))
    fault.clear()
    await asyncio.to_thread(start_all, pair.prefill)
    await pair.recovered()


@pytest.mark.fault("F06")
@pytest.mark.flaky(reruns=4, rerun_except="WrongAnswer")  # ranks that spin for each other, as in test_equal.py
@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2)])
async def test_prefill_is_killed_where_one_side_has_two_ranks(
    cluster: Cluster, oracle: Oracle, path: str, p_tp: int, d_tp: int
) -> None:
    """Every rank of D has its own evidence of every rank of P; the verdict is one."""
    # Five processes and more, and ranks that spin for each other: one may stand still for many seconds.
    calm, bound_s = {"dead_peer_s": 30.0, "orphan_s": 32.0, "wait_s": 60.0}, 3 * BOUND_S
    pair = await faulty_pair(cluster, path, calm, p={"tp": p_tp}, d={"tp": d_tp})
    prompt, tid = words(300, 63), fresh()
    async with (
        Client() as client,
        started(client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)) as tasks,
    ):
        await asyncio.sleep(1.0)
        assert not tasks[0].done(), tasks[0].result()
        pair.prefill.kill()
        answer = await bounded(tasks[0], bound_s, "D")
    right_or_failed(answer, await oracle.answer(prompt, 6))
    await asyncio.to_thread(pair.emptied, pair.decode, limit_s=bound_s)
    await asyncio.to_thread(start_all, pair.prefill)
    async with Client() as client:  # the first prefill of a new process can take longer than the short bounds
        same(await client.complete(pair.prefill, prompt, 6), await oracle.answer(prompt, 6))
    await pair.recovered()


@pytest.mark.fault("F06")
@pytest.mark.usefixtures("only_pushkv")
@pytest.mark.parametrize("end", ["killed", "frozen"])
@pytest.mark.parametrize("when", ["waiting", "writing"])
async def test_a_dead_prefill_is_noticed_by_its_silence(cluster: Cluster, path: str, when: str, end: str) -> None:
    """Every other bound is ten times as long: D tells its client that P is gone, and holds nothing for it but blocks
    into which a process that lives might still write.
    """
    pair = await faulty_pair(cluster, path, LONG)
    before = pair.decode.counted("pushkv:transfers_failed_total")
    async with Client() as client, started(*under_way(client, pair, words(300, 64), when)) as tasks:
        await asyncio.sleep(1.0)
        assert not tasks[0].done(), tasks[0].result()
        if end == "killed":
            pair.prefill.kill()
        else:
            pair.prefill.freeze()
        answer = await bounded(tasks[0], DEATH_S, "D")
        assert not answer.ok, "nobody can have answered this"
        if (path, when, end) != ("direct", "writing", "frozen"):
            await asyncio.to_thread(pair.emptied, pair.decode, limit_s=DEATH_S)
        after = pair.decode.counted("pushkv:transfers_failed_total")
        assert {what for what in after if after[what] != before.get(what)} <= {"peer silent", "peer gone"}
        Fault(pair.prefill).clear()
        if end == "killed":
            await asyncio.to_thread(start_all, pair.prefill)
        else:
            pair.prefill.thaw()
    await pair.recovered(limit_s=DEATH_S)


@pytest.mark.fault("F07")
@pytest.mark.parametrize("when", ["registered", "writing"])
async def test_decode_is_killed_and_comes_back(cluster: Cluster, oracle: Oracle, path: str, when: str) -> None:
    """P must not write what the first D registered into the memory of the second, and frees its own."""
    pair = await faulty_pair(cluster, path)
    fault, prompt, tid = Fault(pair.prefill), words(300, 71), fresh()
    async with Client() as client:
        to_d = client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)
        to_p = client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)
        if when == "writing":
            fault.set("hold")
        async with started(to_d) as tasks:
            await asyncio.sleep(1.0)
            if when == "writing":
                assert (await to_p).ok
                await asyncio.sleep(0.5)
            pair.decode.kill()
            await tasks[0]
        await asyncio.to_thread(start_all, pair.decode)
        other = words(700, 72)
        running = asyncio.create_task(client.complete(pair.decode, other, 60))
        if when == "registered":
            assert (await to_p).ok
        fault.clear()
        same(await running, await oracle.answer(other, 60))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F07", "F14")
async def test_decode_is_killed_for_good(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """P frees what it finished for a D that is gone, long before the lease ends, and serves on."""
    pair = await faulty_pair(cluster, path, LONG)
    prompt, tid = words(300, 73), fresh()
    async with Client() as client:
        async with started(
            client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)
        ) as tasks:
            await asyncio.sleep(1.0)
            pair.decode.kill()
            await tasks[0]
        assert (await client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)).ok
        await asyncio.to_thread(pair.emptied, pair.prefill, limit_s=BOUND_S)
        same(await client.complete(pair.prefill, prompt, 6), await oracle.answer(prompt, 6))
    await asyncio.to_thread(start_all, pair.decode)
    await pair.recovered()


@pytest.mark.fault("F36")
async def test_prefill_pauses_for_less_than_the_bound(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """Two seconds of silence are not death: the request is answered."""
    pair = await faulty_pair(cluster, path)
    prompt, tid = words(300, 361), fresh()
    async with (
        Client() as client,
        started(client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)) as tasks,
    ):
        await asyncio.sleep(0.7)
        pair.prefill.freeze()
        await asyncio.sleep(2.0)
        pair.prefill.thaw()
        assert (await client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)).ok
        same(await bounded(tasks[0], BOUND_S, "D"), await oracle.answer(prompt, 6))
    await pair.recovered()


@pytest.mark.fault("F06", "F36")
async def test_prefill_freezes_and_wakes(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """P stops for longer than the bound with its prefill finished.

    D tells its client in time; what P does when it wakes reaches nobody.
    """
    pair = await faulty_pair(cluster, path)
    fault, prompt, tid = Fault(pair.prefill), words(300, 362), fresh()
    fault.set("hold")
    async with Client() as client:
        async with started(
            client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid),
            client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid),
        ) as tasks:
            await asyncio.sleep(1.5)
            pair.prefill.freeze()
            try:
                answer = await bounded(tasks[0], BOUND_S, "D")
                other = words(900, 363)
                running = asyncio.create_task(client.complete(pair.decode, other, 60))
                await asyncio.sleep(0.5)
            finally:
                fault.clear()
                pair.prefill.thaw()
            same(await running, await oracle.answer(other, 60))
        right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F40")
async def test_stale_identity(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """The router names an engine that no longer lives at that address: refused quickly, and nothing stays."""
    pair = await faulty_pair(cluster, path)
    prompt, tid = words(200, 401), fresh()
    async with Client() as client:
        answer = await bounded(
            client.complete(
                pair.decode, prompt, 6, for_decode(pair.prefill, tid, remote_engine_id="P-of-yesterday"), request_id=tid
            ),
            BOUND_S,
            "D",
        )
        right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F40")
async def test_nobody_listens(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """The router names an address where nobody listens."""
    pair = await faulty_pair(cluster, path)
    prompt, tid = words(200, 402), fresh()
    async with Client() as client:
        params = for_decode(pair.prefill, tid, remote_engine_id="P-nowhere", remote_port=9)
        answer = await bounded(client.complete(pair.decode, prompt, 6, params, request_id=tid), BOUND_S, "D")
        right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)
