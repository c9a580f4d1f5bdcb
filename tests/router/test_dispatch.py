"""What the two legs say, when they leave, and what the client gets."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from .stack import expected, play, stack, until


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_both_legs_leave_at_once(chat: bool, stream: bool) -> None:
    async def go() -> None:
        async with stack() as s:
            s.prefill[0].prefill_s = 0.2
            asking = asyncio.create_task(s.ask("hello", stream=stream, chat=chat))
            await until(lambda: bool(s.prefill[0].seen and s.decode[0].seen))
            assert not asking.done() and s.prefill[0].open == s.decode[0].open == 1
            reply = await asking
            assert (reply.status, reply.text, reply.done) == (200, expected("hello"), stream)
            assert await s.metric("dispatches_total", how="parallel", reason="push") == 1

    play(go())


def test_what_the_legs_say() -> None:
    async def go() -> None:
        async with stack() as s:
            tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
            sent = {"stream_options": {"include_usage": True}, "tools": tools, "n": 2, "top_logprobs": 2}
            sent |= {"max_completion_tokens": 9, "logprobs": True, "kv_transfer_params": {"remote_host": "evil"}}
            headers = {"Authorization": "Bearer abc", "traceparent": "00-1-2-01", "X-Request-Id": "mine"}
            reply = await s.ask("hello", stream=True, chat=True, headers=headers, **sent)
            p, d = s.prefill[0].seen[0], s.decode[0].seen[0]
            tid = p.params["transfer_id"]
            assert re.fullmatch(r"[0-9a-f]{32}", tid)
            assert p.params["do_remote_decode"] is True and p.params["do_remote_prefill"] is False
            assert d.params == {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "P0.1",
                "remote_request_id": f"chatcmpl-{tid}", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
                "transfer_id": tid,
            }  # fmt: skip
            assert p.body["max_tokens"] == p.body["max_completion_tokens"] == 1
            assert not {"stream", "stream_options", "logprobs", "top_logprobs"} & set(p.body)
            assert p.body["tools"] == d.body["tools"] == tools and p.body["n"] == d.body["n"] == 2
            assert d.body["stream"] is True and d.body["max_completion_tokens"] == 9 and d.body["max_tokens"] == 4
            for leg in (p, d):
                assert leg.headers["authorization"] == "Bearer abc" and leg.headers["traceparent"] == "00-1-2-01"
                assert leg.headers["x-request-id"] == tid
            assert reply.headers is not None and reply.headers["x-request-id"] == "mine"
            await s.ask("hello")
            assert s.prefill[0].seen[1].params["transfer_id"] != tid

    play(go())


def test_an_unknown_engine_is_asked_first_and_then_known() -> None:
    async def go() -> None:
        async with stack(named=False) as s:
            assert (await s.ask("one")).text == expected("one")
            assert await s.metric("dispatches_total", how="sequential", reason="identity unknown") == 1
            first = s.decode[0].seen[0].params
            assert first["remote_engine_id"] == "P0.1" and first["remote_port"] == 5600
            assert first["transfer_id"] == s.prefill[0].seen[0].params["transfer_id"]
            assert (await s.ask("two")).text == expected("two")
            assert await s.metric("dispatches_total", how="parallel") == 1
            assert await s.metric("identities_learnt_total") == 1

    play(go())


def test_pull_is_sequential_and_passes_on_what_p_said() -> None:
    async def go() -> None:
        async with stack(mode="pull") as s:
            assert (await s.ask("one", stream=True)).text == expected("one")
            assert await s.metric("dispatches_total", how="sequential", reason="pull") == 1
            said = s.decode[0].seen[0].params
            assert said["remote_num_tokens"] and said["remote_block_ids"] == [] and said["do_remote_prefill"] is True

    play(go())


def test_sequential_as_set() -> None:
    async def go() -> None:
        async with stack(dispatch="sequential") as s:
            assert (await s.ask("one")).text == expected("one")
            assert await s.metric("dispatches_total", how="sequential", reason="as set") == 1

    play(go())


def test_what_cannot_be_handed_over_is_served_by_one() -> None:
    async def go() -> None:
        async with stack() as s:
            assert (await s.ask("one", use_beam_search=True, kv_transfer_params={"remote_host": "x"})).text == expected(
                "one"
            )
            assert not s.prefill[0].seen and s.decode[0].seen[0].params == {}
            assert await s.metric("server_outstanding_tokens") == 0

    play(go())


def test_other_paths() -> None:
    async def go() -> None:
        async with stack() as s:
            async with s.http.get(s.url + "/v1/models") as response:
                assert response.status == 200 and (await response.json())["data"][0]["id"] == "tiny"
            for path, status in (
                ("/health", 200),
                ("/ready", 200),
                ("/metrics", 200),
                ("/v1/completions", 405),
                ("/x", 404),
            ):
                async with s.http.get(s.url + path) as response:
                    assert response.status == status, path
            for mock in s.mocks:
                mock.well = False
            await until(lambda: not s.router.decode.alive and not s.router.prefill.alive)
            for path, status in (("/health", 200), ("/ready", 503)):
                async with s.http.get(s.url + path) as response:
                    assert response.status == status, path

    play(go())


def test_a_long_prompt_reaches_the_engines_byte_for_byte() -> None:
    async def go() -> None:
        async with stack() as s:
            prompt = 'é\\"\u2028' * 300_000
            body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}, ensure_ascii=False).encode()
            reply = await s.post("/v1/completions", body)
            assert reply.text == f" {prompt}#0"
            assert s.prefill[0].seen[0].body["prompt"] == s.decode[0].seen[0].body["prompt"] == prompt

    play(go())


def test_recorded_refusals_are_the_clients() -> None:
    async def go() -> None:
        async with stack() as s:
            for name, status in (("too_long", 400), ("no_such_model", 404), ("wrong_type", 400)):
                for mock in s.mocks:
                    mock.fault = lambda _, name=name: name  # type: ignore[misc]
                reply = await s.ask("x")
                assert reply.status == status and reply.error is not None and reply.error["code"] == status
            assert await s.metric("retries_total") == 0

    play(go())
