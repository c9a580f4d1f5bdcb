"""Two processes with a transport each: this one writes, the other (`target.py`) is written to."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pushkv.reference.transport import Transport, Write

from .target import Memory

Longs = Any


class Target:
    """The other process. Its answers come as JSON lines; `signal` stops, continues or kills it."""

    def __init__(
        self, name: str, size: int, backend: str = "UCX", environment: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("target.py")), name, backend, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        ready = self._answer()
        self.metadata = base64.b64decode(ready["metadata"])
        self.address = int(ready["address"])

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return next(iter(self._answer().values()))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise AssertionError(f"the target ended with {self.process.wait()}")


class Writer:
    """This process's side: a transport, and memory of random bytes."""

    def __init__(self, name: str, size: int, backend: str = "UCX", **settings: Any) -> None:
        self.transport = Transport(name, backend, **settings)
        self.memory = Memory(size)
        self.memory.bytes[:] = np.random.default_rng(7).integers(0, 256, size, np.uint8)
        self.transport.register([self.memory])  # type: ignore[list-item]

    def post(self, agent: str, target: Target, offsets: Longs, length: Longs, notice: bytes = b"") -> Write:
        """The same offsets on both sides."""
        offsets, length = np.asarray(offsets, np.int64), np.asarray(length, np.int64)
        return self.transport.post(
            agent, offsets + self.memory.data_ptr(), offsets + target.address, length, notice=notice
        )

    def until(self, condition: Callable[[], object], within_s: float = 20.0) -> bool:
        """Drives the transport until the condition holds."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if condition():
                return True
            self.transport.progress()
            time.sleep(0.0005)
        return False

    def finish(self, write: Write, within_s: float = 20.0) -> str:
        self.until(lambda: self.transport.poll(write) != "active", within_s)
        return write.state


def spaced(count: int, size: int, seed: int = 1) -> tuple[Longs, Longs]:
    """`count` descriptors of `size` bytes with gaps, in random order: (offsets, lengths)."""
    offsets = np.random.default_rng(seed).permutation(count) * 2 * size
    return offsets, np.full(count, size)
