"""Waits for copies on a device beside the transfer thread, and wakes it when one is done.

Decides nothing. Looking again and again would take the interpreter from the engine's thread for as long as a copy waits
for the engine's own step; here the operating system waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

log = logging.getLogger(__name__)


class Waits(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Block the calling thread until it is done."""
        ...


class Bell:
    """``ring`` is called once per copy, on a thread that runs from the first ``watch`` on: one for the copies of each
    stream, as these end in order.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._copies: dict[bool, SimpleQueue[Waits | None]] = {waiting: SimpleQueue() for waiting in (False, True)}
        self._running: set[bool] = set()

    def watch(self, copy: Waits, *, waiting: bool = False) -> None:
        """Ring when ``copy`` is done, and those watched before it. ``waiting``: it is behind an event, and those that
        are not do not wait for it.
        """
        copies = self._copies[waiting]
        copies.put(copy)
        if waiting not in self._running:
            self._running.add(waiting)
            threading.Thread(target=self._run, args=(copies,), name="pushkv-bell", daemon=True).start()

    def close(self) -> None:
        """Ring no more."""
        for copies in self._copies.values():
            copies.put(None)

    def _run(self, copies: SimpleQueue[Waits | None]) -> None:
        while (copy := copies.get()) is not None:
            try:
                copy.wait()
            except Exception:  # the transfer thread finds out for itself
                log.exception("waiting for a copy")
            self._ring()
