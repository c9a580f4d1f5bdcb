"""Clients that are slow, silent or long-winded before their request is known."""

from __future__ import annotations

import asyncio
import json

import pytest

from .stack import Stack, expected, play, stack

BODY = json.dumps({"model": "t", "prompt": "x", "max_tokens": 4}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)


async def connected(s: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD, b"\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(sent: bytes, after: bool) -> None:
    """after: on a connection that has carried a request."""

    async def go() -> None:
        async with stack(client_idle_s=0.5) as s:
            reader, writer = await connected(s)
            if after:
                writer.write(HEAD + b"\r\n" + BODY)
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(one[15:]) for one in head.split(b"\r\n") if one.startswith(b"content-length:"))
                assert expected("x").encode() in await reader.readexactly(length)
            writer.write(sent)
            async with asyncio.timeout(10):
                said = await reader.read(-1)
            assert b"did not come in time" in said if sent else said == b""
            writer.close()
            assert (await s.ask("y")).text == expected("y")

    play(go())


@pytest.mark.parametrize("line", [b"x-%d: y\r\n", b"%d" + b"y" * 100])
def test_a_head_without_end_is_refused(line: bytes) -> None:
    async def go() -> None:
        async with stack() as s:
            reader, writer = await connected(s)
            writer.write(HEAD + b"x-a: ")
            sent = 0
            try:
                while sent < 4 << 20 and not reader.at_eof():
                    writer.write(line % sent)
                    sent += len(line)
                    await writer.drain()
                    await asyncio.sleep(0)
            except ConnectionError:
                pass
            assert sent < 4 << 20
            assert (await s.ask("y")).text == expected("y")
            writer.transport.abort()

    play(go())


def test_a_long_head_that_ends_is_served() -> None:
    async def go() -> None:
        async with stack() as s:
            assert (await s.ask("x", headers={"x-long": "y" * 8000, "x-too": "z" * 8000})).text == expected("x")

    play(go())


def test_half_a_head_behind_a_request_does_not_cut_its_answer() -> None:
    async def go() -> None:
        async with stack(client_idle_s=0.2, mock={"token_s": 0.3}) as s:
            reader, writer = await connected(s)
            writer.write(HEAD + b"\r\n" + BODY)
            await asyncio.sleep(0.05)
            writer.write(b"POST /v1/comp")
            async with asyncio.timeout(10):
                said = await reader.read(-1)
            assert expected("x").encode() in said and said.endswith(b"did not come in time.")
            writer.close()

    play(go())
