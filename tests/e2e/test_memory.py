"""The KV cache never waits for the network: the promise of the packed path, read from vLLM's own metric."""

from __future__ import annotations

import asyncio

import pytest

from .answers import same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, PATIENT, Fault, bounded, faulty_pair, started

pytestmark = pytest.mark.usefixtures("only_pushkv")


async def test_decode_holds_no_block_while_the_prefill_has_not_come(cluster: Cluster, oracle: Oracle) -> None:
    pair = await faulty_pair(cluster, "packed", knobs=PATIENT)
    prompt, tid, beside = words(600, 41), fresh(), words(64, 42)
    async with (
        Client() as client,
        started(client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)) as tasks,
    ):
        for _ in range(10):
            # an own request makes D step, and its metrics new
            same(await client.complete(pair.decode, beside, 1), await oracle.answer(beside, 1))
            assert pair.decode.cache_usage() == 0.0
            await asyncio.sleep(0.1)
        assert not tasks[0].done(), tasks[0].result()
        assert (await client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)).ok
        same(await bounded(tasks[0], BOUND_S, "D"), await oracle.answer(prompt, 6))
    await pair.recovered()


async def test_neither_holds_a_block_while_the_network_stands_still(cluster: Cluster, oracle: Oracle) -> None:
    pair = await faulty_pair(cluster, "packed", knobs=PATIENT)
    fault, prompt, tid, beside = Fault(pair.prefill), words(600, 43), fresh(), words(64, 44)
    fault.set("hold")
    async with (
        Client() as client,
        started(client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)) as tasks,
    ):
        assert (await client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)).ok
        for _ in range(5):
            for server in pair.servers:
                same(await client.complete(server, beside, 1), await oracle.answer(beside, 1))
                assert server.cache_usage() == 0.0, f"{server.name} holds blocks while a write is under way"
            await asyncio.sleep(0.2)
        assert not tasks[0].done(), tasks[0].result()
        fault.clear()
        same(await bounded(tasks[0], BOUND_S, "D"), await oracle.answer(prompt, 6))
    await pair.recovered()
