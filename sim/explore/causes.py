"""What was done to a world, and to whom: which faults hit, in which states engines crashed, and what may therefore
fail (V1).

A fault that chance brings has a label that stays the same while other things are taken out of the run. A failure must
have a cause that explains its reason: one that names the transfer where the reason is the transfer's own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pushkv.model.protocol.states import RECEIVING_SETTLED, SENDING_CLOSED, Receiving, Sending
from pushkv.sim.explore.violation import Violation

if TYPE_CHECKING:
    from pushkv.sim.explore.network import Lane
    from pushkv.sim.explore.process import Process
    from pushkv.sim.explore.world import Request, World

CRASH_STATES = tuple(
    [f"sending {state}" for state in Sending if state not in SENDING_CLOSED]
    + [f"receiving {state}" for state in Receiving if state not in RECEIVING_SETTLED]
)
"""States of open shards in which a crash can find an engine."""

MESSAGE = frozenset({"late", "doubled", "lost"})
WRITE = frozenset({"slow", "broken", "parked"})

OWN = {
    "write failed": frozenset({"broken"}),
    "write took too long": WRITE,
    "writes took too long": WRITE,
    "forgotten": MESSAGE,
    "forgotten by the sender": MESSAGE,
    "superseded": MESSAGE,
    "handed over before": MESSAGE,
}
"""Reasons of a failure, and what of it must have been done to the transfer itself."""

LINK = {
    "peer silent": frozenset({"late", "lost"}),
    "peer unreachable": frozenset({"late", "lost"}),
    "cannot connect": frozenset({"unfit"}),
    "forgotten": MESSAGE,
    "forgotten by the sender": MESSAGE,
}
"""Reasons that may also come from what was done to greetings and beats between its two engines."""

STARVED = frozenset({"lease", "deadline"})
"""Reasons of one that has waited in vain, perhaps for memory that others had."""

NEVER_BY_CHANCE = frozenset(
    {
        "peer gone",
        "aborted",
        "rejected",
        "more tokens than the prompt has",
        "fewer tokens than wanted",
        "the prompt is shorter than what is wanted",
        "transfer is registered by another engine",
        "larger than the landing memory",
    }
)
"""Reasons that need a kill, an abort or a wrong dispatch."""


class Causes:
    """Of one world."""

    def __init__(self, world: World, only: Collection[str] | None) -> None:
        self.world = world
        self.labels: list[str] = []
        """Faults that chance brought, in order."""
        self.crashes: set[tuple[str, str]] = set()
        """("killed" or "paused", a state): an engine had an open shard in that state when it happened."""
        self.kinds: set[str] = set()
        """Of what chance brought, and "unheard": a leg was aborted before its peer had heard of it, whose half keeps
        its memory until its lease or its wait is over, for nothing."""
        self._only = None if only is None else frozenset(only)
        self._links: dict[frozenset[str], list[tuple[float, str]]] = {}

    def hit(self, what: str, of: str, number: int, request: Request | None, lane: Lane | None) -> bool:
        """``what`` happens to the ``number``-th ``of`` of ``request`` or of ``lane``: noted, and whether it does."""
        whose = request.tid if request is not None else lane.name if lane is not None else ""
        label = f"{what} {of} {number} of {whose}"
        if self._only is not None and label not in self._only:
            return False
        self.labels.append(label)
        self.kinds.add(what)
        if request is not None:
            request.causes.add(what)
        elif lane is not None:
            self._links.setdefault(frozenset(lane.engines), []).append((self.world.now, what))
        if self.world.log is not None and what not in MESSAGE:
            who = (request.p if request.mode != "pull" else request.d, 0) if request is not None else (whose, 0)
            self.world.note(who, f"! {label}")
        return True

    def crash(self, how: str, process: Process) -> None:
        """``process`` is killed or paused."""
        for endpoint in process.endpoints:
            for sending in endpoint.sender._transfers.values():
                for shard in sending.shards.values():
                    self.crashes.add((how, f"sending {shard.state}"))
            for receiving in endpoint.receiver._transfers.values():
                for registration in receiving.shards:
                    self.crashes.add((how, f"receiving {registration.state}"))

    # ---------------------------------------------------------------- V1

    def check_outcome(self, request: Request) -> None:
        """V1: what failed has a cause that explains it."""
        if request.outcome == "loaded" or request.spoiled:
            return
        reason = request.outcome.removeprefix("failed: ")
        if reason in OWN or reason in LINK:
            excused = bool(request.causes & OWN.get(reason, frozenset())) or self._on_link(request, reason)
        elif reason in NEVER_BY_CHANCE:
            excused = False
        else:  # memory and time that others were robbed of
            excused = bool(self.kinds - {"doubled"}) or (reason in STARVED and self._robbed(request))
        if not excused:
            done = ", ".join(sorted(request.causes)) or "nothing"
            raise Violation(f"V1: {request.tid} ({request.outcome or 'no outcome'}): {done} was done to it")

    def _robbed(self, request: Request) -> bool:
        """Whether a transfer that shares an engine with it has lost an engine or a leg: its other half holds memory
        until a lease or a wait is over. An abort is not enough: all but the "unheard" are heard of.
        """
        engines = {request.p, request.d}
        return any(
            other.spoiled not in ("", "abort") and not engines.isdisjoint((other.p, other.d))
            for other in self.world.requests.values()
            if other is not request
            and other.spoiled_at <= request.ended_at
            and (other.outcome != "loaded" or other.ended_at >= request.at)
        )

    def _on_link(self, request: Request, reason: str) -> bool:
        explains = LINK.get(reason, frozenset())
        if request.causes & explains:
            return True
        noise = self._links.get(frozenset((request.p, request.d)), [])
        return any(what in explains and at <= request.ended_at for at, what in noise)
