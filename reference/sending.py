"""The sending half of a rank's host: gathers into staging, posts writes, and watches both.

Decides where in staging a part lies and when its memory is free again, and that nothing is gathered before the step
that computes it is enqueued. What is packed or posted, and when, the machines say; at the moment of posting they are
asked once more (``Sender.claim``). The machines share staging by bytes; where memory is given, in whole segments, a
peer holds no more than the same share of them, or two parts.

Chunks. A chunk is told of when its step is scheduled; the machines hear of it when the step is enqueued (``Enqueued``),
so that what is planned can be gathered. The gather waits on the device for the step itself: it runs right behind it and
before the next one is done. A prompt that is finished is held until nothing reads it. One that is preempted loses its
blocks at once: before they are overwritten ``fence`` waits for the gathers under way, and what is not gathered yet, for
want of room, is given back to the machines (``Unpacked``). A fence names requests, not keys: it may come before the
words about them, and a chunk that is told of later is known by its request and its step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pushkv.model.layout import Part, Shard, block_table, plan, plan_gather
from pushkv.model.protocol import events as ev
from pushkv.reference.grants import (
    GrantError,
    check_inside,
    notice_of,
    part_offset,
    read_blocks,
    read_segments,
)
from pushkv.reference.metric_names import label
from pushkv.reference.office import Table
from pushkv.reference.pools import SegmentPool, cross, spread
from pushkv.reference.ports import Told
from pushkv.reference.prompts import Enqueued, Fence, Posted, Prompt, Staged, Stamps, record_of

if TYPE_CHECKING:
    from pushkv.reference.copies import Copier
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


class _ShareError(Exception):
    """A peer holds its share of staging."""


class Sending:
    """``copier`` copies between the cache and ``staging``."""

    def __init__(self, rank: Rank, staging: SegmentPool, copier: Copier) -> None:
        self.rank, self.staging, self.copier = rank, staging, copier
        self.prompts: dict[str, Prompt] = {}
        self._waiting: deque[ev.Pack] = deque()
        self._staged: dict[int, Staged] = {}
        self._gathering: list[int] = []
        self._writes: dict[int, Posted] = {}
        self._enqueued = self._over_step = 0
        self._marks: deque[Enqueued] = deque()
        self._scheduled: deque[tuple[int, ev.Computed]] = deque()
        self._fenced: dict[str, int] = {}
        """By request: chunks of a step before this one are lost. Until all of those have been told of."""
        self._told = 0

    @property
    def active(self) -> bool:
        """Whether something here must be looked at again at once; for gathers on a device a bell rings."""
        return bool(self._writes) or (bool(self._gathering) and self.rank.bell is None)

    @property
    def writes_open(self) -> int:
        """Writes posted and not complete."""
        return len(self._writes)

    @property
    def leases(self) -> int:
        """Finished prompts of which nothing is asked for yet."""
        return sum(bool(one.computed_s and not one.parts and not one.over) for one in list(self.prompts.values()))

    # ------------------------------------------------------------ what the host says

    def begin(self, command: ev.Begin, now: float) -> None:
        """A prompt that will be sent."""
        self.prompts[command.transfer_id] = Prompt(command.transfer_id, command.tokens, now)

    def table(self, table: Table) -> None:
        """The blocks of a prompt, as far as it is computed."""
        prompt = self.prompts.get(table.transfer_id)
        if prompt is None:
            return
        if table.step:
            prompt.request_id = table.request_id
            prompt.stale = table.step < self._fenced.get(table.request_id, 0)
            if prompt.stale:
                return  # it was preempted meanwhile
            prompt.chunks.append((table.tokens, table.step))
            if table.step <= self._enqueued:
                prompt.enqueued_s = time.monotonic()
        else:
            prompt.chunks = [(prompt.tokens, 0)]
            prompt.computed_s = time.monotonic()
        prompt.blocks, prompt.tables = table.blocks, None

    def computed(self, command: ev.Computed) -> bool:
        """Whether the machines hear of a chunk now: not before its step is enqueued, and never when it was preempted
        before they could.
        """
        prompt = self.prompts.get(command.transfer_id)
        if prompt is None or command.final or not command.tokens:
            return True
        if not prompt.stale and prompt.last_step > self._enqueued:
            self._scheduled.append((prompt.last_step, command))
            return False
        return not prompt.stale

    def enqueued(self, word: Enqueued) -> None:
        """A step is enqueued: what it computes can be gathered behind it."""
        self._enqueued = word.step
        while self._scheduled and self._scheduled[0][0] <= word.step:
            step, command = self._scheduled.popleft()
            found = self.prompts.get(command.transfer_id)
            if found is not None and (command.tokens, step) in found.chunks:  # else it is lost, or finished since
                self.rank.pending.append(command)
        self._marks.append(word)
        self._look_over()
        for prompt in self.prompts.values():
            if prompt.last_step == word.step:
                prompt.enqueued_s = word.at_s
        self._start()

    def _look_over(self) -> None:
        """Which steps are done by now."""
        marks = self._marks
        while marks and (marks[0].event is None or marks[0].event.query()):
            self._over_step = marks.popleft().step

    def _behind(self, step: int) -> Any:
        """The event that says that ``step`` is done; ``None`` when it is."""
        if step > self._over_step:
            self._look_over()
        if step <= self._over_step:
            return None
        return next(mark.event for mark in self._marks if mark.step >= step)

    def fence(self, fence: Fence) -> None:
        """What is not gathered of these prompts waits to be taken back; what is under way is said. Of the step that
        fences there may be blocks already: they are the new ones.
        """
        mine = fence.request_ids
        for prompt in self.prompts.values():
            if prompt.request_id in mine:
                prompt.lose(fence.step)
        if fence.step > self._told:  # the office may be behind
            self._fenced.update(dict.fromkeys(mine, fence.step))
        copies = []
        for handle in self._gathering:
            staged = self._staged[handle]
            if staged.prompt is not None and staged.prompt.request_id in mine and staged.copy is not None:
                copies.append(staged.copy)
        fence.answer(copies)

    def told(self, word: Told) -> None:
        """No chunk of an earlier step will be told of."""
        self._told = word.step
        self._fenced = {name: step for name, step in self._fenced.items() if step > word.step}

    def commanded(self, command: ev.Preempted | ev.Abort) -> None:
        """The engine took the blocks back, or gave the prompt up."""
        prompt = self.prompts.get(command.transfer_id)
        if prompt is None:
            return
        if isinstance(command, ev.Abort):
            prompt.over = True
            self._start()
        elif prompt.last_step:
            prompt.lose()

    def reported(self, report: ev.Record, now: float) -> None:
        """The machines' verdicts: a prompt that is sent or given up and not read any more is forgotten."""
        if isinstance(report, ev.Released):
            prompt = self.prompts.get(report.transfer_id)
            if prompt is not None:
                prompt.blocks = prompt.tables = None
                prompt.over = True
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
                self.rank.record(record_of(prompt, report, time.monotonic()))  # this turn began before
            self._start()

    def lingers(self, transfer_id: str) -> bool:
        """Whether a transfer that has its verdict still writes. It has that id at the machines: what is said of a later
        one is not for them.
        """
        return transfer_id not in self.prompts and any(
            posted.transfer_id == transfer_id for posted in self._writes.values()
        )

    # ------------------------------------------------------------ packing

    def pack(self, action: ev.Pack, now: float) -> None:
        """Gather a part into staging, when there is room."""
        prompt = self.prompts.get(action.transfer_id)
        if prompt is not None:
            prompt.parts[action.handle] = Stamps(action.stop - action.start, time.monotonic())
        self._waiting.append(action)
        self._start()

    def take_back(self) -> None:
        """The machines have heard of a preemption: what they have lost before its gather began is given back."""
        lost = self.rank.endpoint.sender.lost
        kept: deque[ev.Pack] = deque()
        for action in reversed(self._waiting):
            if not lost(action.handle):
                kept.appendleft(action)
                continue
            prompt = self.prompts.get(action.transfer_id)
            if prompt is not None:
                prompt.parts.pop(action.handle, None)
            self.rank.count("parts taken back")
            self.rank.pending.append(ev.Unpacked(action.handle))
        self._waiting = kept

    def _start(self) -> None:
        """Gather what can be gathered. Who waits for memory is served in order; who lost its blocks, or waits for what
        its own peer holds, delays nobody else.
        """
        kept: deque[ev.Pack] = deque()
        room, full = True, set[str]()
        while self._waiting:
            action = self._waiting.popleft()
            prompt = self.prompts.get(action.transfer_id)
            staged: Staged | None = None
            if prompt is None or prompt.over:  # nobody will post it
                staged = Staged(None, None, None, 0)
            elif (
                room
                and action.link[0] not in full
                and (step := prompt.step_of(action.stop)) is not None
                and step <= self._enqueued
            ):
                try:
                    staged = self._place(action, prompt, step)
                except _ShareError:
                    full.add(action.link[0])
                except Exception as error:  # the machines get their answer; the part fails when it would be posted
                    log.error("gather for %s: %s", action.transfer_id, error)
                    self.rank.count("gather failed")
                    staged = Staged(None, None, None, 0)
                else:
                    room = staged is not None
            if staged is None:
                kept.append(action)
                continue
            if prompt is not None and (stamps := prompt.parts.get(action.handle)) is not None:
                stamps.launched = time.monotonic()
                staged.stamps = stamps
            self._staged[action.handle] = staged
            self._gathering.append(action.handle)
            if staged.copy is None:  # no copy whose end would wake anybody
                self.rank.look_again()
        self._waiting = kept

    def _place(self, action: ev.Pack, prompt: Prompt, step: int) -> Staged | None:
        """The part in staging with its gather under way behind ``step``, or ``None`` when there is no room now.

        Raises ``_ShareError`` where the peer would hold more than its share in more than two parts: a second one may be
        packed while the first is written, however segments round.
        """
        fellow = self._fellow(action.link)
        prompt.packed = True
        if fellow.outgoing is None:
            return Staged(prompt, None, None, 0)
        shard, part = self._part(fellow.outgoing, prompt, action.handle, action.start, action.stop)
        staged = Staged(prompt, shard, part, shard.part_bytes(part))
        if staged.size:
            need = -(-staged.size // self.staging.segment_bytes)
            if need > self.staging.count:
                raise GrantError(f"a part of {staged.size} bytes, staging has {self.staging.count} segments")
            staged.peer = action.link[0]
            mine = [len(one.segments) for one in self._staged.values() if one.segments and one.peer == staged.peer]
            if len(mine) > 1 and sum(mine) + need > self.staging.count * self.rank.settings.staging_share:
                raise _ShareError
            segments = self.staging.take(need)
            if segments is None:
                return None
            staged.segments = segments
            try:
                gather = plan_gather(shard, prompt.source(), part)
                after = self._behind(step)
                staged.copy = self.copier.gather(gather, segments, 0, after)
                if self.rank.bell is not None:
                    self.rank.bell.watch(staged.copy, waiting=after is not None)
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
        prompt = self.prompts.get(action.transfer_id)
        stamps = prompt.parts.get(handle) if prompt is not None else None
        if stamps is None:  # direct: nothing was packed
            stamps = Stamps(action.stop - action.start, time.monotonic())
            if prompt is not None:
                prompt.parts[handle] = stamps
        stamps.begun = time.monotonic()
        try:
            attempt, _, _ = rank.endpoint.sender.about(handle)
            write = self._write(action)
        except Exception as error:
            log.warning("write for %s to %s: %s", action.transfer_id, action.link, error)
            rank.count("post failed")
            self._unstage(handle)
            rank.pending.extend((ev.WriteBroken(handle), ev.WriteQuiet(handle)))
            return
        stamps.posted = time.monotonic()
        if write is None:
            stamps.done = stamps.posted
            self._unstage(handle)
            rank.pending.append(ev.WriteDone(handle))
        else:
            self._writes[handle] = Posted(action.transfer_id, write, stamps, action.link, attempt)

    def _write(self, action: ev.Post) -> Write | None:
        """The write on its way; ``None`` when there is nothing to write."""
        fellow, rank = self._fellow(action.link), self.rank
        prompt = self.prompts[action.transfer_id]
        if action.packed:
            spans, device = self._packed_spans(action, fellow), fellow.facts.landing.device
        else:
            spans, device = self._direct_spans(action, fellow, prompt), fellow.device
        local, remote, length = spans
        noticed = rank.transport.arrival == "notification" and fellow.outgoing is not None
        if not len(length) and not noticed:
            return None
        prompt.bytes += int(length.sum())
        prompt.descriptors += len(length)
        attempt, part, _ = rank.endpoint.sender.about(action.handle)
        # Of a part without bytes, too, a notice is awaited.
        notice = notice_of(fellow.incarnation, attempt, part) if noticed else b""
        return rank.transport.post(fellow.agent, local, remote, length, rank.device, device, notice)

    def _packed_spans(self, action: ev.Post, fellow: Fellow) -> Spans:
        staged, there = self._staged[action.handle], fellow.facts.landing
        if staged.prompt is None:
            raise GrantError("its gather failed")
        if staged.shard is None or staged.part is None:
            return NOTHING  # a sibling holds the same heads and writes them
        offset = part_offset(staged.shard, staged.part)
        known = staged.prompt.grants.get(action.link)
        if known is None or known[0] is not action.memory:  # every part of a shard names the same memory
            known = staged.prompt.grants[action.link] = (action.memory, *read_segments(action.memory, there.count))
        _, base, segments = known
        offset += base
        check_inside(segments, there.segment_bytes, offset + staged.size)
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
                    if staged.stamps is not None:
                        staged.stamps.gathered = time.monotonic()
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
            posted.stamps.done = time.monotonic()
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
        posted = self._writes.pop(handle)
        self.rank.settling.over(posted.link, posted.attempt, time.monotonic())
        self._unstage(handle)
        self.rank.pending.append(event)
        self._start()
