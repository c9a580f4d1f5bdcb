"""Bounds: the queue, bodies of every kind and size, many streams at once; and what is never written down."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.router.attempt import Attempt
from pushkv.router.exchange import Exchange
from pushkv.router.request import Refusal, parse
from pushkv.router.upstream import Connection

from .stack import expected, play, stack, until


def test_the_queue_is_bounded_and_fair() -> None:
    async def go() -> None:
        async with stack(max_active=2, max_queued=3, mock={"token_s": 0.1}) as s:
            asking = []
            for n in range(5):
                asking.append(asyncio.create_task(s.ask(f"q{n}", max_tokens=1 + n)))
                await until(lambda n=n: s.router.gate.active + s.router.gate.queued == n + 1)  # type: ignore[misc]
            refused = await s.ask("one too many")
            assert refused.status == 429 and refused.headers is not None
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.error is not None and refused.error["type"] == "rate_limit_error"
            replies = await asyncio.gather(*asking)
            assert [r.text for r in replies] == [expected(f"q{n}", 1 + n) for n in range(5)]
            assert max(mock.most_open for mock in s.decode) == 2
            assert [seen.body["prompt"] for seen in s.decode[0].seen] == [f"q{n}" for n in range(5)]
            assert s.router.gate.active == s.router.gate.queued == 0

    play(go())


def test_who_waits_too_long_is_refused_and_who_leaves_the_queue_makes_room() -> None:
    async def go() -> None:
        async with stack(max_active=1, max_queued=1, queue_s=0.3) as s:
            s.decode[0].fault = lambda seen: "hang" if seen.body["prompt"] == "stuck" else ""
            stuck = asyncio.create_task(s.ask("stuck"))
            await until(lambda: s.router.gate.active == 1)
            assert (await s.ask("late")).status == 429
            leaves = asyncio.create_task(s.ask("leaves"))
            await until(lambda: s.router.gate.queued == 1)
            leaves.cancel()
            await until(lambda: s.router.gate.queued == 0)
            waits = asyncio.create_task(s.ask("waits"))
            await until(lambda: s.router.gate.queued == 1)
            stuck.cancel()
            assert (await waits).text == expected("waits")
            assert s.router.gate.active == s.router.gate.queued == 0

    play(go())


def test_two_thousand_streams() -> None:
    """All at once; each client gets its own answer, and afterwards nothing is left."""
    count = 2000

    async def go() -> None:
        async with stack(2, 2, max_active=count, mock={"prefill_s": 0.5}, health_every_s=60.0, connect_s=30.0) as s:
            for mock in s.mocks:
                mock.keep_seen = False

            async def one(number: int) -> bytes:
                body = b'{"model":"t","stream":true,"max_tokens":2,"prompt":"q%d"}' % number
                reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % len(body) + body)
                got = await reader.read(-1)
                writer.close()
                return got

            for number, got in enumerate(await asyncio.gather(*(one(n) for n in range(count)))):
                assert re.findall(rb'"text": "(.*?)"', got) == [b" q%d#0" % number, b" q%d#1" % number]
                assert b"data: [DONE]" in got and b"error" not in got
            assert await s.metric("dispatches_total", how="parallel") == count
            assert await s.metric("retries_total") == 0
            await until(lambda: s.router.gate.active == 0 and all(mock.open == 0 for mock in s.mocks))

    play(go())


def test_memory_does_not_grow_with_requests() -> None:
    """Objects, not bytes: those are the allocator's."""

    async def go() -> None:
        async with stack(2, 2, health_every_s=60.0) as s:
            for mock in s.mocks:
                mock.keep_seen = False

            async def some(count: int) -> int:
                for start in range(0, count, 50):
                    replies = await asyncio.gather(*(s.ask(f"q{start + n}", stream=n % 2 == 0) for n in range(50)))
                    assert all(reply.status == 200 for reply in replies)
                for mock in s.mocks:
                    mock.wire.done.clear()
                await until(lambda: s.router.gate.active == 0)
                await asyncio.sleep(0.2)
                gc.collect()
                return len(gc.get_objects())

            await some(200)
            first = await some(50)
            assert await some(250) - first < 150

    play(go())


KINDS = (Attempt, Exchange, Connection)


@pytest.mark.parametrize("dispatch", ["parallel", "sequential"])
def test_what_fails_leaves_nothing_to_the_collector(dispatch: str) -> None:
    """An error holds the frames that it went through: held by what they hold, it stays until the collector runs, which
    is seldom.
    """

    async def go() -> None:
        async with stack(2, 2, dispatch=dispatch, health_every_s=0.02) as s:
            assert (await s.ask("x")).status == 200
            await s.prefill[0].kill()
            await s.decode[0].kill()
            s.decode[1].fault = s.prefill[1].fault = lambda _: "close"
            gc.collect()
            gc.disable()
            try:
                for n in range(20):
                    assert (await s.ask("x", stream=n % 2 == 0)).status >= 500
                    await s.http.get(s.url + "/v1/models")
                    await asyncio.sleep(0.02)
                left = Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, KINDS))
            finally:
                gc.enable()
            assert left["Exchange"] < 12 and left["Attempt"] < 6 and left["Connection"] < 40, left

    play(go())


@pytest.mark.parametrize("declared", [True, False])
def test_an_oversized_body_is_refused(declared: bool) -> None:
    async def go() -> None:
        async with stack(max_body_bytes=100_000) as s:
            body = json.dumps({"prompt": "x" * 200_000}).encode()

            async def pieces():  # type: ignore[no-untyped-def]
                for start in range(0, len(body), 10_000):
                    yield body[start : start + 10_000]

            data = body if declared else pieces()
            async with s.http.post(s.url + "/v1/completions", data=data) as response:
                assert response.status == 413
            assert (await s.ask("x")).text == expected("x")
            assert len(s.decode[0].seen) == 1

    play(go())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def go() -> None:
        async with stack(client_body_s=0.2) as s:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
            writer.transport.abort()

    play(go())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["model", "prompt", "messages", "n", "stream", "max_tokens", "max_completion_tokens", "use_beam_search"]
FIELDS += ["kv_transfer_params", "user", "prompt_embeds", "stream_options"]


@settings(max_examples=60)
@given(
    st.one_of(
        st.binary(max_size=200),
        JSON.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8).map(lambda value: json.dumps(value).encode()),
        st.integers(1, 20_000).map(lambda depth: b"[" * depth),
        st.integers(1, 20_000).map(lambda depth: b'{"prompt":' * depth),
        st.integers(1, 3000).map(lambda depth: b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"),
    )
)
def test_no_body_makes_the_parser_fail(body: bytes) -> None:
    """It is refused with a 4xx, or both legs are written, as JSON and without the client's transfer parameters."""
    try:
        ask = parse(b"/v1/completions", [], body, b"x-session-id", prefixes=True)
    except Refusal as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert 400 <= refusal.status < 500
        return
    params = {"transfer_id": "ours"}
    try:
        meant = json.loads(body)
    except (ValueError, RecursionError):
        return  # more lenient than Python: the engine decides
    assert json.loads(ask.prefill_body(params)) == {
        **{k: v for k, v in meant.items() if k not in ("stream", "stream_options")},
        **({"max_completion_tokens": 1} if "max_completion_tokens" in meant else {}),
        "max_tokens": 1,
        "kv_transfer_params": params,
    }
    assert json.loads(ask.decode_body(params)) == {**meant, "kv_transfer_params": params}
    assert "kv_transfer_params" not in json.loads(ask.decode_body(None))


@settings(max_examples=2)
@given(st.integers(0, 2**32))
def test_fuzzed_bodies_and_heads_never_give_a_5xx(seed: int) -> None:
    """Over the wire: the servers answer what vLLM answers to a body that is not right."""
    draw = random.Random(seed)
    good = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()

    def mangled() -> bytes:
        body = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(body))
            deed = draw.randrange(3)
            if deed == 0:
                body[place] = draw.randrange(256)
            elif deed == 1:
                del body[place : place + draw.randint(1, 5)]
            else:
                body[place:place] = draw.randbytes(draw.randint(1, 5))
            if not body:
                break
        return bytes(body)

    async def go() -> None:
        async with stack(health_every_s=60.0) as s:
            for mock in s.mocks:  # what the engines say to a body, right or wrong, is not the question
                mock.fault = lambda _: "wrong_type"
            for _ in range(50):
                reply = await s.post("/v1/completions", mangled())
                assert 400 <= reply.status < 500, reply
                raw = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
                place = draw.randrange(len(raw))
                raw = raw[:place] + draw.randbytes(1) + raw[place + draw.randrange(2) :]
                reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
                writer.write(raw)
                writer.write_eof()
                first = await asyncio.wait_for(reader.readline(), 10)
                assert not first or first.split()[1].startswith(b"4"), (raw, first)
                writer.transport.abort()

    play(go())


def test_no_credential_and_no_prompt_in_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """At the chattiest level, through failures of every kind, and with a fault of our own."""
    caplog.set_level(logging.DEBUG, logger="pushkv.router")
    caplog.set_level(logging.DEBUG, logger="uvicorn")

    async def go() -> None:
        async with stack(2, 2) as s:
            faults = iter(
                ["close", "garbage", "too_long", "decode_leg_refused", "die after two tokens", "half an answer"] * 9
            )
            for mock in s.mocks:
                mock.fault = lambda _: next(faults, "")
            secret = {
                "Authorization": "Bearer sk-secret",
                "X-Session-Id": "secret-session",
                "X-Request-Id": "secret-id",
            }
            for n in range(12):
                await s.ask("secret-prompt", stream=n % 2 == 0, headers=secret, user="secret-user")
            await s.post("/v1/completions", b'{"prompt": "secret-prompt', secret)
            s.router.gate.leave = None  # type: ignore[assignment,method-assign]
            await s.ask("secret-prompt", headers=secret)

    play(go())
    said = "\n".join(record.getMessage() + str(record.exc_info or "") for record in caplog.records)
    assert "failed" in said and "failed in the router itself" in said
    assert "secret" not in said


def test_what_makes_an_answer_long_is_not_asked_of_p() -> None:
    fields = {"prompt": "x", "model": "m", "top_logprobs": 5, "prompt_logprobs": 5, "echo": True}
    fields |= {"return_token_ids": True, "return_token_offsets": True, "return_prompt_text": True, "min_tokens": 9}
    ask = parse(b"/v1/completions", [], json.dumps(fields).encode(), b"x-session-id", prefixes=False)
    sent = json.loads(ask.prefill_body({}))
    assert sent == {"prompt": "x", "model": "m", "max_tokens": 1, "kv_transfer_params": {}}
    assert json.loads(ask.decode_body({})) == {**fields, "kv_transfer_params": {}}
