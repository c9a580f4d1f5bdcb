"""Mistakes with peers: who is there, who is dead, and who must not wait for whom (rules 5, 6 and 9)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.endpoint import Endpoint
from pushkv.model.protocol.receiver import Receiver
from pushkv.sim.explore.profiles import CALM, CRASHY, HOSTILE, LOSSY, PARTITION, PAUSED, Config
from pushkv.sim.explore.world import SETTINGS
from tests.protocol.mutants.registry import Patch, mutant, wrap
from tests.protocol.mutants.trials import churn, isolation, own_pause, retry


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

    wrap(patch, Endpoint, "_received", make)


@mutant(replace(PARTITION, slow=0.3), "I1 I2 V5")
def silence_taken_for_death(patch: Patch) -> None:
    """F36: the suspected are buried."""

    def make(link_silent: Any) -> Any:
        def mutated(self: Receiver, link: Any, out: Any) -> None:
            link_silent(self, link, out)
            for shard in list(self._links[link].live.values()):
                self._end(shard, "silent", out)

        return mutated

    wrap(patch, Receiver, "link_silent", make)


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
    """F06, F40: nobody asks who answers now."""
    patch.setattr("pushkv.model.protocol.peer.Peer.on_welcome", lambda self, m, now, out: False)
    patch.setattr(Endpoint, "_process_gone", lambda self, e, now, out: None)


@mutant(CRASHY, "V2")
def nobody_asks_who_speaks(patch: Patch) -> None:
    """F07, F40: words of a successor are dropped, and it is not asked who it is."""
    patch.setattr("pushkv.model.protocol.peer.Peer.doubt", lambda self, now, out: None)


@mutant(replace(CALM, unfit=0.4), "I1")
def unfit_peers_are_used(patch: Patch) -> None:
    """F25: a peer that does not fit is connected all the same."""
    patch.setattr(
        Endpoint, "_unfit", lambda self, e, now, out: self._connected(ev.Connected(e.link, e.incarnation), now, out)
    )


@mutant(churn, "V3")
def peers_are_never_forgotten(patch: Patch) -> None:
    """F23: every engine that was ever here is kept."""
    patch.setattr(Endpoint, "_make_room", lambda self: None)


@mutant(
    replace(HOSTILE, requests=4.0), "I V", replace(SETTINGS, links=2), Config({"P0": 1, "P1": 2}, {"D0": 2, "D1": 2})
)
def live_links_are_forgotten(patch: Patch) -> None:
    """F24: room is made by forgetting whoever was heard least recently, whatever is open with it."""

    def make_room(self: Endpoint) -> None:
        self._forget(min(self.peers.values(), key=lambda peer: peer.heard_at))

    patch.setattr(Endpoint, "_make_room", make_room)


@mutant(isolation, "I6")
def one_handshake_holds_all(patch: Patch) -> None:
    """F10: nothing is registered while a handshake is under way."""

    def make(send_unsent: Any) -> Any:
        def mutated(self: Receiver, link: Any, now: float, out: Any) -> None:
            if all(other.up for other in self._links.values()):
                send_unsent(self, link, now, out)

        return mutated

    wrap(patch, Receiver, "_send_unsent", make)


@mutant(retry, "I7")
def attempts_queue_behind_each_other(patch: Patch) -> None:
    """F11: an attempt waits until the one before it is settled."""

    def make(send_unsent: Any) -> Any:
        def mutated(self: Receiver, link: Any, now: float, out: Any) -> None:
            if not link.live:
                send_unsent(self, link, now, out)

        return mutated

    wrap(patch, Receiver, "_send_unsent", make)


@mutant(replace(CRASHY, loss=0.3), "I5 V2 V1")
def nobody_keeps_an_eye_on_a_link(patch: Patch) -> None:
    """F37: writes are in flight, and nothing wakes whoever waits for them."""
    patch.setattr(Endpoint, "_rearm", lambda self, peer: None)


@mutant(LOSSY, "I5 V2")
def nobody_is_woken(patch: Patch) -> None:
    """F18: what waits goes on with the next event only; on an idle engine there is none."""
    patch.setattr(Endpoint, "wake_at", property(lambda self: float("inf")))


@mutant(own_pause, "V1")
def ones_own_pause_is_silence_of_the_peer(patch: Patch) -> None:
    """F42: a jump of the clock counts as silence of the others."""
    patch.setattr("pushkv.model.protocol.peer.Peer.paused", lambda self, jump_s, now: None)
