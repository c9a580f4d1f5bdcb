"""``kv_load_failure_policy`` is ``recompute``: a failed hand-over costs time, and D computes the prompt itself."""

from __future__ import annotations

import asyncio

import pytest

from .answers import same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, Fault, abort, bounded, faulty_pair, started
from .servers import start_all

pytestmark = pytest.mark.usefixtures("only_pushkv")

POLICY = {"policy": "recompute"}


@pytest.mark.fault("F06", "F13")
@pytest.mark.parametrize("what", ["killed", "never comes", "aborted"])
async def test_without_a_prefill_decode_computes(cluster: Cluster, oracle: Oracle, path: str, what: str) -> None:
    pair = await faulty_pair(cluster, path, POLICY)
    prompt, tid = words(700, 81), fresh()
    async with Client() as client:
        legs = [client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)]
        if what != "never comes":
            legs.append(client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid))
        async with started(*legs) as tasks:
            if what == "aborted":
                await asyncio.sleep(0.05)
                await abort(tasks[1])
            elif what == "killed":
                await asyncio.sleep(0.05)
                pair.prefill.kill()
            same(await bounded(tasks[0], BOUND_S, "D"), await oracle.answer(prompt, 6))
    if what == "killed":
        await asyncio.to_thread(start_all, pair.prefill)
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F32", "F35")
@pytest.mark.parametrize("word", ["error", "raise", "lose"])
async def test_what_is_not_written_is_computed(cluster: Cluster, oracle: Oracle, path: str, word: str) -> None:
    pair = await faulty_pair(cluster, path, POLICY)
    fault, prompt = Fault(pair.prefill), words(300, 82)
    fault.set(word)
    try:
        async with Client() as client:
            got = await bounded(client.push(pair.prefill, pair.decode, prompt, 6), BOUND_S, "D")
    finally:
        fault.clear()
    same(got.decode, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)
