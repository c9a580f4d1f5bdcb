"""The simulator has no rule of its own: break one in ``model/protocol``, and ``simulate`` breaks with it. And it
counts the machines' steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pushkv.model.protocol import Endpoint, Ledger, LocalProtocolError, Peer, Receiver, Sender, states
from pushkv.model.protocol.states import Incoming, Linking, Receiving, Sending
from pushkv.sim.request import Flight
from pushkv.sim.scenario import Scenario
from pushkv.sim.ticks import ticks
from pushkv.sim.transfers import Transfers
from pushkv.sim.world import World

from .worlds import WAYS, Row, completed, hasty, leaks, rest, scenario, simulate, way_name, world

ROWS: list[Row] = [(0.1 * i, 500, 8) for i in range(5)]
Patch = pytest.MonkeyPatch


def outcome(plan: Scenario, rows: list[Row]) -> str | int:
    """How many requests were completed; or the exception that ended the run, or "leaks" when they were but something
    was left behind."""
    made = world(plan, rows, settings=hasty(plan))
    try:
        made.go()
        rest(made, 20)
    except Exception as error:
        return type(error).__name__
    return "leaks" if completed(made) == len(rows) and leaks(made) else completed(made)


def nothing(*_: object, **__: object) -> None:
    """A rule that is not carried out."""


def no_edge(patch: Patch, table: dict[Any, dict[str, Any]], state: Any, event: str) -> None:
    patch.delitem(table[state], event)


def never_claim(patch: Patch) -> None:
    patch.setattr(Sender, "claim", lambda self, handle, now: False)


def no_finish(patch: Patch) -> None:
    no_edge(patch, states.SENDING, Sending.WRITING, "finish")


def no_landed(patch: Patch) -> None:
    no_edge(patch, states.RECEIVING, Receiving.EXPOSED, "landed")


def no_meeting(patch: Patch) -> None:
    no_edge(patch, states.SENDING, Sending.REGISTERED, "meet")
    no_edge(patch, states.SENDING, Sending.PROMISED, "meet")


def no_ready(patch: Patch) -> None:
    no_edge(patch, states.INCOMING, Incoming.HOLDING, "landed")


def no_connection(patch: Patch) -> None:
    no_edge(patch, states.LINKING, Linking.CONNECTING, "connect")


def deaf_sender(patch: Patch) -> None:
    """Registrations are counted as seen, and no more."""
    patch.setattr(Sender, "on_register", nothing)


def deaf_receiver(patch: Patch) -> None:
    patch.setattr(Receiver, "on_written", nothing)


def miscounting_receiver(patch: Patch) -> None:
    """The last part does not close the count."""
    real = Receiver.on_written

    def wrong(self: Receiver, link: Any, m: Any, now: float, out: Any) -> None:
        real(self, link, type(m)(m.src, m.dst, m.attempt, m.part + 1, m.tokens, m.last), now, out)

    patch.setattr(Receiver, "on_written", wrong)


def nobody_greets(patch: Patch) -> None:
    patch.setattr(Peer, "want", nothing)


ALL: list[Callable[[Patch], None]] = [
    never_claim, no_finish, no_landed, no_meeting, no_ready, no_connection, deaf_sender, deaf_receiver,
    miscounting_receiver, nobody_greets,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize("broken", ALL, ids=lambda rule: rule.__name__)
def test_a_broken_rule_breaks_every_mode(
    broken: Callable[[Patch], None], way: dict[str, str], monkeypatch: Patch
) -> None:
    plan = scenario(**way)
    assert outcome(plan, ROWS) == len(ROWS)
    broken(monkeypatch)
    # Pull: D reads all, and P never learns of it.
    deaf_p = broken in (deaf_receiver, miscounting_receiver) and plan.mode == "pull"
    assert outcome(plan, ROWS) in (("leaks",) if deaf_p else (0, LocalProtocolError.__name__))


def test_a_ledger_that_grants_nothing_stops_what_is_packed_and_nothing_else(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Ledger, "_grant", nothing)
    for way in WAYS:
        packed = way.get("path") == "packed"
        assert outcome(scenario(**way), ROWS) == (0 if packed else len(ROWS))


def test_a_sender_that_offers_nothing_stops_what_is_granted_late(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Sender, "_offer", nothing)
    for way in WAYS:
        late = way["mode"] == "pushkv"
        assert outcome(scenario(**way), ROWS) == (0 if late else len(ROWS))


def opposite(patch: Patch) -> list[Row]:
    """Four prompts of which each cache holds two: the first two reach P first and D last, as two clients with two
    routers may send them."""
    real = World._reach_d

    def late(self: World, flight: Flight) -> None:
        wait = ticks(0.02) if flight.index < 2 else 0
        self.later(self.env.ticks + wait, lambda held: real(self, held), flight)

    patch.setattr(World, "_reach_d", late)
    return [(0.001 * i, 320, 8) for i in range(4)]


@pytest.mark.parametrize("way", WAYS[1:], ids=way_name)
def test_two_caches_filled_in_opposite_order(way: dict[str, str], monkeypatch: Patch) -> None:
    """vLLM's push stalls until its lease ends. Here somebody gives way (rule 8), and all is loaded within a second;
    without the rule push fails too. Memory that is given late, or is no KV block, does not come into it.
    """
    plan = scenario(**way, num_blocks=41)
    rows = opposite(monkeypatch)
    made = world(plan, rows, settings=hasty(plan))
    made.go()
    gave_way = sum(host.ledger.counters.get("gave_way", 0) for host in made.hosts.values())
    assert completed(made) == len(rows)
    assert made.totals().duration_s < 1.0
    assert (gave_way > 0) == (plan.mode == "push")
    monkeypatch.setattr(Ledger, "_yield", nothing)
    assert (outcome(plan, rows) == len(rows)) == (plan.mode != "push")


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_every_step_of_the_machines_is_counted_and_every_byte_was_claimed(
    way: dict[str, str], monkeypatch: Patch
) -> None:
    steps, claims, moves = [], [], []
    for machine in (Endpoint, Ledger):
        real_step = machine.step

        def step(self: Any, events: Any, now: float, out: Any, real: Any = real_step) -> None:
            steps.append(1)
            real(self, events, now, out)

        monkeypatch.setattr(machine, "step", step)
    real_claim, real_move = Sender.claim, Transfers.move

    def claim(self: Sender, handle: int, now: float) -> bool:
        claims.append(real_claim(self, handle, now))
        return claims[-1]

    def move(self: Transfers, *args: Any, **options: Any) -> None:
        moves.append(1)
        real_move(self, *args, **options)

    monkeypatch.setattr(Sender, "claim", claim)
    monkeypatch.setattr(Transfers, "move", move)
    result = simulate(scenario(**way), ROWS)
    assert result.totals.machine_steps == len(steps)
    assert claims == [True] * len(moves)
    assert len(moves) == len(ROWS)


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_machine_steps_grow_with_the_requests(way: dict[str, str]) -> None:
    counts = []
    for requests in (20, 40, 60):
        plan = scenario(**way, arrival="uniform", qps=2, requests=requests, output_len=4)
        counts.append(simulate(plan).totals.machine_steps)
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], rel=0.03)  # a beat now and then
    assert counts[0] == pytest.approx(counts[1] - counts[0], rel=0.1)
    assert counts[0] / 20 >= 10, "registration, prefill, memory, arrival, verdicts on both sides"
