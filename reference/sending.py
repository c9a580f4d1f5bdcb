"""The sending half of a rank's host: gathers into staging, posts writes, and watches both.

Decides where in staging a part lies and when its memory is free again. What is packed or posted, and when, the machines
say; at the moment of posting they are asked once more (``Sender.claim``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import BlockTable, Part, Shard, block_table, plan, plan_gather
from pushkv.model.protocol import events as ev
from pushkv.reference.grants import GrantError, notice_of, part_offset, read_blocks, read_segments
from pushkv.reference.metric_names import label
from pushkv.reference.office import Table
from pushkv.reference.pools import SegmentPool, cross, spread
from pushkv.reference.ports import BlockIds

if TYPE_CHECKING:
    from pushkv.reference.copies import Copier, Copy
    from pushkv.reference.fellow import Fellow
    from pushkv.reference.rank import Rank
    from pushkv.reference.transport import Write

log = logging.getLogger(__name__)

DESCRIPTOR_BYTES = 64 << 20
"""Longer stretches are cut, so that a transport can put several on their way at once."""

Longs = npt.NDArray[np.int64]
Spans = tuple[Longs, Longs, Longs]
"""Addresses here, addresses there, bytes."""
NOTHING: Spans = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


class Prompt:
    """A prompt that is sent from here. Times are seconds of the monotonic clock."""

    __slots__ = (
        "begun_s",
        "blocks",
        "bytes",
        "computed_s",
        "descriptors",
        "gather_s",
        "packed",
        "post_s",
        "tables",
        "tokens",
        "transfer_id",
        "wire_s",
    )

    def __init__(self, transfer_id: str, tokens: int, now: float) -> None:
        self.transfer_id, self.tokens = transfer_id, tokens
        self.blocks: BlockIds | None = None
        self.tables: list[BlockTable] | None = None
        self.begun_s, self.computed_s = now, 0.0
        self.gather_s = self.post_s = self.wire_s = 0.0
        self.bytes = self.descriptors = 0
        self.packed = False

    def source(self) -> list[BlockTable]:
        """The blocks as tables, converted once, on this thread."""
        if self.tables is None:
            if self.blocks is None:
                raise GrantError(f"{self.transfer_id}: no blocks are known")
            self.tables = [block_table(ids) for ids in self.blocks]
        return self.tables


class Staged:
    """One part in staging, or on its way there."""

    __slots__ = ("copy", "part", "prompt", "segments", "shard", "since_s", "size")

    def __init__(self, prompt: Prompt | None, shard: Shard | None, part: Part | None, size: int) -> None:
        self.prompt, self.shard, self.part, self.size = prompt, shard, part, size
        self.segments: tuple[int, ...] = ()
        self.copy: Copy | None = None
        self.since_s = 0.0


class Posted:
    """One write of ours that may be active."""

    __slots__ = ("broken", "posted_s", "stopping", "transfer_id", "write")

    def __init__(self, transfer_id: str, write: Write, now: float) -> None:
        self.transfer_id, self.write, self.posted_s = transfer_id, write, now
        self.broken = self.stopping = False


class Sending:
    """``copier`` copies between the cache and ``staging``."""

    def __init__(self, rank: Rank, staging: SegmentPool, copier: Copier) -> None:
        self.rank, self.staging, self.copier = rank, staging, copier
        self.prompts: dict[str, Prompt] = {}
        self._waiting: deque[ev.Pack] = deque()
        self._staged: dict[int, Staged] = {}
        self._gathering: list[int] = []
        self._writes: dict[int, Posted] = {}

    @property
    def active(self) -> bool:
        """Whether something here must be looked at again at once."""
        return bool(self._gathering or self._writes)

    @property
    def writes_open(self) -> int:
        """Writes posted and not complete."""
        return len(self._writes)

    # ------------------------------------------------------------ what the host says

    def begin(self, command: ev.Begin, now: float) -> None:
        """A prompt that will be sent."""
        self.prompts[command.transfer_id] = Prompt(command.transfer_id, command.tokens, now)

    def table(self, table: Table) -> None:
        """The blocks of a prompt."""
        prompt = self.prompts.get(table.transfer_id)
        if prompt is not None:
            prompt.blocks, prompt.tables = table.blocks, None
            prompt.computed_s = time.monotonic()

    def reported(self, report: ev.Record, now: float) -> None:
        """The machines' verdicts: a prompt that is sent or given up and not read any more is forgotten."""
        if isinstance(report, ev.Released):
            prompt = self.prompts.get(report.transfer_id)
            if prompt is not None:
                prompt.blocks = prompt.tables = None
        elif isinstance(report, ev.Sent):
            prompt = self.prompts.pop(report.transfer_id, None)
            if report.ok:
                self.rank.count("transfers_sent")
            elif report.reason == "cancelled":
                self.rank.count("transfers_cancelled")
            else:
                self.rank.count(f"transfers_failed:{label(report.reason)}")
            if prompt is not None:
                self.rank.count("bytes_sent", prompt.bytes)
                self.rank.count("descriptors", prompt.descriptors)
                self.rank.record(
                    {
                        "side": "send",
                        "transfer_id": prompt.transfer_id,
                        "ok": report.ok,
                        "reason": report.reason,
                        "tokens": prompt.tokens,
                        "packed": prompt.packed,
                        "bytes": prompt.bytes,
                        "descriptors": prompt.descriptors,
                        "gather_s": prompt.gather_s,
                        "post_s": prompt.post_s,
                        "wire_s": prompt.wire_s,
                        "handover_s": now - prompt.computed_s if prompt.computed_s else 0.0,
                    }
                )

    # ------------------------------------------------------------ packing

    def pack(self, action: ev.Pack, now: float) -> None:
        """Gather a part into staging, when there is room."""
        self._waiting.append(action)
        self._start()

    def _start(self) -> None:
        while self._waiting:
            action = self._waiting[0]
            try:
                staged = self._place(action)
            except Exception as error:  # the machines get their answer; the part fails when it would be posted
                log.error("gather for %s: %s", action.transfer_id, error)
                self.rank.count("gather failed")
                staged = Staged(None, None, None, 0)
            if staged is None:
                return
            self._waiting.popleft()
            staged.since_s = time.monotonic()
            self._staged[action.handle] = staged
            self._gathering.append(action.handle)

    def _place(self, action: ev.Pack) -> Staged | None:
        """The part in staging with its gather under way, or ``None`` when there is no room now."""
        fellow = self._fellow(action.link)
        prompt = self.prompts[action.transfer_id]
        prompt.packed = True
        if fellow.outgoing is None:
            return Staged(prompt, None, None, 0)
        shard, part = self._part(fellow.outgoing, prompt, action.handle, action.start, action.stop)
        staged = Staged(prompt, shard, part, shard.part_bytes(part))
        if staged.size:
            need = -(-staged.size // self.staging.segment_bytes)
            if need > self.staging.count:
                raise GrantError(f"a part of {staged.size} bytes, staging has {self.staging.count} segments")
            segments = self.staging.take(need)
            if segments is None:
                return None
            staged.segments = segments
            try:
                gather = plan_gather(shard, prompt.source(), part)
                staged.copy = self.copier.gather(gather, segments)
            except BaseException:
                self.staging.give(segments)
                raise
        return staged

    def _part(self, shard: Shard, prompt: Prompt, handle: int, start: int, stop: int) -> tuple[Shard, Part]:
        _, _, first = self.rank.endpoint.sender.about(handle)
        return shard, Part(start, stop, first, stop == prompt.tokens)

    def _fellow(self, link: ev.Link) -> Fellow:
        fellow = self.rank.fellows.get(link)
        if fellow is None:
            raise GrantError(f"{link} is not connected")
        return fellow

    def _unstage(self, handle: int) -> None:
        staged = self._staged.pop(handle, None)
        if staged is not None and staged.segments:
            self.staging.give(staged.segments)

    # ------------------------------------------------------------ posting

    def post(self, action: ev.Post, now: float) -> None:
        """Claim, then post. What cannot be posted is a broken write of which nothing is active."""
        rank, handle = self.rank, action.handle
        if not rank.claim(handle, now):
            rank.count("not claimed")
            self._unstage(handle)
            return
        begun = time.monotonic()
        try:
            write = self._write(action)
        except Exception as error:
            log.warning("write for %s to %s: %s", action.transfer_id, action.link, error)
            rank.count("post failed")
            self._unstage(handle)
            rank.pending.extend((ev.WriteBroken(handle), ev.WriteQuiet(handle)))
            return
        prompt = self.prompts.get(action.transfer_id)
        posted = time.monotonic()
        if prompt is not None:
            prompt.post_s += posted - begun
        if write is None:
            self._unstage(handle)
            rank.pending.append(ev.WriteDone(handle))
        else:
            self._writes[handle] = Posted(action.transfer_id, write, posted)

    def _write(self, action: ev.Post) -> Write | None:
        """The write on its way; ``None`` when there is nothing to write."""
        fellow, rank = self._fellow(action.link), self.rank
        prompt = self.prompts[action.transfer_id]
        if action.packed:
            spans, device = self._packed_spans(action, fellow), fellow.facts.landing.device
        else:
            spans, device = self._direct_spans(action, fellow, prompt), fellow.device
        local, remote, length = spans
        if not len(length):
            return None
        prompt.bytes += int(length.sum())
        prompt.descriptors += len(length)
        attempt, part, _ = rank.endpoint.sender.about(action.handle)
        notice = notice_of(fellow.incarnation, attempt, part) if rank.transport.arrival == "notification" else b""
        return rank.transport.post(fellow.agent, local, remote, length, rank.device, device, notice)

    def _packed_spans(self, action: ev.Post, fellow: Fellow) -> Spans:
        staged, there = self._staged[action.handle], fellow.facts.landing
        if staged.prompt is None:
            raise GrantError("its gather failed")
        if staged.shard is None or staged.part is None:
            return NOTHING  # a sibling holds the same heads and writes them
        offset = part_offset(staged.shard, staged.part)
        offset, segments = read_segments(action.memory, there.count, there.segment_bytes, offset, staged.size)
        if not staged.size:
            return NOTHING
        source = self.staging.spread(staged.segments, 0, staged.size)
        target = spread(there.address, there.count, there.segment_bytes, segments, offset, staged.size)
        return cross(source, target, DESCRIPTOR_BYTES)

    def _direct_spans(self, action: ev.Post, fellow: Fellow, prompt: Prompt) -> Spans:
        if fellow.outgoing is None:
            return NOTHING
        shard, part = self._part(fellow.outgoing, prompt, action.handle, action.start, action.stop)
        first, tables = read_blocks(action.memory, len(shard.dst_groups))
        found = plan(shard, prompt.source(), [block_table(ids, first) for ids in tables], part).spans()
        here, there = self.rank.bases, fellow.bases
        return here[found.src_region] + found.src_offset, there[found.dst_region] + found.dst_offset, found.length

    def abandon(self, action: ev.Abandon, now: float) -> None:
        """Stop a write if the fabric can; watched until it is quiet."""
        posted = self._writes.get(action.handle)
        if posted is not None:
            posted.stopping = True
            self.rank.transport.stop(posted.write)
            self._watch(action.handle, posted)

    # ------------------------------------------------------------ watching

    def poll(self, now: float) -> None:
        """Gathers and writes that have ended."""
        if self._gathering:
            for handle in list(self._gathering):
                staged = self._staged[handle]
                if staged.copy is None or staged.copy.done():
                    self._gathering.remove(handle)
                    staged.copy = None
                    if staged.prompt is not None:
                        staged.prompt.gather_s += time.monotonic() - staged.since_s
                    self._packed(handle, now)
        for handle, posted in list(self._writes.items()):
            self._watch(handle, posted)

    def _packed(self, handle: int, now: float) -> None:
        """Tell the machines; what they do not post in answer will never be posted."""
        rank = self.rank
        rank.pending.append(ev.Packed(handle))
        rank.step(now)
        if handle not in self._writes:
            self._unstage(handle)
            self._start()

    def _watch(self, handle: int, posted: Posted) -> None:
        rank = self.rank
        state = rank.transport.poll(posted.write)
        if state == "done":
            prompt = self.prompts.get(posted.transfer_id)
            if prompt is not None:
                prompt.wire_s += time.monotonic() - posted.posted_s
            rank.transport.release(posted.write)
            self._over(handle, ev.WriteQuiet(handle) if posted.broken else ev.WriteDone(handle))
            return
        if state == "broken" and not posted.broken:
            posted.broken = True
            rank.count("writes_broken")
            rank.pending.append(ev.WriteBroken(handle))
        if (posted.broken or posted.stopping) and rank.transport.release(posted.write):
            self._over(handle, ev.WriteQuiet(handle))

    def _over(self, handle: int, event: ev.Record) -> None:
        del self._writes[handle]
        self._unstage(handle)
        self.rank.pending.append(event)
        self._start()
