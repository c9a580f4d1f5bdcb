"""Engines in memory: the real `Endpoint` and `Ledger` of every engine, a transport that is a dictionary, no vLLM.

No message is made up: what one half hears, the other half has said. An `Engine` fulfils the ports `Office` and `Rank`;
`vllm_like.py` drives a `SchedulerSide` on top of it. Caches hold token ids, so that wrong or stale content is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pushkv.model.protocol import LocalProtocolError, Settings
from pushkv.model.protocol import events as ev
from pushkv.model.protocol.endpoint import Endpoint
from pushkv.model.protocol.ledger import Ledger
from pushkv.model.protocol.messages import Message, decode, encode
from pushkv.model.protocol.states import Incoming
from pushkv.reference.handles import Handles
from pushkv.reference.identity import Identity, IdentityError, address_of
from pushkv.reference.ports import BlockIds, Chunk, Complete, Held, Load, RankCard, Told, Wanted
from pushkv.reference.refusals import OF_A_PROMPT, answers

BLOCK = 4
SEGMENT = 8
"""Tokens of a block and of a segment."""

Cell = tuple[int, int]
_REPORTS = (ev.Offered, ev.Landed, ev.Broken, ev.Settled, ev.Sent, ev.Released)
_NEWS = (ev.Admit, ev.Ready, ev.Fail, ev.Free, ev.TakeBack, ev.Finished, ev.Release)


class _Ear(deque[Any]):
    """Who speaks into it is heard at once; ``busy``: when somebody says so."""

    def __init__(self, hear: Callable[[Any], None]) -> None:
        super().__init__()
        self._hear = hear
        self.busy = False

    def append(self, word: Any) -> None:
        super().append(word)
        if not self.busy:
            self.hear()

    def hear(self, most: int = 1 << 30) -> None:
        for _ in range(min(most, len(self))):
            self._hear(self.popleft())


@dataclass
class Cluster:
    """All engines, the wire between them, and the time. cut: engines that nobody hears. stuck: no write ends."""

    now: float = 100.0
    engines: dict[str, Engine] = field(default_factory=dict)
    wire: deque[tuple[str, str, bytes]] = field(default_factory=deque)
    cut: set[str] = field(default_factory=set)
    stuck: bool = False

    def settle(self) -> None:
        """Until nobody has anything to do at this time."""
        busy = True
        while busy:
            busy = False
            for engine in list(self.engines.values()):
                busy |= engine.pump()
            while self.wire:
                source, target, frame = self.wire.popleft()
                busy = True
                if target in self.engines and not self.cut & {source, target}:
                    self.engines[target].hear(source, decode(frame))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        self.settle()
        while self.now < end:
            soonest = min((engine.endpoint.wake_at for engine in self.engines.values()), default=end)
            self.now = min(end, max(soonest, self.now + 1e-3))
            for engine in self.engines.values():
                engine.wake()
            self.settle()


class Engine:
    """One engine of one rank; its office and its rank."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        packed: bool = True,
        incarnation: int = 0,
        block_tokens: int = BLOCK,
        **protocol: Any,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.packed = packed
        self.block_tokens = block_tokens
        settings = Settings(**{"landing_segments": 64, **protocol})
        self.endpoint = Endpoint(incarnation or 1000 + len(cluster.engines), settings)
        self.ledger = Ledger(settings)
        self.cache: dict[Cell, int] = {}
        self.tables: dict[str, BlockIds] = {}
        self.chunks: dict[str, tuple[int, int]] = {}
        self.packs: list[ev.Pack] = []
        self.step = 0
        self.owners: dict[str, str] = {}
        self.fences: dict[str, int] = {}
        self.prompts: set[str] = set()
        self.over: set[str] = set()
        self.landing: dict[Any, dict[int, int]] = {}
        self.memory: dict[str, Any] = {}
        self.staged: dict[int, dict[int, int]] = {}
        self.held_writes: list[ev.Post] = []
        self.loads: Sequence[Load] = ()
        self.broken = False  # no load can be done
        self.arrivals: list[tuple[str, int, int, bool]] = []
        self.fenced: list[str] = []
        self.told: list[Any] = []
        self.counters: Mapping[str, float] = {}
        self.gauges: Mapping[str, float] = {}
        self.handles = Handles()
        self.stopped = False
        self._todo: deque[tuple[str, ev.Record]] = deque()
        self.news: deque[ev.Record] = deque()
        self.inbox: _Ear = _Ear(self._heard)
        cluster.engines[name] = self

    @property
    def card(self) -> RankCard:
        return RankCard(0, 1 << 20, 1 << 20, 1)

    # ------------------------------------------------------------ Office

    def knock(self) -> None:
        """What is said is heard at once."""

    def _heard(self, word: Any) -> None:
        """A word of the scheduler side."""
        if isinstance(word, Held):
            name = word.identity.request_id
            self.told.append(word)
            if self._known(name, word.identity, True):
                self._todo.append(("ledger", ev.Hold(self.key(name), word.tokens, 1, chunked=word.chunked)))
        elif isinstance(word, Wanted):
            self._wanted(word)
        elif isinstance(word, Told):
            self.fences = {name: step for name, step in self.fences.items() if step > word.step}
        elif isinstance(word, Chunk):
            if word.step < self.fences.get(word.transfer_id, 0):
                return  # it was preempted meanwhile
            self._blocks(word.transfer_id, word.blocks(), word.tokens, word.step)
            self._say("rank", ev.Computed(word.transfer_id, word.tokens, False))
        elif isinstance(word, Complete):
            self._blocks(word.transfer_id, word.blocks, 1 << 30, 0)
            self._say("rank", ev.Computed(word.transfer_id, word.tokens, True), word)
        elif isinstance(word, ev.Allocated):
            self._blocks(word.transfer_id, word.memory(), 1 << 30, 0)
            self._say("ledger", ev.Allocated(word.transfer_id, word.transfer_id))
        else:
            commands = (ev.Computed, ev.Preempted, ev.GiveWay, ev.Abort)
            self._say("rank" if isinstance(word, commands) else "ledger", word)

    def _known(self, handle: str, identity: Identity, sends: bool) -> bool:
        refusal = self.handles.add(handle, identity, sends)
        if refusal:
            name = f"requests_refused:{refusal}"
            self.counters = {**self.counters, name: self.counters.get(name, 0) + 1}
        return not refusal

    def key(self, handle: str) -> str:
        return self.handles.key(handle)

    def _say(self, target: str, said: ev.Record, word: Any = None) -> None:
        self.told.append(said)
        translated = self.handles.inward(said)
        if translated is None:
            self.news.extend(self.handles.refusals(word or said))
        else:
            self._todo.append((target, translated))

    def _blocks(self, transfer_id: str, blocks: BlockIds, tokens: int, step: int) -> None:
        key = self.key(transfer_id)
        self.tables[key], self.chunks[key], self.owners[key] = blocks, (tokens, step), transfer_id

    def _wanted(self, word: Wanted) -> None:
        handle = word.transfer_id
        try:
            peer, identity = address_of(word.params), word.identity()
        except IdentityError as error:
            self.news.append(ev.Fail(handle, str(error), True))
            return
        if not self._known(handle, identity, False):
            self.news.append(self.handles.refused_arrival(handle))
            return
        packed = self.packed if word.packed is None else word.packed
        key = self.key(handle)
        self.arrivals.append((key, word.tokens, word.total, packed))
        segments = -(-word.tokens // SEGMENT) if packed else 0
        links = (((peer.engine_id, 0),),)
        self._todo.append(("ledger", ev.Arrived(key, peer.engine_id, links, word.tokens, packed, segments)))

    def stop(self, drain_s: float) -> None:
        self.stopped = True

    # ------------------------------------------------------------ Rank

    def scatter(self, loads: Sequence[Load]) -> Engine:
        self.loads = loads
        for one in loads:
            if self.broken:
                self._say("ledger", ev.Loaded(one.transfer_id))
                continue
            content = self.landing[tuple(self.memory[one.transfer_id])]
            for token in range(one.first, one.stop):
                self.cache[self._cell(one.blocks, token)] = content[token]
            self._say("ledger", ev.Loaded(one.transfer_id))
        return self

    def wait(self) -> Sequence[Load]:
        """As `Loading`: it is done, or cannot be."""
        return self.loads if self.broken else ()

    def enqueued(self, step: int) -> None:
        self.step = step
        self._gather()

    def fence(self, request_ids: Sequence[str], step: int) -> None:
        self.fenced += request_ids
        self.fences.update(dict.fromkeys(request_ids, step))
        for key, owner in self.owners.items():
            if owner in request_ids and self.chunks[key][1] < step:
                self.chunks[key] = (0, 0)

    def _gather(self) -> None:
        """What is computed; what nobody will post is answered."""
        for action in list(self.packs):
            tokens, step = self.chunks.get(action.transfer_id, (0, 0))
            lost = action.transfer_id in self.over
            if lost or (action.stop <= tokens and step <= self.step):
                self.packs.remove(action)
                if not lost:
                    self.staged[action.handle] = self._read(action.transfer_id, action.start, action.stop)
                self._todo.append(("rank", ev.Packed(action.handle)))

    def drain_records(self) -> Sequence[Mapping[str, Any]]:
        return ()

    # ------------------------------------------------------------ the machines

    def hear(self, source: str, message: Message) -> None:
        self._todo.append(("rank", ev.Received((source, 0), message)))

    def wake(self) -> None:
        out: list[ev.Record] = []
        self.endpoint.step((), self.cluster.now, out)
        self._carry_out(out)

    def release_writes(self) -> None:
        """The stuck writes go through."""
        writes, self.held_writes = self.held_writes, []
        for post in writes:
            self._write(post)

    def pump(self) -> bool:
        worked = False
        while self._todo:
            worked = True
            target, record = self._todo.popleft()
            out: list[ev.Record] = []
            closed: Any = None
            if target == "rank":
                self._tell_rank(record, out)
            elif not self._stale(record):
                sending = self.ledger.open()[1]
                self.ledger.step((record,), self.cluster.now, out)
                if self.ledger.open()[1] < sending:
                    assert isinstance(record, ev.FromRank)
                    closed = record.report
            later, self._todo = self._todo, deque()
            self._carry_out(out)
            if closed is not None:
                self.handles.sent(closed.transfer_id)
            about = getattr(record.report if isinstance(record, ev.FromRank) else record, "transfer_id", "")
            if target == "ledger" and not self.ledger.expects(about):
                self.handles.received(about)
            self._todo.extend(later)  # what follows from an event comes before the next event
        return worked

    def _tell_rank(self, record: ev.Record, out: list[ev.Record]) -> None:
        """One that returns while a write of its first life hangs is refused by the machines."""
        if isinstance(record, OF_A_PROMPT):
            key = record.transfer_id
            if key not in self.prompts and any(post.transfer_id == key for post in self.held_writes):
                return
        if isinstance(record, ev.Abort):
            self.over.add(record.transfer_id)
        elif isinstance(record, ev.Begin):
            self.over.discard(record.transfer_id)
            self.prompts.add(record.transfer_id)
        try:
            self.endpoint.step((record,), self.cluster.now, out)
        except LocalProtocolError as error:
            if not isinstance(record, ev.Begin):
                raise
            out += answers(record, error)

    def _stale(self, record: ev.Record) -> bool:
        """What an office keeps from the ledger: events about a transfer whose news the host has not heard yet."""
        entry = self.ledger._in.get(getattr(record, "transfer_id", ""))
        if isinstance(record, ev.Loaded):
            return entry is None or entry.state is not Incoming.READY
        if isinstance(record, ev.Arrived) and entry is not None:
            self.news.append(ev.Fail(record.transfer_id, "still being settled", True))
            return True
        return False

    def _carry_out(self, actions: list[ev.Record]) -> None:
        self._gather()
        for action in actions:
            if isinstance(action, _NEWS):
                if isinstance(action, ev.Ready):
                    self.memory[action.transfer_id] = action.memory
                self.news.append(self.handles.outward(action))
            elif isinstance(action, _REPORTS):
                if isinstance(action, (ev.Sent, ev.Released)):
                    self.over.add(action.transfer_id)
                if isinstance(action, ev.Sent):
                    self.prompts.discard(action.transfer_id)
                self._todo.append(("ledger", ev.FromRank(0, action)))
            elif isinstance(action, (ev.ToRank, ev.ToRanks)):
                self._todo.append(("rank", action.command))
            elif isinstance(action, ev.Send):
                self.cluster.wire.append((self.name, action.link[0], encode(action.message)))
            elif isinstance(action, ev.Connect):
                self._todo.append(("rank", ev.Connected(action.link, action.incarnation)))
            elif isinstance(action, ev.Pack):
                self.packs.append(action)
                self._gather()
            elif isinstance(action, ev.Post):
                if self.endpoint.sender.claim(action.handle, self.cluster.now):
                    self.held_writes.append(action)
                    if not self.cluster.stuck:
                        self.release_writes()
            elif not isinstance(action, (ev.Abandon, ev.Disconnect)):
                raise AssertionError(f"unknown action {action}")

    def _read(self, tid: str, start: int, stop: int) -> dict[int, int]:
        return {token: self.cache[self._cell(self.tables[tid], token)] for token in range(start, stop)}

    def _cell(self, table: BlockIds, token: int) -> Cell:
        return table[0][token // self.block_tokens], token % self.block_tokens

    def _write(self, post: ev.Post) -> None:
        peer = self.cluster.engines[post.link[0]]
        content = self.staged.pop(post.handle) if post.packed else self._read(post.transfer_id, post.start, post.stop)
        if post.packed:
            peer.landing.setdefault(tuple(post.memory), {}).update(content)
        else:
            for token, value in content.items():
                peer.cache[peer._cell(peer.tables[post.transfer_id], token)] = value
        self._todo.append(("rank", ev.WriteDone(post.handle)))
