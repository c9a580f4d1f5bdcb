"""Two engines in two processes, with their real ranks, side channels and NIXL agents; run by `test_two_ranks.py`.

`python -m tests.reference.rank_cases CASE BACKEND packed|direct` ends with 0 if the case holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.reference import opening
from pushkv.reference.ports import Address
from pushkv.reference.transport import Transport

from .channels import until
from .engine_pairs import Hosts, hand_over, shards
from .inprocess import Engine
from .said import wanted

DRAIN_S = 1.0
"""Of broken writes, instead of LIBFABRIC's 30 s: nothing here stores later than its connection is closed."""


class Real(Engine):
    """An engine over NIXL, of which more than the books can be asked."""

    def __init__(self, name: str, port: int, folder: str, settings: dict[str, Any]) -> None:
        opening.Transport = partial(Transport, batch_descriptors=64, drain_s=DRAIN_S)  # type: ignore[assignment, misc]
        sizes = {"landing_bytes": 64 << 12, "staging_bytes": 16 << 12, "part_bytes": 8192}
        block = 16 if name.startswith("P") else 32
        super().__init__(name, 1, Path(folder), block=block, port=port, **sizes | settings)
        self.waiting: list[tuple[float, tuple[str, bytes]]] = []
        self.held = self.notices = 0
        landing = self.ranks[0].landing
        heard, noticed = landing.heard, landing.noticed

        def hear(link: Any, message: Any) -> bool:
            on = heard(link, message)
            self.held += not on
            return on

        def notice(agent: str, said: bytes) -> None:
            self.notices += 1
            noticed(agent, said)

        landing.heard, landing.noticed = hear, notice  # type: ignore[method-assign]

    def delay_notices(self, seconds: float) -> None:
        """What has arrived is told of later: words about it come first."""
        transport = self.transports[0]
        progress = transport.progress

        def late() -> list[tuple[str, bytes]]:
            now = time.monotonic()
            self.waiting += [(now + seconds, one) for one in progress()]
            ready = [one for due, one in self.waiting if due <= now]
            self.waiting = [(due, one) for due, one in self.waiting if due > now]
            return ready

        transport.progress = late

    def wants(self, tid: str, peer: Any, tokens: int, packed: bool) -> None:
        self.say(wanted(tid, peer.address, tokens, tokens, packed))

    def granted(self, tid: str, peer: Any, tokens: int, packed: bool) -> None:
        """What is wanted has memory, or is about to be granted some."""
        self.wants(tid, peer, tokens, packed)
        if not packed:
            blocks = Hosts(2).blocks(self, tokens)
            assert isinstance(self.until(ev.Admit, tid), ev.Admit)
            self.say(ev.Allocated(tid, lambda: blocks))

    def registered(self) -> bool:
        """Whether all of D's ranks have asked for what is sent next."""
        return bool(shards(self.ranks[0]))

    def ends(self, tid: str) -> str:
        """Why a transfer failed."""
        return str(self.until(ev.Fail, tid).reason)

    def posted(self) -> int:
        return int(self.transports[0].counters["posts"])

    def batches(self) -> int:
        return int(self.transports[0].counters["batches"])

    def clean(self) -> None:
        """Nothing is left, nothing went wrong, and no notice was refused."""
        self.emptied()
        wrong = ("faults:", "messages_refused:", "late:stray notice", "late:notice of no write")
        assert not {key: value for key, value in self.ranks[0].counters.items() if value and key.startswith(wrong)}


@dataclass
class Named:
    """What another process is told of an engine."""

    address: Address


class Remote:
    """An engine in another process; each method is called there."""

    def __init__(self, name: str, port: int, folder: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, port, folder, settings), daemon=True)
        self.process.start()
        theirs.close()
        REMOTES.append(self)
        self.address = Address(name, "127.0.0.1", port, 1)
        self.block: int = self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            sent = [Named(one.address) if isinstance(one, (Engine, Remote)) else one for one in arguments]
            self._pipe.send((name, sent))
            return self._answer()

        return call

    def _answer(self) -> Any:
        assert self._pipe.poll(120), "no answer"
        trouble, value = self._pipe.recv()
        assert not trouble, trouble
        return value

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def serve(pipe: Any, name: str, port: int, folder: str, settings: dict[str, Any]) -> None:
    engine = Real(name, port, folder, settings)
    pipe.send(("", engine.block))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = ("", getattr(engine, method)(*arguments))
        except Exception:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)


REMOTES: list[Remote] = []


class World:
    """P in another process and D here, or the other way round."""

    def __init__(self, backend: str, here: str = "D") -> None:
        self.backend, self.settings = backend, {"backend": backend}
        self.folder = tempfile.TemporaryDirectory()
        self.ports = {name: free_port() for name in "PD"}
        there = "P" if here == "D" else "D"
        self.remote = self.start(there)
        self.local = Real(here, self.ports[here], self.folder.name, self.settings)
        self.notified = backend == "LIBFABRIC"

    def start(self, name: str) -> Remote:
        return Remote(name, self.ports[name], self.folder.name, self.settings)


def free_port() -> int:
    """One that the system gives to nobody who does not ask for it."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port


def blocks_of(engine: Any, tokens: int) -> tuple[list[int]]:
    return Hosts(1).blocks(engine, tokens)


def handed_over(p: Any, d: Any, tid: str, tokens: int, packed: bool, base: int = 0) -> bool:
    """Bytes are compared, source and target are given back."""
    return hand_over((p, d), tid, tokens, packed, base) == ("", True)


def prompts_of_many_sizes(backend: str, packed: bool) -> None:
    world = World(backend)
    p, d = world.remote, world.local
    for tokens in (1, 33, 200, 700):
        assert handed_over(p, d, f"r{tokens}", tokens, packed)
    assert handed_over(p, d, "tail", 150, packed, base=64)
    assert bool(d.notices) == world.notified
    assert p.batches() > p.posted() or packed, "the direct ones have several batches"
    assert p.posted() > 8 or not packed, "the packed ones have several parts"
    assert not world.notified or d.notices == p.posted()
    p.clean()
    d.clean()


def words_wait_for_the_notices(backend: str, packed: bool) -> None:
    """All of them come first, and are held."""
    world = World(backend)
    p, d = world.remote, world.local
    d.delay_notices(0.1)
    for tokens in (33, 700):
        assert handed_over(p, d, f"r{tokens}", tokens, packed)
    assert bool(d.held) == world.notified
    p.clean()
    d.clean()


def what_is_aborted_leaves_nothing(backend: str, packed: bool) -> None:
    """Before the prefill, when a part has landed, and by P; what comes next is right."""
    world = World(backend)
    p, d = world.remote, world.local
    source = blocks_of(p, 200)
    p.begin("early", 200)
    d.wants("early", p, 200, packed)
    assert until(lambda: p.registered())
    d.say(ev.Aborted("early"))
    assert d.ends("early") == "aborted"
    p.compute("early", 200, source)
    assert not p.sent("early", source, 200)
    if packed:
        p.begin("late", 200)
        d.wants("late", p, 200, packed)
        before = p.posted()
        p.chunk("late", 128, source)
        assert until(lambda: p.posted() > before)
        d.say(ev.Aborted("late"))
        assert d.ends("late") == "aborted"
        p.compute("late", 200, source)
        p.sent("late", source, 200)  # or not: the rest may have been quicker than the word
    p.begin("never", 200)
    d.wants("never", p, 200, packed)
    p.say(ev.Abort("never", "prefill aborted"))
    assert d.ends("never") == "prefill aborted"
    assert not p.sent("never", source, 200)
    for engine in (p, d):
        engine.emptied()
    assert handed_over(p, d, "next", 200, packed)
    for engine in (p, d):
        engine.emptied()


def a_killed_sender_leaves_nothing(backend: str, packed: bool) -> None:
    """With memory granted and a part of the prompt written; its successor is heard."""
    world = World(backend)
    p, d = world.remote, world.local
    assert handed_over(p, d, "before", 200, packed)
    source = blocks_of(p, 200)
    d.delay_notices(0.5)
    p.begin("t", 200)
    d.granted("t", p, 200, packed)
    before = p.posted()
    p.chunk("t", 128, source)
    if packed:
        assert until(lambda: p.posted() > before)
    p.kill()
    assert d.ends("t") in ("peer gone", "peer silent")
    d.emptied()
    assert handed_over(world.start("P"), d, "after", 200, packed)
    d.emptied()


def a_killed_receiver_leaves_nothing(backend: str, packed: bool) -> None:
    """Stopped with memory granted, so that what P writes waits, and then killed."""
    world = World(backend, here="P")
    d, p = world.remote, world.local
    assert handed_over(p, d, "before", 200, packed)
    source = blocks_of(p, 200)
    p.begin("t", 200)
    d.granted("t", p, 200, packed)
    before = p.posted()
    p.chunk("t", 64, source)
    assert until(lambda: p.posted() > before if packed else p.registered())
    d.signal(signal.SIGSTOP)
    p.chunk("t", 200, source)
    p.compute("t", 200, source)
    time.sleep(0.2)
    d.kill()
    p.sent("t", source, 200)  # or not: small writes end before anybody has read them
    p.emptied()
    assert handed_over(p, world.start("D"), "after", 200, packed)
    p.emptied()


CASES = {
    case.__name__: case
    for case in (
        prompts_of_many_sizes,
        words_wait_for_the_notices,
        what_is_aborted_leaves_nothing,
        a_killed_sender_leaves_nothing,
        a_killed_receiver_leaves_nothing,
    )
}

if __name__ == "__main__":
    begun = time.monotonic()
    try:
        CASES[sys.argv[1]](sys.argv[2], sys.argv[3] == "packed")
    finally:
        for remote in REMOTES:
            remote.kill()
    print(f"{' '.join(sys.argv[1:])}: {time.monotonic() - begun:.1f} s", flush=True)
    os._exit(0)  # without waiting for threads
