"""Who runs at present: one plain server that knows the right answers, and at most one pair.

A pair is used by as many tests as possible; a test that asks for other settings gets a new one, and one that broke
something gets it mended.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from .answers import same
from .dispatch import Answer, Client, words
from .kinds import Kind, Knobs
from .servers import NURSERY, Server, Spec, start_all, until

EMPTY_S = 10.0
"""A cache must be empty this long after the last request ended, unless a test names a bound of its own."""


class Oracle:
    """A plain vLLM server: what it says is right."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.server = Server(Spec("plain", model, folder))
        self._known: dict[str, list[Answer]] = {}
        self._starting = asyncio.Lock()

    async def answers(self, prompt: Any, tokens: int, **more: Any) -> list[Answer]:
        """All choices of one request; asked once."""
        key = repr((prompt, tokens, sorted(more.items())))
        if key not in self._known:
            async with self._starting:
                if not self.server.alive:
                    await asyncio.to_thread(start_all, self.server)
            async with Client() as client:
                found = await client.complete_all(self.server, prompt, tokens, **more)
            assert all(answer.ok for answer in found), found
            self._known[key] = found
        return self._known[key]

    async def answer(self, prompt: Any, tokens: int, **more: Any) -> Answer:
        return (await self.answers(prompt, tokens, **more))[0]


class Pair:
    """One prefill and one decode server."""

    def __init__(self, prefill: Server, decode: Server, oracle: Oracle) -> None:
        self.prefill = prefill
        self.decode = decode
        self._oracle = oracle
        self._seed = 0

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def emptied(self, *servers: Server, limit_s: float = EMPTY_S) -> None:
        """Fail unless both caches (or those of ``servers``) are empty within ``limit_s``."""
        for server in servers or self.servers:
            if not until(lambda server=server: server.cache_usage() == 0.0, limit_s, 0.2):
                assert server.alive, f"{server.name} has ended"
                held = server.cache_usage()
                assert held is not None, f"{server.name} does not answer"
                raise AssertionError(f"{server.name} still holds {held:.1%} of its cache after {limit_s:.0f} s")

    async def right(self, length: int = 150, tokens: int = 6) -> None:
        """Fail unless the next request is handed over and answered rightly."""
        self._seed += 1
        prompt = words(length, 900_000 + self._seed)
        async with Client(30.0) as client:
            got = await client.push(self.prefill, self.decode, prompt, tokens)
        for name, answer in (("P", got.prefill), ("D", got.decode)):
            assert answer.ok, f"the next request fails: {name} says {answer.status} {answer.error or answer.finish}"
        same(got.decode, await self._oracle.answer(prompt, tokens))

    async def recovered(self, limit_s: float = EMPTY_S) -> None:
        """What must hold after every fault: nothing is left in either cache, and the next request is right, and leaves
        nothing behind."""
        await asyncio.to_thread(self.emptied, limit_s=limit_s)
        await self.right()
        await asyncio.to_thread(self.emptied)

    def mend(self) -> None:
        """Bring both up, healthy and empty: both anew where one is not, so that no test sees what another left."""
        if all(_thawed(s).healthy and until(lambda s=s: s.cache_usage() == 0.0, 2.0) for s in self.servers):
            return
        for server in self.servers:
            server.kill()
        start_all(*self.servers)


def _thawed(server: Server) -> Server:
    if server.alive:
        server.thaw()
    return server


class Cluster:
    """Hands out pairs; owns every server."""

    def __init__(self, kind: Kind, model: Path, folder: Path) -> None:
        self.kind = kind
        self.model = model
        self.folder = folder
        self.oracle = Oracle(model, folder)
        self._pair: Pair | None = None
        self._settings: tuple[Any, ...] = ()

    def pair(self, knobs: Knobs, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None, **both: Any) -> Pair:
        """A healthy pair with these settings: the present one, mended, where it has them.

        ``p``, ``d`` and ``both`` are fields of :class:`Spec`.
        """
        if len(self.kind.paths) == 1:
            knobs = replace(knobs, path=self.kind.paths[0])
        settings = (knobs, p, d, both)
        if self._pair is None or self._settings != settings:
            self.drop()
            made = [
                Server(self.kind.spec(name, self.model, self.folder, knobs, **both, **(own or {})))
                for name, own in (("P", p), ("D", d))
            ]
            start_all(*made)
            self._pair, self._settings = Pair(made[0], made[1], self.oracle), settings
        else:
            self._pair.mend()
        return self._pair

    def servers(self) -> list[Server]:
        """Those that exist, for their logs."""
        return [*(self._pair.servers if self._pair else ()), self.oracle.server]

    def drop(self) -> None:
        """Stop the pair."""
        if self._pair is not None:
            for server in self._pair.servers:
                server.kill()
            self._pair = None

    def close(self) -> None:
        """Stop everything."""
        self.drop()
        self.oracle.server.kill()
        NURSERY.close()
