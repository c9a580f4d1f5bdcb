"""Mistakes with parts whose gather has not begun when their prefill is preempted (rules 3, 7 and 8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol.sender import Sender
from pushkv.sim.explore.profiles import CALM
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.mutants.registry import Patch, mutant, wrap

CROWDED = replace(CALM, modes=("packed",), preempts=0.6, crowded=0.5, crowded_s=2.0)
SHORT = replace(SETTINGS, landing_segments=32)


@mutant(CROWDED, "V1 I5", SHORT)
def what_is_not_gathered_keeps_its_staging(patch: Patch) -> None:
    """F21, F28: a part that is planned waits in staging until its prefill has been computed again. (Was so before there
    was ``Unpacked``.)
    """
    lost: list[tuple[Sender, ev.Pack, Any]] = []

    def unpacked(self: Sender, e: ev.Unpacked, now: float, out: Any) -> None:
        shard = self._writes[e.handle].shard
        write = self._writes[e.handle]
        pack = ev.Pack(e.handle, shard.outgoing.transfer_id, shard.link.key, write.start, write.stop)
        lost.append((self, pack, shard.outgoing))

    def make(computed: Any) -> Any:
        def mutated(self: Sender, e: ev.Computed, now: float, out: Any) -> None:
            computed(self, e, now, out)
            for entry in list(lost):
                sender, pack, outgoing = entry
                if sender is self and pack.stop <= outgoing.computed:
                    lost.remove(entry)
                    out.append(pack)

        return mutated

    patch.setattr(Sender, "unpacked", unpacked)
    wrap(patch, Sender, "computed", make)


def _after(patch: Patch, change: Any) -> None:
    """``change(shard, parts, planned)`` after an ``Unpacked``, with what they were before it."""

    def make(unpacked: Any) -> Any:
        def mutated(self: Sender, e: ev.Unpacked, now: float, out: Any) -> None:
            shard = self._writes[e.handle].shard
            before = shard.parts, shard.planned
            unpacked(self, e, now, out)
            change(shard, *before)

        return mutated

    wrap(patch, Sender, "unpacked", make)


@mutant(CROWDED, "I3 V1 I5", SHORT)
def what_was_not_gathered_is_not_planned_again(patch: Patch) -> None:
    """F21: the tokens of a part that was taken back are left out."""

    def change(shard: Any, parts: int, planned: int) -> None:
        shard.planned = planned

    _after(patch, change)


@mutant(CROWDED, "V1 I5", SHORT)
def a_part_that_was_taken_back_keeps_its_number(patch: Patch) -> None:
    """F21: the receiver waits for a part that nobody will send."""

    def change(shard: Any, parts: int, planned: int) -> None:
        shard.parts = parts

    _after(patch, change)


@mutant(CROWDED, "I5", SHORT)
def what_is_not_gathered_counts_as_a_reader(patch: Patch) -> None:
    """F21, F22: the source waits for a gather that will not be."""

    def change(shard: Any, parts: int, planned: int) -> None:
        shard.outgoing.readers += 1

    _after(patch, change)


@mutant(CROWDED, "I2", SHORT)
def a_preemption_loses_nothing(patch: Patch) -> None:
    """F21: a gather begins after its blocks are somebody else's."""
    patch.setattr(Sender, "lost", lambda self, handle: False)
