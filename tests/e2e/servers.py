"""One vLLM server as a process: started, watched, stopped, frozen, killed, started again under the same identity.

It decides nothing about the connector: ``kinds.py`` says what ``--kv-transfer-config`` holds. Every server runs in a
process group of its own that dies with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .nursery import Nursery

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

HOST = "127.0.0.1"
NAME = "tiny"
"""The model's name in requests."""
START_S = 300.0
"""The first start takes 20 to 60 s alone, more beside other work; the others a few."""
NURSERY = Nursery()


class ServerDied(RuntimeError):
    """A server ended, or did not come up; the message holds the end of its log."""


def free_ports(count: int) -> range:
    """Ports in a row, none of them in use, as the ranks of an engine need them."""
    while True:
        last = free_port()
        got = [last] + [free_port() for _ in range(count - 1)]
        if got[0] - got[-1] == count - 1:
            return range(got[-1], last + 1)


def free_port() -> int:
    """A TCP port that nobody listens on now, below the range that the system hands out for outgoing connections."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first = int(file.read().split()[0])
    for port in range(first - 1 - 61 * os.getpid() % 16_000, 1024, -1):  # processes begin far from each other
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError("no free port")


_given: set[int] = set()


@dataclass(frozen=True, slots=True)
class Spec:
    """What one server is: everything that stays the same when it is started again."""

    name: str
    model: Path
    folder: Path
    """Logs and traces go here."""
    block_size: int = 32
    blocks: int = 256
    """Blocks in the KV cache (``--num-gpu-blocks-override``)."""
    max_seqs: int = 16
    tp: int = 1
    dp: int = 1
    """Data-parallel engines behind one address."""
    batch_tokens: int = 2048
    max_tokens: int = 2048
    """Longest prompt and answer together."""
    transfer: Mapping[str, Any] | None = None
    """``--kv-transfer-config``, or None for a plain server."""
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    side_ports: tuple[int, ...] = ()
    """Where its side channel listens: rank 0's, rank 1's ..., then those of the next data-parallel engine."""

    @property
    def engine_id(self) -> str:
        return self.transfer["engine_id"] if self.transfer else self.name


class Server:
    """A running (or stopped) server of one :class:`Spec`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.port = free_port()
        self.pid = 0
        self._pidfd = -1
        self.starts = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> Path:
        return self.spec.folder / f"{self.spec.name}.{self.starts}.log"

    def _arguments(self) -> list[str]:
        spec = self.spec
        command = ["--model", str(spec.model), "--served-model-name", NAME, "--host", HOST, "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(spec.block_size)]
        command += ["--max-model-len", str(spec.max_tokens), "--max-num-seqs", str(spec.max_seqs)]
        command += ["--max-num-batched-tokens", str(spec.batch_tokens)]
        command += ["--num-gpu-blocks-override", str(spec.blocks), *spec.arguments]
        if spec.tp > 1:
            command += ["--tensor-parallel-size", str(spec.tp)]
        if spec.dp > 1:
            command += ["--data-parallel-size", str(spec.dp)]
        if spec.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(spec.transfer)]
        return command

    def start(self) -> None:
        """Start the process; :meth:`wait` waits for it."""
        assert not self.alive, f"{self.name} runs already"
        self.spec.folder.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        while self.log.exists():  # of an earlier server of this name
            self.starts += 1
        self.pid = NURSERY.fork(self._arguments(), self.spec.environment, self.log)
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, limit_s: float = START_S) -> None:
        """Return when the server answers ``/health``."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if not self.alive:
                raise ServerDied(f"{self.name} ended while starting:\n{self.tail()}")
            if self.get("/health", 1.0) is not None:
                return
            time.sleep(0.3)
        raise ServerDied(f"{self.name} was not up after {limit_s:.0f} s:\n{self.tail()}")

    @property
    def alive(self) -> bool:
        """Whether the HTTP process runs (the engine's process ends with it, and it with the engine's)."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def _gone(self, limit_s: float) -> bool:
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], limit_s)[0])

    @property
    def healthy(self) -> bool:
        return self.alive and self.get("/health", 5.0) is not None

    def get(self, path: str, limit_s: float = 5.0) -> str | None:
        """The body of a GET, or None where there is no 200 in time."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=limit_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return body if response.status == 200 else None

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """``kill -9``: no goodbye to anyone."""
        self.signal(signal.SIGKILL)
        self._gone(30.0)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def stop(self, limit_s: float = 15.0) -> bool:
        """End it as an operator would (SIGTERM to its first process), by force where that takes too long; whether it
        ended by itself."""
        if self.alive:
            self.thaw()
            os.kill(self.pid, signal.SIGTERM)
        ended = self._gone(limit_s)
        self.kill()
        return ended

    def samples(self) -> Iterator[Sample]:
        """vLLM's Prometheus values."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics") or ""):
            yield from family.samples

    def metrics(self) -> dict[str, float]:
        """The same, summed over labels."""
        found: dict[str, float] = {}
        for sample in self.samples():
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def counted(self, name: str, label: str = "what") -> dict[str, float]:
        """What one metric holds by one of its labels; zeros are left out."""
        found: dict[str, float] = {}
        for sample in self.samples():
            if sample.name == name and sample.value:
                found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
        return found

    def cache_usage(self) -> float | None:
        """The used part of the KV cache, 0 to 1; None where the server does not answer."""
        return self.metrics().get("vllm:kv_cache_usage_perc")

    def requests(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        found = self.metrics()
        return int(found.get("vllm:num_requests_running", -1)), int(found.get("vllm:num_requests_waiting", -1))

    def rss_mib(self) -> float:
        """Resident memory of the server's processes."""
        total = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.getpgid(int(entry.name)) == self.pid:
                        total += int((entry / "statm").read_text(encoding="ascii").split()[1])
        return total * os.sysconf("SC_PAGE_SIZE") / 2**20

    def say_where(self) -> None:
        """Have every thread of the server write its stack into the log."""
        if self.alive:
            self.signal(signal.SIGUSR1)
            time.sleep(0.2)

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        if not self.log.is_file():
            return "(no log)"
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def start_all(*servers: Server) -> None:
    """Start servers side by side and wait for all of them; none is left running where one fails."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
    except BaseException:
        for server in servers:
            server.kill()
        raise


def until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.1) -> bool:
    """Whether ``condition`` came true within ``limit_s``."""
    end = time.monotonic() + limit_s
    while True:
        if condition():
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(every_s)
