"""What the fault tests share: the pair they use, how a fault is switched on, and what "in bounded time" means."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from .cluster import Cluster, Pair
from .dispatch import Answer
from .kinds import FAULT_FILE, Knobs
from .servers import Server

LEASE_S = 10.0
DEAD_PEER_S = 3.0
BOUND_S = 20.0
"""Every verdict and every release falls within this, with the settings above."""


class Fault:
    """Switches faults of one server on and off while it runs; see ``plugins/faulty.py`` for the words."""

    def __init__(self, server: Server) -> None:
        self._file = server.spec.folder / f"{server.name}.{FAULT_FILE}"

    def set(self, *words: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("\n".join(words), encoding="ascii")
        new.replace(self._file)

    def clear(self) -> None:
        self.set()


SHORT: dict[str, Any] = {
    "lease_s": LEASE_S,
    "dead_peer_s": DEAD_PEER_S,
    "orphan_s": 5.0,
    "wait_s": 15.0,
    "write_s": 8.0,
    "faulty": True,
}
PATIENT: dict[str, Any] = {"lease_s": 60.0, "dead_peer_s": 20.0, "orphan_s": 40.0, "wait_s": 60.0, "write_s": 30.0}
"""For tests in which nothing times out."""
LONG: dict[str, Any] = {"lease_s": 120.0, "orphan_s": 100.0, "wait_s": 120.0, "write_s": 100.0}
"""With ``SHORT``'s bound for a dead peer: what is told before these is told because the peer is dead."""
DEATH_S = 15.0
"""A dead peer's transfers have their verdict and their memory by then: ``DEAD_PEER_S``, a beat, the fabric's drain, and
some seconds for a machine that does other things too."""
TRIES = 3
SMALL: dict[str, Any] = {"blocks": 40, "max_tokens": 1100, "batch_tokens": 128}
"""A cache in which a second request soon gets the blocks of the first, and prefills of many steps."""


async def faulty_pair(cluster: Cluster, path: str, knobs: dict[str, Any] | None = None, **both: Any) -> Pair:
    """A pair with short bounds whose writes can be held and broken; no fault is on.

    It has answered a request, so that the two know each other. On a machine that is busy the first handshake can take
    longer than the short bounds: then the pair begins anew.
    """
    settings = SMALL | both
    chosen = Knobs(path=path, **(SHORT | (knobs or {})))
    for attempt in range(TRIES):
        pair = await asyncio.to_thread(cluster.pair, chosen, **settings)
        for server in pair.servers:
            Fault(server).clear()
        try:
            await pair.right()
            await asyncio.to_thread(pair.emptied)
        except AssertionError as error:
            if attempt == TRIES - 1:
                raise AssertionError(f"no pair to begin with: {error}") from error
            cluster.drop()
        else:
            break
    return pair


@contextlib.asynccontextmanager
async def started(*legs: Coroutine[Any, Any, Answer]) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Send requests; those still open at the end are aborted by closing their connection."""
    tasks = [asyncio.create_task(leg) for leg in legs]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def bounded(leg: asyncio.Task[Answer] | Coroutine[Any, Any, Answer], limit_s: float, who: str) -> Answer:
    """The answer of a leg, which must come within ``limit_s``."""
    try:
        return await asyncio.wait_for(leg, limit_s)
    except TimeoutError:
        raise AssertionError(f"{who} has told its client nothing after {limit_s:.0f} s") from None


async def abort(task: asyncio.Task[Answer]) -> None:
    """Close the connection of a request."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
