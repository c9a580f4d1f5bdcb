"""A router with mock servers behind it and a client before it, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop

from pushkv.router.command import Service, Source
from pushkv.router.core import Router
from pushkv.router.settings import RouterSettings, ServerSettings

from .mock import Mock, mocks

LIMIT_S = 120.0


@dataclass
class Reply:
    """What the client got. text: of all choices of index 0. error: of a stream or a body. events: lines of a stream."""

    status: int
    text: str = ""
    error: dict[str, Any] | None = None
    done: bool = False
    headers: dict[str, str] | None = None
    raw: bytes = b""


@dataclass
class Stack:
    prefill: list[Mock]
    decode: list[Mock]
    service: Service
    url: str
    http: aiohttp.ClientSession

    @property
    def router(self) -> Router:
        return self.service.application.router

    @property
    def mocks(self) -> list[Mock]:
        return [*self.prefill, *self.decode]

    async def ask(
        self,
        prompt: Any,
        *,
        stream: bool = False,
        chat: bool = False,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> Reply:
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "stream": stream}
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return await self.post(
            "/v1/chat/completions" if chat else "/v1/completions", json.dumps(body | more).encode(), headers
        )

    async def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Reply:
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.http.post(self.url + path, data=body, headers=sent) as response:
            raw = await response.read()
            reply = Reply(response.status, raw=raw, headers={k.lower(): v for k, v in response.headers.items()})
            kind = response.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            for line in raw.split(b"\n"):
                if line == b"data: [DONE]":
                    reply.done = True
                elif line.startswith(b"data: "):
                    _take(json.loads(line[6:]), reply)
        elif raw:
            _take(json.loads(raw), reply)
        return reply

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over the series that have these labels."""
        async with self.http.get(self.url + "/metrics") as response:
            text = await response.text()
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == f"pushkv_router_{name}" and all(
                f'{key}="{wanted}"' in series for key, wanted in labels.items()
            ):
                total += float(value)
        return total


def play(story: Coroutine[Any, Any, None]) -> None:
    """Run one test's story on the loop that the router runs on."""
    uvloop.run(story)


def expected(prompt: str, tokens: int = 4) -> str:
    return "".join(f" {prompt}#{number}" for number in range(tokens))


def _take(body: dict[str, Any], reply: Reply) -> None:
    if "error" in body:
        reply.error = body["error"]
    for choice in body.get("choices", ()):
        reply.text += choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""


@contextlib.asynccontextmanager
async def stack(
    prefill: int = 1,
    decode: int = 1,
    *,
    named: bool = True,
    mock: dict[str, Any] | None = None,
    servers: RouterSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """named: the settings say who the prefill engines are, so that the first request is dispatched in parallel.

    servers: all settings, for servers that the caller runs.
    """
    async with mocks(prefill, decode, **(mock or {})) as (ps, ds):
        made = servers or RouterSettings(
            prefill=tuple(
                ServerSettings(p.url, p.engine_id, "127.0.0.1", p.side_port) if named else ServerSettings(p.url)
                for p in ps
            ),
            decode=tuple(ServerSettings(d.url) for d in ds),
            **{"health_every_s": 0.05, "health_s": 30.0, "connect_s": 30.0, **settings},
        )
        service = Service(made, Source(None, {}))
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = asyncio.create_task(service.serve(listening))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(LIMIT_S)) as http:
            await until(lambda: service.started)
            try:
                yield Stack(ps, ds, service, url, http)
            finally:
                service.stop()
                service.stop()
        await serving


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Returns when `condition` is true; fails when it does not become so."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)
