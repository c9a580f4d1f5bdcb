"""Two engines in one process: real ranks, offices, pools and copies; frames by a queue, writes by memmove.

Nothing is injected: every message is what the other engine sent. Frames can be held back or dropped, writes can be slow
or fail, so that faults meet the code that ships.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

Link = tuple[str, int]


class Exchange:
    """Where all channels meet. ``drop(frame)`` says which frames are lost."""

    def __init__(self) -> None:
        self.boxes: dict[Link, deque[tuple[Link, bytes]]] = {}
        self.drop: Callable[[bytes], bool] = lambda frame: False
        self.sent = 0


class Channel:
    """A side channel that is a queue."""

    def __init__(self, exchange: Exchange, me: Link) -> None:
        self.exchange, self.me = exchange, me
        exchange.boxes[me] = deque()
        self.counters: dict[str, int] = {}

    def open(self, link: Link, host: str, port: int) -> None:
        """Addresses mean nothing here."""

    def close_link(self, link: Link) -> None:
        """Nothing is kept per link."""

    def send(self, link: Link, frame: bytes) -> bool:
        self.exchange.sent += 1
        if self.exchange.drop(frame) or link not in self.exchange.boxes:
            return False
        self.exchange.boxes[link].append((self.me, frame))
        return True

    def receive(self) -> list[tuple[Link, bytes]]:
        box, frames = self.exchange.boxes[self.me], []
        while box:
            frames.append(box.popleft())
        return frames

    def sockets(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.exchange.boxes.pop(self.me, None)


class Transfer:
    """A write that copies when ``due``."""

    def __init__(self, ranges: tuple[np.ndarray, np.ndarray, np.ndarray], due: float) -> None:
        self.ranges, self.due = ranges, due
        self.state = "active"


class MemoryTransport:
    """Writes by memmove, ``delay_s`` after the post; ``fail`` names what goes wrong: ``""``, ``raise`` or ``break``."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s, self.fail = delay_s, ""
        self.metadata = b"memory"
        self.posted = self.descriptors = 0
        self.agents: set[str] = set()

    def connect(self, metadata: bytes) -> str:
        name = f"agent-{len(self.agents)}"
        self.agents.add(name)
        return name

    def disconnect(self, agent: str) -> None:
        self.agents.discard(agent)

    def post(
        self, agent: str, local: Any, remote: Any, length: Any, here: int, there: int, notice: bytes = b""
    ) -> Transfer:
        if self.fail == "raise":
            raise RuntimeError("post refused")
        assert agent in self.agents
        self.posted += 1
        self.descriptors += len(length)
        write = Transfer((local, remote, length), time.monotonic() + self.delay_s)
        if self.fail == "break":
            write.state = "broken"
        return write

    def poll(self, write: Transfer) -> str:
        if write.state == "active" and time.monotonic() >= write.due:
            for source, target, size in zip(*write.ranges, strict=True):
                ctypes.memmove(int(target), int(source), int(size))
            write.state = "done"
        return write.state

    def release(self, write: Transfer) -> bool:
        return write.state != "active"

    def progress(self) -> list[tuple[str, bytes]]:
        return []

    def close(self) -> None:
        self.agents.clear()
