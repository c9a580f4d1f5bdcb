"""``pushkv router`` as a process of its own, as an operator starts it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from .servers import HOST, Server, free_port


class Front:
    """A running router, as a server that the tests' client can ask."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://{HOST}:{port}"

    async def text(self, path: str) -> str:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
            return await response.text()

    async def counted(self, name: str, **labels: str) -> float:
        """Sum over the series with these labels."""
        total = 0.0
        for line in (await self.text("/metrics")).splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == f"pushkv_router_{name}" and all(
                f'{k}="{v}"' in series for k, v in labels.items()
            ):
                total += float(value)
        return total


@contextlib.asynccontextmanager
async def front(p: Server, d: Server, log: Path, *flags: str, named: bool = False) -> AsyncIterator[Front]:
    """``pushkv router`` before a pair. named: it is told who P is."""
    port = free_port()
    told = f"{p.url}={p.spec.engine_id}@{HOST}:{p.spec.side_ports[0]}" if named else p.url
    command = [sys.executable, "-m", "pushkv.sim.cli", "router", "--prefill", told, "--decode", d.url]
    with open(log, "ab") as file:
        process = await asyncio.create_subprocess_exec(
            *command, "--listen", f"{HOST}:{port}", *flags, stdin=subprocess.DEVNULL, stderr=file
        )
    made = Front(process, port)
    try:
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    await made.text("/health")
                    break
                await asyncio.sleep(0.1)
        yield made
    finally:
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), 90) == 0, log.read_text()[-2000:]
