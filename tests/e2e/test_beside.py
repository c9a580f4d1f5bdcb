"""Beside another connector, under vLLM's `MultiConnector`: every hook is answered for both, every result told once.

vLLM's offloading connectors want CUDA; the one that stores prompts on disk runs on a CPU. Its copies are checked to be
there; they are not loaded (no prompt comes twice).
"""

from __future__ import annotations

import asyncio

import pytest

from .answers import same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, fresh, words
from .faults import BOUND_S, SHORT
from .kinds import Knobs

pytestmark = pytest.mark.usefixtures("only_pushkv")


async def test_prompts_are_handed_over_beside_a_connector_that_stores(cluster: Cluster, oracle: Oracle) -> None:
    pair = cluster.pair(Knobs(path="packed", beside=True, **{**SHORT, "faulty": False}))
    prompts = [words(64 * (1 + index), 8_100 + index) for index in range(4)]
    async with Client(BOUND_S) as client:
        expected = [await oracle.answer(prompt, 4) for prompt in prompts]
        pushed = [client.push(pair.prefill, pair.decode, prompt, 4) for prompt in prompts]
        for got, right in zip(await asyncio.gather(*pushed), expected, strict=True):
            same(got.decode, right)
        assert list((pair.prefill.spec.folder / "P.store").rglob("*.safetensors")), "the other connector stores nothing"
        # and what it does with a request that is given up
        tid = fresh()
        leg = asyncio.create_task(
            client.complete(pair.decode, words(100, 8_200), 4, for_decode(pair.prefill, tid), request_id=tid)
        )
        await asyncio.sleep(0.5)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
    await pair.recovered(BOUND_S)
