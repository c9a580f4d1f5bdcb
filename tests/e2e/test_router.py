"""The connector behind ``pushkv router``, behind a router that speaks vLLM's own push contract only, and sequentially.

The router is a process of its own, as an operator starts it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .answers import same
from .cluster import Cluster, Oracle
from .dispatch import Client, fresh, words
from .front import front
from .kinds import Knobs
from .servers import HOST, NAME, Server, start_all

TOKENS = 8


@pytest.mark.parametrize("how", ["learnt", "named", "sequential"])
async def test_through_the_router(cluster: Cluster, oracle: Oracle, path: str, folder: Path, how: str) -> None:
    """Every shape of request is answered as a plain server answers it, and was handed over."""
    pair = cluster.pair(Knobs(path=path), batch_tokens=256)
    flags = ["--dispatch", "sequential"] if how == "sequential" else []
    async with front(*pair.servers, folder / "router.log", *flags, named=how == "named") as router, Client() as client:
        server: Any = router
        before = pair.decode.metrics().get("pushkv:transfers_received_total", 0.0)
        for number, length in enumerate((2, 33, 200, 1000)):
            prompt = words(length, 5000 + number)
            same(
                await client.complete(server, prompt, TOKENS, stream=number % 2 == 1),
                await oracle.answer(prompt, TOKENS),
            )
        text = " ".join(f"w{i}" for i in words(120, 5100))
        same(await client.complete(server, text, TOKENS, chat=True), await oracle.answer(text, TOKENS, chat=True))
        several = [words(90, 5200), words(40, 5201)]
        got = await client.complete_all(server, several, TOKENS)
        for mine, right in zip(got, await oracle.answers(several, TOKENS), strict=True):
            same(mine, right)
        both = await client.complete_all(server, words(70, 5300), TOKENS, n=2, temperature=0.5, seed=3)
        assert len(both) == 2 and all(answer.ok for answer in both)
        sequential = {"learnt": 1, "named": 0, "sequential": 7}[how]
        assert await router.counted("dispatches_total", how="sequential") == sequential
        assert await router.counted("dispatches_total", how="parallel") == 7 - sequential
        assert await router.counted("retries_total") == 0
        assert await router.counted("identity_mismatches_total") == 0
        for _ in range(20):  # statistics come with a step, at times a later one
            await client.complete(pair.decode, words(5, 1), 1)
            received = pair.decode.metrics().get("pushkv:transfers_received_total", 0.0) - before
            if received >= 9:
                break
            await asyncio.sleep(0.25)
        assert received >= 9, "the requests were answered, but not all of them were handed over"
        assert NAME in await router.text("/v1/models")
    await asyncio.to_thread(pair.emptied)


async def test_a_restarted_prefill_server_behind_the_router(
    cluster: Cluster, oracle: Oracle, path: str, folder: Path, only_pushkv: None
) -> None:
    """There is no other: while it is away requests are refused quickly; once it is back the next one is right."""
    pair = cluster.pair(Knobs(path=path, dead_peer_s=3.0, orphan_s=4.0), batch_tokens=256)
    async with front(*pair.servers, folder / "router.log") as router, Client() as client:
        server: Any = router
        prompt = words(300, 5400)
        same(await client.complete(server, prompt, TOKENS), await oracle.answer(prompt, TOKENS))
        pair.prefill.kill()
        refused = await client.complete(server, words(300, 5401), TOKENS)
        assert refused.status in (500, 502, 503), refused
        await asyncio.to_thread(start_all, pair.prefill)
        async with asyncio.timeout(30):
            while await router.counted("server_up", role="prefill") != 1:
                await asyncio.sleep(0.2)
        prompt = words(300, 5402)
        same(await client.complete(server, prompt, TOKENS), await oracle.answer(prompt, TOKENS))
        assert await router.counted("dispatches_total", how="sequential", reason="identity in doubt") >= 1
    await asyncio.to_thread(pair.emptied)


async def test_a_client_that_leaves_the_router_leaves_nothing_behind(cluster: Cluster, path: str, folder: Path) -> None:
    pair = cluster.pair(Knobs(path=path), batch_tokens=256)
    async with front(*pair.servers, folder / "router.log", named=True) as router, Client() as client:
        server: Any = router
        for wait_s in (0.0, 0.05, 0.4):
            leaving = asyncio.create_task(client.complete(server, words(1000, 5500), 500, stream=True))
            await asyncio.sleep(wait_s)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.to_thread(pair.emptied)
        assert await router.counted("active") == 0


async def test_more_streams_than_the_engines_run_at_once(
    cluster: Cluster, oracle: Oracle, path: str, folder: Path
) -> None:
    """Some wait in the engines, some in the router's queue; every one is right, and nothing is left behind."""
    pair = cluster.pair(Knobs(path=path), batch_tokens=256)
    prompts = [words(40 + 7 * n, 5900 + n) for n in range(24)]
    right = [await oracle.answer(prompt, TOKENS) for prompt in prompts]
    config = folder / "router.toml"
    servers = f'[[prefill]]\nurl = "{pair.prefill.url}"\n[[decode]]\nurl = "{pair.decode.url}"\n'
    config.write_text("max_active = 18\n" + servers)
    async with (
        front(*pair.servers, folder / "router.log", "--config", str(config), named=True) as router,
        Client() as client,
    ):
        server: Any = router
        asked = [client.complete(server, prompt, TOKENS, stream=n % 2 == 0) for n, prompt in enumerate(prompts)]
        for got, wanted in zip(await asyncio.gather(*asked), right, strict=True):
            same(got, wanted)
        assert await router.counted("dispatches_total") == len(prompts)
        assert await router.counted("queue_seconds_count") > 0
    await asyncio.to_thread(pair.emptied)


def contract(prefill: Server, request_id: str) -> dict[str, Any]:
    """What vLLM's own example of a push router tells D: P's coordinates, and no transfer id."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.spec.engine_id,
        "remote_request_id": f"cmpl-{request_id}-0",
        "remote_host": HOST,
        "remote_port": prefill.spec.side_ports[0],
        "tp_size": prefill.spec.tp,
    }


NOBODY_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("order", ["both", "prefill"])
async def test_vllms_own_push_contract_and_nothing_more(
    cluster: Cluster, oracle: Oracle, path: str, order: str, chat: bool
) -> None:
    """The legs share an ``X-Request-Id``, no transfer id; D is told P's coordinates, at once or after P's answer."""
    pair = cluster.pair(Knobs(path=path), batch_tokens=256)
    async with Client() as client:
        for length in (33, 300):
            request_id = fresh()
            tokens = words(length, 5600 + length + len(order) + chat)
            prompt: Any = " ".join(f"w{i}" for i in tokens) if chat else tokens
            first = client.complete(pair.prefill, prompt, 1, NOBODY_YET, request_id=request_id, chat=chat)
            if order == "prefill":
                said = (await first).params
                assert said is not None and said["remote_engine_id"] == pair.prefill.spec.engine_id
                fields = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
                params = {"do_remote_prefill": True, "do_remote_decode": False, **{name: said[name] for name in fields}}
                got = await client.complete(pair.decode, prompt, TOKENS, params, request_id=request_id, chat=chat)
            else:
                params = contract(pair.prefill, request_id)
                second = client.complete(pair.decode, prompt, TOKENS, params, request_id=request_id, chat=chat)
                prefilled, got = await asyncio.gather(first, second)
                assert prefilled.ok, prefilled
            more = {"chat": True} if chat else {}
            same(got, await oracle.answer(prompt, TOKENS, **more))
    pair.emptied()


async def test_pulls_contract_one_leg_after_the_other(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """As vLLM's pull routers, llm-d's sidecar, Dynamo and vllm-router do it: D gets what P said, word for word."""
    pair = cluster.pair(Knobs(path=path), batch_tokens=256)
    async with Client() as client:
        for length in (33, 300):
            request_id, prompt = fresh(), words(length, 5700 + length)
            said = (await client.complete(pair.prefill, prompt, 1, NOBODY_YET, request_id=request_id)).params
            got = await client.complete(pair.decode, prompt, TOKENS, said, request_id=request_id)
            same(got, await oracle.answer(prompt, TOKENS))
    pair.emptied()


async def test_an_identity_kept_from_an_earlier_answer(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """As llm-d's sidecar does it in push mode: who P is comes from its last answer, both legs leave at once."""
    pair = cluster.pair(Knobs(path=path), batch_tokens=256)
    async with Client() as client:
        said = (await client.complete(pair.prefill, words(50, 5800), 1, NOBODY_YET, request_id=fresh())).params
        assert said is not None and said["transfer_mode"] == "push"
        kept = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "transfer_mode")
        for length in (33, 300):
            request_id, transfer_id, prompt = fresh(), f"xfer-{fresh()}", words(length, 5800 + length)
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_request_id": request_id,
                "transfer_id": transfer_id,
                **{name: said[name] for name in kept},
            }
            to_p = NOBODY_YET | {"transfer_id": transfer_id}
            prefilled, got = await asyncio.gather(
                client.complete(pair.prefill, prompt, 1, to_p, request_id=request_id),
                client.complete(pair.decode, prompt, TOKENS, params, request_id=request_id),
            )
            assert prefilled.ok, prefilled
            same(got, await oracle.answer(prompt, TOKENS))
        # The first prefill has no decode leg: a registration that needs nothing lets P go.
        await client.complete(pair.decode, words(50, 5800), 1, said, request_id=fresh())
    pair.emptied()
