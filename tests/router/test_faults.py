"""Servers that fail, restart, lie or hang; clients that leave or read slowly."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from .mock import Seen
from .stack import Stack, expected, play, stack, until


async def idle(s: Stack) -> None:
    """No leg is left anywhere, in the servers or in the books."""
    await until(lambda: all(mock.open == 0 for mock in s.mocks))
    await until(lambda: s.router.gate.active == 0)
    for fleet in (s.router.prefill, s.router.decode):
        for server in fleet:
            await until(lambda fleet=fleet, server=server: fleet.outstanding(server) == 0)  # type: ignore[misc]
    await until(lambda: s.router.held.bytes == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["close", "garbage", "decode_leg_refused", "half an answer"])
def test_a_failed_decode_leg_is_tried_on_another_server(fault: str, stream: bool) -> None:
    """The client sees one whole answer, unless it has some of it already."""

    async def go() -> None:
        async with stack(1, 2) as s:
            s.decode[0].fault = lambda _: fault
            replies = [await s.ask(f"q{n}", stream=stream) for n in range(4)]
            for n, reply in enumerate(replies):
                if stream and fault == "half an answer" and reply.error:
                    assert reply.text == expected(f"q{n}", 2) and reply.error["code"] == 502 and reply.done
                else:
                    assert (reply.status, reply.text, reply.error) == (200, expected(f"q{n}"), None)
            ids = [seen.params["transfer_id"] for seen in s.prefill[0].seen]
            assert len(set(ids)) == len(ids)
            await idle(s)
            assert any(reply.error for reply in replies) or await s.metric("retries_total") >= 1

    play(go())


def test_a_stream_that_begins_with_its_error_is_tried_again() -> None:
    async def go() -> None:
        async with stack(1, 2) as s:
            s.decode[0].fault = lambda _: "decode_leg_refused_stream"
            for n in range(3):
                reply = await s.ask(f"q{n}", stream=True)
                assert (reply.status, reply.text, reply.error) == (200, expected(f"q{n}"), None)
            s.decode[1].fault = lambda _: "decode_leg_refused_stream"
            reply = await s.ask("last", stream=True)
            assert reply.status == 500 and reply.error is not None and reply.error["code"] == 500
            await idle(s)

    play(go())


@pytest.mark.parametrize("fault", ["close", "garbage", "decode_leg_refused"])
def test_a_failed_prefill_leg_ends_the_decode_leg(fault: str) -> None:
    async def go() -> None:
        async with stack(2, 1) as s:
            s.prefill[0].fault = lambda _: fault
            replies = [await s.ask(f"q{n}", stream=True) for n in range(3)]
            assert [reply.text for reply in replies] == [expected(f"q{n}") for n in range(3)]
            await idle(s)  # an answer's last word is out before its leg has ended
            ends = [seen.end for seen in s.decode[0].seen]
            assert ends.count("answered") == 3 and "aborted" in ends

    play(go())


def test_a_refused_prompt_ends_the_decode_leg_and_is_not_tried_again() -> None:
    async def go() -> None:
        async with stack(2, 2) as s:
            for mock in s.prefill:
                mock.fault = lambda _: "too_long"
            reply = await s.ask("x", stream=True)
            assert reply.status == 400 and reply.error is not None and "context length" in reply.error["message"]
            await idle(s)
            assert [len(mock.seen) for mock in s.prefill] in ([1, 0], [0, 1])
            assert [seen.end for mock in s.decode for seen in mock.seen] == ["aborted"]

    play(go())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_d_refuses_ends_the_prefill_leg(stream: bool) -> None:
    async def go() -> None:
        async with stack() as s:
            s.prefill[0].prefill_s = 60
            s.decode[0].fault = lambda _: "too_long"
            reply = await s.ask("x", stream=stream)
            assert reply.status == 400 and reply.error is not None and "context length" in reply.error["message"]
            await idle(s)
            assert [seen.end for seen in s.prefill[0].seen] == ["aborted"]

    play(go())


def test_a_stream_that_comes_in_small_pieces_is_put_together() -> None:
    async def go() -> None:
        async with stack() as s:
            s.decode[0].fault = lambda _: "in small pieces"
            reply = await s.ask("x", stream=True)
            assert (reply.status, reply.text, reply.done, reply.error) == (200, expected("x"), True, None)

    play(go())


def test_after_the_first_token_nothing_is_tried_again() -> None:
    async def go() -> None:
        async with stack(2, 2) as s:
            for mock in s.decode:
                mock.fault = lambda _: "die after two tokens"
            reply = await s.ask("x", stream=True)
            assert (reply.status, reply.text) == (200, expected("x", 2))
            assert reply.error is not None and reply.error["code"] == 502
            assert sum(len(mock.seen) for mock in s.decode) == 1
            assert await s.metric("streams_broken_total") == 1
            await idle(s)

    play(go())


@pytest.mark.parametrize("known", [True, False])
def test_a_restarted_prefill_server_is_learnt(known: bool) -> None:
    """Under a new engine id. known: the router has seen that it was away."""

    async def go() -> None:
        async with stack(health_every_s=0.02 if known else 60.0) as s:
            s.decode[0].refuse_s = 30.0  # the engine would find out by itself, but late
            assert (await s.ask("one")).text == expected("one")
            await s.prefill[0].kill()
            if known:
                await until(lambda: not s.router.prefill.alive)
            await s.prefill[0].start()
            if known:
                await until(lambda: s.router.prefill.alive)
            else:  # no leg of the old process is left in a kept connection
                next(iter(s.router.prefill)).pool.trim()
            async with asyncio.timeout(5):
                reply = await s.ask("two")
            assert (reply.status, reply.text) == (200, expected("two"))
            assert s.decode[0].seen[-1].params["remote_engine_id"] == "P0.2"
            if known:
                assert await s.metric("dispatches_total", how="sequential", reason="identity in doubt") == 1
            else:
                assert await s.metric("identity_mismatches_total") == 1
                assert s.decode[0].seen[-2].end == "aborted"
            before = await s.metric("dispatches_total", how="parallel")
            assert (await s.ask("three")).text == expected("three")
            assert await s.metric("dispatches_total", how="parallel") == before + 1
            await idle(s)

    play(go())


def test_an_address_with_several_engines_behind_it_is_asked_first() -> None:
    """Data-parallel ranks: every second prefill is another engine's."""

    async def go() -> None:
        async with stack() as s:
            p = s.prefill[0]
            names = [p.engine_id, "P0.other"]
            p.wire.engines["P0.other"] = p

            def other(_: Seen) -> str:
                p.engine_id = names[len(p.seen) % 2]
                return ""

            p.fault = other
            for n in range(8):
                assert (await s.ask(f"q{n}")).text == expected(f"q{n}")
            assert await s.metric("dispatches_total", how="sequential", reason="identity changes") >= 5
            assert await s.metric("identity_mismatches_total") <= 3

    play(go())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["prefill", "decode", "tokens"])
def test_a_client_that_leaves_ends_both_legs(when: str, stream: bool) -> None:
    async def go() -> None:
        async with stack(mock={"token_s": 0.05}) as s:
            if when == "prefill":
                s.prefill[0].prefill_s = 60
            body = json.dumps({"model": "t", "prompt": "x", "max_tokens": 1000, "stream": stream}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await until(lambda: s.decode[0].open == 1)
            if when != "prefill":
                await until(lambda: s.prefill[0].seen[-1].end == "answered")
            if when == "tokens" and stream:
                assert b"200" in await reader.readline()
            writer.transport.abort()
            await idle(s)
            assert s.decode[0].seen[0].end == "aborted"
            assert s.prefill[0].seen[0].end == ("aborted" if when == "prefill" else "answered")
            assert await s.metric("clients_gone_total") == 1
            assert await s.metric("retries_total") == 0

    play(go())


def test_a_slow_client_slows_its_server_down_and_nobody_else() -> None:
    """What it does not read stays in the kernel and in the server; what it reads at last is whole."""

    async def go() -> None:
        async with stack(mock={"token_s": 0.0}) as s:
            prompt, tokens = "y" * 20_000, 1500  # 30 MB of answer
            body = json.dumps({"model": "t", "prompt": prompt, "max_tokens": tokens, "stream": True}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]), limit=1 << 12)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await until(lambda: s.decode[0].open == 1)
            await asyncio.sleep(0.5)
            assert s.decode[0].open == 1, "nobody has read 30 MB, but the server has got rid of them"
            assert (await s.ask("other", stream=True)).text == expected("other")
            got = bytearray()
            while part := await reader.read(1 << 16):
                got += part
            assert got.count(prompt.encode()) == tokens and b"data: [DONE]" in got[-40:]
            await idle(s)

    play(go())


def test_a_client_that_takes_nothing_is_let_go() -> None:
    async def go() -> None:
        async with stack(mock={"token_s": 0.0}, client_stall_s=0.3) as s:
            body = json.dumps({"model": "t", "prompt": "y" * 20_000, "max_tokens": 1500, "stream": True}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]), limit=1 << 12)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await until(lambda: s.decode[0].open == 1)
            await idle(s)
            assert s.decode[0].seen[0].end in ("aborted", "broken")  # it was reading, or writing
            assert reader is not None
            writer.transport.abort()

    play(go())


@pytest.mark.parametrize(
    ("setting", "role", "stream", "tries"),
    [
        ("first_token_s", "decode", True, 2),
        ("answer_s", "decode", False, 1),
        ("prefill_s", "prefill", True, 2),
        ("prefill_s", "prefill", False, 2),
    ],
)
def test_a_leg_that_hangs_is_given_up(setting: str, role: str, stream: bool, tries: int) -> None:
    """A whole answer that takes too long would take another server as long: that is not tried again."""

    async def go() -> None:
        async with stack(attempts=2, **{setting: 0.2}) as s:
            hanging = (s.prefill if role == "prefill" else s.decode)[0]
            hanging.fault = lambda _: "hang"
            reply = await s.ask("x", stream=stream)
            assert reply.status == 504
            await idle(s)
            assert len(hanging.seen) == tries

    play(go())


def test_a_whole_answer_may_take_longer_than_a_first_token() -> None:
    async def go() -> None:
        async with stack(first_token_s=0.1, mock={"token_s": 0.1}) as s:
            assert (await s.ask("x")).text == expected("x")
            assert await s.metric("retries_total") == 0

    play(go())


def test_a_stream_that_falls_silent_is_ended() -> None:
    async def go() -> None:
        async with stack(token_gap_s=0.2, mock={"token_s": 30.0}) as s:
            reply = await s.ask("x", stream=True)
            assert reply.text == expected("x", 1) and reply.error is not None
            assert await s.metric("streams_broken_total", reason="timeout") == 1
            await idle(s)

    play(go())


def test_nobody_is_there() -> None:
    async def go() -> None:
        async with stack() as s:
            await s.decode[0].kill()
            reply = await s.ask("x")
            assert reply.status == 503 and reply.headers is not None and reply.headers["retry-after"] == "1"
            await s.decode[0].start()
            await until(lambda: s.router.decode.alive)
            assert (await s.ask("y")).text == expected("y")
            await idle(s)

    play(go())


def test_kept_connections_that_the_servers_close_cost_no_request() -> None:
    async def go() -> None:
        async with stack(upstream_idle_s=100.0, health_every_s=60.0) as s:
            for n in range(5):
                replies = await asyncio.gather(*(s.ask(f"q{n}.{m}") for m in range(8)))
                assert [reply.text for reply in replies] == [expected(f"q{n}.{m}") for m in range(8)]
                for mock in s.mocks:  # as a server does after its keep-alive time
                    for task in list(mock._connections):
                        task.cancel()
            assert await s.metric("legs_failed_total") == 0
            await idle(s)

    play(go())


def test_unequal_load_goes_where_the_least_is() -> None:
    async def go() -> None:
        async with stack(2, 2) as s:
            slow: list[Seen] = []

            def hang(seen: Seen) -> str:
                slow.append(seen)
                return "hang" if len(slow) == 1 else ""

            s.decode[0].fault = hang
            stuck = asyncio.create_task(s.ask("long", max_tokens=4000))
            await until(lambda: len(slow) == 1)
            for n in range(6):
                assert (await s.ask(f"q{n}")).text == expected(f"q{n}")
            assert len(s.decode[1].seen) == 6
            stuck.cancel()
            await asyncio.gather(stuck, return_exceptions=True)
            await idle(s)

    play(go())


def test_a_lost_connection_is_not_a_lost_request() -> None:
    """Every tenth decode leg breaks; all get their own answer, each from one server only."""

    async def go() -> None:
        async with stack(2, 3) as s:
            count = iter(range(10**6))
            for mock in s.decode:
                mock.fault = lambda _: "close" if next(count) % 10 == 9 else ""
            replies = await asyncio.gather(*(s.ask(f"q{n}", stream=n % 2 == 0) for n in range(200)))
            assert [reply.text for reply in replies] == [expected(f"q{n}") for n in range(200)]
            answered = [seen.body["prompt"] for mock in s.decode for seen in mock.seen if seen.end == "answered"]
            assert sorted(answered) == sorted(f"q{n}" for n in range(200))
            await idle(s)

    play(go())


def test_the_session_of_aiohttp_sees_no_half_answer() -> None:
    """An answer that is not streamed is whole or an error, also when every server breaks off."""

    async def go() -> None:
        async with stack() as s:
            s.decode[0].fault = lambda _: "half an answer"
            async with s.http.post(s.url + "/v1/completions", json={"prompt": "x", "model": "t"}) as response:
                try:
                    body = await response.json()
                except aiohttp.ClientError:
                    pytest.fail("the answer broke off")
            assert response.status in (502, 503) and body["error"]["code"] == response.status

    play(go())


def test_a_long_answer_of_p_holds_no_connection() -> None:
    """Nobody waits for it, but it is taken whole: up to `max_answer_bytes`, then P is let go."""

    async def go() -> None:
        async with stack(max_answer_bytes=20 << 20) as s:
            s.prefill[0].padding = 16 << 20
            assert (await s.ask("x", stream=True)).text == expected("x")
            await idle(s)
            assert [seen.end for seen in s.prefill[0].seen] == ["answered"]
            s.prefill[0].padding = 32 << 20
            await s.ask("y", stream=True)
            await idle(s)
            assert await s.metric("legs_failed_total", reason="too large") == 1

    play(go())
