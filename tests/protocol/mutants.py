"""Ways to break the protocol. Each is a mistake that some real system made; the world must notice every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.endpoint import Endpoint
from pushkv.model.protocol.ledger import Ledger
from pushkv.model.protocol.outgoing import CLAIMED
from pushkv.model.protocol.receiver import Receiver
from pushkv.model.protocol.seen import Seen
from pushkv.model.protocol.sender import Sender
from pushkv.sim.explore.profiles import CALM, CHURN, CRASHY, HOSTILE, LOSSY, PARTITION, PAUSED, Profile
from pushkv.sim.explore.world import SETTINGS

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, tuple[Callable[[Patch], None], Profile, str, Any]] = {}


def mutant(profile: Profile, expected: str, settings: Any = SETTINGS) -> Callable[[Callable[[Patch], None]], None]:
    """Register a mutant: under ``profile`` a property of ``expected`` must break."""

    def add(apply: Callable[[Patch], None]) -> None:
        MUTANTS[apply.__name__] = (apply, profile, expected, settings)

    return add


def _wrap(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


@mutant(replace(CHURN, slow=0.2), "I1")
def freed_at_the_first_failure(patch: Patch) -> None:
    """F02, F05: the verdict frees."""

    def make(judge: Any) -> Any:
        def mutated(self: Receiver, transfer: Any, out: Any) -> None:
            if transfer.verdict:
                transfer.exposed = False
            judge(self, transfer, out)

        return mutated

    _wrap(patch, Receiver, "_judge", make)


@mutant(replace(HOSTILE, slow=0.4), "I2", replace(SETTINGS, lease_s=3.0))
def lease_over_a_posted_write(patch: Patch) -> None:
    """The lease frees the source of a write that was posted before it ended."""

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

    _wrap(patch, Sender, "_settle", make)


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


@mutant(replace(CRASHY, straggle=0.3, kills=0.3), "I1 I3 V2 V5")
def incarnation_ignored(patch: Patch) -> None:
    """F07: a word is taken for the present process's, whoever said it to whomever."""

    def make(received: Any) -> Any:
        def mutated(self: Endpoint, e: ev.Received, now: float, out: Any) -> None:
            peer = self.peers.get(e.link)
            if peer is not None and peer.incarnation and not isinstance(e.message, (msg.Hello, msg.Welcome)):
                message = msgspec.structs.replace(e.message, src=peer.incarnation, dst=self.incarnation)
                e = ev.Received(e.link, message)
            received(self, e, now, out)

        return mutated

    _wrap(patch, Endpoint, "_received", make)


@mutant(CHURN, "I5")
def cancel_not_answered(patch: Patch) -> None:
    """F16: nobody tells D that its memory is settled."""
    patch.setattr(Sender, "on_cancel", lambda self, link, m, now, out: None)
    patch.setattr(Sender, "_cancel", lambda self, shard, requeue, out: None)


@mutant(replace(CHURN, broken=0.3), "I1 I2")
def failed_with_a_handle_active(patch: Patch) -> None:
    """F05: the first error is told while the rest is still being written."""

    def stop(self: Sender, shard: Any, closing: str, reason: str, out: Any) -> None:
        if shard.state not in ("written", "failed", "cancelled", "stopping"):
            shard.reason, shard.closing = reason, closing
            self._close(shard, closing, out)

    patch.setattr(Sender, "_stop", stop)


@mutant(replace(LOSSY, duplicate=0.5), "I3 I5 V5")
def arrivals_counted_not_collected(patch: Patch) -> None:
    """F19: a duplicate counts for a part that has not come."""

    def on_written(self: Receiver, link: Any, m: msg.Written, now: float, out: Any) -> None:
        shard = self._open(link, m.attempt)
        if shard is not None and shard.transfer.memory is not None:
            shard.parts.add(len(shard.parts))
            if m.last:
                shard.parts_in_all = m.part + 1
            if len(shard.parts) == shard.parts_in_all:
                self._land(shard, out)

    patch.setattr(Receiver, "on_written", on_written)


@mutant(
    replace(LOSSY, duplicate=0.6, straggle=0.5, straggle_s=20.0, aborts=2.0, late_leg_s=10.0, modes=("early",)),
    "I1",
    replace(SETTINGS, remembered_ids=1),
)
def seen_forgotten(patch: Patch) -> None:
    """A late duplicate of a closed registration is taken for a new one."""
    patch.setattr(Seen, "__contains__", lambda self, number: False)


@mutant(replace(CRASHY, kills=0.4, slow=0.4, os_tells=1.0, os_tells_s=0.3), "I1")
def drain_time_ignored(patch: Patch) -> None:
    """A dead writer is taken for a silent NIC."""

    def make(link_gone: Any) -> Any:
        def mutated(self: Receiver, link: Any, heard_at: float, out: Any) -> None:
            link_gone(self, link, heard_at, out)
            self.link_drained(link, out)

        return mutated

    _wrap(patch, Receiver, "link_gone", make)


@mutant(replace(PARTITION, slow=0.3), "I1 I2 V5")
def silence_taken_for_death(patch: Patch) -> None:
    """F36: the suspected are buried."""

    def make(link_silent: Any) -> Any:
        def mutated(self: Receiver, link: Any, out: Any) -> None:
            link_silent(self, link, out)
            for shard in list(self._links[link].live.values()):
                self._end(shard, "silent", out)

        return mutated

    _wrap(patch, Receiver, "link_silent", make)


@mutant(replace(LOSSY, loss=0.3), "I5 V1 V2")
def beats_repeat_nothing(patch: Patch) -> None:
    """F19: a lost notice stays lost."""
    patch.setattr(Sender, "on_beat", lambda self, link, m, now, out: ())


@mutant(replace(CHURN, aborts=6.0, preempts=0.0, latency_s=0.1, inside_s=0.1), "I5 V6")
def landed_after_an_abort_is_kept(patch: Patch) -> None:
    """F16: an abort crosses the last notice; nobody gives the memory back. (Was in the first version of
    ``Ledger._close``.)
    """

    def make(close: Any) -> Any:
        def mutated(self: Ledger, entry: Any, out: Any, *, failed: bool = False) -> None:
            close(self, entry, out, failed=failed and len(entry.landed) < self._all)

        return mutated

    _wrap(patch, Ledger, "_close", make)


@mutant(PAUSED, "I5 V1 V2 V5")
def no_deadline_at_the_receiver(patch: Patch) -> None:
    """F06: D waits for ever."""

    def fire(self: Receiver, now: float, out: Any) -> None:
        while self.deadlines.pop_due(now) is not None:
            pass

    patch.setattr(Receiver, "fire", fire)
    patch.setattr(Receiver, "link_silent", lambda self, link, out: None)


@mutant(CRASHY, "I5 V2")
def death_not_noticed(patch: Patch) -> None:
    """Nobody asks who answers now."""
    patch.setattr("pushkv.model.protocol.peer.Peer.on_welcome", lambda self, m, now, out: False)
    patch.setattr(Endpoint, "_process_gone", lambda self, e, now, out: None)


@mutant(replace(CHURN, modes=("packed",), preempts=3.0), "I2")
def gathers_do_not_count_as_readers(patch: Patch) -> None:
    """F21: the source is let go while it is gathered."""

    def make(settle: Any) -> Any:
        def mutated(self: Sender, outgoing: Any, out: Any) -> None:
            readers, outgoing.readers = outgoing.readers, 0
            settle(self, outgoing, out)
            outgoing.readers = readers

        return mutated

    _wrap(patch, Sender, "_settle", make)


@mutant(CRASHY, "V2")
def nobody_asks_who_speaks(patch: Patch) -> None:
    """F07, F40: words of a successor are dropped, and it is not asked who it is."""
    patch.setattr("pushkv.model.protocol.peer.Peer.doubt", lambda self, now, out: None)


@mutant(replace(CALM, modes=("late",), blocks=9, requests=6.0, inside_s=0.1, preempts=1.0), "V1")
def landed_ranks_are_asked_again(patch: Patch) -> None:
    """F17: what gave way on one rank and landed on another is registered anew on both, though nobody sends twice."""
    patch.setattr(Ledger, "_resume", lambda self, entry, out: self._requeue(entry, out))


@mutant(replace(CALM, modes=("late", "packed"), blocks=7, requests=6.0, preempts=3.0), "V1 I5")
def giving_way_is_a_failure(patch: Patch) -> None:
    """F17: the yielding transfer is not registered anew."""

    def make(broken: Any) -> Any:
        def mutated(self: Ledger, rank: int, r: ev.Broken, out: Any) -> None:
            broken(self, rank, ev.Broken(r.transfer_id, "gave way for ever"), out)

        return mutated

    _wrap(patch, Ledger, "_broken", make)
