"""Writes that hang, fail, raise or lose their notice, and strangers at the side channel.

The writes of a tiny model are over before a test can aim at them: ``plugins/faulty.py`` stretches and breaks them.
"""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from .answers import right_or_failed, same
from .cluster import Cluster, Oracle, Pair
from .dispatch import Answer, Client, for_decode, for_prefill, fresh, words
from .faults import BOUND_S, LEASE_S, PATIENT, Fault, bounded, faulty_pair
from .servers import HOST

LARGE = 64 << 20
"""Bytes of a frame that no peer sends."""


async def handed_over(pair: Pair, prompt: list[int], limit_s: float = BOUND_S) -> Answer:
    """D's answer to a request whose legs go out at once; P must have answered."""
    async with Client() as client:
        got = await bounded(client.push(pair.prefill, pair.decode, prompt, 6), limit_s, "D")
    assert got.prefill.ok, got.prefill
    return got.decode


@pytest.mark.fault("F09")
async def test_lease_ends_while_the_peer_is_slow_to_know(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """A finished prefill waits for a slow handshake until its lease ends, and P gives its blocks to others."""
    pair = await faulty_pair(cluster, path)
    # both forget each other
    for server in pair.servers:
        server.kill()
    fault = Fault(pair.prefill)
    fault.set("slow")
    await asyncio.to_thread(pair.mend)
    prompt, tid = words(600, 91), fresh()
    async with Client() as client:
        to_d = asyncio.create_task(
            client.complete(pair.decode, prompt, 6, for_decode(pair.prefill, tid), request_id=tid)
        )
        assert (await client.complete(pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)).ok
        await asyncio.sleep(LEASE_S + 2.0)
        for index in range(3):
            other = words(900, 92 + index)
            same(await client.complete(pair.prefill, other, 6), await oracle.answer(other, 6))
        fault.clear()
        right_or_failed(await bounded(to_d, BOUND_S, "D"), await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F19")
@pytest.mark.parametrize("word", ["lose", "double", "late"])
async def test_notice_is_lost_doubled_or_late(cluster: Cluster, oracle: Oracle, path: str, word: str) -> None:
    """The bytes are there, the notice is not, or comes twice or late: the verdict is bounded, and counted once."""
    pair = await faulty_pair(cluster, path)
    fault, prompt = Fault(pair.prefill), words(300, 191)
    fault.set(word)
    try:
        answer = await handed_over(pair, prompt)
    finally:
        fault.clear()
    right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F32")
@pytest.mark.parametrize("end", ["goes on", "fails"])
async def test_link_stalls_for_two_seconds(cluster: Cluster, oracle: Oracle, path: str, end: str) -> None:
    """A write stalls, and then goes on or fails: never half a cache with 200 OK."""
    pair = await faulty_pair(cluster, path)
    fault, prompt = Fault(pair.prefill), words(700, 321)
    fault.set("hold" if end == "goes on" else "error")
    running = asyncio.create_task(handed_over(pair, prompt))
    await asyncio.sleep(2.0)
    fault.clear()
    right = right_or_failed(await running, await oracle.answer(prompt, 6))
    assert right or end == "fails", "a stall of two seconds failed the request"
    await pair.recovered(limit_s=BOUND_S)


PARTS = {"more": {"segment_bytes": 128 << 10, "part_bytes": 256 << 10}}
"""A prompt of 700 tokens leaves in several writes, each with a notice of its own."""


@pytest.mark.fault("F19", "F32")
@pytest.mark.usefixtures("only_pushkv")
@pytest.mark.parametrize("end", ["goes on", "fails"])
async def test_one_of_several_writes_is_behind_its_siblings(
    cluster: Cluster, oracle: Oracle, path: str, end: str
) -> None:
    """Half of a cache is there, and told of, for two seconds: nobody reads it before the other half has come."""
    pair = await faulty_pair(cluster, path, PARTS)
    fault, prompt = Fault(pair.prefill), words(700, 322)
    before = pair.prefill.metrics().get("pushkv:bytes_sent_total", 0.0)
    fault.set("one", "hold" if end == "goes on" else "error")
    running = asyncio.create_task(handed_over(pair, prompt))
    await asyncio.sleep(2.0)
    assert end == "fails" or not running.done(), "answered from half a cache"
    fault.clear()
    right = right_or_failed(await running, await oracle.answer(prompt, 6))
    assert right or end == "fails", "a stall of two seconds failed the request"
    await pair.recovered(limit_s=BOUND_S)
    assert pair.prefill.metrics()["pushkv:bytes_sent_total"] > before, "no sibling was written"


@pytest.mark.fault("F35")
async def test_posting_raises(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """An exception is a failed write, not a dead thread."""
    pair = await faulty_pair(cluster, path)
    fault, prompt = Fault(pair.prefill), words(300, 351)
    fault.set("raise")
    try:
        answer = await handed_over(pair, prompt)
    finally:
        fault.clear()
    right_or_failed(answer, await oracle.answer(prompt, 6))
    await pair.recovered(limit_s=BOUND_S)


@pytest.mark.fault("F18", "F37")
async def test_nothing_else_happens_on_either_engine(cluster: Cluster, oracle: Oracle, path: str) -> None:
    """Both engines are idle while the write is under way, and while a registration waits for its prefill."""
    pair = await faulty_pair(cluster, path)
    fault, prompt = Fault(pair.prefill), words(300, 371)
    fault.set("hold")
    running = asyncio.create_task(handed_over(pair, prompt))
    await asyncio.sleep(2.5)
    fault.clear()
    same(await running, await oracle.answer(prompt, 6))
    async with Client() as client:
        again = words(300, 372)
        got = await client.push(pair.prefill, pair.decode, again, 6, order="decode", gap_s=2.5)
    same(got.decode, await oracle.answer(again, 6))
    await pair.recovered()


@pytest.mark.fault("F27")
async def test_strangers_at_the_side_channel(cluster: Cluster, path: str) -> None:
    """Random bytes, a half-open connection, a peer without the key and frames of random content."""
    import zmq

    pair = await faulty_pair(cluster, path)
    context = zmq.Context()
    try:
        for server in pair.servers:
            port = server.spec.side_ports[0]
            for size in (1, 64, 70_000):
                with socket.create_connection((HOST, port), 2.0) as stranger, _broken_pipe():
                    stranger.sendall(os.urandom(size))
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(f"tcp://{HOST}:{port}")
            for frames in ([b""], [b"", b""], [os.urandom(40)], [b"", os.urandom(3000)], [b"\x93\x01\x02\x03"] * 3):
                dealer.send_multipart(frames)
            await asyncio.sleep(0.5)
            before = server.rss_mib()
            dealer.send_multipart([bytes(LARGE)])
            await asyncio.sleep(0.5)
            dealer.close()
            assert server.healthy, f"{server.name} has ended"
            assert server.rss_mib() < before + LARGE / 2**21, f"{server.name} takes what a stranger sends"
    finally:
        context.destroy(linger=0)
    await pair.right()
    # those who met the strangers must still be able to meet somebody new
    await asyncio.to_thread(pair.decode.kill)
    await asyncio.to_thread(pair.mend)
    await pair.recovered()


@pytest.mark.fault("F28")
@pytest.mark.usefixtures("only_pushkv")
async def test_staging_and_landing_are_full(cluster: Cluster, oracle: Oracle) -> None:
    """Room for about one prompt on either side, and twelve at once: they wait for each other."""
    small = {"landing_bytes": 2 << 20, "staging_bytes": 2 << 20, "segment_bytes": 256 << 10}
    pair = await faulty_pair(cluster, "packed", knobs=PATIENT | small)
    prompts = [words(500 + 20 * i, 2800 + i) for i in range(12)]
    found = await asyncio.gather(*(handed_over(pair, prompt, 3 * BOUND_S) for prompt in prompts))
    for prompt, answer in zip(prompts, found, strict=True):
        same(answer, await oracle.answer(prompt, 6))
    await pair.recovered()


class _broken_pipe:
    """A stranger may be cut off while he speaks."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, OSError)
