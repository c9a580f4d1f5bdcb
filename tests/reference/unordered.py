"""A fabric whose completion is no arrival, as EFA's: what is posted is done at once and comes later, batch by batch, in
any order, each batch with its notice.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from pushkv.reference import opening
from pushkv.reference.notices import Notices, Room, pack

from .inprocess import Exchange, MemoryTransport, Transfer

Batch = tuple[float, list[tuple[int, bytes]], str, bytes]


class UnorderedTransport(MemoryTransport):
    """Batches come ``least_s`` to ``held_s`` later, and later than the words about them mostly."""

    arrival = "notification"

    def __init__(self, exchange: Exchange, name: str, seed: int = 1) -> None:
        super().__init__()
        self.exchange, self.name, self.metadata = exchange, name, name.encode()
        self.dice = random.Random(f"{seed} {name.rsplit('.', 1)[0]}")
        self.least_s, self.held_s = 0.0, 0.02
        self.coming: deque[Batch] = deque()
        self.notices = Notices()
        self.empty = 0

    def connect(self, metadata: bytes) -> str:
        self.agents.add(metadata.decode())
        return metadata.decode()

    def post(
        self, agent: str, local: Any, remote: Any, length: Any, here: int, there: int, notice: bytes = b""
    ) -> Transfer:
        assert agent in self.agents and notice
        self.posted += 1
        self.empty += not len(length)
        engine, rank, _ = agent.rsplit(".", 2)
        pieces = [
            (int(to), ctypes.string_at(int(source), int(size)))
            for source, to, size in zip(local, remote, length, strict=True)
        ]
        count = max(1, min(3, len(pieces), int(sum(length)) // 512))  # fewer than tokens: there is room for so many
        for batch in range(count):
            due = time.monotonic() + self.dice.uniform(self.least_s, self.held_s)
            frame = pack(self.posted, batch, count, notice)
            self.exchange.transports[engine, int(rank)].coming.append((due, pieces[batch::count], self.name, frame))
        write = Transfer((local, remote, length), 0.0)
        write.state = "done"
        return write

    def expect(self, room: Callable[[str, bytes], Room | None]) -> None:
        self.notices.expect(room)

    def progress(self) -> list[tuple[str, bytes]]:
        now = time.monotonic()
        here = [self.coming.popleft() for _ in range(len(self.coming))]
        self.coming.extend(batch for batch in here if batch[0] > now)
        for _, pieces, agent, frame in sorted((batch for batch in here if batch[0] <= now), key=lambda one: one[0]):
            for to, data in pieces:
                ctypes.memmove(to, data, len(data))
            self.notices.add(agent, frame)
        return self.notices.take()


def unordered(monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> None:
    """From here on ranks are opened on such a fabric."""

    def transport(name: str, backend: str) -> MemoryTransport:
        engine, rank, _ = name.rsplit(".", 2)
        return exchange.transports.setdefault((engine, int(rank)), UnorderedTransport(exchange, name))

    monkeypatch.setattr(opening, "Transport", transport)
