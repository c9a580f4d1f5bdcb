"""The rules, and the transition tables that carry them. Nothing else: no data, no time, no message.

Read this first. Numbers are those of the design.

1. Rendezvous. Registration and prefill meet in either order, repeatedly, late or never: ``REGISTERED`` and
   ``PROMISED`` wait for the prefill, ``MET`` waits for memory, ``GRANTED`` has both.
2. Fence. Memory that a peer may touch goes back to its owner in a settled state only: ``LANDED`` or ``ENDED`` at the
   receiver. ``WITHDRAWN`` is not one: there a verdict may be known, and the memory is in quarantine.
3. Source. ``STOPPING`` is where a sender waits for its handles. ``FAILED`` and ``CANCELLED`` are entered only with
   none active, ``WRITTEN`` only when all are complete and no shard beside it can begin anew. A lease ends
   ``REGISTERED`` … ``GRANTED``, never ``WRITING``; ``claim`` is the moment of posting, and only ``GRANTED`` and
   ``WRITING`` have it.
4. Count once. A shard has one closing event, ``landed`` or ``end``; in a closed state there is none, so a duplicate
   cannot count twice.
5. Bounded verdict. Every open state has an edge for a deadline: ``fail``/``stop`` at the sender, ``withdraw`` at the
   receiver, ``fail`` at the ledger.
6. Isolation. Tables are per shard and per link: no transition looks at another peer.
7. Retry. A retry is a new attempt, thus a new shard in its first state. No edge leads out of a closed state. ``again``
   is for an attempt that nobody has answered, and that its sender cannot have any more: it gets another number.
8. Give way. ``YIELDING`` takes memory back from a transfer that has not started, or cannot go on as its prefill was
   preempted; it ends in ``WAITING`` (registered anew), or in ``HOLDING`` when a rank of it has landed meanwhile, never
   in a failure of its own.
9. Pause. ``SUSPECT`` leads back to ``UP``, when the peer is heard and when nothing is open: silence proves nothing.
   Only evidence leads to ``DRAINING``.

A table maps state -> event -> next state. An event without an edge is a ``LocalProtocolError`` when the host caused it;
machines look before they apply a peer's word, and count what does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final


class Sending(StrEnum):
    """One shard at the sender: what one sending rank writes into one receiving rank, for one attempt."""

    REGISTERED = "registered"
    PROMISED = "promised"
    MET = "met"
    GRANTED = "granted"
    WRITING = "writing"
    STOPPING = "stopping"
    WRITTEN = "written"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Receiving(StrEnum):
    """The same shard at the receiver."""

    UNSENT = "unsent"
    REGISTERED = "registered"
    OFFERED = "offered"
    EXPOSED = "exposed"
    WITHDRAWN = "withdrawn"
    LANDED = "landed"
    ENDED = "ended"


class Linking(StrEnum):
    """What is known of the process at the other end of a link."""

    COLD = "cold"
    GREETING = "greeting"
    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    REFUSED = "refused"
    DRAINING = "draining"


class Incoming(StrEnum):
    """A transfer at the ledger of the engine whose memory is written (push) or read (pull)."""

    WAITING = "waiting"
    WANTING = "wanting"
    HOLDING = "holding"
    YIELDING = "yielding"
    READY = "ready"
    ENDING = "ending"
    DONE = "done"


class Outgoing(StrEnum):
    """A transfer at the ledger of the engine that posts."""

    ACTIVE = "active"
    ENDING = "ending"
    DONE = "done"


SENDING: Final[dict[Sending, dict[str, Sending]]] = {
    Sending.REGISTERED: {
        "meet": Sending.MET,
        "grant": Sending.PROMISED,
        "fail": Sending.FAILED,
        "cancel": Sending.CANCELLED,
    },
    Sending.PROMISED: {"meet": Sending.GRANTED, "fail": Sending.FAILED, "cancel": Sending.CANCELLED},
    Sending.MET: {"grant": Sending.GRANTED, "fail": Sending.FAILED, "cancel": Sending.CANCELLED},
    Sending.GRANTED: {
        "claim": Sending.WRITING,
        "finish": Sending.WRITTEN,
        "fail": Sending.FAILED,
        "cancel": Sending.CANCELLED,
    },
    Sending.WRITING: {
        "claim": Sending.WRITING,
        "finish": Sending.WRITTEN,
        "stop": Sending.STOPPING,
        "fail": Sending.FAILED,
        "cancel": Sending.CANCELLED,
    },
    Sending.STOPPING: {"fail": Sending.FAILED, "cancel": Sending.CANCELLED},
    Sending.WRITTEN: {},
    Sending.FAILED: {},
    Sending.CANCELLED: {},
}

RECEIVING: Final[dict[Receiving, dict[str, Receiving]]] = {
    Receiving.UNSENT: {"send": Receiving.REGISTERED, "send_exposed": Receiving.EXPOSED, "end": Receiving.ENDED},
    Receiving.REGISTERED: {
        "again": Receiving.UNSENT,
        "offer": Receiving.OFFERED,
        "expose": Receiving.EXPOSED,
        "withdraw": Receiving.WITHDRAWN,
        "landed": Receiving.LANDED,
        "end": Receiving.ENDED,
    },
    Receiving.OFFERED: {
        "offer": Receiving.OFFERED,
        "expose": Receiving.EXPOSED,
        "withdraw": Receiving.WITHDRAWN,
        "landed": Receiving.LANDED,
        "end": Receiving.ENDED,
    },
    Receiving.EXPOSED: {
        "again": Receiving.UNSENT,
        "landed": Receiving.LANDED,
        "withdraw": Receiving.WITHDRAWN,
        "end": Receiving.ENDED,
    },
    Receiving.WITHDRAWN: {"landed": Receiving.LANDED, "end": Receiving.ENDED},
    Receiving.LANDED: {},
    Receiving.ENDED: {},
}

LINKING: Final[dict[Linking, dict[str, Linking]]] = {
    Linking.COLD: {"greet": Linking.GREETING, "greeted": Linking.CONNECTING},
    Linking.GREETING: {
        "greet": Linking.GREETING,
        "greeted": Linking.CONNECTING,
        "refuse": Linking.REFUSED,
        "abandon": Linking.COLD,
    },
    Linking.CONNECTING: {"connect": Linking.UP, "refuse": Linking.REFUSED, "gone": Linking.DRAINING},
    Linking.UP: {"silence": Linking.SUSPECT, "gone": Linking.DRAINING},
    Linking.SUSPECT: {"heard": Linking.UP, "lapse": Linking.UP, "gone": Linking.DRAINING},
    Linking.REFUSED: {"gone": Linking.DRAINING, "retry": Linking.COLD},
    Linking.DRAINING: {"drained": Linking.COLD},
}

INCOMING: Final[dict[Incoming, dict[str, Incoming]]] = {
    Incoming.WAITING: {
        "offer": Incoming.WANTING,
        "expose": Incoming.HOLDING,
        "landed": Incoming.READY,
        "fail": Incoming.ENDING,
    },
    Incoming.WANTING: {
        "offer": Incoming.WANTING,
        "expose": Incoming.HOLDING,
        "landed": Incoming.READY,
        "fail": Incoming.ENDING,
    },
    Incoming.HOLDING: {"landed": Incoming.READY, "yield": Incoming.YIELDING, "fail": Incoming.ENDING},
    Incoming.YIELDING: {
        "landed": Incoming.READY,
        "requeue": Incoming.WAITING,
        "resume": Incoming.HOLDING,
        "fail": Incoming.ENDING,
    },
    Incoming.READY: {"loaded": Incoming.DONE, "fail": Incoming.DONE},
    Incoming.ENDING: {"settle": Incoming.DONE},
    Incoming.DONE: {},
}

OUTGOING: Final[dict[Outgoing, dict[str, Outgoing]]] = {
    Outgoing.ACTIVE: {"verdict": Outgoing.ENDING},
    Outgoing.ENDING: {"release": Outgoing.DONE},
    Outgoing.DONE: {},
}

SENDING_CLOSED: Final = frozenset({Sending.WRITTEN, Sending.FAILED, Sending.CANCELLED})
RECEIVING_SETTLED: Final = frozenset({Receiving.LANDED, Receiving.ENDED})

TABLES: Final[dict[str, tuple[str, Mapping[Any, Mapping[str, str]]]]] = {
    "sending": ("Shard at the sender", SENDING),
    "receiving": ("Shard at the receiver", RECEIVING),
    "linking": ("Link to a peer", LINKING),
    "incoming": ("Transfer at the receiving ledger", INCOMING),
    "outgoing": ("Transfer at the sending ledger", OUTGOING),
}
