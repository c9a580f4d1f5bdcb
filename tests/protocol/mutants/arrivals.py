"""Mistakes with what is told: lost, doubled, out of order, forged, or meant for another attempt (rules 4 and 7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.ledger import Ledger
from pushkv.model.protocol.receiver import Receiver
from pushkv.model.protocol.seen import Seen
from pushkv.model.protocol.sender import Sender
from pushkv.sim.explore.profiles import CALM, CHURN, CONFIGS, LOSSY
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.mutants.registry import Patch, mutant, wrap
from tests.protocol.mutants.trials import Anything, forged, frames


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
    """F11: a late duplicate of a closed registration is taken for a new one."""
    patch.setattr(Seen, "__contains__", lambda self, number: False)


@mutant(replace(LOSSY, loss=0.3), "I5 V1 V2")
def beats_repeat_nothing(patch: Patch) -> None:
    """F19: a lost notice stays lost."""
    patch.setattr(Sender, "on_beat", lambda self, link, m, now, out: ())


@mutant(replace(CHURN, broken=0.3), "I3")
def a_failure_counts_as_an_arrival(patch: Patch) -> None:
    """F04: the verdict is a count of answers, whatever they say."""

    def make(closed: Any) -> Any:
        def mutated(self: Receiver, link: Any, attempt: int, reason: str, out: Any) -> None:
            shard = self._open(link, attempt)
            if shard is not None and shard.state == "exposed":
                self._land(shard, out)
            else:
                closed(self, link, attempt, reason, out)

        return mutated

    wrap(patch, Receiver, "_closed", make)


@mutant(replace(CHURN, broken=0.3), "I5")
def a_failure_is_not_told(patch: Patch) -> None:
    """F04: whoever cannot write keeps silent about it."""

    def make(close: Any) -> Any:
        def mutated(self: Sender, shard: Any, event: str, out: Any) -> None:
            before = len(out)
            close(self, shard, event, out)
            if shard.state == "failed":
                del out[before:]
                shard.notices.clear()

        return mutated

    wrap(patch, Sender, "_close", make)


@mutant(replace(CALM, modes=("packed",), requests=3.0), "I3")
def parts_come_in_order(patch: Patch) -> None:
    """F19, F31: the last part is taken to say that all before it are here."""

    def on_written(self: Receiver, link: Any, m: msg.Written, now: float, out: Any) -> None:
        shard = self._open(link, m.attempt)
        if shard is not None and shard.transfer.memory is not None:
            shard.parts.add(m.part)
            if m.last:
                self._land(shard, out)

    patch.setattr(Receiver, "on_written", on_written)


@mutant(replace(CHURN, broken=0.3), "I2 I3")
def a_broken_write_counts_as_done(patch: Patch) -> None:
    """F32: a link that died in the middle of a write and came back is taken to have delivered all."""

    def write_broken(self: Sender, e: ev.WriteBroken, now: float, out: Any) -> None:
        self.write_done(ev.WriteDone(e.handle), now, out)

    def make(quiet: Any) -> Any:
        def mutated(self: Sender, e: ev.WriteQuiet, now: float, out: Any) -> None:
            if e.handle in self._writes:
                quiet(self, e, now, out)

        return mutated

    patch.setattr(Sender, "write_broken", write_broken)
    wrap(patch, Sender, "write_quiet", make)


@mutant(replace(CHURN, broken=0.3), "I3")
def a_failed_receive_is_started(patch: Patch) -> None:
    """F33: D starts with what an older prompt has left in the memory."""

    def make(broken: Any) -> Any:
        def mutated(self: Ledger, rank: int, r: ev.Broken, out: Any) -> None:
            if self._in[r.transfer_id].state == "holding" and r.reason == "write failed":
                for each in self._ranks:
                    if self._in[r.transfer_id].state == "holding":
                        self._has_landed(each, ev.Landed(r.transfer_id), out)
            else:
                broken(self, rank, r, out)

        return mutated

    wrap(patch, Ledger, "_broken", make)


@mutant(replace(LOSSY, duplicate=0.5, straggle=0.3, requests=4.0, aborts=2.0), "I3 I1 V5")
def an_answer_is_for_the_newest(patch: Patch) -> None:
    """F11, F33: an answer to an earlier attempt is taken for one to the present attempt."""

    def opened(self: Receiver, link: Any, attempt: int) -> Any:
        state = self._links.get(link)
        return None if state is None or not state.live else state.live.get(attempt, list(state.live.values())[-1])

    patch.setattr(Receiver, "_open", opened)


@mutant(forged, "I3")
def written_before_there_is_memory(patch: Patch) -> None:
    """F27: a notice is believed that nobody can have sent."""

    def on_written(self: Receiver, link: Any, m: msg.Written, now: float, out: Any) -> None:
        shard = self._open(link, m.attempt)
        if shard is not None and m.part not in shard.parts:
            shard.parts.add(m.part)
            shard.tokens += m.tokens
            shard.parts_in_all = m.part + 1 if m.last else shard.parts_in_all
            if len(shard.parts) == shard.parts_in_all:
                self._land(shard, out)

    patch.setattr(Receiver, "on_written", on_written)


@mutant(frames, "F27")
def any_version_is_read(patch: Patch) -> None:
    """F27: the version of a frame is not looked at."""
    patch.setattr(msg, "VERSION", Anything())


@mutant(frames, "F27")
def frames_are_read_whatever_their_size(patch: Patch) -> None:
    """F27: a frame of any size is parsed."""
    patch.setattr(msg, "MAX_FRAME_BYTES", 1 << 40)


@mutant(replace(LOSSY, loss=0.3, aborts=1.0), "I5 V2")
def beats_name_other_ids(patch: Patch) -> None:
    """F08: beats name what is open by numbers that the peer does not know."""

    def make(beat: Any) -> Any:
        def mutated(self: Receiver, link: Any) -> Any:
            highest, lowest, asks = beat(self, link)
            return highest, lowest, tuple(msg.Ask(ask.attempt + 10**6, ask.stage, ask.parts) for ask in asks)

        return mutated

    wrap(patch, Receiver, "beat", make)


@mutant(CALM, "V1", SETTINGS, CONFIGS["fan-out"])
def one_rank_is_enough(patch: Patch) -> None:
    """F30: the sender is done when it has served the first of several ranks."""

    def make(on_register: Any) -> Any:
        def mutated(self: Sender, link: Any, m: msg.Register, now: float, out: Any) -> None:
            on_register(self, link, msgspec.structs.replace(m, fanout=1), now, out)

        return mutated

    wrap(patch, Sender, "on_register", make)


@mutant(replace(LOSSY, loss=0.4, modes=("packed",)), "I5 V1 V2")
def only_the_last_notice_is_repeated(patch: Patch) -> None:
    """F19: of several parts whose notices were lost the last is told again."""

    def make(on_beat: Any) -> Any:
        def mutated(self: Sender, link: Any, m: msg.Beat, now: float, out: Any) -> Any:
            told: list[Any] = []
            missing = on_beat(self, link, m, now, told)
            parts: dict[int, Any] = {}
            for action in told:
                if isinstance(action.message, msg.Written):
                    parts[action.message.attempt] = action
                else:
                    out.append(action)
            out.extend(parts.values())
            return missing

        return mutated

    wrap(patch, Sender, "on_beat", make)


@mutant(replace(LOSSY, duplicate=0.5, modes=("packed",)), "I3 I5 V1")
def tokens_are_counted_twice(patch: Patch) -> None:
    """F19: a duplicate adds to the tokens that have come."""

    def on_written(self: Receiver, link: Any, m: msg.Written, now: float, out: Any) -> None:
        shard = self._open(link, m.attempt)
        if shard is not None and shard.transfer.memory is not None:
            shard.parts.add(m.part)
            shard.tokens += m.tokens
            if shard.tokens >= shard.transfer.tokens:
                self._land(shard, out)

    patch.setattr(Receiver, "on_written", on_written)
