"""One rank's transfer thread: it owns the NIXL agent, the side channel, the rank's machines and its segment memory.

Decides when to look and when to sleep, and translates: frames and completions into events, actions into writes, copies
and frames. Every rule is in ``pushkv.model.protocol``. It drives itself: vLLM's engine may be idle, or in a step of
three seconds, and transfers go on. The engine thread only appends to queues (``receive``, ``scatter``).

Nothing here may end the thread but ``stop``: what an event or action of one transfer raises is logged and counted, and
fails that transfer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from pushkv.model.protocol import Endpoint, LocalProtocolError, MessageError, Settings, decode, encode
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.states import Linking
from pushkv.reference import facts as facts_
from pushkv.reference.bell import Bell
from pushkv.reference.copies import marked
from pushkv.reference.landing import Landing
from pushkv.reference.loading import Loading
from pushkv.reference.meeting import Meeting, Met
from pushkv.reference.metric_names import merged, shown
from pushkv.reference.office import Forget, Office, Open, Table, Total
from pushkv.reference.ports import Load, RankCard, Told
from pushkv.reference.prompts import Enqueued, Fence
from pushkv.reference.refusals import OF_A_PROMPT, answers
from pushkv.reference.sending import Sending
from pushkv.reference.settling import Settling

if TYPE_CHECKING:
    from pushkv.reference.copies import Copier
    from pushkv.reference.evidence import Evidence
    from pushkv.reference.mailbox import Door
    from pushkv.reference.pools import SegmentPool
    from pushkv.reference.side_channel import SideChannel
    from pushkv.reference.trace import RecordLog, Trace
    from pushkv.reference.transport import Transport

log = logging.getLogger(__name__)

RECORDS = 4096
"""Records of hand-overs that wait to be fetched at the most."""
IDLE_S = 1.0
"""Longest sleep when nothing is open: words and commands wake the thread."""
OPEN_MS = 1
"""Between two looks at the transport while a peer may write here or connects: some fabrics need the target's help."""
HELPED_MS = 4
"""The same where writes into a device's memory need no help of the target."""
ACTIVE_S = 50e-6
SLOWEST_S = 1e-3
"""Between two looks while writes or copies of our own are under way: first, and when nothing has moved for long."""


class Rank:
    """``facts`` describes this rank. Every part is given, so that each can be replaced by another transport, or by one
    that fails on purpose.
    """

    def __init__(
        self,
        facts: facts_.Facts,
        settings: Settings,
        *,
        channel: SideChannel,
        transport: Transport,
        staging: tuple[SegmentPool, Copier],
        landing: Copier,
        evidence: Evidence | None = None,
        trace: Trace | None = None,
        door: Door | None = None,
        log: RecordLog | None = None,
        incarnation: int = 0,
    ) -> None:
        self.facts, self.settings = facts, settings
        self.number = facts.rank
        self._who = f"rank {facts.rank}"
        self.incarnation = incarnation or secrets.randbits(62) | 1
        self.channel, self.transport = channel, transport
        self.bases = np.asarray([region.address for region in facts.regions], np.int64)
        self.device = facts.regions[0].device if facts.regions else 0
        self._on_device = staging[0].tensor.is_cuda
        self._open_ms = HELPED_MS if self._on_device and transport.arrival == "completion" else OPEN_MS
        self.trace, self.door, self.log = trace, door, log
        self.meeting = Meeting(self, evidence)
        self.fellows = self.meeting.fellows
        self.endpoint = Endpoint(self.incarnation, settings, facts_.encode(facts))
        self.bell = Bell(self._ring) if self._on_device else None
        self._rung = False
        self._counts: dict[str, int] = {}
        self._longest_s = 0.0
        self.office: Office | None = None
        self.sending = Sending(self, *staging)
        self.settling = Settling(settings.drain_s if transport.arrival == "notification" else 0.0)
        self.landing = Landing(self, landing)
        transport.expect(self.landing.room)
        self.pending: deque[ev.Record] = deque()
        self._inbox: deque[object] = deque()
        self._telling: ev.Record | None = None
        self._open, self._looks = False, 0
        self.records: deque[dict[str, Any]] = deque(maxlen=RECORDS)
        self.card: RankCard | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False
        channel.poller.register(self._wake_fd, zmq.POLLIN)
        if door is not None:
            channel.poller.register(door.socket, zmq.POLLIN)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pushkv-transfer-{self.number}", daemon=True)
        self._actions: dict[type[ev.Record], Callable[[Any, float], None]] = {
            ev.Send: self._send,
            ev.Connect: self.meeting.connect,
            ev.Disconnect: self.meeting.disconnect,
            ev.Pack: self.sending.pack,
            ev.Post: self.sending.post,
            ev.Abandon: self.sending.abandon,
        }

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Let the thread run."""
        self._thread.start()

    def stop(self, drain_s: float = 0.0) -> None:
        """Wait up to ``drain_s`` for what is open, then end the thread and give everything back."""
        deadline = time.monotonic() + drain_s
        while self._thread.is_alive() and self._open and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def receive(self, command: object) -> None:
        """A command of the office or the host: a record of the protocol, or ``Open``, ``Table``, ``Forget``."""
        self._inbox.append(command)
        self.wake()

    def scatter(self, loads: Sequence[Load]) -> Loading:
        """Copy what has landed into the blocks of ``loads`` (which begin with the prompt's first token), from its
        ``first`` token on. What is past ``stop`` is copied too when it has landed: the forward writes it anew.
        """
        loading = Loading(loads, self._stream())
        self.receive(loading)
        return loading

    def _stream(self) -> Any:
        """The calling thread's: blocks may still be used by what is enqueued there."""
        if not self._on_device:
            return None
        import torch

        return torch.cuda.current_stream(self.device)

    def _mark(self) -> Any:
        """Where the calling thread's stream stands."""
        return marked(self._stream())

    def enqueued(self, step: int) -> None:
        """The engine's step ``step`` is enqueued on the calling thread's stream (on a host: done)."""
        self.receive(Enqueued(step, self._mark()))

    def fence(self, request_ids: Sequence[str], step: int) -> None:
        """Return when what the caller enqueues from now on comes after all gathers out of the blocks that these
        preempted prompts had before ``step``. Finished prompts are held: only chunks can be under way.
        """
        fence = Fence(request_ids, step)
        self.receive(fence)
        while not fence.wait(1.0):
            if not self.alive:
                return  # nothing gathers any more

    def drain_records(self) -> Sequence[Mapping[str, Any]]:
        """Records of the transfers that ended since the last call."""
        found = []
        while self.records:
            found.append(self.records.popleft())
        return found

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start, of this rank and of its parts; names in ``metric_names``."""
        machines = self.endpoint
        return merged(
            shown("rank", self._counts),
            shown("side channel", self.channel.counters),
            shown("transport", self.transport.counters),
            shown("endpoint", machines.counters),
            shown("sender", machines.sender.counters),
            shown("receiver", machines.receiver.counters),
        )

    @property
    def gauges(self) -> Mapping[str, float]:
        """What is held now; names in ``metric_names``."""
        return {
            "staging_bytes": float(self.sending.staging.count * self.sending.staging.segment_bytes),
            "staging_bytes_used": float(self.endpoint.sender.staged_bytes),
            "writes_open": float(self.sending.writes_open),
            "leases": float(self.sending.leases),
            "peers": float(len(self.fellows)),
        }

    def wake(self) -> None:
        """Have the thread look."""
        if self._asleep:
            self._asleep = False  # once is enough
            os.eventfd_write(self._wake_fd, 1)

    def look_again(self) -> None:
        """By this thread: do not sleep before the next look."""
        self._rung = True

    def _ring(self) -> None:
        """A copy is done."""
        self.look_again()
        self.wake()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    begun = time.monotonic()
                    self.turn()
                    self._longest_s = max(self._longest_s, time.monotonic() - begun)
                    self._sleep()
                except Exception:  # one bad turn must not end the transfers of all others
                    log.exception("a turn of the transfer thread of rank %d", self.number)
                    self.count("failed turn")
                    time.sleep(0.05)
        finally:
            self._close()

    def _close(self) -> None:
        """The side channel goes last: once nobody listens there, peers may take this process for gone."""
        for part in (self.bell, self.meeting.evidence, self.trace, self.log, self.door, self.transport, self.channel):
            try:
                if part is not None:
                    part.close()
            except Exception:
                log.exception("closing")
        os.close(self._wake_fd)

    def turn(self) -> bool:
        """Look at everything once; whether anything happened."""
        now = time.monotonic()
        if self.office is not None:
            self.office.turn(now)
        self._read(now)
        self._rung = False
        self.sending.poll(now)
        self.landing.poll(now)
        self.meeting.look(now)
        for late in self.settling.due(now):
            self._send(late, now)
        busy = False
        while self.pending or now >= self.endpoint.wake_at:
            busy = True
            self._looks = 0
            self.step(now)
            if self.office is not None:
                self.office.turn(now)
            self._commands(now)
        self.landing.plan_ahead()
        return busy

    def _read(self, now: float) -> None:
        if self.door is not None:
            self._inbox.extend(self.door.receive())
        self._commands(now)
        for link, frame in self.channel.receive():
            try:
                message = decode(frame)
            except MessageError as error:
                log.debug("a frame of %s: %s", link, error)
                self.count(f"messages_refused:{error.kind}")
                continue
            if self.landing.heard(link, message):
                self.pending.append(ev.Received(link, message))
        for agent, notice in self.transport.progress():
            self.landing.noticed(agent, notice)

    def _commands(self, now: float) -> None:
        inbox = self._inbox
        while inbox:
            command = inbox.popleft()
            if isinstance(command, Open):
                if trouble := self.channel.open(command.link, command.host, command.port):
                    log.warning("%s", trouble)
            elif isinstance(command, Table):
                self.sending.table(command)
            elif isinstance(command, Total):
                self.landing.total(command)
            elif isinstance(command, Forget):
                self.landing.forget(command.transfer_id)
            elif isinstance(command, Met):
                self.meeting.met(command)
            elif isinstance(command, Loading):
                self.landing.load(command)
            elif isinstance(command, Enqueued):
                self.sending.enqueued(command)
            elif isinstance(command, Fence):
                self.sending.fence(command)
            elif isinstance(command, Told):
                self.sending.told(command)
            else:
                assert isinstance(command, ev.Record)
                if isinstance(command, ev.Unfit):
                    self.count("peers_refused")
                elif isinstance(command, (ev.Expect, ev.Expose)):
                    self.landing.commanded(command, now)
                elif isinstance(command, ev.Begin):
                    self.sending.begin(command, now)
                elif isinstance(command, ev.Computed):
                    if not self.sending.computed(command):
                        continue
                elif isinstance(command, (ev.Preempted, ev.Abort)):
                    self.sending.commanded(command)
                self.pending.append(command)

    def step(self, now: float) -> None:
        """One step of the machines with all that has happened (rule 9: before a timer fires), and its actions; one more
        with what stands behind an event that they refuse.
        """
        while self._step(now) and self.pending:
            pass

    def _step(self, now: float) -> bool:
        """Whether an event was refused."""
        refused = False
        out: list[ev.Record] = []
        told: list[ev.Record] = []
        self._telling = None
        try:
            self.endpoint.step(self._drained(told), now, out)
        except Exception as error:
            known, refused = isinstance(error, LocalProtocolError), True
            log.warning("the machines refuse an event: %s", error, exc_info=not known)
            self.count("refused event")
            for answer in answers(self._telling, error):
                self.receive(answer) if isinstance(answer, ev.Abort) else out.append(answer)
        if self.trace is not None:
            self.trace.step(self._who, now, told)
        for action in out:
            carry = self._actions.get(type(action))
            try:
                if carry is not None:
                    carry(action, now)
                else:
                    self._report(action, now)
            except Exception:
                log.exception("%s", action)
                self.count("failed action")
        if any(isinstance(event, ev.Preempted) for event in told):
            self.sending.take_back()
        return refused

    def _drained(self, told: list[ev.Record]) -> Iterator[ev.Record]:
        pending = self.pending
        while pending:
            event = pending.popleft()
            if isinstance(event, OF_A_PROMPT) and self.sending.lingers(event.transfer_id):
                continue
            told.append(event)
            self._telling = event
            yield event
            self._telling = None

    def claim(self, handle: int, now: float) -> bool:
        """The moment of posting."""
        granted = self.endpoint.sender.claim(handle, now)
        if self.trace is not None:
            self.trace.claim(self._who, now, handle, granted)
        return granted

    def _report(self, report: ev.Record, now: float) -> None:
        if isinstance(report, ev.Landed) and (lacking := self.landing.lacks(report.transfer_id)):
            log.error("%s has not landed: %s", report.transfer_id, lacking)
            self._report(ev.Broken(report.transfer_id, lacking), now)
            report = ev.Settled(report.transfer_id)  # as after a landing, nobody can write any more
        try:
            self.landing.reported(report, now)
            self.sending.reported(report, now)
        finally:  # whatever goes wrong with what is kept here: a verdict reaches the ledger
            self.tell_office(report, now)

    def tell_office(self, report: msgspec.Struct, now: float) -> None:
        """A report of the machines, or ``Loaded``."""
        if self.office is not None:
            self.office.report(self.number, report, now)
        elif self.door is not None:
            self.door.send(report)

    def _sleep(self) -> None:
        """Until something can have happened."""
        active = self.sending.active or self.landing.active
        peers = self.endpoint.peers
        self._open = bool(
            self.sending.prompts
            or self.landing.inbound
            or self.settling
            or any(self.endpoint.busy(link) for link in peers)
        )
        if self._rung:
            return
        if active:
            self._looks += 1
            time.sleep(min(SLOWEST_S, ACTIVE_S * (1 << min(self._looks // 64, 8))))
            return
        connecting = any(p.state in (Linking.CONNECTING, Linking.GREETING) for p in peers.values())
        if self._open or connecting:
            timeout_ms = OPEN_MS if connecting else self._open_ms
        else:
            timeout_ms = math.ceil(1000 * max(0.0, min(IDLE_S, self.endpoint.wake_at - time.monotonic())))
        self._asleep = True
        try:
            if not (self._inbox or self._rung or (self.office is not None and self.office.inbox)):
                self.channel.poller.poll(timeout_ms)
        finally:
            self._asleep = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    # ------------------------------------------------------------ actions

    def _send(self, action: ev.Send, now: float) -> None:
        message = action.message
        if self.settling.keep(action, now):
            return
        if isinstance(message, (msg.Register, msg.Grant)):
            message = self.landing.named(action.link, message, now)
        try:
            frame = encode(message)
        except MessageError as error:  # larger than a frame: it is as lost as any other lost message, and told of
            log.error("%s to %s: %s", type(message).__name__, action.link, error)
            self.count("oversized")
            return
        self.channel.send(action.link, frame)

    def count(self, name: str, by: int = 1) -> None:
        """Count ``name``."""
        self._counts[name] = self._counts.get(name, 0) + by

    def record(self, record: dict[str, Any]) -> None:
        """Keep the record of one hand-over, for the metrics, the trace and the file of records. ``longest_turn_s``: of
        this thread, since the last record: what kept it from looking.
        """
        record["longest_turn_s"], self._longest_s = self._longest_s, 0.0
        if record["side"] == "receive":
            self.count("bytes_received", record["bytes"])
        if len(self.records) == RECORDS:
            self.count("records_dropped")
        self.records.append(record)
        for writer in (self.trace, self.log):
            if writer is not None:
                writer.record(record)
