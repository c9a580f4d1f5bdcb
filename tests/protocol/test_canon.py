"""The canonical form: what will behave alike is written alike, and a copy shares nothing that changes."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import Endpoint, incoming, outgoing
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.sim.explore import canon
from pushkv.sim.explore.canon import clone, swapped, written
from pushkv.sim.explore.moves import Moves
from pushkv.sim.explore.rows import State
from pushkv.sim.explore.scope import TRANSFERS, Budget, Plan, Scope, settings

D = ("D", 0)


def _receiver(order: tuple[str, ...], now: float) -> Endpoint:
    """A sender that knows D and was told of ``order``, at time ``now``."""
    endpoint = Endpoint(7, settings())
    hello = ev.Received(D, msg.Hello(9, 0, 1))
    endpoint.step((hello, ev.Connected(D, 9)), now, [])
    for attempt, tid in enumerate(order, 1):
        register = msg.Register(9, 7, attempt, tid, 1, 1, True, 1)
        endpoint.step((ev.Received(D, register),), now, [])
    return endpoint


def test_the_present_time_does_not_matter() -> None:
    assert written(_receiver(TRANSFERS, 3.0), 3.0) == written(_receiver(TRANSFERS, 500.0), 500.0)
    assert written(_receiver(TRANSFERS, 3.0), 3.0) != written(_receiver(TRANSFERS, 3.0), 4.0)


def test_names_may_be_interchanged() -> None:
    one, two = _receiver(TRANSFERS, 1.0), _receiver(TRANSFERS[::-1], 1.0)
    assert written(one, 1.0) != written(two, 1.0)
    assert swapped(written(one, 1.0), TRANSFERS) == written(two, 1.0)


def test_idle_counts_do_not_matter() -> None:
    one, two = _receiver(TRANSFERS, 1.0), _receiver(TRANSFERS, 1.0)
    two.step((ev.Received(D, msg.Grant(9, 7, 99, (0,))),), 1.0, [])
    assert two.sender.counters != one.sender.counters
    assert written(one, 1.0) == written(two, 1.0)


def test_a_copy_is_alike_and_apart() -> None:
    one = _receiver(TRANSFERS, 1.0)
    before, two = written(one, 1.0), clone(one, {})
    assert written(two, 1.0) == before
    two.step((ev.Begin(TRANSFERS[0], 1), ev.Computed(TRANSFERS[0], 1, True)), 1.0, [])
    assert written(two, 1.0) != before
    assert written(one, 1.0) == before
    assert two._handlers[ev.Begin].__self__ is two.sender


def test_what_has_just_been_made_can_be_copied() -> None:
    """A record has all that it names from the start: it may be met at any moment."""
    expected, transfer = incoming.Expected("t", 4, False, 1, None, 1), outgoing.Transfer("t")
    receiving, sending = incoming.ReceiverLink(D, 0), outgoing.SenderLink(D, 9, 0, 8)
    shard = outgoing.Shard(sending, transfer, msg.Register(9, 7, 1, "t", 4, 1, True, 1))
    write = outgoing.Write(1, shard, 0, 0, 4, True, 4, outgoing.PACKING)
    for made in (expected, receiving, incoming.Shard(receiving, expected), sending, transfer, shard, write):
        assert written(clone(made, {}), 0.0) == written(made, 0.0)


def test_a_float_without_a_role_is_refused() -> None:
    class Strange:
        def __init__(self) -> None:
            self.since = 0.5

    with pytest.raises(TypeError, match="since"):
        written(Strange(), 1.0)


def test_every_named_time_exists() -> None:
    """A name that no machine has any more would hide a new one's lack."""
    endpoint = _receiver(TRANSFERS, 1.0)
    found: set[str] = set()
    todo, seen = [endpoint, Moves(Scope("", ())).parts], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (str, bytes)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += [*value.values()]
        elif isinstance(value, (list, tuple, set)):
            todo += value
        else:
            names = {*canon.attributes(type(value)), *getattr(value, "__dict__", {})}
            found |= names
            todo += [getattr(value, name) for name in names if hasattr(value, name)]
    assert canon.TIMES - found <= {"now", "registered_at"}
    assert found >= canon.SPANS


def _after(moves: Moves, words: tuple[str, ...]) -> State:
    """The state after free moves whose event's name and transfer are ``words``, in order."""
    state = moves.start()
    for word in words:
        for move, after in moves.free(state):
            if move[0] == "host" and " ".join(map(str, moves.parts.events.values[move[2]])) == word:
                state = after
                break
        else:
            raise AssertionError(word)
    return state


def test_two_orders_that_lead_to_the_same_state_are_one_state() -> None:
    moves = Moves(Scope("order", (Plan("late"), Plan("late"))))
    one = _after(moves, ("arrives t-1", "starts t-1", "computes t-1"))
    both = {_after(moves, order) for order in (("arrives t-1", "arrives t-2"), ("arrives t-2", "arrives t-1"))}
    assert len({moves.key(state) for state in both}) == 1
    other = _after(moves, ("arrives t-2", "starts t-2", "computes t-2"))
    assert one != other
    assert moves.key(one) == moves.key(other)


def test_steps_of_different_machines_commute() -> None:
    moves = Moves(Scope("commute", (Plan("late"), Plan("packed")), Budget(abort=1)))
    state, found = moves.start(), 0
    first = list(moves.free(state))
    for i, (a, after_a) in enumerate(first):
        for b, after_b in first[i + 1 :]:
            if a[0] == b[0] == "host" and a[1] != b[1]:
                ab = next(after for move, after in moves.free(after_a) if move == b)
                ba = next(after for move, after in moves.free(after_b) if move == a)
                assert ab == ba
                found += 1
    assert found
