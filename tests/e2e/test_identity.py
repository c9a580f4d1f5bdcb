"""A prompt is more than its tokens: with another cache salt it is another prompt, and never meets."""

from __future__ import annotations

import asyncio

import pytest

from .answers import same
from .cluster import Cluster, Oracle
from .dispatch import Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, SHORT
from .kinds import Knobs

pytestmark = pytest.mark.usefixtures("only_pushkv")


async def test_the_cache_salt_is_part_of_what_is_handed_over(cluster: Cluster, oracle: Oracle, path: str) -> None:
    pair = cluster.pair(Knobs(path=path, **{**SHORT, "faulty": False}))
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
