"""Legs that are aborted, rejected, misdirected or never come, and memory that is handed on meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest

from .answers import right_or_failed, same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, LEASE_S, Fault, abort, bounded, faulty_pair, started


@pytest.mark.fault("F02", "F03")
@pytest.mark.parametrize("when", ["registered", "writing"])
async def test_abort_on_decode_then_the_write_comes(cluster: Cluster, oracle: Oracle, path: str, when: str) -> None:
    """D's request is aborted, another fills D's cache, and only then P writes: the other's answer is right."""
    pair = await faulty_pair(cluster, path)
    fault, prompt, other, tid = Fault(pair.prefill), words(700, 21), words(900, 22), fresh()
    async with Client() as client:
        to_p = client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)
        async with started(
            client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)
        ) as tasks:
            await asyncio.sleep(1.0)
            if when == "writing":
                fault.set("hold")
                assert (await to_p).ok
                await asyncio.sleep(0.5)
            await abort(tasks[0])
        await asyncio.sleep(0.5)
        running = asyncio.create_task(client.complete(pair.decode, other, 60))
        await asyncio.sleep(0.3)
        if when == "registered":
            assert (await to_p).ok
        fault.clear()
        same(await bounded(running, BOUND_S, "D"), await oracle.answer(other, 60))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F12", "F13")
async def test_prefill_never_comes(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """The P leg went elsewhere, or was rejected: D tells its clients in bounded time."""
    pair = await faulty_pair(cluster, path)
    prompts = [words(150, 1200 + i) for i in range(6)]
    async with Client() as client:
        found = await asyncio.gather(
            *(
                bounded(client.complete(pair.decode, p, 6, for_decode(pair.prefill, tid), request_id=tid), BOUND_S, "D")
                for p, tid in ((p, fresh()) for p in prompts)
            )
        )
    for prompt, answer in zip(prompts, found, strict=True):
        right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F12", "F14")
async def test_decode_never_comes(cluster: Cluster, path: str) -> None:
    """D rejected its leg, or never had one: P's blocks are free when its lease ends."""
    pair = await faulty_pair(cluster, path)
    async with Client() as client:
        too_many = await client.complete(pair.decode, words(200, 141), 5000, for_decode(pair.prefill, "none"))
        assert too_many.status == 400, too_many
        for index in range(4):
            tid = fresh()
            answer = await client.complete(pair.prefill, words(200, 1410 + index), 1, for_prefill(tid), request_id=tid)
            assert answer.ok, answer
    await pair.recovered(limit_s=LEASE_S + 5.0)


@pytest.mark.fault("F13")
async def test_prefill_is_aborted(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """The client closes P's leg in the middle of the prefill: D is told."""
    pair = await faulty_pair(cluster, path)
    prompt, tid = words(1000, 131), fresh()
    async with Client() as client:
        async with started(
            client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid),
            client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid),
        ) as tasks:
            await asyncio.sleep(0.05)
            await abort(tasks[1])
            answer = await bounded(tasks[0], BOUND_S, "D")
        right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F13")
async def test_prefill_ends_on_its_first_token(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """P's only token is a stop: the prompt is handed over all the same."""
    pair = await faulty_pair(cluster, path)
    prompt, tid = words(150, 132), fresh()
    right = await oracle.answer(prompt, 6)
    async with (
        Client() as client,
        started(client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)) as tasks,
    ):
        stop = {"stop_token_ids": [right.tokens[0]]}
        told = await client.complete(pair.prefill, prompt, 2, for_prefill(tid), request_id=tid, **stop)
        assert told.finish == "stop", told
        same(await bounded(tasks[0], BOUND_S, "D"), right)
    await pair.recovered()


@pytest.mark.fault("F15")
async def test_abort_in_decodes_queue(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """D's cache is taken by others when the leg comes; it is aborted while it waits. P keeps nothing."""
    pair = await faulty_pair(cluster, path)
    long, prompt, tid = words(800, 151), words(700, 152), fresh()
    async with Client() as client:
        running = asyncio.create_task(client.complete(pair.decode, long, 200))
        await asyncio.sleep(0.5)
        async with started(
            client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)
        ) as tasks:
            assert (await client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)).ok
            await asyncio.sleep(0.2)
            await abort(tasks[0])
        same(await running, await oracle.answer(long, 200))
    await pair.recovered(limit_s=LEASE_S + 5.0)


@pytest.mark.fault("F16")
async def test_abort_on_decode_and_prefill_never_comes(cluster: Cluster, path: str) -> None:
    """Nothing will ever be written: D's memory is free again in bounded time."""
    pair = await faulty_pair(cluster, path)
    async with (
        Client() as client,
        started(
            *(
                client.complete(pair.decode, words(300, 1600 + i), 6, for_decode(pair.prefill, f"never-{i}-{fresh()}"))
                for i in range(4)
            )
        ),
    ):
        await asyncio.sleep(1.0)
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F17")
async def test_opposite_orders_on_full_caches(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """P and D each have room for two, and are asked in opposite orders: every request ends, and nothing stays."""
    pair = await faulty_pair(cluster, path, blocks=24, max_tokens=640, batch_tokens=128)
    prompts = [words(330, 1700 + i) for i in range(6)]
    ids = [fresh() for _ in prompts]
    async with Client() as client:

        async def send(order: list[int], to_p: bool) -> list[asyncio.Task]:
            tasks = {}
            for i in order:
                params = for_prefill(ids[i]) if to_p else for_decode(pair.prefill, ids[i])
                leg = client.complete(
                    pair.prefill if to_p else pair.decode, prompts[i], 1 if to_p else 6, params, request_id=ids[i]
                )
                tasks[i] = asyncio.create_task(leg)
                await asyncio.sleep(0.02)
            return [tasks[i] for i in range(len(prompts))]

        to_d = await send(list(range(6)), to_p=False)
        to_p = await send(list(reversed(range(6))), to_p=True)
        found = await asyncio.gather(*(bounded(task, 2 * BOUND_S, "D") for task in to_d))
        await asyncio.gather(*(bounded(task, 2 * BOUND_S, "P") for task in to_p))
    right = [right_or_failed(answer, await oracle.answer(p, 6)) for p, answer in zip(prompts, found, strict=True)]
    await pair.recovered(limit_s=BOUND_S)
    assert all(right), f"{right.count(False)} of {len(right)} failed, though nothing was broken"


@pytest.mark.fault("F22")
async def test_success_frees_at_once(cluster: Cluster, path: str) -> None:
    """P keeps nothing of a hand-over that has succeeded until its lease ends."""
    pair = await faulty_pair(cluster, path)
    async with Client() as client:
        found = await asyncio.gather(
            *(client.push(pair.prefill, pair.decode, words(300, 2200 + i), 6) for i in range(6))
        )
    assert all(got.decode.ok for got in found), found
    await pair.recovered(limit_s=LEASE_S / 3)


BAD_PARAMETERS = {
    "port is a word": {"remote_port": "abc"},
    "port is negative": {"remote_port": -1},
    "port is too large": {"remote_port": 70_000},
    "no host": {"remote_host": None},
    "unknown host": {"remote_host": "no.such.host.invalid"},
    "no engine": {"remote_engine_id": None},
    "engine is a list": {"remote_engine_id": [1, 2]},
    "tp is zero": {"tp_size": 0},
    "tp is huge": {"tp_size": 10**9},
    "tp is a word": {"tp_size": "two"},
    "id is a number": {"transfer_id": 17},
    "id is 1 MB": {"transfer_id": "x" * 1_000_000},
    "blocks are out of range": {"remote_block_ids": [[10**9, -5]]},
    "blocks are words": {"remote_block_ids": "many"},
}


@pytest.mark.fault("F26")
@pytest.mark.parametrize("case", BAD_PARAMETERS)
async def test_bad_parameters(cluster: Cluster, oracle: Oracle, path: str, case: str) -> None:
    """That request fails, or is answered rightly; D's engine lives."""
    pair = await faulty_pair(cluster, path)
    params = for_decode(pair.prefill, fresh()) | BAD_PARAMETERS[case]
    prompt = words(120, random.Random(case).randrange(10**6))
    async with Client() as client:
        answer = await bounded(client.complete(pair.decode, prompt, 6, params), BOUND_S, "D")
    assert await asyncio.to_thread(lambda: pair.decode.healthy), "D has ended"
    right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F26")
async def test_bad_parameters_on_prefill(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """The same on P, one after the other; what P finished for nobody is free when its lease ends."""
    pair = await faulty_pair(cluster, path)
    async with Client() as client:
        for case, more in BAD_PARAMETERS.items():
            prompt = words(40, random.Random(f"P {case}").randrange(10**6))
            params = for_prefill(fresh()) | more
            answer = await bounded(client.complete(pair.prefill, prompt, 1, params), BOUND_S, f"P ({case})")
            assert await asyncio.to_thread(lambda: pair.prefill.healthy), f"P has ended: {case}"
            right_or_failed(answer, await oracle.answer(prompt, 1))
    await pair.recovered(limit_s=LEASE_S + 5.0)
