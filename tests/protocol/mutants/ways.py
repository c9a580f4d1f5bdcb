"""Mistakes with legs that come first, late, never or at the wrong engine, and with giving way (rules 1, 5 and 8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.endpoint import Endpoint
from pushkv.model.protocol.incoming import Expected, Shard
from pushkv.model.protocol.ledger import Ledger
from pushkv.model.protocol.outgoing import Shard as Outgoing
from pushkv.model.protocol.receiving import Registrations
from pushkv.model.protocol.sender import Sender
from pushkv.sim.explore.profiles import CALM, CHURN, CONFIGS
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.mutants.registry import Patch, mutant, wrap
from tests.protocol.mutants.trials import cold_link, one_rank_done, wrong_engine


@mutant(
    replace(CALM, modes=("late",), blocks=9, requests=2.0, inside_s=0.1, preempts=1.0),
    "V1",
    replace(SETTINGS, open_per_link=256, yields=8),
    CONFIGS["tp2"],
)
def landed_ranks_are_asked_again(patch: Patch) -> None:
    """F17: what gave way on one rank and landed on another is registered anew on both, though nobody sends twice."""
    patch.setattr(Ledger, "_resume", lambda self, entry, out: self._requeue(entry, out))


@mutant(cold_link, "I5c")
def what_goes_on_is_registered_anywhere(patch: Patch) -> None:
    """F17: what gave way too late is registered again at once, whether its link is up, asleep or forgotten. (Was in the
    first version of ``Registrations._resume``.)
    """

    waiting: list[Shard] = []

    def resume(self: Registrations, transfer: Expected) -> None:
        transfer.requeue, transfer.reason = False, ""
        for index, old in enumerate(transfer.shards):
            if old.state == "ended":
                transfer.shards[index] = shard = Shard(old.link, transfer)
                transfer.open += 1
                waiting.append(shard)
                self.wanted.append(old.link.key)

    def register_again(self: Endpoint, now: float, out: Any) -> None:
        self.receiver.wanted.clear()
        while waiting:
            self.receiver._register(waiting.pop(), now, out)

    patch.setattr(Registrations, "_resume", resume)
    patch.setattr(Endpoint, "_register_again", register_again)


@mutant(replace(CALM, modes=("late", "packed"), blocks=7, requests=6.0, preempts=3.0, crowded=0.0), "V1 I5")
def giving_way_is_a_failure(patch: Patch) -> None:
    """F17: the yielding transfer is not registered anew."""

    def make(broken: Any) -> Any:
        def mutated(self: Ledger, rank: int, r: ev.Broken, out: Any) -> None:
            broken(self, rank, ev.Broken(r.transfer_id, "gave way for ever"), out)

        return mutated

    wrap(patch, Ledger, "_broken", make)


@mutant(wrong_engine, "I5a")
def orphans_wait_for_ever(patch: Patch) -> None:
    """F12: a registration at an engine that has no such prefill is not answered."""

    def make(on_register: Any) -> Any:
        def mutated(self: Sender, link: Any, m: msg.Register, now: float, out: Any) -> None:
            on_register(self, link, m, now, out)
            outgoing = self._transfers.get(m.transfer_id)
            if outgoing is not None and not outgoing.begun:
                self._leases.disarm(outgoing)

        return mutated

    wrap(patch, Sender, "on_register", make)


@mutant(replace(CHURN, wrong_p=0.3), "V3")
def ended_ids_are_never_forgotten(patch: Patch) -> None:
    """F12: the table of what was over before it was registered grows."""

    def remember(self: Sender, transfer_id: str, reason: str) -> None:
        self._remembered[transfer_id] = reason

    patch.setattr(Sender, "_remember", remember)


@mutant(replace(CHURN, aborts=3.0), "I5")
def the_end_of_a_prefill_is_not_told(patch: Patch) -> None:
    """F13: P's leg is aborted or rejected, and D waits for it."""
    patch.setattr(Sender, "abort", lambda self, e, now, out: None)


@mutant(replace(CALM, missing_leg=0.3), "I5")
def no_lease(patch: Patch) -> None:
    """F14: P holds what nobody will ask for."""

    def make(computed: Any) -> Any:
        def mutated(self: Sender, e: ev.Computed, now: float, out: Any) -> None:
            computed(self, e, now, out)
            if (outgoing := self._transfers.get(e.transfer_id)) is not None and outgoing.begun:
                self._leases.disarm(outgoing)

        return mutated

    wrap(patch, Sender, "computed", make)


@mutant(replace(CHURN, aborts=3.0, chunk_s=2.0), "I5a")
def an_abort_waits_for_the_offer(patch: Patch) -> None:
    """F15: what is aborted before it has memory is forgotten by nobody."""

    def make(aborted: Any) -> Any:
        def mutated(self: Ledger, e: ev.Aborted, out: Any) -> None:
            entry = self._in.get(e.transfer_id)
            if entry is None or entry.state != "waiting":
                aborted(self, e, out)

        return mutated

    wrap(patch, Ledger, "_aborted", make)


@mutant(replace(CALM, late_leg_s=3.0), "V1")
def registration_comes_after_the_prefill(patch: Patch) -> None:
    """F39: who registers before the prefill is here is refused; a router that asks both at once loses half."""

    def make(on_register: Any) -> Any:
        def mutated(self: Sender, link: Any, m: msg.Register, now: float, out: Any) -> None:
            if m.transfer_id not in self._transfers and m.attempt not in self._links[link].seen:
                self._links[link].seen.add(m.attempt)
                self._refuse(self._links[link], m.attempt, "unknown", out)
            else:
                on_register(self, link, m, now, out)

        return mutated

    wrap(patch, Sender, "on_register", make)


LOADED = replace(CALM, modes=("packed",), blocks=10, requests=3.0, preempts=1.5)
"""Prefills are preempted beside finished ones that wait for landing memory."""


@mutant(LOADED, "V1", SETTINGS, CONFIGS["plain"])
def what_was_preempted_keeps_its_memory(patch: Patch) -> None:
    """F17: a prefill that was preempted keeps its landing memory, and waits for blocks of finished ones that wait for
    that memory.
    """
    patch.setattr(Outgoing, "idle", property(lambda self: not self.parts))


@mutant(one_rank_done, "V1")
def the_last_part_is_told_of_at_once(patch: Patch) -> None:
    """F17: a rank is over with a prefill that can still be preempted: it cannot begin anew with the others."""

    def make(done: Any) -> Any:
        def mutated(self: Sender, e: ev.WriteDone, now: float, out: Any) -> None:
            outgoing = self._writes[e.handle].shard.outgoing
            final, outgoing.final = outgoing.final, True
            done(self, e, now, out)
            outgoing.final = final

        return mutated

    wrap(patch, Sender, "write_done", make)


@mutant(replace(LOADED, slow=0.3), "I2", SETTINGS, CONFIGS["plain"])
def what_gives_way_is_released(patch: Patch) -> None:
    """F21: what is to be sent again is let go while the write that was stopped is waited for."""

    def make(read_later: Any) -> Any:
        def mutated(self: Sender, outgoing: Any) -> bool:
            return not any(shard.requeue for shard in outgoing.shards.values()) and read_later(self, outgoing)

        return mutated

    wrap(patch, Sender, "_read_later", make)


@mutant(replace(CALM, modes=("late", "packed"), blocks=7, requests=6.0, preempts=3.0, crowded=0.0), "V1 I5")
def nobody_gives_way(patch: Patch) -> None:
    """F17: two engines wait for each other's memory."""
    patch.setattr(Ledger, "_make_way", lambda self, heir, out, peer="": None)
    patch.setattr(Sender, "give_way", lambda self, e, now, out: None)
