"""Data-parallel engines: each has an id and a port of its own, under which the decode leg finds it."""

from __future__ import annotations

import asyncio

import pytest

from .answers import same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S
from .kinds import Knobs

pytestmark = pytest.mark.usefixtures("only_pushkv")


async def test_both_engines_of_a_data_parallel_prefill_server_hand_over(cluster: Cluster, oracle: Oracle) -> None:
    pair = cluster.pair(Knobs(path="packed"), p={"dp": 2})
    prefill = pair.prefill
    assert len(prefill.spec.side_ports) == 2
    async with Client(BOUND_S) as client:
        for rank in (0, 1, 0, 1):
            prompt, tid = words(90, 6_000 + rank), fresh()
            where = {"remote_engine_id": f"P_dp{rank}", "remote_port": prefill.spec.side_ports[rank]}
            first, second = await asyncio.gather(
                client.complete(prefill, prompt, 1, for_prefill(tid), request_id=tid, dp_rank=rank),
                client.complete(pair.decode, prompt, 4, for_decode(prefill, tid, **where), request_id=tid),
            )
            assert first.ok and first.params is not None
            told = {"remote_engine_id": first.params["remote_engine_id"], "remote_port": first.params["remote_port"]}
            assert told == where, "the router would be led to the other engine"
            same(second, await oracle.answer(prompt, 4))
    await asyncio.to_thread(pair.emptied)
    received = pair.decode.metrics().get("pushkv:transfers_received_total")
    assert received == 4, f"{received} of 4 prompts were handed over"
