"""What the router costs: time to the first token that it adds, and requests per second through one process.

    .venv/bin/python benchmarks/router.py [--json out/router.json]

Everything runs on this machine, on loopback: servers that answer at once in vLLM's wire format (one process), the
router, and the clients (this process). Beside it, in the same run and in turns, the same requests straight to the
servers and through nginx as a plain reverse proxy with one worker, where nginx is installed. Through the router each
request is two: the prefill leg and the decode leg.

* first token: so many streams at once, each of 40 tokens 50 ms apart, again and again; from sending a request to the
  first bytes of its body. "Added" is the difference of the percentiles to those of the direct requests.
* requests per second: so many clients that send their next request when they have their answer, not streamed.
* CPU time of the process in between, per request: what bounds it, also where others use the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httptools
import uvloop

HOST = "127.0.0.1"
TOKENS, GAP_S = 40, 0.05
BODY = json.dumps({"model": "tiny", "prompt": "w1 " * 300, "max_tokens": TOKENS}).encode()
STREAM = BODY[:-1] + b', "stream": true}'
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","created":1796000082,"model":"tiny","choices":[{"index":0,"text":" w226","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'  # noqa: E501
ANSWER = b'{"id":"cmpl-1","object":"text_completion","created":1796000082,"model":"tiny","choices":[{"index":0,"text":" w226 w476","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"usage":{"prompt_tokens":300,"total_tokens":302,"completion_tokens":2},"kv_transfer_params":%b}'  # noqa: E501
SAID = b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"P0","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_block_ids":[],"remote_num_tokens":300}'  # noqa: E501


class MockServer(asyncio.Protocol):
    """Answers at once; streams go on by a timer."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        body, self.body = self.body, b""
        if b'"do_remote_decode":true' in body:
            self.whole(ANSWER % SAID)
        elif b'"stream":true' in body or b'"stream": true' in body:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self.transport.write(head + chunk(EVENT))
            self.token(1)
        else:
            self.whole(ANSWER % b"null")

    def whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def token(self, number: int) -> None:
        if number > 1:
            self.transport.write(chunk(EVENT))
        if number < TOKENS:
            self.timer = asyncio.get_running_loop().call_later(GAP_S, self.token, number + 1)
        else:
            self.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve_mocks(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(MockServer, HOST, port, backlog=4096) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


class Load(asyncio.Protocol):
    """One client: its next request follows the last answer. first: seconds to the first bytes of each body."""

    def __init__(self, request: bytes, first: list[float], until: float) -> None:
        self.request, self.first, self.until = request, first, until
        self.over = asyncio.get_running_loop().create_future()
        self.answers = self.errors = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.waiting = True
        self.sent = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if self.waiting:
            self.waiting = False
            self.first.append(time.perf_counter() - self.sent)

    def on_message_complete(self) -> None:
        self.answers += 1
        self.errors += self.parser.get_status_code() != 200
        if time.perf_counter() < self.until:
            self.send()
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def load(port: int, clients: int, seconds: float, body: bytes, spread_s: float) -> tuple[list[float], float]:
    """First-byte times, and answers per second. Raises where an answer is not 200."""
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    request = request % len(body) + body
    first: list[float] = []
    began = time.perf_counter()
    loop = asyncio.get_running_loop()
    protocols: list[Load] = []
    draw = random.Random(1)

    async def one() -> None:
        await asyncio.sleep(draw.random() * spread_s)
        _, protocol = await loop.create_connection(lambda: Load(request, first, began + seconds), HOST, port)
        protocols.append(protocol)
        await protocol.over

    await asyncio.gather(*(one() for _ in range(clients)))
    if any(protocol.errors for protocol in protocols):
        raise RuntimeError("an answer was not 200")
    return first, sum(protocol.answers for protocol in protocols) / (time.perf_counter() - began)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


NGINX = """worker_processes 1; daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 1000000000; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream decode {{ server 127.0.0.1:{decode}; keepalive 1024; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://decode; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""


def start(folder: Path, ports: dict[str, int]) -> list[subprocess.Popen[bytes]]:
    here = str(Path(__file__))
    running = [subprocess.Popen([sys.executable, here, "--mocks", f"{ports['prefill']},{ports['direct']}"])]
    prefill = f"http://{HOST}:{ports['prefill']}=P0@127.0.0.1:5600"
    command = [sys.executable, "-m", "pushkv.sim.cli", "router", "--listen", f"{HOST}:{ports['router']}"]
    command += ["--prefill", prefill, "--decode", f"http://{HOST}:{ports['direct']}"]
    with open(folder / "router.log", "wb") as log:
        running.append(subprocess.Popen(command, stderr=log))
    if "nginx" in ports:
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, decode=ports["direct"], port=ports["nginx"]))
        running.append(subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf")]))
    return running


async def ready(port: int) -> None:
    for _ in range(200):
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise RuntimeError(f"nobody listens on port {port}")


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20


async def measure(ports: dict[str, int], options: argparse.Namespace, pids: dict[str, int]) -> dict[str, Any]:
    ways = [way for way in ("direct", "nginx", "router") if way in ports]
    for port in ports.values():
        await ready(port)
    first: dict[str, list[float]] = {way: [] for way in ways}
    rate: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in pids}
    cpu_stream: dict[str, list[float]] = {way: [] for way in pids}
    for way in ways:  # connections are made, code is warm
        await load(ports[way], options.clients, 1.0, BODY, 0.1)
    memory = [rss_mib(pids["router"])]
    for _ in range(options.rounds):
        for way in ways:
            before = cpu_s(pids[way]) if way in pids else 0.0
            got, _ = await load(ports[way], options.streams, options.seconds, STREAM, TOKENS * GAP_S)
            first[way] += got
            if way in pids:
                cpu_stream[way].append((cpu_s(pids[way]) - before) / len(got))
        for way in ways:
            before = cpu_s(pids[way]) if way in pids else 0.0
            got, per_s = await load(ports[way], options.clients, options.seconds / 2, BODY, 0.05)
            rate[way].append(per_s)
            if way in pids:
                cpu[way].append((cpu_s(pids[way]) - before) / len(got))
    memory.append(rss_mib(pids["router"]))
    return {
        "streams": options.streams,
        "clients": options.clients,
        "samples": {way: len(first[way]) for way in ways},
        "first_token_ms": {
            way: {
                "p50": round(1e3 * percentile(first[way], 0.5), 3),
                "p99": round(1e3 * percentile(first[way], 0.99), 3),
            }
            for way in ways
        },
        "requests_per_s": {way: round(statistics.median(rate[way])) for way in ways},
        "cpu_us_per_request": {way: round(1e6 * statistics.median(found)) for way, found in cpu.items()},
        "cpu_us_per_stream": {way: round(1e6 * statistics.median(found)) for way, found in cpu_stream.items()},
        "router_rss_mib": [round(one, 1) for one in memory],
    }


def show(found: dict[str, Any]) -> None:
    direct = found["first_token_ms"]["direct"]
    print(f"{found['streams']} streams at once; {found['clients']} clients for requests per second")
    print(f"{'way':10}{'first token p50':>18}{'p99':>10}{'added p50':>12}{'added p99':>12}{'requests/s':>12}  (ms)")
    for way, times in found["first_token_ms"].items():
        added = [times[name] - direct[name] for name in ("p50", "p99")]
        print(
            f"{way:10}{times['p50']:>18.2f}{times['p99']:>10.2f}{added[0]:>12.2f}{added[1]:>12.2f}"
            f"{found['requests_per_s'][way]:>12,d}"
        )
    for way, used in found["cpu_us_per_request"].items():
        stream = found["cpu_us_per_stream"][way]
        print(f"CPU time of {way}: {used} µs per request, {stream} µs per stream of {TOKENS} tokens")
    print(f"router's memory: {found['router_rss_mib'][0]} MiB before, {found['router_rss_mib'][1]} MiB after")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=19400, help="the first of four")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--mocks", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mocks:
        uvloop.run(serve_mocks([int(port) for port in options.mocks.split(",")]))
        return
    names = ["prefill", "direct", "router", *(["nginx"] if shutil.which("nginx") else [])]
    ports = {name: options.port + number for number, name in enumerate(names)}
    with tempfile.TemporaryDirectory(prefix="pushkv-router-") as folder:
        running = start(Path(folder), ports)
        pids = {way: process.pid for way, process in zip(("router", "nginx"), running[1:], strict=False)}
        try:
            found = uvloop.run(measure(ports, options, pids))
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait()
    show(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
