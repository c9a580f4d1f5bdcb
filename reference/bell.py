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
    """Its thread runs from the first ``watch`` on. ``ring`` is called on it, once per copy."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._copies: SimpleQueue[Waits | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, copy: Waits) -> None:
        """Ring when ``copy`` is done, and those watched before it."""
        self._copies.put(copy)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pushkv-bell", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ring no more."""
        self._copies.put(None)

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            try:
                copy.wait()
            except Exception:  # the transfer thread finds out for itself
                log.exception("waiting for a copy")
            self._ring()
