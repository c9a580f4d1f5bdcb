"""The shared secret between real servers, from the environment as an operator sets it."""

from __future__ import annotations

from typing import Any

import pytest

from .cluster import Cluster, Oracle
from .dispatch import Client, words
from .faults import BOUND_S, SHORT, bounded
from .kinds import Knobs

pytestmark = pytest.mark.usefixtures("only_pushkv")

KNOBS = Knobs(path="packed", **{**SHORT, "faulty": False})


def with_secret(secret: str) -> dict[str, Any]:
    return {"environment": {"PUSHKV_SECRET": secret}}


async def test_with_one_secret_prompts_are_handed_over(cluster: Cluster) -> None:
    pair = cluster.pair(KNOBS, **with_secret("sixteen characters"))
    await pair.recovered()
    assert pair.decode.metrics()["pushkv:transfers_received_total"] == 1


async def test_with_two_secrets_nothing_is_and_both_live_on(cluster: Cluster, oracle: Oracle) -> None:
    pair = cluster.pair(KNOBS, p=with_secret("sixteen characters"), d=with_secret("seventeen letters"))
    async with Client() as client:
        got = await bounded(client.push(pair.prefill, pair.decode, words(100, 83), 6), BOUND_S, "D")
        assert got.prefill.ok and not got.decode.ok, got
        for server in pair.servers:
            assert (await client.complete(server, words(100, 84), 6)).ok
    pair.emptied(limit_s=BOUND_S)
    assert "pushkv:transfers_sent_total" not in pair.prefill.metrics()
