"""What the router costs: time to the first token that it adds, requests per second, and CPU time.

    .venv/bin/python benchmarks/router.py [--json out/router.json]

Everything runs on this machine, on loopback, and shares its cores: servers in vLLM's wire format and the clients
(`router_peers.c`, compiled here: they should cost as little as can be); between them the router, or nginx as a plain
reverse proxy with one worker where it is installed, or nothing. The servers answer at once; with `--decode-ms` the
decode server does so much later, which is nearer the truth: it has no token before the prefill server has answered.
Through the router each request is two: the prefill leg and the decode leg. In each round all ways take turns; the
numbers are medians over the rounds of a round's own number, and `--json` has every round's.

* streams: 40 tokens, 50 ms apart, so 2 s long; they begin at Poisson's times, 100 a second, whatever has become of
  those before: on average 200 are open at once. First token: from the moment at which a request was to be sent to the
  first bytes of its body. "Added" is the difference to the same percentile of the direct requests of the same round.
* whole answers at a given rate: the same for requests that are not streamed, `--rate` a second.
* whole answers, as many as go: so many clients that send their next request when they have their answer.
* CPU time of what is in between, user and system apart, per request: what bounds it, also where others use the machine.

A round in which an answer was not 200 or was cut is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
TOKENS, STREAM_S = 40, 2.0
BODY = json.dumps({"model": "tiny", "prompt": "w1 " * 300, "max_tokens": TOKENS}).encode()
STREAM = BODY[:-1] + b', "stream": true}'
PEERS = Path(__file__).with_name("router_peers.c")
NGINX = """worker_processes 1; daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 1000000000; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream decode {{ server 127.0.0.1:{decode}; keepalive 1024; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://decode; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""


@dataclass(frozen=True, slots=True)
class Load:
    """One run of the clients. first_ms: to the first byte of each body, sorted. user_us, system_us: of the process in
    between, per answer; 0 where there is none.
    """

    per_s: float
    first_ms: list[float]
    user_us: float
    system_us: float

    def ms(self, share: float) -> float:
        return self.first_ms[min(len(self.first_ms) - 1, int(share * len(self.first_ms)))]


class Bench:
    """The running processes, and how to load them."""

    def __init__(self, folder: Path, first_port: int, decode_ms: int) -> None:
        self._folder, self._decode_ms = folder, decode_ms
        self._peers = folder / "peers"
        names = ["prefill", "direct", "router", *(["nginx"] if shutil.which("nginx") else [])]
        self._ports = {name: first_port + number for number, name in enumerate(names)}
        self.ways = ["direct", *(["nginx"] if "nginx" in self._ports else []), "router"]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-o", str(self._peers), str(PEERS), "-lm"], check=True)
        for name, body in (("whole", BODY), ("stream", STREAM)):
            (folder / name).write_bytes(body)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        ports, folder = self._ports, self._folder
        listen = str(ports["prefill"]), str(ports["direct"])
        self._run("servers", [str(self._peers), "mock", str(self._decode_ms), *listen])
        prefill = f"http://{HOST}:{ports['prefill']}=P0@127.0.0.1:5600"
        command = [sys.executable, "-m", "pushkv.sim.cli", "router", "--listen", f"{HOST}:{ports['router']}"]
        self._run("router", [*command, "--prefill", prefill, "--decode", f"http://{HOST}:{ports['direct']}"])
        if "nginx" in ports:
            (folder / "nginx.conf").write_text(NGINX.format(folder=folder, decode=ports["direct"], port=ports["nginx"]))
            self._run("nginx", ["nginx", "-c", str(folder / "nginx.conf")])
        for port in ports.values():
            _ready(port)

    def stop(self) -> None:
        """Ends what runs, however far `start` has come."""
        for process in reversed(self._running.values()):
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def load(self, way: str, kind: str, rate: float, seconds: float, body: str) -> Load:
        """kind: "open" at `rate` requests per second, or "closed" with `rate` clients. Raises if one is bad."""
        before = self._cpu_us(way)
        command = [str(self._peers), kind, str(self._ports[way]), str(rate), str(seconds), str(self._folder / body)]
        clients = self._running["clients"] = subprocess.Popen(command, stdout=subprocess.PIPE)
        ran, *times = clients.communicate()[0].split(b"\n")
        del self._running["clients"]
        if clients.returncode:
            raise RuntimeError(f"{way}: the clients ended with {clients.returncode}")
        took_s, answers, bad = ran.split()
        if int(bad) or not int(answers):
            raise RuntimeError(f"{way}: {int(bad)} of {int(answers)} answers were bad")
        user, system = ((after - was) / int(answers) for after, was in zip(self._cpu_us(way), before, strict=True))
        found = sorted(float(one) / 1e3 for one in times if one)
        return Load(int(answers) / float(took_s), found, user, system)

    def rss_mib(self) -> float:
        """The router's."""
        statm = Path(f"/proc/{self._running['router'].pid}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def _run(self, name: str, command: list[str]) -> None:
        with open(self._folder / f"{name}.log", "wb") as log:
            self._running[name] = subprocess.Popen(command, stderr=log)

    def _cpu_us(self, way: str) -> tuple[float, float]:
        """User and system time so far."""
        if way not in self._running:
            return 0.0, 0.0
        stat = Path(f"/proc/{self._running[way].pid}/stat").read_text(encoding="ascii")
        fields = stat.rpartition(")")[2].split()
        tick = 1e6 / os.sysconf("SC_CLK_TCK")
        return int(fields[11]) * tick, int(fields[12]) * tick


def _stop(number: int, _: object) -> None:
    """As at the end of a run: nothing that was started may outlive it."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _ready(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection((HOST, port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"nobody listens on port {port}")


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    ways = bench.ways
    for way in ways:  # connections are made, code is warm
        bench.load(way, "closed", options.clients, 1.0, "whole")
        bench.load(way, "open", options.streams / STREAM_S, 1.0, "stream")
    memory = [round(bench.rss_mib(), 1)]
    kinds = {
        "streams": ("open", options.streams / STREAM_S, options.seconds, "stream"),
        "at_rate": ("open", options.rate, options.seconds / 2, "whole"),
        "closed": ("closed", options.clients, options.seconds / 2, "whole"),
    }
    rounds: dict[str, dict[str, list[Load]]] = {kind: {way: [] for way in ways} for kind in kinds}
    for _ in range(options.rounds):
        for kind, settings in kinds.items():
            for way in ways:
                rounds[kind][way].append(bench.load(way, *settings))
    memory.append(round(bench.rss_mib(), 1))
    return {
        "decode_ms": options.decode_ms,
        "streams_at_once": options.streams,
        "streams_per_s": options.streams / STREAM_S,
        "rate_per_s": options.rate,
        "clients": options.clients,
        "rounds": {
            kind: {way: [_row(one, direct) for one, direct in zip(loads, found["direct"], strict=True)]
                   for way, loads in found.items()}
            for kind, found in rounds.items()
        },
        "router_rss_mib": memory,
    }  # fmt: skip


def _row(one: Load, direct: Load) -> dict[str, float]:
    return {
        "answers": len(one.first_ms),
        "per_s": round(one.per_s, 1),
        "p50_ms": round(one.ms(0.5), 3),
        "p99_ms": round(one.ms(0.99), 3),
        "added_p50_ms": round(one.ms(0.5) - direct.ms(0.5), 3),
        "added_p99_ms": round(one.ms(0.99) - direct.ms(0.99), 3),
        "user_us": round(one.user_us, 1),
        "system_us": round(one.system_us, 1),
    }


def show(found: dict[str, Any]) -> None:
    says = {
        "streams": f"{TOKENS}-token streams, {found['streams_per_s']:g} a second: {found['streams_at_once']} open",
        "at_rate": f"whole answers, {found['rate_per_s']:g} a second",
        "closed": f"whole answers, {found['clients']} clients, as many as go",
    }
    for kind, ways in found["rounds"].items():
        print(f"\n{says[kind]}")
        print(f"{'way':8}{'per s':>9}{'first byte p50':>16}{'p99':>8}{'added p50':>11}{'p99':>8}  ms", end="")
        print(f"{'CPU user':>11}{'system':>8}  µs each")
        for way, rows in ways.items():
            m = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            print(f"{way:8}{m['per_s']:>9,.0f}{m['p50_ms']:>16.2f}{m['p99_ms']:>8.2f}", end="")
            print(f"{m['added_p50_ms']:>11.2f}{m['added_p99_ms']:>8.2f}    ", end="")
            print(f"{m['user_us']:>11.0f}{m['system_us']:>8.0f}" if way != "direct" else "")
    print(f"\nrouter's memory: {found['router_rss_mib'][0]} MiB before, {found['router_rss_mib'][1]} MiB after")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=200, help="open at once, on average")
    parser.add_argument("--rate", type=float, default=2000.0, help="whole answers per second")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-ms", type=int, default=0, help="how late the decode server answers")
    parser.add_argument("--port", type=int, default=19400, help="the first of four")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="pushkv-router-") as folder:
        bench = Bench(Path(folder), options.port, options.decode_ms)
        try:
            bench.start()
            found = measure(bench, options)
        finally:
            bench.stop()
    show(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
