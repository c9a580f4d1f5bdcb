"""I6 and I7 over random seeds: what a stalled peer or an earlier attempt suffers changes nothing for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.receiver import Receiver
from pushkv.model.protocol.sender import Sender
from pushkv.sim.explore import pairs
from pushkv.sim.explore.case import EARLIER, STALLED, Played, case_of, play_case
from pushkv.sim.explore.profiles import CONFIGS, PROFILES

SEEDS = 1
"""Of each profile and shape; ``pushkv explore`` plays more."""


def check(kind: str, profile: str, shape: str, seed: int) -> Played:
    return play_case(case_of(seed, PROFILES[profile], CONFIGS[shape], 8, check=kind))


@pytest.mark.parametrize("shape", CONFIGS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", [STALLED, EARLIER])
def test_nothing_changes_for_the_rest(kind: str, profile: str, shape: str) -> None:
    if not pairs.possible(kind, CONFIGS[shape]):
        pytest.skip("nobody is left when one is stalled")
    for seed in range(SEEDS):
        assert check(kind, profile, shape, seed).violation == "", f"seed {seed}"


def test_a_request_sent_to_the_wrong_engine_counts_for_both() -> None:
    """It opens a link of the others, so it is not the stalled peer's alone: it is left out of both runs."""
    assert check(STALLED, "hostile", "fan-in", 5057).violation == ""


@pytest.mark.parametrize("seed", [313750, 315850])
def test_ranks_that_are_due_at_one_instant_have_one_order(seed: int) -> None:
    """Two ranks give up on the same transfer at once, and their words draw from its chance one after the other: in
    whatever order, if beats to the stalled peer had a say in it, and the transfer's history with it.
    """
    assert check(STALLED, "hostile", "tp2", seed).violation == ""


def test_a_pause_is_measured_link_by_link() -> None:
    """How late a stalled peer's timer is says nothing of the others' silence. (It was once measured by the earliest
    timer of all.)
    """
    assert check(STALLED, "paused", "fan-in", 2120).violation == ""


def first(kind: str, profile: str, shape: str) -> str:
    """What the first of some seeds breaks."""
    return next(filter(None, (check(kind, profile, shape, seed).violation for seed in range(20))), "")


def test_a_stalled_peer_that_is_felt_by_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F10: whoever is silent, everybody is suspected."""
    silent = Receiver.link_silent

    def all_silent(self: Receiver, link: Any, out: Any) -> None:
        for other in list(self._links):
            silent(self, other, out)

    monkeypatch.setattr(Receiver, "link_silent", all_silent)
    assert first(STALLED, "hostile", "plain").startswith("I6: with the stalled peer t")


def test_an_earlier_attempt_that_is_felt_by_the_next_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: a cancel stops whatever else is open on its link."""
    on_cancel = Sender.on_cancel

    def cancel_all(self: Sender, link: Any, m: msg.Cancel, now: float, out: Any) -> None:
        for attempt, shard in list(self._links[link].live.items()):
            on_cancel(self, link, msg.Cancel(m.src, m.dst, attempt, shard.outgoing.transfer_id), now, out)
        on_cancel(self, link, m, now, out)

    monkeypatch.setattr(Sender, "on_cancel", cancel_all)
    assert first(EARLIER, "churn", "plain").startswith("I7: with the earlier attempt t")


def test_the_others_are_looked_at() -> None:
    """The two runs are not empty: transfers load in both, and the stalled peer's do not."""
    played = check(STALLED, "calm", "plain", 1)
    with_it, without = played.worlds
    assert len(with_it.requests) > len(without.requests) > 1
    assert all(request.outcome == "loaded" for request in without.requests.values())
