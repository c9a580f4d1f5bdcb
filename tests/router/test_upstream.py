"""HTTP to a server: answers in every framing and every split, and the connections under them. And TLS."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from pushkv.router.exchange import Exchange, UpstreamError
from pushkv.router.settings import RouterSettings, ServerSettings
from pushkv.router.upstream import Pool

from .mock import mocks
from .stack import expected, play, stack, until

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


async def exchanges(answers: list[list[bytes]], do: Callable[[Pool, list[int]], Awaitable[None]]) -> None:
    """A server that gives the n-th request on a connection the n-th answer, in these pieces, and then closes.

    ``do`` gets a pool of it, and a list that holds one entry per connection made.
    """
    made: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(1)
        try:
            for pieces in answers:
                await reader.readuntil(b"\r\n\r\n{}")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool("127.0.0.1", server.sockets[0].getsockname()[1], None, connect_s=5, idle_s=5)
    async with asyncio.timeout(20):
        await do(pool, made)
    pool.close()
    server.close()


async def got(exchange: Exchange) -> tuple[int, bytes]:
    await exchange.head()
    return exchange.status, await exchange.whole(1000)


@pytest.mark.parametrize(
    "answer", [LENGTH, CHUNKED, TO_THE_END, CONTINUED], ids=["length", "chunked", "end", "continue"]
)
def test_every_split(answer: bytes) -> None:
    async def do(pool: Pool, _: list[int]) -> None:
        for cut in range(1, len(answer)):
            pieces[:] = [answer[:cut], answer[cut:]]
            assert await got(pool.start(REQUEST, b"{}")) == (200, b"hello"), cut
        pieces[:] = [answer[i : i + 1] for i in range(len(answer))]
        assert await got(pool.start(REQUEST, b"{}")) == (200, b"hello")

    pieces: list[bytes] = []
    play(exchanges([pieces] if answer is TO_THE_END else [pieces] * 1000, do))


def test_connections_are_kept_and_a_closed_one_is_stale() -> None:
    async def do(pool: Pool, made: list[int]) -> None:
        ended: list[Exchange] = []
        for _ in range(3):
            exchange = pool.start(REQUEST, b"{}", ended.append)
            assert await got(exchange) == (200, b"hello") and ended[-1] is exchange
            assert dict(exchange.headers)[b"x-a"] == b"b"
        assert len(made) == 1
        await until(lambda: pool.connections == 0)
        assert await got(pool.start(REQUEST, b"{}")) == (200, b"hello")
        assert len(made) == 2

    play(exchanges([[LENGTH]] * 3, do))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([b""], "closed"),
        ([LENGTH[:-1]], "closed"),
        ([CHUNKED[:-3]], "closed"),
        ([b"nonsense\r\n\r\n"], "malformed"),
        ([LENGTH.replace(b"200", b"600")], "malformed"),
        ([LENGTH.replace(b"200", b"999")], "malformed"),
        ([LENGTH.replace(b"200", b"099")], "malformed"),
        ([CHUNKED.replace(b"3;", b"g;")], "malformed"),
        ([LENGTH.replace(b"5", b"4000") + b"x" * 3995], "too large"),
    ],
)
def test_what_goes_wrong_has_a_name(pieces: list[bytes], reason: str) -> None:
    async def do(pool: Pool, _: list[int]) -> None:
        exchange = pool.start(REQUEST, b"{}")
        with pytest.raises(UpstreamError) as caught:
            await got(exchange)
        assert caught.value.reason == reason and exchange.ended
        await until(lambda: pool.connections == 0)

    play(exchanges([pieces], do))


@pytest.mark.parametrize("surplus", [LENGTH, LENGTH[:30], b"H", b"x", b"garbage\r\n\r\n"])
@pytest.mark.parametrize("apart", [False, True])
def test_more_than_was_asked_for_is_no_answer_to_the_next_request(surplus: bytes, apart: bool) -> None:
    other = LENGTH.replace(b"hello", b"other")

    async def do(pool: Pool, made: list[int]) -> None:
        assert await got(pool.start(REQUEST, b"{}")) == (200, b"hello")
        if apart:
            await until(lambda: pool.connections == 0)
        assert pool.connections == 0
        first[:] = [other]
        assert await got(pool.start(REQUEST, b"{}")) == (200, b"other")
        assert len(made) == 2

    first = [LENGTH, surplus] if apart else [LENGTH + surplus]
    play(exchanges([first, [other]], do))


@pytest.mark.parametrize("host", ["x" * 64 + ".invalid", "a..invalid"])
def test_a_name_that_cannot_be_looked_up(host: str) -> None:
    async def go() -> None:
        exchange = Pool(host, 9, None, connect_s=5, idle_s=1).start(REQUEST, b"{}")
        exchange.limit(5)
        with pytest.raises(UpstreamError) as caught:
            await exchange.head()
        assert caught.value.reason == "connect"

    play(go())


def test_nobody_listens_and_limits() -> None:
    async def go() -> None:
        pool = Pool("127.0.0.1", 9, None, connect_s=1, idle_s=1)
        with pytest.raises(UpstreamError) as caught:
            await got(pool.start(REQUEST, b"{}"))
        assert caught.value.reason == "connect"

    async def do(pool: Pool, _: list[int]) -> None:
        exchange = pool.start(REQUEST, b"{")  # the server waits for the rest
        exchange.limit(60)
        exchange.limit(0.1)
        with pytest.raises(UpstreamError) as caught:
            await got(exchange)
        assert caught.value.reason == "timeout"
        exchange = pool.start(REQUEST, b"{")
        exchange.limit(0.1)
        exchange.limit(0.4)  # put off
        await asyncio.sleep(0.25)
        assert not exchange.ended
        await until(lambda: exchange.ended)
        exchange = pool.start(REQUEST, b"{")
        exchange.abort(ValueError("ours"))
        with pytest.raises(ValueError, match="ours"):
            await exchange.head()

    play(go())
    play(exchanges([[LENGTH]], do))


def certificate(folder: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_on_both_sides(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(cert, key)

    async def go() -> None:
        async with mocks(1, 1) as (ps, ds):
            for mock in (*ps, *ds):
                await mock.kill()
                mock.tls = server_side
                await mock.start()
            urls = [mock.url.replace("http", "https") for mock in (*ps, *ds)]
            servers = {"prefill": (ServerSettings(urls[0]),), "decode": (ServerSettings(urls[1]),)}
            tls = {"tls_cert": str(cert), "tls_key": str(key)}
            async with stack(servers=RouterSettings(**servers, **tls, upstream_ca=str(cert), health_every_s=60.0)) as s:
                s.url = s.url.replace("http", "https")
                trust = ssl.create_default_context(cafile=str(cert))
                await s.http.close()
                s.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust))
                for n in range(3):
                    assert (await s.ask(f"q{n}", stream=n == 1)).text == expected(f"q{n}")
                await s.http.close()
            async with stack(servers=RouterSettings(**servers, connect_s=5.0, health_every_s=60.0)) as s:
                assert (await s.ask("x")).status == 503  # not trusted
            async with stack(servers=RouterSettings(**servers, upstream_verify=False, health_every_s=60.0)) as s:
                assert (await s.ask("x")).text == expected("x")

    play(go())
