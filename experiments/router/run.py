"""10,000 requests through the router while one server is killed every 5 s: none lost, none answered twice, memory flat.

    .venv/bin/python experiments/router/run.py            # two minutes; renews results/no_loss.json

The router is a process of its own; two prefill and three decode servers answer in vLLM's wire format
(`tests/router/mock.py`). A killed server's connections break, nobody listens on its port for 2 s, and it comes back
under another engine id.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
import uvloop

from tests.router.chaos import chaos
from tests.router.mock import mocks
from tests.router.stack import Reply, Stack

RESULTS = Path(__file__).parent / "results" / "no_loss.json"


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20


async def run(options: argparse.Namespace) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that the router ends with it
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with mocks(2, 3, token_s=0.02, prefill_s=0.02) as (ps, ds):
        command = [sys.executable, "-m", "pushkv.sim.cli", "router", "--config", "/dev/stdin"]
        settings = f'listen = "127.0.0.1:{port}"\nattempts = 4\n'
        settings += "".join(f'[[prefill]]\nurl = "{p.url}"\n' for p in ps)
        settings += "".join(f'[[decode]]\nurl = "{d.url}"\n' for d in ds)
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(settings)
            file.flush()
            command[-1] = file.name
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            try:
                return await measure(options, process, f"http://127.0.0.1:{port}", [*ps, *ds])
            finally:
                process.terminate()
                process.wait()


async def measure(options: argparse.Namespace, process: Any, url: str, servers: list[Any]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        client = Stack([], [], None, url, http)  # type: ignore[arg-type]
        for _ in range(200):
            try:
                async with http.get(url + "/health"):
                    break
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)

        async def ask(prompt: str, stream: bool) -> Reply:
            return await client.ask(prompt, stream=stream)

        memory: list[float] = []

        async def watch() -> None:
            while True:
                await asyncio.sleep(5)
                memory.append(round(rss_mib(process.pid), 1))

        watching = asyncio.create_task(watch())
        began = time.monotonic()
        found = await chaos(
            ask, servers, options.requests, per_s=options.per_s, every_s=options.every_s, down_s=2.0, seed=1
        )
        took = time.monotonic() - began
        watching.cancel()
        counted = {}
        for name in ("dispatches_total", "retries_total", "legs_failed_total", "identity_mismatches_total"):
            counted[name] = int(await client.metric(name))
        counted["active"] = int(await client.metric("active"))
    return {
        "requests": options.requests,
        "seconds": round(took, 1),
        "kills": found.kills,
        "whole": found.whole,
        "cut_after_first_token": found.cut,
        "refused": found.refused,
        "lost": len(found.lost),
        "answered_twice": found.twice,
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "router": counted,
        "router_rss_mib": memory,
        "examples_of_lost": found.lost[:5],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--per-s", type=float, default=100.0)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    found = uvloop.run(run(options))
    text = json.dumps(found, indent=1)
    print(text)
    Path(options.out).write_text(text + "\n", encoding="utf-8")
    return 1 if found["lost"] or found["answered_twice"] else 0


if __name__ == "__main__":
    sys.exit(main())
