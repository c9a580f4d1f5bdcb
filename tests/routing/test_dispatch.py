"""The policies: who gets a request, and what happens when engines come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.model.routing import POLICIES, Dispatcher, LeastTokens, PrefixAffinity, RoundRobin, SessionAffinity


@pytest.mark.parametrize("kind", POLICIES.values())
@given(st.data())
def test_whatever_happens_the_choice_is_allowed_and_the_books_balance(
    kind: type[Dispatcher], data: st.DataObject
) -> None:
    """Removed engines are never picked, dead or excluded ones only when no other is left."""
    policy = kind(data.draw(st.integers(1, 4)))
    removed: set[int] = set()
    dead: set[int] = set()
    known = len(policy)
    open_: list[tuple[int, int]] = []
    for deed in data.draw(st.lists(st.sampled_from(["pick", "finish", "kill", "heal", "add", "remove"]), max_size=40)):
        here = sorted(set(range(known)) - removed)
        if deed == "pick":
            tokens = data.draw(st.integers(0, 1000))
            exclude = data.draw(st.sets(st.integers(0, known - 1)))
            session = data.draw(st.none() | st.integers(0, 3))
            prefix = tuple(range(data.draw(st.integers(0, 3))))
            chosen = policy.pick(tokens, exclude=exclude, session=session, prefix=prefix)
            best = [i for i in here if i not in dead and i not in exclude] or [i for i in here if i not in dead] or here
            assert chosen in best
            open_.append((chosen, tokens))
        elif deed == "finish" and open_:
            policy.finished(*open_.pop())
        elif deed in ("kill", "heal"):
            engine = data.draw(st.sampled_from(here))
            policy.mark(engine, deed == "kill")
            (dead.add if deed == "kill" else dead.discard)(engine)
        elif deed == "add":
            assert policy.add() == known
            known += 1
        elif deed == "remove" and len(here) > 1:
            engine = data.draw(st.sampled_from(here))
            policy.remove(engine)
            removed.add(engine)
        for engine in range(known):
            assert policy.outstanding(engine) == sum(tokens for chosen, tokens in open_ if chosen == engine)


def test_round_robin_goes_round() -> None:
    policy = RoundRobin(3)
    assert [policy.pick(1) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    policy.mark(2, True)
    assert [policy.pick(1) for _ in range(4)] == [1, 0, 1, 0]
    policy.mark(2, False)
    policy.remove(0)
    assert [policy.pick(1) for _ in range(4)] == [1, 2, 1, 2]


def test_least_tokens_balances() -> None:
    policy = LeastTokens(2)
    assert [policy.pick(n) for n in (100, 10, 10, 200, 1)] == [0, 1, 1, 1, 0]
    policy.finished(1, 220)
    assert policy.pick(1) == 1


def test_a_session_stays_and_only_the_sessions_of_a_lost_engine_move() -> None:
    policy = SessionAffinity(4)

    def homes() -> list[int]:
        found = []
        for session in range(200):
            found.append(policy.pick(1, session=session))
            policy.finished(found[-1], 1)
        return found

    before = homes()
    assert before == homes()
    assert all(before.count(engine) > 25 for engine in range(4))
    policy.mark(2, True)
    assert all((old == new) == (old != 2) for old, new in zip(before, homes(), strict=True))
    policy.mark(2, False)
    assert homes() == before


def test_a_session_leaves_an_engine_that_has_too_much_to_do() -> None:
    policy = SessionAffinity(2)
    home = policy.pick(1000, session=7)
    assert policy.pick(10, session=7) == 1 - home
    policy.finished(home, 1000)
    assert policy.pick(10, session=7) == home


def test_a_prefix_goes_where_most_of_it_was() -> None:
    policy = PrefixAffinity(3)
    assert policy.pick(0, prefix=(1, 2, 3)) == 0
    assert policy.pick(5, prefix=(1, 2, 9)) == 0
    assert policy.pick(1, prefix=(4, 5)) == 1  # unknown: the least
    assert policy.pick(1, prefix=(7,)) == 2
    policy.finished(0, 5)
    policy.finished(1, 1)
    policy.finished(2, 1)
    assert [policy.pick(0, prefix=prefix) for prefix in ((4, 5, 6), (1, 2, 3, 8), (7, 19))] == [1, 0, 2]


def test_a_prefix_leaves_an_engine_that_has_too_much_to_do_or_is_gone() -> None:
    policy = PrefixAffinity(2)
    assert policy.pick(1000, prefix=(1,)) == 0
    assert policy.pick(1, prefix=(1,)) == 1
    policy.finished(0, 1000)
    policy.mark(0, True)
    policy.mark(0, False)  # a new process: its cache is empty
    assert policy.pick(1, prefix=(1,)) == 1


def test_prefix_affinity_forgets_what_is_old() -> None:
    policy = PrefixAffinity(1, remembered=10)
    for piece in range(1000):
        policy.pick(1, prefix=(piece,))
    assert len(policy._given) == 10


def test_the_last_engine_cannot_be_removed() -> None:
    policy = LeastTokens(2)
    policy.remove(0)
    with pytest.raises(ValueError, match="last"):
        policy.remove(1)
    with pytest.raises(ValueError, match="at least one"):
        LeastTokens(0)
