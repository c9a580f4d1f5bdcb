"""The nine rules, one by one, in a steady world where everything has its time; ``test_machine`` mixes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pushkv.model.protocol import GAVE_WAY, Endpoint, Ledger, LocalProtocolError
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.model.protocol.receiver import Receiver
from pushkv.sim.explore.profiles import Config
from pushkv.sim.explore.world import SETTINGS, Request, World
from tests.protocol.transcripts import ONE, STEADY

MODES = ("packed", "early", "late", "pull")


def steady(config: Config = ONE, profile: dict[str, Any] | None = None, **settings: Any) -> World:
    return World(1, replace(STEADY, **(profile or {})), config, replace(SETTINGS, **settings))


def verdicts(world: World, engine: str) -> list[tuple[float, str]]:
    history = world.processes[engine].host.history
    return [(at, type(a).__name__) for at, a in history if isinstance(a, (ev.Ready, ev.Fail, ev.Finished))]


# ---------------------------------------------------------------- 1 rendezvous


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delays", [(0.0, 0.0), (0.0, 3.0), (3.0, 0.0), (0.0, 20.0), (8.0, 0.0)])
def test_1_registration_and_prefill_meet_in_either_order(mode: str, delays: tuple[float, float]) -> None:
    world = steady(orphan_s=30.0)
    request = world.request(mode, "P", "D", 10, 8, delays=delays)
    world.drain()
    assert request.outcome == "loaded"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delays", [(0.0, None), (None, 0.0)])
def test_1_a_leg_may_never_come(mode: str, delays: tuple[Any, Any]) -> None:
    world = steady()
    request = world.request(mode, "P", "D", 10, 8, delays=delays)
    world.drain()
    assert request.outcome != "loaded"


def test_1_a_registration_at_the_wrong_engine_is_answered() -> None:
    """F12."""
    world = steady(Config({"P": 1, "Q": 1}, {"D": 1}))
    request = world.request("late", "P", "D", 8, 8)
    request.asks = "Q"
    world.run(SETTINGS.orphan_s + 1.0)
    assert request.outcome == "failed: no prefill here"
    world.drain()


# ---------------------------------------------------------------- 2 fence


@pytest.mark.parametrize("cause", ["abort", "silence", "broken"])
def test_2_memory_returns_when_nothing_is_active(cause: str) -> None:
    """F02, F03, F05: verdict first, memory when the writer says so."""
    world = steady(profile={"quiet_s": 10.0})
    world.request("packed", "P", "D", 4, 4)
    world.run(2.0)
    world.fabric.fates.append((30.0, cause == "broken"))
    request = world.request("early", "P", "D", 8, 8)
    world.run(0.5)
    host = world.processes["D"].host
    if cause == "abort":
        world.abort(request, "D")
        world.run(1.0)
    elif cause == "silence":
        world.cut("D", "P")
        world.run(6.0)
    assert len(host.free) == host.total - 2
    if cause != "broken":
        assert request.outcome.startswith("failed")
        assert world.processes["D"].ledger.quarantined("P") == 1
    world.drain()


# ---------------------------------------------------------------- 3 source


@pytest.mark.parametrize("mode", ["packed", "early"])
def test_3_the_lease_is_checked_at_the_moment_of_posting(mode: str) -> None:
    """F09: the transfer thread gets to the write after the lease has ended."""
    world = steady(profile={"parked": 1.0, "parked_s": 10.0}, lease_s=2.0)
    request = world.request(mode, "P", "D", 8, 8)
    world.run(3.0)
    assert request.outcome == "failed: lease"
    world.run(5.0)
    assert not world.fabric.writes
    world.drain()


def test_3_a_posted_write_outlives_the_lease() -> None:
    world = steady(lease_s=2.0)
    world.fabric.fates.append((4.0, False))
    request = world.request("late", "P", "D", 8, 8)
    world.drain()
    assert request.outcome == "loaded"


@pytest.mark.parametrize("mode", ["packed", "late"])
def test_3_the_source_is_released_at_local_completion(mode: str) -> None:
    """F22: not at the lease. Packed: when it is in staging."""
    world = steady()
    world.fabric.fates.append((3.0, False))
    world.request(mode, "P", "D", 8, 8)
    world.run(1.0)
    released = any(isinstance(a, ev.Release) for _, a in world.processes["P"].host.history)
    assert released == (mode == "packed")
    world.run(3.0)
    assert any(isinstance(a, ev.Release) for _, a in world.processes["P"].host.history)
    world.drain()


# ---------------------------------------------------------------- 4 count once


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [ONE, Config({"P": 2}, {"D": 1}), Config({"P": 1}, {"D": 2})])
def test_4_duplicates_change_nothing(mode: str, config: Config) -> None:
    world = steady(config, profile={"duplicate": 1.0})
    request = world.request(mode, "P", "D", 12, 12, chunked=True)
    world.drain()
    assert request.outcome == "loaded"


def test_4_the_verdict_falls_at_full_count() -> None:
    """F04: one of two feeding ranks cannot write. The other's arrival is waited for."""
    world = steady(Config({"P": 2}, {"D": 1}), profile={"quiet_s": 6.0})
    world.fabric.fates.extend([(0.05, True), (5.0, False)])
    request = world.request("late", "P", "D", 8, 8)
    world.run(2.5)
    assert len(world.fabric.writes) == 2
    assert verdicts(world, "D") == []
    world.drain()
    assert request.outcome == "failed: write failed"
    assert [name for _, name in verdicts(world, "D")] == ["Fail"]


LATE_S = 0.5


def _loads(mode: str, late: int = 0, lost: int = 0) -> tuple[float, list[tuple[float, Any]]]:
    """When a prompt has loaded whose word number ``late`` takes ``LATE_S`` longer and of which ``lost`` does not arrive
    (s), and all words with the times when they were said.
    """
    world = steady()
    world.request("packed", "P", "D", 4, 4)
    world.run(8.0)
    said: list[tuple[float, Any]] = []
    began, send = world.now, world.network.send

    def unkind(source: ev.Link, target: ev.Link, message: msg.Message) -> None:
        said.append((world.now - began, message))
        if len(said) == late:
            world.at(LATE_S, send, source, target, message)
        elif len(said) != lost:
            send(source, target, message)

    world.network.send = unkind  # type: ignore[method-assign]
    request = world.request(mode, "P", "D", 8, 8)
    while not request.outcome:
        world.run(0.01)
    assert request.outcome == "loaded"
    return world.now - began, said


@pytest.mark.parametrize("mode", MODES)
def test_4_a_lost_word_costs_a_beat(mode: str) -> None:
    """F19: whichever it is."""
    calm_s, words = _loads(mode)
    assert len(words) >= 2
    for number in range(1, len(words) + 1):
        assert _loads(mode, lost=number)[0] < calm_s + SETTINGS.beat_s + 0.2


@pytest.mark.parametrize("mode", MODES)
def test_4_a_beat_has_each_thing_said_twice(mode: str) -> None:
    """A word is overtaken, so the first beat has what it was about said again; of that one may be lost. (A grant that
    overtook its registration was once said in the repeated grant alone.)
    """
    calm_s, words = _loads(mode)
    for late in range(1, len(words) + 1):
        _, repeated = _loads(mode, late)
        for number, (at, word) in enumerate(repeated, 1):
            if at > SETTINGS.beat_s and isinstance(word, (msg.Register, msg.Grant)):
                assert _loads(mode, late, number)[0] < calm_s + LATE_S + SETTINGS.beat_s + 0.2


# ---------------------------------------------------------------- 5 bounded verdict


@pytest.mark.parametrize("mode", ["packed", "early", "late"])
@pytest.mark.parametrize("fault", ["kill", "pause", "cut", "cut one way"])
def test_5_a_dead_silent_or_stopped_peer_bounds_the_verdict(mode: str, fault: str) -> None:
    """F06, F16."""
    world = steady()
    world.request("packed", "P", "D", 4, 4)
    world.run(2.0)
    world.fabric.fates.append((100.0, False))
    request = world.request(mode, "P", "D", 8, 8)
    world.run(0.5)
    if fault == "kill":
        world.kill("P")
    elif fault == "pause":
        world.pause("P")
    else:
        world.cut("P", "D", both=fault == "cut")
    start = world.now
    world.run(SETTINGS.dead_peer_verdict_s + 0.5)
    assert request.outcome == "failed: peer silent"
    assert verdicts(world, "D")[-1][0] - start <= SETTINGS.dead_peer_verdict_s
    world.run(60.0)
    world.drain()


@pytest.mark.parametrize("mode", MODES)
def test_5_a_prefill_that_never_comes_bounds_the_verdict(mode: str) -> None:
    world = steady()
    request = world.request(mode, "P", "D", 8, 8, delays=(0.0, None) if mode == "pull" else (None, 0.0))
    world.run(SETTINGS.wait_s + 1.0)
    assert [name for _, name in verdicts(world, "P" if mode == "pull" else "D")] == ["Fail"]
    world.drain()
    assert request.outcome != "loaded"


def test_5_a_sender_short_of_staging_gives_its_verdict() -> None:
    """Stalled writes to two peers fill the staging memory; a third transfer must not wait for ever."""
    config = Config({"P": 1}, {"D0": 1, "D1": 1, "D2": 1})
    world = steady(config, staging_bytes=2400, staging_share=0.5, landing_segments=16)
    for engine in ("D0", "D1"):
        world.fabric.fates.extend([(500.0, False)] * 2)
        world.request("packed", "P", engine, 12, 12)
    world.run(0.5)
    start = world.now
    world.request("packed", "P", "D2", 12, 12)
    world.run(SETTINGS.sender_verdict_s + 1.0)
    assert max(at for at, _ in verdicts(world, "P")) - start <= SETTINGS.sender_verdict_s + 0.5
    assert len(verdicts(world, "P")) == 3


# ---------------------------------------------------------------- 6 isolation


@pytest.mark.parametrize("fault", ["pause", "kill", "cut"])
def test_6_a_stalled_peer_changes_nothing_for_the_others(fault: str) -> None:
    """I6, F10: D0's history is the same whether D1 is there or not."""

    def history(with_stalled: bool) -> list[tuple[float, ev.Record]]:
        world = steady(Config({"P": 1}, {"D0": 1, "D1": 1}), profile={"blocks": 64})
        for number in range(6):
            for mode in ("packed", "early", "late", "pull"):
                world.request(mode, "P", "D0", 8, 8)
            if with_stalled:
                world.request("packed" if number % 2 else "late", "P", "D1", 8, 8)
                if number == 1:
                    getattr(world, fault)(*(("P", "D1") if fault == "cut" else ("D1",)))
            world.run(0.5)
        world.run(10.0)
        names = {r.tid: str(n) for n, r in enumerate(r for r in world.requests.values() if r.d == "D0")}
        host = world.processes["D0"].host
        return [(round(at, 6), type(a).__name__, names[a.transfer_id]) for at, a in host.history]  # type: ignore[misc]

    assert history(True) == history(False)


# ---------------------------------------------------------------- 7 retry and preemption


def test_7_an_attempt_does_not_touch_the_next() -> None:
    """F11: aborted in flight, tried again with a new id, in the same engines."""
    world = steady()
    world.fabric.fates.append((3.0, False))
    first = world.request("early", "P", "D", 8, 8)
    world.run(0.5)
    world.abort(first, "D")
    again = world.request("early", "P", "D", 8, 8)
    world.run(1.0)
    assert again.outcome == "loaded"
    world.drain()


def test_7_parts_that_have_landed_are_not_sent_again() -> None:
    """F20, F21: P is preempted between two chunks; what was sent stays sent."""
    world = steady()
    packs: list[ev.Pack] = []
    world.log = lambda who, text, record: packs.append(record) if isinstance(record, ev.Pack) else None
    request = world.request("packed", "P", "D", 16, 16, chunked=True)
    world.run(0.15)
    host = world.processes["P"].host
    assert 0 < sum(pack.stop - pack.start for pack in packs) < 16
    host.preempt(host.sending[request.tid])
    world.run(2.0)
    assert request.outcome == "loaded"
    assert sorted((pack.start, pack.stop) for pack in packs)[0][0] == 0
    assert sum(pack.stop - pack.start for pack in packs) == 16
    world.drain()


def test_7_an_id_used_again_harms_nobody() -> None:
    """A router that breaks the contract: the same id again, while the first attempt is settled but not answered."""
    world = steady()
    first = world.request("late", "P", "D", 8, 8, delays=(None, 0.0))
    world.run(1.0)
    world.cut("P", "D")
    world.abort(first, "D")
    world.run(0.5)
    second = Request(first.tid, "late", "P", "D", 8, 8, spoiled="id used again")
    world.requests[first.tid] = second
    world.processes["D"].host.decode(second)
    world.drain()


# ---------------------------------------------------------------- 8 give way


def test_8_a_sender_that_gives_way_for_ever_fails_the_transfer() -> None:
    ledger = Ledger(replace(SETTINGS, yields=2))
    out: list[ev.Record] = []
    arrived = ev.Arrived("t", "P", ((("P", 0),),), 8, True, 2)
    ledger.step([arrived, ev.FromRank(0, ev.Offered("t", False))], 0.0, out)
    for _ in range(2):
        ledger.step([ev.FromRank(0, ev.Broken("t", GAVE_WAY)), ev.FromRank(0, ev.Settled("t"))], 0.0, out)
        ledger.step([ev.FromRank(0, ev.Offered("t", False))], 0.0, out)
        ledger.step([ev.FromRank(0, ev.Offered("t", True))], 0.0, out)
        assert not any(isinstance(action, ev.Fail) for action in out)
    ledger.step([ev.FromRank(0, ev.Broken("t", GAVE_WAY)), ev.FromRank(0, ev.Settled("t"))], 0.0, out)
    assert [action for action in out if isinstance(action, ev.Fail)] == [ev.Fail("t", "gave way too often", False)]
    assert ledger.open() == (0, 0)
    assert ledger.landing_free == SETTINGS.landing_segments


def test_8_ranks_that_landed_keep_the_memory_of_those_that_gave_way() -> None:
    """Bytes that have landed are not sent twice, so what gave way on one rank goes on there, where it is."""
    ledger, out = Ledger(SETTINGS, 2), list[ev.Record]()
    links = ((("P", 0),), (("P", 1),))
    ledger.step([ev.Arrived("t", "P", links, 8, False, memory=(1, 2))], 0.0, [])
    ledger.step([ev.FromRank(1, ev.Broken("t", GAVE_WAY)), ev.FromRank(1, ev.Settled("t"))], 0.0, out)
    assert out == [ev.ToRanks(ev.Withdraw("t", GAVE_WAY, True))]
    ledger.step([ev.FromRank(0, ev.Landed("t"))], 0.0, out)
    assert out[1:] == [ev.ToRank(1, ev.Expect("t", links[1], 8, False, 1, (1, 2)))]
    ledger.step([ev.FromRank(1, ev.Landed("t"))], 0.0, out)
    assert out[2:] == [ev.Ready("t", (1, 2))]


@pytest.mark.parametrize("asked_by", ["ledger", "sender"])
def test_8_shards_that_landed_keep_the_memory_of_those_that_gave_way(asked_by: str) -> None:
    """The same between two senders of one rank."""
    receiver, out = Receiver(7, SETTINGS), list[ev.Record]()
    p, q = ("P", 0), ("P", 1)
    for link, incarnation in ((p, 8), (q, 9)):
        receiver.expect(ev.Expect("warm", (link,), 4, False), 0.0, [])
        receiver.link_up(link, incarnation, 0, 0.0, [])
        receiver.on_failed(link, msg.Failed(incarnation, 7, 1, "no"), 0.0, [])
    receiver.expect(ev.Expect("t", (p, q), 8, False, 1, (1, 2)), 0.0, [])
    if asked_by == "ledger":
        receiver.withdraw(ev.Withdraw("t", GAVE_WAY, True), 0.0, out)
        assert [action.message for action in out if isinstance(action, ev.Send)] == (
            [msg.Cancel(7, 8, 2, "t", True), msg.Cancel(7, 9, 2, "t", True)]
        )
        receiver.on_cancelled(q, msg.Cancelled(9, 7, 2), 0.0, out)
    else:
        receiver.on_failed(q, msg.Failed(9, 7, 2, GAVE_WAY), 0.0, out)
        assert out == [ev.Broken("t", GAVE_WAY), ev.Send(p, msg.Cancel(7, 8, 2, "t", True))]
    out.clear()
    receiver.on_written(p, msg.Written(8, 7, 2, 0, 8, True), 0.0, out)
    assert out == [] and receiver.wanted == [q], "the endpoint looks after the link first"
    receiver.register(q, 0.0, out)
    assert out == [ev.Send(q, msg.Register(7, 9, 3, "t", 8, 1, False, 3, (1, 2)))]
    out.clear()
    receiver.on_written(q, msg.Written(9, 7, 3, 0, 8, True), 0.0, out)
    assert out == [ev.Landed("t")]


# ---------------------------------------------------------------- 9 pause


@pytest.mark.parametrize(("engine", "suspect_after_s"), [("P", 30.0), ("D", 4.0)])
def test_9_after_a_pause_the_inbox_comes_first(engine: str, suspect_after_s: float) -> None:
    """F36, F42: P sleeps for less than the suspicion, or D for much longer: no verdict falls for one's own sleep."""
    world = steady(suspect_after_s=suspect_after_s, orphan_s=60.0)
    request = world.request("packed", "P", "D", 8, 8, delays=(9.0, 0.0))
    world.run(1.0)
    world.pause(engine)
    world.run(20.0)
    world.wake(engine)
    world.run(5.0)
    assert request.outcome == "loaded"
    world.drain()


def test_9_ones_own_pause_is_no_silence_of_the_peer() -> None:
    world = steady()
    request = world.request("late", "P", "D", 8, 8, delays=(16.0, 0.0))
    world.run(2.0)
    world.cut("P", "D")  # so that the inbox is empty at the waking
    world.pause("D")
    world.run(5.0)
    world.heal()
    world.wake("D")
    world.run(3.0)
    assert request.outcome == ""
    world.run(10.0)
    assert request.outcome in ("loaded", "failed: no prefill here")
    world.drain()


# ---------------------------------------------------------------- hosts


def test_a_host_that_breaks_the_contract_is_told() -> None:
    ledger = Ledger(SETTINGS)
    with pytest.raises(LocalProtocolError):
        ledger.step([ev.Loaded("unknown")], 0.0, [])
    with pytest.raises(LocalProtocolError):
        ledger.step([ev.Hold("t", 1), ev.Hold("t", 1)], 0.0, [])
    endpoint = steady().processes["P"].endpoints[0]
    for event in (ev.Packed(1), ev.WriteDone(1), ev.WriteBroken(1), ev.WriteQuiet(1), ev.Loaded("t")):
        with pytest.raises(LocalProtocolError):
            endpoint.step([event], 0.0, [])
    with pytest.raises(LocalProtocolError):
        endpoint.step([ev.Begin("t", 4), ev.Computed("t", 5, False)], 0.0, [])


def test_1_a_late_registration_of_what_is_over_harms_no_host() -> None:
    """The transfer is over and forgotten at P; a registration that comes late must not make P's own next event an
    error.
    """
    endpoint, out = Endpoint(7, replace(SETTINGS, remembered_ids=1)), list[ev.Record]()
    link = ("D", 0)
    endpoint.step([ev.Received(link, msg.Hello(8, 0, 1)), ev.Connected(link, 8)], 0.0, out)
    endpoint.step([ev.Begin("t", 4), ev.Abort("t", "aborted"), ev.Begin("u", 4), ev.Abort("u", "aborted")], 0.0, out)
    endpoint.step([ev.Received(link, msg.Register(8, 7, 1, "t", 4, 1, False, 1))], 0.0, out)
    endpoint.step([ev.Computed("t", 0, False), ev.Computed("t", 4, True), ev.Preempted("t")], 0.0, out)
    endpoint.step([], SETTINGS.orphan_s + 1.0, out)
    failed = [
        action.message for action in out if isinstance(action, ev.Send) and isinstance(action.message, msg.Failed)
    ]
    assert failed == [msg.Failed(7, 8, 1, "no prefill here")]


def test_8_a_finished_prefill_is_not_overtaken() -> None:
    """A finished prefill waits for room: nobody else is granted what comes free, and the youngest that has not begun
    gives way.
    """
    ledger, out = Ledger(replace(SETTINGS, landing_segments=4)), list[ev.Record]()
    for name, peer, segments in (("a", "P", 3), ("b", "Q", 2), ("c", "P", 1)):
        ledger.step([ev.Arrived(name, peer, (((peer, 0),),), 4, True, segments)], 0.0, [])
    ledger.step([ev.FromRank(0, ev.Offered("a", False)), ev.FromRank(0, ev.Offered("b", True))], 0.0, out)
    ledger.step([ev.FromRank(0, ev.Offered("c", False))], 0.0, out)
    assert [action.command for action in out if isinstance(action, ev.ToRanks)] == (
        [ev.Expose("a", (2, 1, 0)), ev.Withdraw("a", GAVE_WAY, True)]
    )
    out.clear()
    ledger.step([ev.FromRank(0, ev.Settled("a"))], 0.0, out)
    exposed = [a.command.transfer_id for a in out if isinstance(a, ev.ToRanks) and isinstance(a.command, ev.Expose)]
    assert exposed == ["b", "c"]
