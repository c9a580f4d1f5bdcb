"""Channels for tests, all on loopback, and waiting without a fixed sleep."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pushkv.model.protocol.events import Link
from pushkv.reference.side_channel import SideChannel

SECRET = "correct horse battery staple"
OTHER_SECRET = "incorrect horse battery staple"
P, D = ("P", 0), ("D", 1)
PATIENCE_S = 30.0


@contextmanager
def channel(me: Link, secret: str | None = SECRET, port: int = 0, silent_s: float = 15.0) -> Iterator[SideChannel]:
    made = SideChannel(me, "127.0.0.1", port, secret, silent_s=silent_s)
    try:
        yield made
    finally:
        made.close()


def until(done: Callable[[], bool], channels: Iterable[SideChannel] = (), patience_s: float = PATIENCE_S) -> bool:
    """Drive ``channels``, throwing away what they receive, until ``done`` or out of patience."""
    give_up = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > give_up:
            return False
        for one in channels:
            one.receive()
        time.sleep(0.001)
    return True


def gather(
    who: SideChannel, count: int, others: Iterable[SideChannel] = (), patience_s: float = PATIENCE_S
) -> list[tuple[Link, bytes]]:
    """The next ``count`` frames that come to ``who``, or fewer when patience ends."""
    found: list[tuple[Link, bytes]] = []

    def enough() -> bool:
        found.extend(who.receive())
        return len(found) >= count

    until(enough, others, patience_s)
    return found


class Echo:
    """``echo.py`` in a process."""

    def __init__(self, engine: str, port: int = 0, secret: str = SECRET) -> None:
        command = [sys.executable, str(Path(__file__).with_name("echo.py")), engine, str(port), secret]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def echo(engine: str, port: int = 0, secret: str = SECRET) -> Iterator[Echo]:
    made = Echo(engine, port, secret)
    try:
        yield made
    finally:
        made.kill()


def answers(who: SideChannel, link: Link, word: bytes, patience_s: float = PATIENCE_S) -> bool:
    """Whether ``link`` sends ``word`` back, which is said again and again as the protocol would."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        who.send(link, word)
        again = time.monotonic() + 0.2
        while time.monotonic() < again:
            if (link, word) in who.receive():
                return True
            time.sleep(0.001)
    return False
