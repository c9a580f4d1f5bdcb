"""What a host tells the machines (events) and what they ask of it (actions). Records only.

``link`` is ``(engine, rank)`` of the other end. ``handle`` numbers the writes of one sender, from 1. Memory is named by
handles that the machines never look into. Events and actions of the ranks' machines and of the ledger are apart: the
host carries the ledger's commands to every rank, and the ranks' reports to the ledger.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pushkv.model.protocol.messages import Message

Link = tuple[str, int]


class Record(msgspec.Struct, frozen=True, gc=False):
    """Base of all events and actions."""


# ---------------------------------------------------------------- events of the network and the fabric, to a rank


class Received(Record, frozen=True, gc=False):
    """``message`` came in from ``link``, decoded."""

    link: Link
    message: Message


class Greet(Record, frozen=True, gc=False):
    """Get to know ``link`` before the first transfer needs it."""

    link: Link


class Connected(Record, frozen=True, gc=False):
    """Answer to ``Connect``: transport and layouts fit."""

    link: Link
    incarnation: int


class Unfit(Record, frozen=True, gc=False):
    """Answer to ``Connect``: no transfer is possible; ``reason`` names both sides' values."""

    link: Link
    incarnation: int
    reason: str


class ProcessGone(Record, frozen=True, gc=False):
    """The operating system says that the process ``incarnation`` at ``link`` exists no more (evidence E2)."""

    link: Link
    incarnation: int


class Packed(Record, frozen=True, gc=False):
    """The gather for ``handle`` is complete: its bytes are in staging."""

    handle: int


class Unpacked(Record, frozen=True, gc=False):
    """The gather for ``handle`` had not begun when the prefill was preempted (``Sender.lost``), and will not: nothing
    of it is in staging. Of several parts of a shard the last comes first, all of them before any ``Computed`` that
    follows.
    """

    handle: int


class WriteDone(Record, frozen=True, gc=False):
    """``handle`` is complete: the bytes are in the remote memory and nothing of it is active."""

    handle: int


class WriteBroken(Record, frozen=True, gc=False):
    """``handle`` reported or raised an error. It may still be active until ``WriteQuiet``."""

    handle: int


class WriteQuiet(Record, frozen=True, gc=False):
    """A broken or abandoned ``handle`` has nothing active any more."""

    handle: int


class Revoked(Record, frozen=True, gc=False):
    """The fabric has revoked every remote right to the memory of ``transfer_id`` (evidence E3)."""

    transfer_id: str


# ---------------------------------------------------------------- commands of the ledger (or host) to a rank


class Begin(Record, frozen=True, gc=False):
    """Sending side: the request of ``transfer_id`` is here and will have ``tokens`` tokens, ``bytes_per_token`` of this
    rank each. ``alone``: no other rank sends any of it.
    """

    transfer_id: str
    tokens: int
    bytes_per_token: int = 0
    chunked: bool = False
    alone: bool = False


class Computed(Record, frozen=True, gc=False):
    """Sending side: the first ``tokens`` tokens are in the cache for all that reads it from now on: the step that
    computes them is enqueued (0: the prefill has started). ``final``: that is all.

    The first one is when the receiver is offered bytes: a prompt that queues here takes no memory there.
    """

    transfer_id: str
    tokens: int
    final: bool


class Preempted(Record, frozen=True, gc=False):
    """Sending side: what was computed is lost and will be computed again. A gather that has begun goes on; one that has
    not is answered with ``Unpacked``.
    """

    transfer_id: str


class GiveWay(Record, frozen=True, gc=False):
    """Sending side: the cache is full of finished prefills that wait for memory over there, and nothing that runs will
    free any (rule 8).
    """


class Abort(Record, frozen=True, gc=False):
    """Sending side: there will be no (more) cache for ``transfer_id``; also for one that never began here."""

    transfer_id: str
    reason: str


class Expect(Record, frozen=True, gc=False):
    """Receiving side: register the last ``tokens`` tokens of ``transfer_id`` with every link of ``links``."""

    transfer_id: str
    links: tuple[Link, ...]
    tokens: int
    packed: bool
    fanout: int = 1
    memory: Any = None


class Expose(Record, frozen=True, gc=False):
    """Receiving side: the destination (in pull: the source) of ``transfer_id`` may be touched."""

    transfer_id: str
    memory: Any


class Withdraw(Record, frozen=True, gc=False):
    """Receiving side: give ``transfer_id`` up. ``requeue``: it gives way, and will be registered again."""

    transfer_id: str
    reason: str
    requeue: bool = False


# ---------------------------------------------------------------- actions of a rank


class Send(Record, frozen=True, gc=False):
    """Send ``message`` to ``link``. May be lost, doubled or reordered."""

    link: Link
    message: Message


class Connect(Record, frozen=True, gc=False):
    """Check ``facts`` of the peer and open the transport, beside the transfer thread. Answer ``Connected`` or
    ``Unfit``.
    """

    link: Link
    incarnation: int
    facts: bytes


class Disconnect(Record, frozen=True, gc=False):
    """``incarnation`` at ``link`` is gone and drained: forget its transport."""

    link: Link
    incarnation: int


class Pack(Record, frozen=True, gc=False):
    """Gather tokens [``start``, ``stop``) (counted from the prompt's first) for ``handle`` into staging. Answer
    ``Packed``, or ``Unpacked``. The gathers of one shard begin in order.
    """

    handle: int
    transfer_id: str
    link: Link
    start: int
    stop: int


class Post(Record, frozen=True, gc=False):
    """Post ``handle``: claim it first (``Sender.claim``), at the moment of posting; not claimed, it must not be posted.

    Answer with ``WriteDone``, or ``WriteBroken`` and later ``WriteQuiet``; a call that raises is ``WriteBroken``.
    """

    handle: int
    transfer_id: str
    link: Link
    start: int
    stop: int
    packed: bool
    memory: Any


class Abandon(Record, frozen=True, gc=False):
    """Stop ``handle`` if the fabric can; answer ``WriteQuiet`` (or ``WriteDone``) when nothing of it is active."""

    handle: int


# ---------------------------------------------------------------- reports of a rank to the ledger


class Offered(Record, frozen=True, gc=False):
    """Receiving side: every sender of ``transfer_id`` is at work (``finished``: has all of it) and wants memory."""

    transfer_id: str
    finished: bool


class Landed(Record, frozen=True, gc=False):
    """Receiving side: all parts of all shards are here. Said once, and then nothing more of this attempt."""

    transfer_id: str


class Broken(Record, frozen=True, gc=False):
    """Receiving side: the verdict is that it will not come. Said once; memory is free only with ``Settled``.

    With reason ``GAVE_WAY`` it is no verdict: the sender gives the memory back, and ``Settled`` (or ``Landed``)
    follows.
    """

    transfer_id: str
    reason: str


class Settled(Record, frozen=True, gc=False):
    """Receiving side: after ``Broken`` or ``Withdraw``: nobody can write any more. Said once."""

    transfer_id: str


class Sent(Record, frozen=True, gc=False):
    """Sending side: the verdict. ``ok``: every shard is remotely complete. Said once."""

    transfer_id: str
    ok: bool
    reason: str


class Released(Record, frozen=True, gc=False):
    """Sending side: nothing reads the source any more (packed: from the last gather on). Said once."""

    transfer_id: str


# ---------------------------------------------------------------- events of the host, to the ledger


class Arrived(Record, frozen=True, gc=False):
    """Receiving side: a request that waits for ``tokens`` tokens from ``peer``. ``links`` of every rank follow from the
    handshake.

    ``memory`` given: admitted at once, direct. Else packed needs ``segments`` of landing memory per rank, and direct
    asks with ``Admit`` later.
    """

    transfer_id: str
    peer: str
    links: tuple[tuple[Link, ...], ...]
    tokens: int
    packed: bool
    segments: int = 0
    fanout: int = 1
    memory: Any = None


class Allocated(Record, frozen=True, gc=False):
    """Receiving side: the host has allocated ``memory`` for a direct ``transfer_id`` (after ``Admit``, or early)."""

    transfer_id: str
    memory: Any


class Starved(Record, frozen=True, gc=False):
    """Receiving side: the host could not allocate for ``transfer_id``, and nothing that runs will free memory."""

    transfer_id: str


class Loaded(Record, frozen=True, gc=False):
    """Receiving side: what was ``Ready`` is in the cache (or is not needed any more): landing memory can be reused."""

    transfer_id: str


class Aborted(Record, frozen=True, gc=False):
    """Receiving side: the client or the host gave the request up."""

    transfer_id: str
    reason: str = "aborted"


class Hold(Record, frozen=True, gc=False):
    """Sending side: the host keeps the source of ``transfer_id`` for us from now on, on every rank."""

    transfer_id: str
    tokens: int
    bytes_per_token: int = 0
    chunked: bool = False


class FromRank(Record, frozen=True, gc=False):
    """``report`` of ``rank``."""

    rank: int
    report: Record


# ---------------------------------------------------------------- actions of the ledger, to the host


class ToRanks(Record, frozen=True, gc=False):
    """Carry ``command`` to every rank."""

    command: Record


class ToRank(Record, frozen=True, gc=False):
    """Carry ``command`` to ``rank``."""

    rank: int
    command: Record


class Admit(Record, frozen=True, gc=False):
    """Receiving side, direct: allocate now for ``transfer_id``: the sender has begun. Answer ``Allocated`` (or
    ``Starved``).
    """

    transfer_id: str


class Ready(Record, frozen=True, gc=False):
    """Receiving side: everything has landed on every rank. ``memory`` as granted. Said once."""

    transfer_id: str
    memory: Any


class Fail(Record, frozen=True, gc=False):
    """Receiving side: the verdict for ``transfer_id`` is failed or cancelled. Said once. ``settled``: its memory is
    free too.
    """

    transfer_id: str
    reason: str
    settled: bool


class Free(Record, frozen=True, gc=False):
    """Receiving side: ``memory``, which the host allocated, is settled and its own again. Once per allocation."""

    transfer_id: str
    memory: Any


class TakeBack(Record, frozen=True, gc=False):
    """Receiving side: ``transfer_id`` gave way: ``memory`` is the host's again; queue the request behind ``heir``."""

    transfer_id: str
    memory: Any
    heir: str


class Finished(Record, frozen=True, gc=False):
    """Sending side: the verdict over all ranks. Said once."""

    transfer_id: str
    ok: bool
    reason: str


class Release(Record, frozen=True, gc=False):
    """Sending side: no rank reads the source any more; the host may free it. Said once."""

    transfer_id: str
