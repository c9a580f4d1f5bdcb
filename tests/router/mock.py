"""Prefill and decode servers that speak vLLM's wire format, as recorded from real ones (`record.py`); in one loop.

They keep the contract of the connector: a decode leg waits until the engine that it names has finished the prefill with
the same transfer id, and fails as the recorded one does when there is no such engine. So a router that mixes legs up
gets no answer here either. Each answer repeats the request's prompt, so that no answer can pass for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).parent / "recordings"


@functools.cache
def recorded(name: str) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers without the framing, and the body without chunks, of a recording."""
    head, _, body = (RECORDINGS / f"{name}.http").read_bytes().partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    if ("transfer-encoding", "chunked") in headers:
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
        body = whole
    framing = ("content-length", "transfer-encoding", "connection", "date")
    return int(status.split()[1]), [(k, v) for k, v in headers if k not in framing], body  # type: ignore[misc]


@dataclass
class Wire:
    """What passes between the engines: who lives, and which prefills are done."""

    engines: dict[str, Mock] = field(default_factory=dict)
    done: dict[tuple[str, str], asyncio.Event] = field(default_factory=dict)

    def prefill(self, engine: str, transfer_id: str) -> asyncio.Event:
        return self.done.setdefault((engine, transfer_id), asyncio.Event())


@dataclass
class Seen:
    """One request as a server saw it. end: "", "answered", "refused", "aborted" (its client left), "broken" (by us)."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    end: str = ""

    @property
    def params(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body.get("kv_transfer_params") or {}
        return found


Fault = Callable[[Seen], str]
"""What goes wrong with a request: "" for nothing, or one of Mock.FAULTS, or the name of a recording to answer with."""


class Mock:
    """One server. prefill_s, token_s: how long it takes. fault: asked for every request that has legs."""

    FAULTS = ("close", "hang", "die after two tokens", "half an answer", "garbage", "in small pieces", "stops")

    def __init__(self, role: str, name: str, wire: Wire, *, prefill_s: float = 0.002, token_s: float = 0.001) -> None:
        self.role, self.wire = role, wire
        self.prefill_s, self.token_s = prefill_s, token_s
        self.refuse_s = 0.05
        self.padding = 0  # more bytes of a prefill leg's answer
        self.fault: Fault = lambda _: ""
        self.seen: list[Seen] = []
        self.keep_seen = True
        self.open = 0
        self.most_open = 0
        self.well = True
        self.side_port = 5600
        self.port = 0
        self._alive = False
        self._incarnations = itertools.count(1)
        self._name = name
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    tls: ssl.SSLContext | None = None

    async def start(self) -> None:
        """Under a new engine id each time, on the same port."""
        self.engine_id = f"{self._name}.{next(self._incarnations)}"
        self.wire.engines[self.engine_id] = self
        self._alive = True
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=4096, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Nobody is told; every connection breaks."""
        assert self._server is not None
        self._alive = False
        self.wire.engines.pop(self.engine_id, None)
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        for (engine, _), event in list(self.wire.done.items()):
            if engine == self.engine_id:
                event.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if not self._alive:  # it was in the queue when the server was killed
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = head[0].split(" ")
        if method == "GET":
            name = "models" if path == "/v1/models" else "health"
            status, sent, body = recorded(name) if self.well else (503, [], b"")
            await self._whole(writer, status, sent, body)
            return True
        try:
            seen = Seen(path, headers, json.loads(raw), raw)
        except ValueError:
            await self._whole(writer, *recorded("not_json"))
            return True
        if self.keep_seen:
            self.seen.append(seen)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        answer = asyncio.ensure_future(self._answer(seen, writer))
        left = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                seen.end = seen.end or ("answered" if answer.result() else "broken")
                return answer.result()
            seen.end = "aborted"
            return False
        finally:
            self.open -= 1
            for task in (answer, left):
                task.cancel()
            await asyncio.gather(answer, left, return_exceptions=True)
            if seen.end == "":
                seen.end = "broken"

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """False: the connection is to break."""
        fault = self.fault(seen)
        if fault == "close":
            return False
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "garbage":
            writer.write(b"SMTP/1.0 hello\r\n\r\n")
            return False
        if fault and fault not in self.FAULTS:
            await self._whole(writer, *recorded(fault))
            return True
        params = seen.params
        if params.get("do_remote_decode"):
            return await self._prefill(seen, writer, fault)
        if params.get("do_remote_prefill"):
            named = self.wire.engines.get(params["remote_engine_id"])
            if named is None or named.side_port != params["remote_port"]:
                await asyncio.sleep(self.refuse_s)
                await self._refused(seen, writer)
                return True
            await self.wire.prefill(params["remote_engine_id"], params["transfer_id"]).wait()
            if params["remote_engine_id"] not in self.wire.engines:
                await self._refused(seen, writer)
                return True
        else:
            await asyncio.sleep(self.prefill_s)
        return await self._tokens(seen, writer, fault)

    async def _refused(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        seen.end = "refused"
        name = "decode_leg_refused_stream" if seen.body.get("stream") else "decode_leg_refused"
        await self._whole(writer, *recorded(name))

    async def _prefill(self, seen: Seen, writer: asyncio.StreamWriter, fault: str) -> bool:
        await asyncio.sleep(self.prefill_s)
        chat = "chat" in seen.path
        status, headers, body = recorded("prefill_leg_chat" if chat else "prefill_leg")
        answer = json.loads(body)
        answer["kv_transfer_params"].update(
            remote_engine_id=self.engine_id, remote_port=self.side_port, transfer_id=seen.params["transfer_id"]
        )
        answer["padding"] = "x" * self.padding
        event = self.wire.prefill(self.engine_id, seen.params["transfer_id"])
        event.set()
        await self._whole(writer, status, headers, json.dumps(answer).encode(), fault)
        return True

    async def _tokens(self, seen: Seen, writer: asyncio.StreamWriter, fault: str) -> bool:
        chat, stream = "chat" in seen.path, bool(seen.body.get("stream"))
        prompt = seen.body["messages"][-1]["content"] if chat else seen.body.get("prompt")
        count = int(seen.body.get("max_tokens") or 4)
        pieces = [f" {prompt}#{number}" for number in range(count)]
        if not stream:
            await asyncio.sleep(self.token_s * count)
            status, headers, body = recorded("chat" if chat else "completion")
            answer = json.loads(body)
            choice = answer["choices"][0]
            if chat:
                choice["message"]["content"] = "".join(pieces)
            else:
                choice["text"] = "".join(pieces)
            whole = json.dumps(answer).encode()
            if fault == "half an answer":
                writer.write(_head(status, [*headers, ("content-length", str(len(whole)))]) + whole[: len(whole) // 2])
                await writer.drain()
                return False
            await self._whole(writer, status, headers, whole, fault)
            return True
        status, headers, body = recorded("chat_stream" if chat else "completion_stream")
        events = [event for event in body.decode().split("\n\n") if event]
        template = json.loads(events[1][6:])
        writer.write(_head(status, [*headers, ("transfer-encoding", "chunked")]))
        for number, piece in enumerate(pieces):
            if fault == "die after two tokens" and number == 2:
                await writer.drain()
                return False
            if fault == "half an answer" and number == 2:
                writer.write(b'30\r\ndata: {"id": "cut')
                await writer.drain()
                return False
            if chat:
                template["choices"][0]["delta"]["content"] = piece
            else:
                template["choices"][0]["text"] = piece
            event = _chunk(b"data: " + json.dumps(template).encode() + b"\n\n")
            if fault == "in small pieces":
                for start in range(0, len(event), 7):
                    writer.write(event[start : start + 7])
                    await writer.drain()
                    await asyncio.sleep(0)
            else:
                writer.write(event)
            await writer.drain()
            await asyncio.sleep(self.token_s)
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _whole(
        self, writer: asyncio.StreamWriter, status: int, headers: list[tuple[str, str]], body: bytes, fault: str = ""
    ) -> None:
        if fault == "stops":
            body += b" " * self.padding
        head = _head(status, [*headers, ("content-length", str(len(body)))])
        if fault == "stops":
            writer.write(head + body[:-1])
            await asyncio.sleep(3600)
        writer.write(head + body)
        await writer.drain()


def _head(status: int, headers: list[tuple[str, str]]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def mocks(prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[tuple[list[Mock], list[Mock]]]:
    """Running servers: of each role so many."""
    wire = Wire()
    made = [Mock("prefill", f"P{n}", wire, **settings) for n in range(prefill)]
    for number, mock in enumerate(made):
        mock.side_port = 5600 + number
    made += [Mock("decode", f"D{n}", wire, **settings) for n in range(decode)]
    for mock in made:
        await mock.start()
    try:
        yield made[:prefill], made[prefill:]
    finally:
        for mock in made:
            await mock.kill()
