"""What the sending half of a rank keeps: prompts, their parts on the way, and the engine's words about its steps.

Records, and what is written down of a hand-over. Decides nothing: ``sending`` does. All times are seconds of the
monotonic clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import BlockTable, Part, Shard, block_table
from pushkv.model.protocol import events as ev
from pushkv.reference.grants import GrantError
from pushkv.reference.ports import BlockIds

if TYPE_CHECKING:
    from pushkv.reference.copies import Copy
    from pushkv.reference.transport import Write

Longs = npt.NDArray[np.int64]


class Enqueued:
    """From the engine's thread: step ``step`` is enqueued, and done when ``event`` is (None: it is done)."""

    __slots__ = ("at_s", "event", "step")

    def __init__(self, step: int, event: Any) -> None:
        self.step, self.event, self.at_s = step, event, time.monotonic()


class Fence:
    """The engine's thread waits until nothing reads the blocks that these prompts had before step ``step``."""

    def __init__(self, request_ids: Sequence[str], step: int) -> None:
        self.request_ids, self.step = frozenset(request_ids), step
        self._copies: list[Copy] = []
        self._answered = threading.Event()

    def answer(self, copies: list[Copy]) -> None:
        """By the transfer thread: these copies are under way, and no other will begin."""
        self._copies = copies
        self._answered.set()

    def wait(self, timeout_s: float) -> bool:
        """Return when what this thread enqueues from now on comes after the copies. ``False``: there was no answer."""
        if not self._answered.wait(timeout_s):
            return False
        for copy in self._copies:
            copy.join()
        return True


class Prompt:
    """A prompt that is sent from here.

    grants: the peers' landing memory as it was named, offset and segments. chunks: (tokens, step), ascending: so many
    tokens are in the blocks once the engine's step ``step`` has run, or by now (0). request_id: whose chunks they are.
    stale: the blocks that were told last were its own no more.
    """

    __slots__ = (
        "begun_s", "blocks", "bytes", "chunks", "computed_s", "descriptors", "enqueued_s", "grants", "over", "packed",
        "parts", "request_id", "stale", "tables", "tokens", "transfer_id",
    )  # fmt: skip

    def __init__(self, transfer_id: str, tokens: int, now: float) -> None:
        self.transfer_id, self.tokens = transfer_id, tokens
        self.blocks: BlockIds | None = None
        self.tables: list[BlockTable] | None = None
        self.chunks: list[tuple[int, int]] = []
        self.request_id = ""
        self.begun_s, self.computed_s, self.enqueued_s = now, 0.0, 0.0
        self.parts: dict[int, Stamps] = {}
        self.grants: dict[ev.Link, tuple[Any, int, Longs]] = {}
        self.bytes = self.descriptors = 0
        self.packed = self.over = self.stale = False

    def lose(self, before: float = math.inf) -> None:
        """Its blocks are not its own any more, but for those of step ``before`` or later, and what is held."""
        self.chunks = [chunk for chunk in self.chunks if not chunk[1] or chunk[1] >= before]
        if not self.chunks:
            self.blocks = self.tables = None

    def step_of(self, stop: int) -> int | None:
        """The step that must have run before the first ``stop`` tokens can be gathered; ``None``: not known yet."""
        return next((step for tokens, step in self.chunks if stop <= tokens), None)

    @property
    def last_step(self) -> int:
        """The newest step that was told of; 0 when none was, or none matters any more."""
        return self.chunks[-1][1] if self.chunks else 0

    def source(self) -> list[BlockTable]:
        """The blocks as tables, converted once, on this thread."""
        if self.tables is None:
            if self.blocks is None:
                raise GrantError(f"{self.transfer_id}: no blocks are known")
            self.tables = [block_table(ids) for ids in self.blocks]
        return self.tables


class Stamps:
    """When what happened to one part: 0 for what has not."""

    __slots__ = ("asked", "begun", "done", "gathered", "launched", "posted", "tokens")

    def __init__(self, tokens: int, asked: float) -> None:
        self.tokens, self.asked = tokens, asked
        self.launched = self.gathered = self.begun = self.posted = self.done = 0.0

    @property
    def times(self) -> tuple[float, ...]:
        """In the order of ``STAMPS``."""
        return self.asked, self.launched, self.gathered, self.begun, self.posted, self.done


STAMPS = ("asked", "launched", "gathered", "posting", "posted", "written")
"""What the columns of a record's ``parts`` are, after the tokens."""


class Staged:
    """One part in staging, or on its way there."""

    __slots__ = ("copy", "part", "peer", "prompt", "segments", "shard", "size", "stamps")

    def __init__(self, prompt: Prompt | None, shard: Shard | None, part: Part | None, size: int) -> None:
        self.prompt, self.shard, self.part, self.size = prompt, shard, part, size
        self.segments: tuple[int, ...] = ()
        self.peer = ""  # who holds them
        self.copy: Copy | None = None
        self.stamps: Stamps | None = None


class Posted:
    """One write of ours that may be active, for registration ``attempt`` of ``link``."""

    __slots__ = ("attempt", "broken", "link", "stamps", "stopping", "transfer_id", "write")

    def __init__(self, transfer_id: str, write: Write, stamps: Stamps, link: ev.Link, attempt: int) -> None:
        self.transfer_id, self.write, self.stamps = transfer_id, write, stamps
        self.link, self.attempt = link, attempt
        self.broken = self.stopping = False


def record_of(prompt: Prompt, report: ev.Sent, now: float) -> dict[str, Any]:
    """What is kept of a hand-over. ``gather_s``, ``post_s`` and ``wire_s`` are sums over its parts, which overlap."""
    parts = list(prompt.parts.values())
    begun = max(prompt.computed_s, prompt.enqueued_s)
    return {
        "side": "send",
        "transfer_id": prompt.transfer_id,
        "ok": report.ok,
        "reason": report.reason,
        "tokens": prompt.tokens,
        "packed": prompt.packed,
        "bytes": prompt.bytes,
        "descriptors": prompt.descriptors,
        "gather_s": sum(max(0.0, part.gathered - part.launched) for part in parts),
        "post_s": sum(max(0.0, part.posted - part.begun) for part in parts),
        "wire_s": sum(max(0.0, part.done - part.posted) for part in parts),
        "handover_s": now - begun if begun else 0.0,
        "begun_s": prompt.begun_s,
        "enqueued_s": prompt.enqueued_s,
        "computed_s": prompt.computed_s,
        "verdict_s": now,
        "parts": [[part.tokens, *(round(time_s, 6) for time_s in part.times)] for part in parts],
    }
