"""One engine's office: its ``Ledger``, fed by the scheduler and by the ranks, beside vLLM's engine thread.

Decides nothing about transfers: it turns an address into links, a prompt into segments of landing memory, and carries
records. The engine thread only appends words to one queue (``inbox``), knocks, and takes what the ledger told from
another (``news``); everything else happens in ``turn`` and ``report``, on the thread that owns the office: the rank's
transfer thread when the engine has one rank, its own when it has more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pushkv.model.protocol import Ledger, LocalProtocolError, Settings
from pushkv.model.protocol import events as ev
from pushkv.reference.handles import Handles
from pushkv.reference.identity import address_of
from pushkv.reference.metric_names import merged, shown
from pushkv.reference.ports import Address, BlockIds, Chunk, Complete, Held, Told, Wanted

if TYPE_CHECKING:
    from pushkv.reference.trace import Trace

log = logging.getLogger(__name__)


class Open(msgspec.Struct, frozen=True):
    """To a rank: ``link`` listens at ``host:port``."""

    link: ev.Link
    host: str
    port: int


class Table(msgspec.Struct, frozen=True):
    """To a rank: the blocks that hold the source of ``transfer_id``, from its first token on.

    ``step`` 0: all of it, and they are held. Else its first ``tokens`` tokens, once the engine's step ``step`` is done;
    ``request_id``: by what a fence would name it.
    """

    transfer_id: str
    blocks: BlockIds
    tokens: int = 0
    step: int = 0
    request_id: str = ""


def feeders(rank: int, ranks: int, peer_tp: int, peer_pp: int = 1) -> tuple[int, ...]:
    """The peer's ranks that feed ``rank`` of ``ranks``: neighbours in the order of heads, in every pipeline stage.

    Raises ``ValueError`` when neither tensor-parallel size divides the other.
    """
    if peer_tp % ranks and ranks % peer_tp:
        raise ValueError(f"tensor-parallel sizes {peer_tp} and {ranks}: neither divides the other")
    if peer_tp >= ranks:
        wide = peer_tp // ranks
        mine = range(rank * wide, (rank + 1) * wide)
    else:
        mine = range(rank * peer_tp // ranks, rank * peer_tp // ranks + 1)
    return tuple(stage * peer_tp + r for stage in range(peer_pp) for r in mine)


class Total(msgspec.Struct, frozen=True):
    """To a rank: the prompt of ``transfer_id``, of which the tail is expected, has ``tokens`` tokens."""

    transfer_id: str
    tokens: int


class Forget(msgspec.Struct, frozen=True):
    """To a rank: the landing of ``transfer_id`` is not needed any more."""

    transfer_id: str


class Loaded(msgspec.Struct, frozen=True):
    """From a rank: ``transfer_id`` is in the cache, its landing memory is not read any more."""

    transfer_id: str


class Office:
    """``deliver(rank, command)`` hands a command to one rank, on the thread that owns the office; ``wake`` has that
    thread look. ``landing_bytes(tokens, links)``: bytes of one rank's landing memory that a transfer needs.
    ``packed_costs_less(tokens)``: what path ``auto`` goes by where both are possible.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: int,
        *,
        path: str,
        packed_costs_less: Callable[[int], bool] = lambda tokens: True,
        segment_bytes: int,
        token_bytes: int,
        landing_bytes: Callable[[int, int], int],
        deliver: Callable[[int, object], None],
        wake: Callable[[], None],
        stop: Callable[[float], None],
    ) -> None:
        self.ledger = Ledger(settings, ranks)
        self.ranks = ranks
        self.trace: Trace | None = None
        self._fixed = None if path == "auto" else path == "packed"
        self._segment_bytes, self._token_bytes = segment_bytes, token_bytes
        self._packed_costs_less = packed_costs_less
        self._landing_bytes = landing_bytes
        self._deliver, self.knock, self._stop = deliver, wake, stop
        self.inbox: deque[Any] = deque()
        self.news: deque[ev.Record] = deque()
        self._handles = Handles()
        self._loaded: dict[str, set[int]] = {}
        self._counters: dict[str, float] = {}

    # ------------------------------------------------------------ the engine thread

    def key(self, handle: str) -> str:
        """What the ranks call the transfer ``handle``, of which there was news."""
        return self._handles.key(handle)

    def stop(self, drain_s: float) -> None:
        """Wait for what is open, ``drain_s`` at the most, then end."""
        self._stop(drain_s)

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start; names in ``metric_names``."""
        return merged(shown("office", self._counters), shown("ledger", self.ledger.counters))

    @property
    def gauges(self) -> Mapping[str, float]:
        """What is held now; names in ``metric_names``."""
        receiving, sending = self.ledger.open()
        segments = self.ledger.segments
        return {
            "open_incoming": float(receiving),
            "open_outgoing": float(sending),
            "quarantined": float(self.ledger.quarantined()),
            "landing_segments": float(segments),
            "landing_segments_used": float(segments - self.ledger.landing_free),
        }

    # ------------------------------------------------------------ the office's thread

    def turn(self, now: float) -> None:
        """Take what the engine thread has said."""
        inbox = self.inbox
        while inbox:
            said = inbox.popleft()
            if isinstance(said, Held):
                self._held(said, now)
            elif isinstance(said, Wanted):
                self._wanted(said, now)
            elif (word := self._handles.inward(said)) is None:
                self.news.extend(self._handles.refusals(said))
            elif isinstance(word, Chunk):
                self._all(Table(word.transfer_id, word.blocks(), word.tokens, word.step, said.transfer_id))
                self._all(ev.Computed(word.transfer_id, word.tokens, False))
            elif isinstance(word, Complete):
                self._all(Table(word.transfer_id, word.blocks))
                self._all(ev.Computed(word.transfer_id, word.tokens, True))
            elif type(word) in _COMMANDS:
                self._all(word)
            else:
                assert isinstance(word, ev.Record)
                self._hosts(word, now)

    def _held(self, word: Held, now: float) -> None:
        name = word.identity.request_id
        if refusal := self._handles.add(name, word.identity, True):
            self._count(f"requests_refused:{refusal}")
            return
        hold = ev.Hold(self._handles.key(name), word.tokens, self._token_bytes, chunked=word.chunked)
        if refusal := self._step(hold, now):
            self._handles.refuse(name, True, refusal)
            self._count("requests_refused:ambiguous")

    def _wanted(self, word: Wanted, now: float) -> None:
        name = word.transfer_id
        try:
            peer, identity = address_of(word.params), word.identity()
        except Exception as error:  # an ``IdentityError``, or whatever else a request from the network may cause
            self._count("requests_refused:identity")
            self.news.append(ev.Fail(name, str(error), True))
            return
        if refusal := self._handles.add(name, identity, False):
            self._count(f"requests_refused:{refusal}")
            self.news.append(self._handles.refused_arrival(name))
            return
        packed, why = word.packed, "asked for"
        if packed is None:
            packed, why = self._choose(word.tokens, max(1, peer.tp_size // self.ranks))
        self._arrive(self._handles.key(name), peer, word, packed, why, now)

    def _choose(self, tokens: int, links: int) -> tuple[bool, str]:
        """(packed, why): by setting, by memory, by cost."""
        if self._fixed is not None:
            return self._fixed, "by setting"
        if not self.ledger.fits(self._segments(tokens, links)):
            return False, "larger than the landing memory"
        if not tokens or self._packed_costs_less(tokens):
            return True, "costs less"
        return False, "costs less"

    def _hosts(self, event: ev.Record, now: float) -> None:
        """An event of the scheduler for the ledger."""
        if isinstance(event, ev.Allocated):
            event = ev.Allocated(event.transfer_id, (0, event.memory()))
        if self._step(event, now) and isinstance(event, ev.Allocated):  # nobody was told of that memory
            self._step(ev.Aborted(event.transfer_id), now)
            self.news.append(self._handles.outward(ev.Free(event.transfer_id, event.memory)))
        if isinstance(event, (ev.Loaded, ev.Aborted)):
            self._over(event.transfer_id)

    def report(self, rank: int, report: object, now: float) -> None:
        """``rank`` reports to the ledger."""
        if isinstance(report, Loaded):
            done = self._loaded.setdefault(report.transfer_id, set())
            done.add(rank)
            if len(done) == self.ranks:
                del self._loaded[report.transfer_id]
                self._hosts(ev.Loaded(report.transfer_id), now)
        else:
            assert isinstance(report, ev.Record)
            held = self.ledger.open()[1]
            self._step(ev.FromRank(rank, report), now)
            if self.ledger.open()[1] < held:
                self._handles.sent(report.transfer_id)  # type: ignore[attr-defined]
            if isinstance(report, (ev.Landed, ev.Broken, ev.Settled)):
                self._over(report.transfer_id)

    def _over(self, transfer_id: str) -> None:
        """The ranks need not remember what the books have closed: one may have its bytes while another has failed."""
        if not self.ledger.expects(transfer_id):
            self._handles.received(transfer_id)
            self._all(Forget(transfer_id))

    def _arrive(self, transfer_id: str, peer: Address, word: Wanted, packed: bool, why: str, now: float) -> None:
        tokens = word.tokens
        rows: list[tuple[ev.Link, ...]] = []
        try:
            for rank in range(self.ranks):
                row = feeders(rank, self.ranks, peer.tp_size)
                rows.append(tuple((peer.engine_id, number) for number in row))
                self._deliver(rank, Total(transfer_id, word.total))
                for number in row:
                    self._deliver(rank, Open((peer.engine_id, number), peer.host, peer.port + number))
        except ValueError as error:
            self._tell(ev.Fail(transfer_id, str(error), True), now)
            self._over(transfer_id)
            return
        if tokens:
            self._count(f"path:{'packed' if packed else 'direct'}, {why}")
        fanout = max(1, self.ranks // peer.tp_size)
        segments = self._segments(tokens, len(rows[0])) if packed else 0
        arrived = ev.Arrived(transfer_id, peer.engine_id, tuple(rows), tokens, packed, segments, fanout)
        if refusal := self._step(arrived, now):
            self._handles.refuse(word.transfer_id, False, refusal)
            self.news.append(self._handles.refused_arrival(word.transfer_id))
        self._over(transfer_id)

    def _segments(self, tokens: int, links: int) -> int:
        return -(-self._landing_bytes(tokens, links) // self._segment_bytes) if tokens else 0

    def _step(self, event: ev.Record, now: float) -> str:
        """Why the ledger refuses it, if it does: whoever said it must be told what the ledger will never tell."""
        out: list[ev.Record] = []
        refusal = ""
        try:
            self.ledger.step((event,), now, out)
        except LocalProtocolError as error:
            refusal = str(error)  # the news that closes a transfer and a word about it may cross
            log.info("the ledger refuses %s: %s", event, error)
            self._count("refused event")
        if self.trace is not None:
            self.trace.step("ledger", now, (event,))
        for action in out:
            if isinstance(action, ev.ToRank):
                self._deliver(action.rank, action.command)
            elif isinstance(action, ev.ToRanks):
                self._all(action.command)
            else:
                self._tell(action, now)
        return refusal

    def _tell(self, action: ev.Record, now: float) -> None:
        if self.trace is not None:
            self.trace.verdict(now, action)
        self.news.append(self._handles.outward(action))

    def _all(self, command: object) -> None:
        for rank in range(self.ranks):
            self._deliver(rank, command)

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + 1


_COMMANDS = frozenset({ev.Computed, ev.Preempted, ev.GiveWay, ev.Abort, Told})
