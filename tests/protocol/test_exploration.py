"""Many seeds of every profile on every shape of engines. A failure names the seed: ``play(seed, PROFILES[...],
CONFIGS[...])``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pushkv.model.protocol import messages as msg
from pushkv.sim.explore.case import case_of, play_case
from pushkv.sim.explore.plan import Abort, Dispatch
from pushkv.sim.explore.profiles import CONFIGS, PROFILES, Config, Driver, play
from pushkv.sim.explore.violation import Violation
from pushkv.sim.explore.world import SETTINGS, World
from tests.protocol.transcripts import STEADY

SEEDS = {"calm": 4, "lossy": 6, "crashy": 10, "hostile": 14, "churn": 6, "partition": 8, "paused": 8}
"""Seeds of each profile, for each shape; `hostile` finds most."""


@pytest.mark.parametrize("shape", CONFIGS)
@pytest.mark.parametrize("profile", PROFILES)
def test_properties_hold(profile: str, shape: str) -> None:
    for seed in range(SEEDS[profile]):
        try:
            play(seed, PROFILES[profile], CONFIGS[shape])
        except Exception as error:
            error.add_note(f"play({seed}, PROFILES[{profile!r}], CONFIGS[{shape!r}])")
            raise


@pytest.mark.parametrize("profile", ["lossy", "hostile"])
def test_properties_hold_when_links_are_forgotten(profile: str) -> None:
    """F23, F24: more peers than links are kept for, tiny caches, and duplicates that come very late."""
    late = replace(PROFILES[profile], straggle=0.1, straggle_s=15.0, duplicate=0.3)
    settings = replace(SETTINGS, links=4, tombstones_per_link=2, remembered_ids=2)
    crowd = Config({"P0": 1, "P1": 2}, {"D0": 2, "D1": 2, "D2": 1, "D3": 1})
    for seed in range(8):
        Driver(World(seed, late, crowd, settings)).play()


@pytest.mark.parametrize("shape", CONFIGS)
def test_a_share_of_the_landing_memory_starves_nobody(shape: str) -> None:
    """V1: a large prompt of a peer is not overtaken for ever by that peer's small ones."""
    busy = replace(PROFILES["calm"], modes=("packed",), requests=3.0)
    for seed in (30, 31):
        Driver(World(seed, busy, CONFIGS[shape], replace(SETTINGS, landing_share=0.75))).play()


def test_a_leg_given_up_unheard_explains_what_its_peer_keeps() -> None:
    """V1: the decode legs of two finished prefills are aborted before they have registered; the prefills keep blocks
    until their leases end, and a transfer that waits for those blocks fails. Nothing else was done to anybody.
    """
    case = case_of(104472, PROFILES["churn"], CONFIGS["both-parts"], 8)
    aborts = [action for action in case.plan() if isinstance(action, Abort)]
    kept = [action for action in case.plan() if isinstance(action, Dispatch)] + aborts
    played = play_case(msgspec.structs.replace(case, actions=tuple(kept), faults=()))
    (world,) = played.worlds
    assert played.violation == ""
    assert world.requests["t3"].outcome == "failed: lease" and not world.requests["t3"].spoiled
    assert world.causes.kinds == {"unheard"}


def test_an_engine_that_is_paused_explains_what_is_kept_for_it() -> None:
    """V1: D1 is paused before it has registered two prefills; P1 keeps their blocks until their leases end, and a
    transfer that waits for those blocks fails, though neither of its engines was paused. Nothing else was done.
    """
    played = play_case(case_of(910531, PROFILES["paused"], CONFIGS["plain"], 8))
    (world,) = played.worlds
    failed = world.requests["t8"]
    assert failed.outcome == "failed: lease" and not failed.spoiled and world.causes.kinds == {"doubled"}
    assert {world.requests[tid].spoiled for tid in ("t4", "t7")} == {"pause"}
    assert played.violation == ""
    world.causes.check_outcome(failed)
    for request in world.requests.values():
        request.spoiled_at = failed.ended_at + 1  # what comes later explains nothing
    with pytest.raises(Violation, match="V1: t8"):
        world.causes.check_outcome(failed)


def test_who_wakes_may_still_be_cut_off() -> None:
    """V1: B wakes, and A is started again, while neither reaches the other. What is dispatched to them may fail."""
    world = World(1, PROFILES["calm"], CONFIGS["both-parts"])
    world.pause("B")
    world.cut("A", "B")
    world.kill("A")
    world.wake("B")
    world.start("A")
    well_s = world.settings.suspect_after_s + world.settings.beat_s + world.settings.drain_s
    world.run(2 * well_s)
    assert world.request("early", "A", "B", 4, 4).spoiled == "partition"
    world.heal()
    world.run(well_s + 0.1)
    assert not world.request("early", "A", "B", 4, 4).spoiled
    played = play_case(case_of(382476, PROFILES["hostile"], CONFIGS["both-parts"], 8))
    assert played.violation == ""


def test_who_was_paused_when_it_was_killed_is_well_again() -> None:
    world = World(1, PROFILES["calm"], CONFIGS["both-parts"])
    world.pause("A")
    world.kill("A")
    world.start("A")
    world.wake("A")
    assert world.request("early", "A", "B", 4, 4).spoiled
    world.run(60)
    assert not world.request("early", "A", "B", 4, 4).spoiled


def test_a_seed_fixes_everything() -> None:
    def run() -> list[tuple[float, str, str]]:
        world = World(7, PROFILES["hostile"], CONFIGS["plain"])
        lines: list[tuple[float, str, str]] = []
        world.log = lambda who, text, record: lines.append((world.now, str(who), text))
        Driver(world).play()
        return lines

    first = run()
    assert len(first) > 1000
    assert first == run()


def test_messages_of_a_calm_transfer_are_few() -> None:
    """V4: register, offer (twice at the most: begun, finished), grant, and one notice a part."""
    world = play(3, PROFILES["calm"], CONFIGS["plain"])
    sent, transfers = world.network.sent, len(world.requests)
    assert sent["Register"] <= 1.1 * transfers
    assert sent.get("Grant", 0) <= transfers
    assert sent.get("Offer", 0) <= 3 * transfers
    assert sent.get("Failed", 0) + sent.get("Cancelled", 0) + sent.get("Cancel", 0) <= 0.2 * transfers
    assert sent["Written"] <= 6 * transfers


@pytest.mark.parametrize("kind", [kind for kind in msg.KINDS if kind is not msg.Beat])
def test_what_never_arrives_is_repeated_by_the_beat(kind: type[msg.Message]) -> None:
    """V4: both engines lack something of the other, and go on lacking it (a frame that the transport drops)."""
    world = World(1, STEADY, CONFIGS["both-parts"])
    if kind not in (msg.Hello, msg.Welcome):
        world.request("packed", "A", "B", 4, 4)
        world.request("packed", "B", "A", 4, 4)
        world.run(8.0)
    send = world.network.send

    def without(source: Any, target: Any, message: Any) -> None:
        if not isinstance(message, kind):
            send(source, target, message)
        else:
            lost.append(message)

    lost: list[Any] = []
    world.network.send = without  # type: ignore[method-assign]
    before = sum(world.network.sent.values())
    requests = [world.request("packed", *pair, 8, 8, spoiled="lost") for pair in (("A", "B"), ("B", "A"))]
    requests += [world.request("late", *pair, 8, 8, spoiled="lost") for pair in (("A", "B"), ("B", "A"))]
    world.run(0.1)
    world.abort(requests[0], "B")
    world.abort(requests[1], "A")
    world.run(10.0)
    assert sum(world.network.sent.values()) - before + len(lost) < 200


def test_messages_of_an_unkind_world_are_bounded() -> None:
    """V4: resends are paced by beats, so they are bounded by time, not by what is lost."""
    world = play(3, PROFILES["hostile"], CONFIGS["tp2"])
    links = sum(endpoint.peers.__len__() for process in world.processes.values() for endpoint in process.endpoints)
    beats = world.now / world.settings.beat_s
    assert sum(world.network.sent.values()) < 4 * links * beats + 40 * len(world.requests)
