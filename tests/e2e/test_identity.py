"""A prompt is more than its tokens: with another cache salt or adapter it is another prompt, and never meets."""

from __future__ import annotations

import asyncio

import pytest

from .answers import TOLERANCE, distance, same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, SHORT, faulty_pair
from .kinds import Knobs
from .model import make_adapter

pytestmark = pytest.mark.usefixtures("only_pushkv")


async def test_the_cache_salt_is_part_of_what_is_handed_over(cluster: Cluster, oracle: Oracle) -> None:
    pair = await faulty_pair(cluster, "packed")
    prompt = words(100, 4711)
    expected = await oracle.answer(prompt, 4)
    async with Client(BOUND_S) as client:
        both = await client.push(pair.prefill, pair.decode, prompt, 4, cache_salt="one customer")
        same(both.decode, expected)
        tid = fresh()
        first, second = await asyncio.gather(
            client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid, cache_salt="one customer"),
            client.complete(
                pair.decode, prompt, 4, for_decode(pair.prefill, tid), request_id=tid, cache_salt="another customer"
            ),
        )
        assert first.ok and not second.ok and "no answer within" not in second.error, second
    await pair.recovered(BOUND_S)


async def test_the_adapter_is_part_of_what_is_handed_over(cluster: Cluster, oracle: Oracle) -> None:
    """The right answer of an adapter is what D says alone, with a salt so that nothing of it is cached for later."""
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"lora={make_adapter(cluster.model)}")
    pair = cluster.pair(Knobs(path="packed", **{**SHORT, "faulty": False}), arguments=lora)
    prompt, adapted = words(100, 4712), {"model": "lora"}
    async with Client(BOUND_S) as client:
        alone = await client.complete(pair.decode, prompt, 4, cache_salt="alone", **adapted)
        assert distance(alone, await oracle.answer(prompt, 4)) > TOLERANCE, "the adapter changes nothing"
        both = await client.push(pair.prefill, pair.decode, prompt, 4, **adapted)
        same(both.decode, alone)
        received = pair.decode.metrics().get("pushkv:transfers_received_total")
        tid = fresh()
        first, second = await asyncio.gather(
            client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid),
            client.complete(pair.decode, prompt, 4, for_decode(pair.prefill, tid), request_id=tid, **adapted),
        )
        assert first.ok and not second.ok and "no answer within" not in second.error, second
    await pair.recovered(BOUND_S)
    assert received == 1, "the prompt of the adapter was not handed over"
