"""An operator stops a server: what it still owes is delivered first.

Without ``--shutdown-timeout``, vLLM kills its engine's process in the moment in which it is asked to end.
"""

from __future__ import annotations

import asyncio

import pytest

from .answers import same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, PATIENT, Fault, bounded, faulty_pair, started
from .servers import start_all

pytestmark = pytest.mark.usefixtures("only_pushkv")


async def test_a_stopping_prefill_server_delivers(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """SIGTERM comes while a write is under way: the server ends when D has its prompt."""
    patient = PATIENT | {"more": {"drain_s": 20.0}}
    pair = await faulty_pair(cluster, path, patient, arguments=("--shutdown-timeout", "30"))
    fault, prompt, tid = Fault(pair.prefill), words(300, 85), fresh()
    fault.set("hold")
    async with (
        Client() as client,
        started(client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)) as tasks,
    ):
        assert (await client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)).ok
        await asyncio.sleep(0.5)
        ending = asyncio.create_task(asyncio.to_thread(pair.prefill.stop, 40.0))
        await asyncio.sleep(1.0)
        assert not tasks[0].done(), tasks[0].result()
        fault.clear()
        same(await bounded(tasks[0], BOUND_S, "D"), await oracle.answer(prompt, 6))
        assert await ending, "the server had to be killed"
    await asyncio.to_thread(start_all, pair.prefill)
    await pair.recovered()
