"""The receiving half of a rank's host: names the memory that peers may write, keeps what has come, scatters it.

Decides where in a transfer's segments each link's bytes lie (one link after the other, aligned), which parts there are,
and whether they are all of this rank's cache: a transfer from ranks that cannot bring that is refused, and one of which
something lacks has not landed, whatever its links say. When memory may be written, and when every link has brought what
it has, the machines say.

A link may be forgotten as soon as nothing is open on it: what it brought is worked out when its last part comes.

On a device the scatter of each part is planned as the part comes, before its blocks are known: a step that loads a
prompt waits only until they are put in and one kernel is launched.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pushkv.model.layout import LayoutError, Part, Shard, block_table, plan_scatter, scatter_ahead
from pushkv.model.protocol import GAVE_WAY
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.reference.copies import CopyError
from pushkv.reference.device_copies import DeviceCopier
from pushkv.reference.fellow import Fellow, heads
from pushkv.reference.grants import aligned, name_blocks, name_segments, part_offset, read_notice
from pushkv.reference.inbound import Inbound
from pushkv.reference.loading import Loading
from pushkv.reference.metric_names import label
from pushkv.reference.notices import Room, batches_at_most
from pushkv.reference.office import Loaded, Total
from pushkv.reference.ports import Load
from pushkv.reference.transport import agent_name, link_of

if TYPE_CHECKING:
    from pushkv.reference.copies import Copier, Copy
    from pushkv.reference.device_copies import Ahead
    from pushkv.reference.rank import Rank

log = logging.getLogger(__name__)


class Landing:
    """``copier`` copies between landing memory and the cache."""

    def __init__(self, rank: Rank, copier: Copier) -> None:
        self.rank, self.copier = rank, copier
        self.inbound: dict[str, Inbound] = {}
        self.totals: dict[str, int] = {}
        self._of_attempt: dict[tuple[ev.Link, int], str] = {}
        self._heads = heads(rank.facts.layout)
        self._loads: list[tuple[str, dict[str, Any] | None, list[Copy]]] = []
        """What is being scattered: transfer, what to write down of it (failed: nothing), its copies."""
        self._fresh: list[tuple[str, dict[str, Any] | None, list[Copy]]] = []
        """The same, begun since the last look: the engine's thread wakes up at that and wants the interpreter, so what
        follows from it waits for the next one."""
        self._unplanned: deque[tuple[Inbound, ev.Link]] = deque()

    @property
    def active(self) -> bool:
        """Whether a scatter is under way; for those on a device a bell rings."""
        return bool(self._loads or self._fresh) and self.rank.bell is None

    # ------------------------------------------------------------ commands, words and reports

    def commanded(self, command: ev.Expect | ev.Expose, now: float) -> None:
        """The ledger registers a transfer (again), or gives it memory."""
        if isinstance(command, ev.Expect):
            old = self.inbound.get(command.transfer_id)
            if old is not None:
                self._drop_attempts(old)
            self.inbound[command.transfer_id] = Inbound(command, old.registered_s if old is not None else now)
        elif (inbound := self.inbound.get(command.transfer_id)) is not None:
            inbound.memory, inbound.exposed_s = command.memory, now

    def named(self, link: ev.Link, message: msg.Register | msg.Grant, now: float) -> msg.Register | msg.Grant:
        """``message`` with its memory as the peer can read it; a registration is remembered by its number. Where the
        transfer cannot be, the office is told, and no memory is named: the registration itself is sent all the same, as
        only that shows whether another process has taken the peer's place. Raises ``LayoutError`` while another link of
        the transfer is down on which it depends where this one writes: a beat says it again.
        """
        if isinstance(message, msg.Register):
            inbound = self.inbound.get(message.transfer_id)
            if inbound is None:
                return message
            if inbound.tokens:
                self._check(inbound, link, now)
            if inbound.attempts.get(link) != message.attempt:
                self._of_attempt.pop((link, inbound.attempts.get(link, 0)), None)
                inbound.attempts[link] = message.attempt
                inbound.parts[link] = {}
                inbound.brought.pop(link, None)
                inbound.left[link] = inbound.tokens
                inbound.ahead.clear()  # another attempt may have other parts, or come from another process
                inbound.noticed = {key for key in inbound.noticed if key[0] != link}
                inbound.early = {key: word for key, word in inbound.early.items() if key[0] != link}
                inbound.rooms.pop(link, None)
                self._of_attempt[link, message.attempt] = message.transfer_id
        else:
            inbound = self.inbound.get(self._of_attempt.get((link, message.attempt), ""))
        if inbound is None or message.memory is None:
            return message
        if inbound.refused or not inbound.tokens:
            memory = []
        elif inbound.packed:
            memory = name_segments(self._offset(inbound, link), sorted(message.memory))
        else:
            first, tables = message.memory
            memory = name_blocks(first, tables)
        return msgspec.structs.replace(message, memory=memory)

    def _check(self, inbound: Inbound, link: ev.Link, now: float) -> None:
        """Whether ``inbound`` can come from ``link`` and the others it names. If not, that is told once; the ledger has
        the machines withdraw what is open.
        """
        fellow = self.rank.fellows.get(link)
        if fellow is None or inbound.refused:
            return
        why = fellow.misnamed(inbound.links, inbound.fanout)
        if not why and inbound.packed:
            size = self._size(inbound, fellow.incoming)
            if inbound.memory is None:
                inbound.sizes[link] = size
            elif inbound.sizes.setdefault(link, size) != size:  # where the others write goes by it
                why = f"{link[0]!r} has come back with another layout"
        if why:
            log.warning("%s is refused: %s", inbound.transfer_id, why)
            inbound.refused = True
            broken = ev.Broken(inbound.transfer_id, why)
            self.reported(broken, now)
            self.rank.tell_office(broken, now)

    def _size(self, inbound: Inbound, shard: Shard | None) -> int:
        return 0 if shard is None else aligned(shard.part_bytes(self._whole(inbound)))

    def _offset(self, inbound: Inbound, link: ev.Link) -> int:
        """Where the bytes of ``link`` begin in the transfer's segments."""
        offset = 0
        for other in inbound.links:
            if other == link:
                return offset
            if other not in inbound.sizes:
                inbound.sizes[other] = self._size(inbound, self._shard(other))
            offset += inbound.sizes[other]
        raise LayoutError(f"{link} does not feed {inbound.transfer_id}")

    def _whole(self, inbound: Inbound) -> Part:
        total = self.totals.get(inbound.transfer_id, inbound.tokens)
        return Part.whole(total - inbound.tokens, total)

    def _bytes(self, inbound: Inbound) -> int:
        """What its links have brought together; without those that have gone since."""
        fellows = [self.rank.fellows.get(link) for link in inbound.links]
        shards = [fellow.incoming for fellow in fellows if fellow is not None]
        return sum(shard.part_bytes(self._whole(inbound)) for shard in shards if shard is not None)

    def _shard(self, link: ev.Link) -> Shard | None:
        fellow = self.rank.fellows.get(link)
        if fellow is None:
            raise LayoutError(f"{link} is not connected")
        return fellow.incoming

    def heard(self, link: ev.Link, message: msg.Message) -> bool:
        """A word that is about to reach the machines: parts that are written are noted for the scatter. Whether it may
        go on: where only a notification shows that bytes have arrived, ``Written`` waits for it.
        """
        if not isinstance(message, msg.Written):
            return True
        inbound = self.inbound.get(self._of_attempt.get((link, message.attempt), ""))
        fellow = self.rank.fellows.get(link)
        if (
            inbound is None
            or fellow is None
            or (message.src, message.dst) != (fellow.incarnation, self.rank.incarnation)
        ):
            return True  # the machines will not believe it
        most = inbound.tokens  # every part has a token; but for the one of a transfer that has none
        if message.part >= max(1, most) or message.tokens > most or bool(message.tokens) != bool(most):
            self.rank.count("impossible part")
            return False
        if message.part not in inbound.parts[link]:
            inbound.parts[link][message.part] = message.tokens
            inbound.left[link] -= message.tokens
            if inbound.tokens and not inbound.left[link]:
                self._brings(inbound, link, fellow)
        inbound.heard_s = inbound.heard_s or time.monotonic()
        if inbound.packed and isinstance(self.copier, DeviceCopier):
            self._unplanned.append((inbound, link))
        silent = fellow.incoming is None or fellow.facts.arrival != "notification"
        if silent or not message.tokens:
            return True
        if (link, message.part) in inbound.noticed:
            return True
        inbound.early[link, message.part] = message
        return False

    def room(self, agent: str, notice: bytes) -> Room | None:
        """Where the batches of the write with this notice are counted until all have come: as many as the link's share
        of the transfer can have. ``None``: nobody waits for it.
        """
        awaited = self._awaited(agent, notice)
        if awaited is None:
            return None
        inbound, link, _ = awaited
        if link not in inbound.rooms:
            try:
                shard, whole = self._shard(link), self._whole(inbound)
            except LayoutError:
                return None
            if shard is None:
                return None
            size = shard.part_bytes(whole)
            pieces = 2 * size // max(1, min(bundle.row_bytes for bundle in shard.bundles))
            inbound.rooms[link] = Room(inbound.tokens, batches_at_most(inbound.tokens, pieces, size))
        return inbound.rooms[link]

    def _brings(self, inbound: Inbound, link: ev.Link, fellow: Fellow) -> None:
        """All tokens of ``link`` are here, or will be when the machines say that it has landed."""
        try:
            pieces = self._parts(inbound, link) if inbound.packed else []
        except LayoutError:
            log.exception("what has come of %s from %s", inbound.transfer_id, link)
            return
        if not inbound.packed or (pieces and pieces[-1][1].last):  # without a gap
            inbound.brought[link] = fellow.covers, pieces

    def lacks(self, transfer_id: str) -> str:
        """``""`` if what has come of ``transfer_id`` is all of this rank's cache, or what is to be said instead of that
        it has landed. The tokens of each link were counted when it brought them.
        """
        inbound = self.inbound.get(transfer_id)
        if inbound is None or not inbound.tokens:
            return ""
        covered = 0
        for link in inbound.links:
            covered |= inbound.brought.get(link, (0, ()))[0]
        if covered == (1 << self._heads) - 1:
            return ""
        ranks = ", ".join(str(number) for _, number in inbound.links)
        return (
            f"ranks {ranks} of {inbound.links[0][0]!r} have sent {covered.bit_count()} of the {self._heads} heads, over"
            f" all layers, of rank {self.rank.number}"
        )

    def noticed(self, agent: str, notice: bytes) -> None:
        """A write has arrived: the word about it may go on."""
        awaited = self._awaited(agent, notice)
        if awaited is None:
            self.rank.count("stray notice")
            return
        inbound, link, part = awaited
        inbound.noticed.add((link, part))
        word = inbound.early.pop((link, part), None)
        if word is not None:
            self.rank.pending.append(ev.Received(link, word))

    def _awaited(self, agent: str, notice: bytes) -> tuple[Inbound, ev.Link, int] | None:
        """(transfer, link, part) of a write that is expected and has not come."""
        found, link = read_notice(notice), link_of(agent)
        fellow = None if link is None else self.rank.fellows.get(link)
        if found is None or link is None or fellow is None or agent_name(*link, fellow.incarnation) != agent:
            return None
        incarnation, attempt, part = found
        inbound = self.inbound.get(self._of_attempt.get((link, attempt), ""))
        if incarnation != self.rank.incarnation or inbound is None or fellow.facts.arrival != "notification":
            return None
        return (inbound, link, part) if part < inbound.tokens and (link, part) not in inbound.noticed else None

    def reported(self, report: ev.Record, now: float) -> None:
        """The machines' verdicts."""
        if isinstance(report, ev.Landed):
            inbound = self.inbound.get(report.transfer_id)
            if inbound is not None:
                inbound.landed_s = now
                inbound.pieces = [
                    piece for link in inbound.links if link in inbound.brought for piece in inbound.brought[link][1]
                ]
                self._drop_attempts(inbound)
                self.rank.count("transfers_received")
                self.rank.record(
                    {
                        "side": "receive",
                        "transfer_id": inbound.transfer_id,
                        "ok": True,
                        "tokens": inbound.tokens,
                        "packed": inbound.packed,
                        "bytes": self._bytes(inbound),
                        "registered_to_granted_s": max(0.0, inbound.exposed_s - inbound.registered_s),
                        "granted_to_landed_s": now - inbound.exposed_s if inbound.exposed_s else 0.0,
                        "registered_s": inbound.registered_s,
                        "granted_s": inbound.exposed_s,
                        "heard_s": inbound.heard_s,
                        "landed_s": now,
                    }
                )
        elif isinstance(report, ev.Broken):
            cancelled = report.reason in ("cancelled", "aborted", GAVE_WAY)
            self.rank.count("transfers_cancelled" if cancelled else f"transfers_failed:{label(report.reason)}")
        elif isinstance(report, ev.Settled) and report.transfer_id in self.inbound:
            self._drop_attempts(self.inbound[report.transfer_id])  # the office says when it is over on every rank

    def forget(self, transfer_id: str) -> None:
        """What has landed (or will not) is not needed any more."""
        inbound = self.inbound.pop(transfer_id, None)
        self.totals.pop(transfer_id, None)
        if inbound is not None:
            self._drop_attempts(inbound)

    def _drop_attempts(self, inbound: Inbound) -> None:
        for link, attempt in inbound.attempts.items():
            self._of_attempt.pop((link, attempt), None)
        for kept in (inbound.rooms, inbound.early, inbound.noticed):
            kept.clear()

    # ------------------------------------------------------------ scatter

    def load(self, loading: Loading) -> None:
        """Scatter what has landed."""
        now = time.monotonic()
        if not loading.take():
            for one in loading.loads:
                self.rank.count("scatter too late")
                self.rank.tell_office(Loaded(one.transfer_id), now)
            return
        after: Any = None
        every: list[Copy] = []
        for one in loading.loads:
            copies: list[Copy] = []
            record: dict[str, Any] | None = None
            try:
                after = after or loading.mark()
                self._scatter(one, after, copies)
                times = {"asked_s": loading.asked_s, "launched_s": time.monotonic()}
                record = {"side": "load", "transfer_id": one.transfer_id, **times}
            except Exception:  # what was launched before goes on
                log.exception("scatter of %s", one.transfer_id)
                self.rank.count("scatter failed")
                loading.failed.append(one)
            self._fresh.append((one.transfer_id, record, copies))
            every += copies
        loading.begun(every)
        if self.rank.bell is not None and every:
            self.rank.bell.watch(every[-1])

    def plan_ahead(self) -> None:
        """Plan the scatter of a part that has come: after everybody was told of it, and one between two looks, so that
        nobody who loads meanwhile waits for all of them.
        """
        while self._unplanned:
            if self._planned(*self._unplanned[0]):
                self.rank.look_again()
                return
            self._unplanned.popleft()

    def _planned(self, inbound: Inbound, link: ev.Link) -> bool:
        """Plan the first part from ``link`` that is not; whether there was one."""
        if self.inbound.get(inbound.transfer_id) is not inbound or link not in inbound.parts:
            return False
        try:
            for shard, part, offset in self._parts(inbound, link):
                if (offset, part.stop) not in inbound.ahead:
                    inbound.ahead[offset, part.stop] = self._ahead(shard, part, offset)
                    return True
        except LayoutError as error:  # it is planned when it is loaded
            log.debug("%s: %s", inbound.transfer_id, error)
        return False

    def _ahead(self, shard: Shard, part: Part, offset: int) -> list[Ahead] | None:
        """``None`` when this part must be planned when it is loaded."""
        assert isinstance(self.copier, DeviceCopier)
        try:
            return self.copier.prepare(scatter_ahead(shard, part), offset)
        except (LayoutError, CopyError):
            return None

    def _parts(self, inbound: Inbound, link: ev.Link) -> list[tuple[Shard, Part, int]]:
        """(shard, part, offset in bytes) of what has come from ``link`` without a gap."""
        shard, whole, parts = self._shard(link), self._whole(inbound), inbound.parts[link]
        if shard is None:
            return []
        base, start, found = self._offset(inbound, link), whole.start, []
        for number in range(len(parts)):
            if number not in parts:
                break
            stop = start + parts[number]
            part = Part(start, stop, whole.first, stop == whole.stop)
            found.append((shard, part, base + part_offset(shard, part)))
            start = stop
        return found

    def _scatter(self, load: Load, after: Any, copies: list[Copy]) -> None:
        """Adds each copy as it is under way. Raises when one cannot be."""
        inbound = self.inbound.get(load.transfer_id)
        if inbound is None or not inbound.landed_s or not inbound.packed:
            raise LayoutError(f"{load.transfer_id} has not landed here")
        tables = [block_table(ids) for ids in load.blocks]
        segments = np.asarray(sorted(inbound.memory), np.int64)
        pieces = inbound.pieces
        if isinstance(self.copier, DeviceCopier):
            planned, pieces = self._split(inbound, load.first)
            if planned:
                copies.append(self.copier.scatter_ahead(planned, tables, segments, after))
        for shard, part, offset in pieces:
            if load.first < part.stop or part.last:
                scatter = plan_scatter(shard, tables, part, min(max(part.start, load.first), part.stop))
                copies.append(self.copier.scatter(scatter, segments, offset, after))

    def _split(self, inbound: Inbound, first: int) -> tuple[list[Ahead], list[tuple[Shard, Part, int]]]:
        """What was planned ahead, and the parts that were not, or of which not all is wanted."""
        planned: list[Ahead] = []
        rest = []
        for shard, part, offset in inbound.pieces:
            ahead = inbound.ahead.get((offset, part.stop))
            if ahead is None and (offset, part.stop) not in inbound.ahead:
                ahead = self._ahead(shard, part, offset)
            if ahead is None or first > part.start:
                rest.append((shard, part, offset))
            else:
                planned += ahead
        return planned, rest

    def poll(self, now: float) -> None:
        """Scatters that have ended."""
        for load in list(self._loads):
            transfer_id, record, copies = load
            if all(copy.done() for copy in copies):
                self._loads.remove(load)
                if record is not None:
                    over = time.monotonic()
                    self.rank.record(record | {"loaded_s": over, "scatter_s": over - record["asked_s"]})
                self.rank.tell_office(Loaded(transfer_id), now)
        self._loads += self._fresh
        self._fresh.clear()

    def total(self, word: Total) -> None:
        """How long the whole prompt is, of which the tail is expected."""
        self.totals[word.transfer_id] = word.tokens

    def sizes(self) -> dict[str, Any]:
        """How much is kept, for metrics and leak checks."""
        return {
            "inbound": len(self.inbound),
            "attempts": len(self._of_attempt),
            "loads": len(self._loads) + len(self._fresh),
        }
