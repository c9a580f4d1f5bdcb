"""What the sending half of a rank keeps: prompts, their parts on the way, and the engine's words about its steps.

Records, and what is written down of a hand-over. Decides nothing: ``sending`` does. All times are seconds of the
monotonic clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pushkv.model.layout import BlockTable, Part, Shard, block_table
from pushkv.model.protocol import events as ev
from pushkv.reference.grants import GrantError
from pushkv.reference.ports import BlockIds

if TYPE_CHECKING:
    from pushkv.reference.copies import Copy
    from pushkv.reference.transport import Write


class Enqueued:
    """From the engine's thread: step ``step`` is enqueued, and done when ``event`` is (None: it is done)."""

    __slots__ = ("at_s", "event", "step")

    def __init__(self, step: int, event: Any) -> None:
        self.step, self.event, self.at_s = step, event, time.monotonic()


class Fence:
    """The engine's thread waits until nothing reads the blocks that these prompts had before step ``step``."""

    def __init__(self, transfer_ids: Sequence[str], step: int) -> None:
        self.transfer_ids, self.step = transfer_ids, step
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

    ready: tokens whose blocks are known and hold them once ``step`` has run. fenced: what was told in an earlier step
    holds no more.
    """

    __slots__ = (
        "begun_s", "blocks", "bytes", "computed_s", "descriptors", "enqueued_s", "fenced", "over", "packed", "parts",
        "ready", "step", "tables", "tokens", "transfer_id",
    )  # fmt: skip

    def __init__(self, transfer_id: str, tokens: int, now: float) -> None:
        self.transfer_id, self.tokens = transfer_id, tokens
        self.blocks: BlockIds | None = None
        self.tables: list[BlockTable] | None = None
        self.ready = self.step = self.fenced = 0
        self.begun_s, self.computed_s, self.enqueued_s = now, 0.0, 0.0
        self.parts: dict[int, Stamps] = {}
        self.bytes = self.descriptors = 0
        self.packed = self.over = False

    def lose(self) -> None:
        """Its blocks are not its own any more."""
        self.blocks = self.tables = None
        self.ready = 0

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

    __slots__ = ("copy", "part", "prompt", "segments", "shard", "size", "stamps")

    def __init__(self, prompt: Prompt | None, shard: Shard | None, part: Part | None, size: int) -> None:
        self.prompt, self.shard, self.part, self.size = prompt, shard, part, size
        self.segments: tuple[int, ...] = ()
        self.copy: Copy | None = None
        self.stamps: Stamps | None = None


class Posted:
    """One write of ours that may be active."""

    __slots__ = ("broken", "stamps", "stopping", "write")

    def __init__(self, write: Write, stamps: Stamps) -> None:
        self.write, self.stamps = write, stamps
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
