"""Mistakes with memory: freed, read or written when it is somebody else's (rules 2 and 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.model.protocol.ledger import Ledger
from pushkv.model.protocol.outgoing import CLAIMED
from pushkv.model.protocol.receiver import Receiver
from pushkv.model.protocol.sender import Sender
from pushkv.model.protocol.states import Receiving
from pushkv.sim.explore.profiles import CALM, CHURN, CONFIGS, CRASHY, HOSTILE
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.mutants.registry import Patch, mutant, wrap


@mutant(replace(CHURN, slow=0.2, crowded=0.0), "I1")
def freed_at_the_first_failure(patch: Patch) -> None:
    """F02, F05: the verdict frees."""

    def make(judge: Any) -> Any:
        def mutated(self: Receiver, transfer: Any, out: Any) -> None:
            if transfer.verdict:
                transfer.exposed = False
            judge(self, transfer, out)

        return mutated

    wrap(patch, Receiver, "_judge", make)


@mutant(replace(CHURN, broken=0.3), "I1 I2")
def failed_with_a_handle_active(patch: Patch) -> None:
    """F05: the first error is told while the rest is still being written."""

    def stop(self: Sender, shard: Any, closing: str, reason: str, out: Any) -> None:
        if shard.state not in ("written", "failed", "cancelled", "stopping"):
            shard.reason, shard.closing = reason, closing
            self._close(shard, closing, out)

    patch.setattr(Sender, "_stop", stop)


@mutant(replace(HOSTILE, slow=0.4), "I2", replace(SETTINGS, lease_s=3.0))
def lease_over_a_posted_write(patch: Patch) -> None:
    """F09: the lease frees the source of a write that was posted before it ended."""

    def make(settle: Any) -> Any:
        def mutated(self: Sender, outgoing: Any, out: Any) -> None:
            if outgoing.overdue:
                outgoing.readers = 0
                patch_read = self._read_later
                self._read_later = lambda _: False  # type: ignore[method-assign]
                settle(self, outgoing, out)
                self._read_later = patch_read  # type: ignore[method-assign]
            else:
                settle(self, outgoing, out)

        return mutated

    wrap(patch, Sender, "_settle", make)


@mutant(replace(HOSTILE, parked=0.3), "I1 I2")
def no_check_at_the_moment_of_posting(patch: Patch) -> None:
    """F09: what was right when the write was planned is taken to be right when it is posted."""

    def claim(self: Sender, handle: int, now: float) -> bool:
        write = self._writes.get(handle)
        if write is not None:
            if write.shard.state in ("granted", "writing"):
                write.shard.move("claim")
            write.stage = CLAIMED
            write.shard.outgoing.readers += not write.shard.packed
        return True

    patch.setattr(Sender, "claim", claim)


@mutant(CHURN, "I5")
def cancel_not_answered(patch: Patch) -> None:
    """F16: nobody tells D that its memory is settled."""
    patch.setattr(Sender, "on_cancel", lambda self, link, m, now, out: None)
    patch.setattr(Sender, "_cancel", lambda self, shard, requeue, out: None)


@mutant(replace(CHURN, aborts=6.0, preempts=0.0, latency_s=0.1, inside_s=0.1), "I5 V6")
def landed_after_an_abort_is_kept(patch: Patch) -> None:
    """F16: an abort crosses the last notice; nobody gives the memory back. (Was in the first version of
    ``Ledger._close``.)
    """

    def make(close: Any) -> Any:
        def mutated(self: Ledger, entry: Any, out: Any, *, failed: bool = False) -> None:
            close(self, entry, out, failed=failed and len(entry.landed) < self._all)

        return mutated

    wrap(patch, Ledger, "_close", make)


@mutant(replace(CRASHY, kills=0.4, slow=0.4, os_tells=1.0, os_tells_s=0.3), "I1")
def drain_time_ignored(patch: Patch) -> None:
    """F06: a dead writer is taken for a silent NIC."""

    def make(link_gone: Any) -> Any:
        def mutated(self: Receiver, link: Any, heard_at: float, out: Any) -> None:
            link_gone(self, link, heard_at, out)
            self.link_drained(link, out)

        return mutated

    wrap(patch, Receiver, "link_gone", make)


@mutant(replace(CHURN, modes=("packed",), preempts=3.0), "I2")
def gathers_do_not_count_as_readers(patch: Patch) -> None:
    """F21: the source is let go while it is gathered."""

    def make(settle: Any) -> Any:
        def mutated(self: Sender, outgoing: Any, out: Any) -> None:
            readers, outgoing.readers = outgoing.readers, 0
            settle(self, outgoing, out)
            outgoing.readers = readers

        return mutated

    wrap(patch, Sender, "_settle", make)


@mutant(CALM, "I1")
def front_trim(patch: Patch) -> None:
    """F01: what is wanted of the prompt is taken from its front."""

    def make(pump: Any) -> Any:
        def mutated(self: Sender, shard: Any, out: Any) -> None:
            if shard.planned < 0 and shard.tokens and shard.state in ("granted", "writing"):
                shard.planned = 0
            pump(self, shard, out)

        return mutated

    wrap(patch, Sender, "_pump", make)


@mutant(replace(CHURN, slow=0.2), "I1")
def withdrawn_is_settled(patch: Patch) -> None:
    """F03: an abort gives the memory back without asking whoever writes into it."""

    def make(withdraw: Any) -> Any:
        def mutated(self: Receiver, e: ev.Withdraw, now: float, out: Any) -> None:
            transfer = self._transfers.get(e.transfer_id)
            withdraw(self, e, now, out)
            for shard in transfer.shards if transfer is not None and not e.requeue else ():
                if shard.state == "withdrawn":
                    self._end(shard, e.reason, out)

        return mutated

    wrap(patch, Receiver, "withdraw", make)


@mutant(replace(CHURN, slow=0.2, inside_s=0.2), "I1", SETTINGS, CONFIGS["tp2"], CONFIGS["fan-out"])
def one_rank_settles_for_all(patch: Patch) -> None:
    """F03: memory goes back at the first of several notices."""

    def make(has_settled: Any) -> Any:
        def mutated(self: Ledger, rank: int, r: ev.Settled, out: Any) -> None:
            entry = self._in.get(r.transfer_id)
            if entry is not None and entry.state == "ending":
                entry.settled = set(self._ranks)
            if entry is not None:
                has_settled(self, rank, r, out)

        return mutated

    wrap(patch, Ledger, "_has_settled", make)


@mutant(replace(CHURN, connect_s=3.0, modes=("early",), aborts=6.0), "I1")
def registered_after_its_abort(patch: Patch) -> None:
    """F03, F09: what waited for a handshake is not looked at again when the handshake is done."""

    def make(withdraw_all: Any) -> Any:
        def mutated(self: Receiver, transfer: Any, out: Any) -> None:
            parked = [shard for shard in transfer.shards if shard.state == "unsent"]
            withdraw_all(self, transfer, out)
            for shard in parked:
                shard.state = Receiving.UNSENT
                shard.link.unsent.append(shard)

        return mutated

    wrap(patch, Receiver, "_withdraw_all", make)


@mutant(replace(CALM, preempts=3.0, chunk_s=1.0), "I2")
def preempted_is_taken_for_finished(patch: Patch) -> None:
    """F20: a prefill that was preempted is handed over as if it were finished."""

    def preempted(self: Sender, e: ev.Preempted, now: float, out: Any) -> None:
        outgoing = self._transfers.get(e.transfer_id)
        if outgoing is not None and outgoing.begun and not outgoing.ended:
            outgoing.computed, outgoing.final = outgoing.tokens, True
            for shard in list(outgoing.shards.values()):
                self._pump(shard, out)

    patch.setattr(Sender, "preempted", preempted)


@mutant(CALM, "I5b")
def released_with_the_lease(patch: Patch) -> None:
    """F22: the source is kept until the lease ends, however soon it was read."""

    def make(settle: Any) -> Any:
        def mutated(self: Sender, outgoing: Any, out: Any) -> None:
            outgoing.readers += not outgoing.overdue
            settle(self, outgoing, out)
            outgoing.readers -= not outgoing.overdue

        return mutated

    wrap(patch, Sender, "_settle", make)


@mutant(replace(CALM, modes=("packed",)), "V1 I5")
def staging_is_not_given_back(patch: Patch) -> None:
    """F28: slots of staging are used once."""
    patch.setattr("pushkv.model.protocol.staging.Staging.give_back", lambda self, peer, size: None)


@mutant(replace(CALM, modes=("packed",), requests=4.0), "V1 I5")
def nobody_is_called_when_staging_is_free(patch: Patch) -> None:
    """F28: who found staging full is forgotten."""

    def refill(self: Sender, out: Any) -> None:
        self.short.clear()

    patch.setattr(Sender, "refill", refill)


@mutant(replace(CHURN, broken=0.3), "I5")
def an_error_is_no_end(patch: Patch) -> None:
    """F35: a call that raised is waited for like one that is under way."""
    patch.setattr(Sender, "write_broken", lambda self, e, now, out: None)
    patch.setattr(Sender, "write_quiet", lambda self, e, now, out: None)


@mutant(replace(CALM, modes=("packed",), requests=4.0), "I1 V5")
def segments_are_granted_twice(patch: Patch) -> None:
    """F28: landing memory stays on the list of what is free."""

    def make(grant: Any) -> Any:
        def mutated(self: Ledger, out: Any) -> None:
            free = list(self._free)
            grant(self, out)
            self._free = free

        return mutated

    wrap(patch, Ledger, "_grant", make)


@mutant(CALM, "I2", SETTINGS, CONFIGS["tp2"], CONFIGS["fan-out"])
def one_rank_releases_for_all(patch: Patch) -> None:
    """F21, F30: the source goes with the first of several ranks that has read it."""

    def released(self: Ledger, rank: int, r: ev.Released, out: Any) -> None:
        entry = self._out[r.transfer_id]
        entry.released.add(rank)
        if len(entry.released) == 1:
            out.append(ev.Release(r.transfer_id))
        self._finish(r.transfer_id, entry)

    patch.setattr(Ledger, "_released", released)


@mutant(replace(CHURN, slow=0.3, broken=0.3, modes=("packed",)), "I1 I2")
def one_write_is_quiet_for_all(patch: Patch) -> None:
    """F05: the first of several writes that has stopped speaks for the rest."""

    def make(quiet: Any) -> Any:
        def mutated(self: Sender, shard: Any, out: Any) -> None:
            if shard.state == "stopping":
                self._close(shard, shard.closing, out)
            self._settle(shard.outgoing, out)

        return mutated

    wrap(patch, Sender, "_quiet", make)


@mutant(replace(CHURN, preempts=3.0, modes=("packed",)), "I2")
def what_was_preempted_counts_as_computed(patch: Patch) -> None:
    """F21: parts are planned from a cache that is gone."""

    def preempted(self: Sender, e: ev.Preempted, now: float, out: Any) -> None:
        outgoing = self._transfers.get(e.transfer_id)
        if outgoing is not None:
            outgoing.started = False

    patch.setattr(Sender, "preempted", preempted)
