"""How large an exhaustive world is: who is there, what is handed over, and how often each kind of fate may strike.

A budget is what makes a world finite, so it is part of its name: ``Scope`` prints itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from pushkv.model.protocol import Settings

ENGINES = ("P", "D")
TRANSFERS = ("t-1", "t-2")
UNIT_S = 1.0
"""The lattice of time: all spans are whole numbers of it, so that equal ages are equal numbers."""


def settings(**spans: float) -> Settings:
    """Spans so short that a few steps of time reach every bound."""
    base = Settings(
        beat_s=2.0, suspect_after_s=5.0, wait_s=6.0, lease_s=4.0, orphan_s=3.0, write_s=2.0, drain_s=1.0, greet_s=2.0,
        pause_s=0.5, yields=1, tombstones_per_link=4, remembered_ids=4, open_per_link=4, landing_segments=2,
        staging_bytes=400,
    )  # fmt: skip
    return replace(base, **spans)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Budget:
    """How often it may happen on one path, at any point of it."""

    drop: int = 0
    """Messages lost."""
    duplicate: int = 0
    """Messages that come twice, the second time whenever it likes."""
    early: int = 0
    """Steps of time (to the next deadline of anybody) while something else could still happen. When nothing else can,
    time is free.
    """
    dark: int = 0
    """Steps of time while somebody is dead or stopped and the others are at rest."""
    abort: int = 0
    """Legs given up, at either side."""
    preempt: int = 0
    """Prefills taken off the cache before they end."""
    kill: int = 0
    """Processes killed; starting anew is free."""
    tell: int = 0
    """Times that the operating system tells of a death (E2)."""
    pause: int = 0
    """Processes stopped; waking is free."""
    broken: int = 0
    """Writes that report an error while their descriptors may still land."""
    unfit: int = 0
    """Connections that the host refuses."""
    revoke: int = 0
    """Transfers whose remote rights the fabric takes away (E3)."""

    def __str__(self) -> str:
        spent = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name)]
        return " ".join(spent) or "no faults"


KINDS = tuple(f.name for f in fields(Budget))


@dataclass(frozen=True)
class Plan:
    """One transfer: ``early``, ``late``, ``packed`` or ``pull``; ``parts`` chunks of the prefill, of one token each."""

    mode: str
    parts: int = 1
    missing: str = ""
    """Engine that is never told of it (``P`` or ``D``)."""
    tokens: int = -1
    """Tokens that the receiver lacks; -1: all."""
    apart: bool = False
    """Whether the prefill ends at a move of its own after its last chunk: it can be preempted between the two."""

    @property
    def wanted(self) -> int:
        """Tokens that are handed over."""
        return self.parts if self.tokens < 0 else self.tokens


@dataclass(frozen=True)
class Scope:
    """One exhaustive world: ``prefill`` ranks at P, ``decode`` ranks at D."""

    name: str
    plans: tuple[Plan, ...]
    budget: Budget = Budget()
    prefill: int = 1
    decode: int = 1
    p_blocks: int = 4
    d_blocks: int = 4
    warm: bool = True
    """Whether the engines know each other at the start."""
    prelude: tuple[str, ...] = ()
    """What hosts have done before the search begins (``"D arrives t-1"``), each when all before it has come to rest."""
    inside: bool = False
    """Whether reports and commands between a ledger and its ranks queue up, in order, or arrive at once."""
    settings: Settings = field(default_factory=settings)

    @property
    def transfers(self) -> dict[str, Plan]:
        """The plans by their transfers' names."""
        return dict(zip(TRANSFERS, self.plans, strict=False))

    @property
    def alike(self) -> tuple[str, ...]:
        """Names that may be interchanged."""
        same = len(self.plans) == 2 and self.plans[0] == self.plans[1]
        return TRANSFERS if same else ()

    @property
    def calm(self) -> bool:
        """Whether all must load when no fault strikes: both legs come, and a beat comes before any deadline. (Without
        one a grant that overtakes its registration is not said again in time.)
        """
        return self.settings.beat_s < self.settings.lease_s and not any(plan.missing for plan in self.plans)

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of each engine."""
        return {"P": self.prefill, "D": self.decode}

    def links(self, mine: str) -> tuple[tuple[tuple[str, int], ...], ...]:
        """For each rank of ``mine`` the links of the other engine that it exchanges bytes with."""
        theirs = "D" if mine == "P" else "P"
        a, b = self.ranks[mine], self.ranks[theirs]
        if a >= b:
            return tuple(((theirs, rank * b // a),) for rank in range(a))
        return tuple(tuple((theirs, rank * (b // a) + i) for i in range(b // a)) for rank in range(a))

    def fanout(self, mine: str) -> int:
        """Receiving ranks of ``mine`` that one sending rank serves."""
        return max(1, self.ranks[mine] // self.ranks["D" if mine == "P" else "P"])
