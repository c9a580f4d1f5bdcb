"""Between client and router: header lines of one hop, memory for bodies and answers, the end of an answer."""

from __future__ import annotations

import asyncio
import json

import pytest

from .stack import Stack, expected, play, stack, until
from .test_faults import idle
from .test_heads import BODY, connected

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"


async def sent(s: Stack, raw: bytes) -> bytes:
    """The head of the answer to it."""
    reader, writer = await connected(s)
    writer.write(raw)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    return head


def test_trailers_and_what_connection_names_are_not_passed_on() -> None:
    async def go() -> None:
        async with stack() as s:
            head = CHUNKED + b"connection: keep-alive, X-Hop\r\nx-hop: 1\r\nx-kept: 2\r\n\r\n"
            body = b"%x\r\n%b\r\n0\r\nauthorization: Bearer late\r\n\r\n" % (len(BODY), BODY)
            assert b" 200 " in await sent(s, head + body)
            for leg in (s.prefill[0].seen[0], s.decode[0].seen[0]):
                assert leg.headers["x-kept"] == "2"
                assert "x-hop" not in leg.headers and "authorization" not in leg.headers

    play(go())


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_in_memory_are_bounded_together(declared: bool) -> None:
    async def go() -> None:
        async with stack(max_held_bytes=250_000) as s:
            s.prefill[0].prefill_s = 60
            stuck = asyncio.create_task(s.ask("x" * 200_000))
            await until(lambda: s.router.gate.active == 1)
            big = json.dumps({"prompt": "y" * 100_000, "max_tokens": 4}).encode()
            if declared:
                head = await sent(s, BODY_HEAD % len(big))
            else:
                head = await sent(
                    s, CHUNKED + b"\r\n" + b"".join(b"2710\r\n%b\r\n" % (b"y" * 10_000) for _ in range(10))
                )
            assert b" 429 " in head and b"retry-after: 1" in head
            assert s.router.held.bytes < 250_000
            stuck.cancel()
            await idle(s)
            await until(lambda: s.router.held.bytes == 0)
            s.prefill[0].prefill_s = 0.0
            assert (await s.post("/v1/completions", big)).status == 200

    play(go())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["x", "y"]}], ids=["one", "n", "prompts"])
def test_answers_that_are_not_whole_yet_count_as_held(role: str, more: dict[str, object]) -> None:
    async def go() -> None:
        async with stack(max_held_bytes=120_000) as s:
            server, other = s.prefill[0], s.decode[0]
            if role == "decode":
                server, other = other, server
            server.padding = 120_000
            server.fault = lambda _: "stops"
            other.fault = lambda _: "hang" if role == "prefill" else ""
            asking = asyncio.create_task(s.ask(**{"prompt": "x", **more}))
            await until(lambda: s.router.held.bytes > 120_000)
            server.fault = other.fault = lambda _: ""
            assert (await s.ask("another")).status == 429
            asking.cancel()
            await idle(s)
            await until(lambda: s.router.held.bytes == 0)
            assert (await s.ask("another")).status == 200
            assert s.router.held.bytes == 0

    play(go())


BODY_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


async def long_answer(s: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """A client that has asked for a whole answer of 16 MB, and reads nothing yet."""
    body = json.dumps({"model": "t", "prompt": "y" * 16_000, "max_tokens": 1000}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]), limit=1 << 12)
    writer.write(BODY_HEAD % len(body) + body)
    downstream = s.service.application.downstream
    await until(lambda: downstream.unsent_bytes > 1 << 20)
    return reader, writer, 16_000_000


def test_a_client_that_does_not_fetch_its_whole_answer_is_let_go() -> None:
    async def go() -> None:
        async with stack(client_stall_s=0.3, mock={"token_s": 0.0}) as s:
            _, writer, _ = await long_answer(s)
            await until(lambda: s.service.application.downstream.unsent_bytes == 0)
            assert not s.service.application.downstream.behind
            writer.transport.abort()

    play(go())


def test_a_stop_waits_for_what_a_slow_client_has_not_taken() -> None:
    async def go() -> None:
        async with stack(mock={"token_s": 0.0}) as s:
            reader, writer, least = await long_answer(s)
            assert s.service.application.downstream.open == 0
            s.service.stop()
            await asyncio.sleep(0.2)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(one[15:]) for one in head.split(b"\r\n") if one.startswith(b"content-length:"))
            assert length > least and len(await reader.readexactly(length)) == length
            writer.transport.abort()

    play(go())


def test_a_leg_of_p_that_goes_on_keeps_its_place() -> None:
    async def go() -> None:
        async with stack(max_active=1, max_queued=1, queue_s=0.2) as s:
            s.prefill[0].fault = lambda seen: "hang" if seen.body["prompt"] == "x" else ""
            s.decode[0].fault = lambda seen: "completion" if seen.body["prompt"] == "x" else ""
            assert (await s.ask("x")).status == 200
            assert s.prefill[0].open == s.router.gate.active == 1
            assert (await s.ask("y")).status == 429
            for leg in list(s.prefill[0]._connections):
                leg.cancel()
            await idle(s)

    play(go())


def test_forwarded_requests_wait_at_the_gate() -> None:
    async def go() -> None:
        async with stack(max_active=1, max_queued=1, queue_s=0.2) as s:
            s.decode[0].fault = lambda _: "hang"
            stuck = asyncio.create_task(s.ask("stuck"))
            await until(lambda: s.router.gate.active == 1)
            async with s.http.get(s.url + "/v1/models") as response:
                assert response.status == 429
            stuck.cancel()
            await idle(s)
            async with s.http.get(s.url + "/v1/models") as response:
                assert response.status == 200

    play(go())


def test_a_refused_hand_over_is_told_in_a_sentence() -> None:
    async def go() -> None:
        async with stack(attempts=1) as s:
            s.decode[0].fault = lambda _: "decode_leg_refused"
            reply = await s.ask("x")
            assert reply.status == 500 and reply.error is not None
            said = reply.error["message"]
            assert "KV cache" in said and "Internal server error" in said
            assert s.decode[0].seen[0].params["transfer_id"] in said

    play(go())


def test_requests_sent_without_waiting_are_answered_in_turn() -> None:
    async def go() -> None:
        async with stack() as s:
            reader, writer = await connected(s)
            for n in range(5):
                body = json.dumps({"model": "t", "prompt": f"q{n}", "max_tokens": 4}).encode()
                writer.write(BODY_HEAD % len(body) + body)
            for n in range(5):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
                length = next(int(one[15:]) for one in head.split(b"\r\n") if one.startswith(b"content-length:"))
                assert expected(f"q{n}").encode() in await reader.readexactly(length)
            writer.transport.abort()

    play(go())


def test_an_old_client_gets_a_stream_that_ends_with_its_connection() -> None:
    async def go() -> None:
        async with stack() as s:
            body = json.dumps({"model": "t", "prompt": "x", "max_tokens": 2, "stream": True}).encode()
            reader, writer = await connected(s)
            writer.write(BODY_HEAD.replace(b"1.1", b"1.0") % len(body) + body)
            said = await asyncio.wait_for(reader.read(-1), 10)
            assert b"chunked" not in said and said.endswith(b"data: [DONE]\n\n")
            writer.close()

    play(go())
