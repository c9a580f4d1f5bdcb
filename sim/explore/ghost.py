"""What is true in the world, kept apart from every table of the machines: who owns memory, what is in it, who is
touching it.

Properties I1 to I4 are checked here, at each landing, claim, release and verdict. A breach raises ``Violation``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pushkv.sim.explore.violation import Violation

UNIT_TOKENS = 4
"""Tokens in one landing segment, and in one block."""

Unit = tuple[str, int]


@dataclass(eq=False)
class Custody:
    """Units that belong to one registration of ``transfer_id`` from its grant until they are another's."""

    transfer_id: str
    units: tuple[Unit, ...]
    serial: int


@dataclass(eq=False)
class Source:
    """What the posting side reads (in pull: fills) for one transfer. ``generation`` changes when its bytes do."""

    transfer_id: str
    generation: int = 0
    freed: bool = False
    packing: set[tuple[int, int]] = field(default_factory=set)
    active: set[tuple[int, int]] = field(default_factory=set)
    read: dict[tuple[int, int, int], Any] = field(default_factory=dict)


def units_of(memory: Any, packed: bool) -> tuple[Unit, ...]:
    """The units that a memory handle of the protocol names."""
    return tuple(("segment" if packed else "block", int(unit)) for unit in memory)


class Ghost:
    """Ghost state of one process (an engine from start to kill)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.serials = count(1)
        self.owner: dict[Unit, Custody] = {}
        self.custody: dict[str, Custody] = {}
        self.landing: dict[str, int] = {}
        """The first landing segment of each custody that has any."""
        self.cells: dict[tuple[int, Unit, int, int], Any] = {}
        self.registered: dict[tuple[Any, ...], str] = {}
        self.granted: dict[tuple[Any, ...], Custody] = {}
        self.sources: dict[str, Source] = {}

    # ---------------------------------------------------------------- memory that a peer may touch

    def give(self, transfer_id: str, memory: Any, packed: bool) -> None:
        """``memory`` belongs to ``transfer_id`` from now on."""
        custody = Custody(transfer_id, units_of(memory, packed), next(self.serials))
        for unit in custody.units:
            if unit in self.owner:
                raise Violation(f"I1: {self.name} gives {unit} of {self.owner[unit].transfer_id} to {transfer_id}")
            self.owner[unit] = custody
        self.custody[transfer_id] = custody
        if packed and custody.units:
            self.landing[transfer_id] = custody.units[0][1]

    def take(self, transfer_id: str) -> None:
        """What ``transfer_id`` had is its owner's again: no landing may hit it any more."""
        custody = self.custody.pop(transfer_id, None)
        self.landing.pop(transfer_id, None)
        if custody is not None:
            for unit in custody.units:
                del self.owner[unit]

    def sent(self, link: Any, peer: Any, message: Any) -> None:
        """``link`` of this process told ``peer`` of a registration or its memory."""
        key = (link, peer, message.src, message.attempt)
        if hasattr(message, "transfer_id"):
            self.registered[key] = message.transfer_id
        transfer_id = self.registered[key]
        if message.memory is None or not message.memory:
            return
        custody = self.custody.get(transfer_id)
        if key in self.granted and self.granted[key] is custody:
            return
        if custody is None or units_of(message.memory, custody.units[0][0] == "segment") != custody.units:
            raise Violation(f"I1: {self.name} exposes {message.memory}, which is not memory of {transfer_id}")
        self.granted[key] = custody

    def land(self, custody: Custody, unit: Unit) -> None:
        """I1: a descriptor of the registration that has ``custody`` touches ``unit``."""
        owner = self.owner.get(unit)
        if owner is not custody:
            whose = "nobody" if owner is None else f"{owner.transfer_id}#{owner.serial}"
            raise Violation(
                f"I1: {unit} of {self.name} touched for {custody.transfer_id}#{custody.serial}, owner: {whose}"
            )

    def check_loaded(self, transfer_id: str, prompt: int, tokens: int, feeders: list[tuple[int, ...]]) -> None:
        """I3 and I4: every wanted token holds the bytes that ``feeders[rank]`` have for it."""
        custody = self.custody.get(transfer_id)
        for rank, writers in enumerate(feeders):
            for index in range(tokens):
                if custody is None:
                    raise Violation(f"I3: {transfer_id} starts at {self.name}, which has no memory for it")
                unit = custody.units[index // UNIT_TOKENS]
                for writer in writers:
                    found = self.cells.get((rank, unit, index % UNIT_TOKENS, writer))
                    if found != (transfer_id, writer, prompt - tokens + index):
                        raise Violation(
                            f"I3: {transfer_id} starts at {self.name}, token {index} rank {rank} holds {found}"
                        )

    # ---------------------------------------------------------------- memory of the posting side

    def source(self, transfer_id: str) -> Source:
        """The source of ``transfer_id``."""
        if transfer_id not in self.sources:
            self.sources[transfer_id] = Source(transfer_id)
        return self.sources[transfer_id]

    def rewrite(self, transfer_id: str) -> None:
        """I2: the host takes the source's blocks back (preemption). The gathers that are enqueued have run by then."""
        source = self.source(transfer_id)
        source.generation += 1
        if source.active:
            raise Violation(f"I2: {self.name} rewrites the source of {transfer_id} under {sorted(source.active)}")

    def release(self, transfer_id: str) -> None:
        """I2: the machines let the source go."""
        source = self.source(transfer_id)
        if source.active or source.packing:
            raise Violation(f"I2: {self.name} frees {transfer_id} under {sorted(source.active | source.packing)}")
        source.freed = True

    def check_read(self, transfer_id: str, prompt: int, tokens: int, readers: list[tuple[int, ...]]) -> None:
        """I3 in pull: every rank has read every token from each of its peers."""
        source = self.source(transfer_id)
        for rank, peers in enumerate(readers):
            for peer in peers:
                for position in range(prompt - tokens, prompt):
                    if source.read.get((rank, peer, position)) != (transfer_id, peer, position):
                        raise Violation(
                            f"I3: {transfer_id} at {self.name}: rank {rank} lacks token {position} of {peer}"
                        )
