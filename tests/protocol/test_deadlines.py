"""``Deadlines`` against a plain dictionary of times."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.model.protocol.deadlines import NEVER, Alarm, Deadlines


class Record:
    """Something that can be due."""

    def __init__(self, name: int) -> None:
        self.name, self.due = name, NEVER


steps = st.lists(
    st.tuples(st.sampled_from(("arm", "arm", "disarm", "pop")), st.integers(0, 9), st.integers(0, 20)), max_size=80
)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_soonest_first_and_nothing_that_was_disarmed(steps: list[tuple[str, int, int]]) -> None:
    alarm = Alarm()
    records, deadlines = [Record(n) for n in range(10)], Deadlines[Record](alarm)
    model: dict[int, tuple[float, int]] = {}
    for order, (kind, name, at) in enumerate(steps):
        if kind == "arm":
            deadlines.arm(records[name], float(at))
            if name not in model or model[name][0] != at:
                model[name] = (float(at), order)
        elif kind == "disarm":
            deadlines.disarm(records[name])
            model.pop(name, None)
        else:
            due = {n: key for n, key in model.items() if key[0] <= at}
            expected = min(due, key=lambda n: due[n]) if due else None
            popped = deadlines.pop_due(float(at))
            assert (popped.name if popped else None) == expected
            if expected is not None:
                del model[expected]
                assert records[expected].due == NEVER
        soonest = min((key[0] for key in model.values()), default=NEVER)
        assert alarm.at <= soonest
        assert deadlines.armed == len(model)
        assert deadlines.next_at() == soonest
        alarm.at = soonest


def test_it_is_bounded_by_what_is_armed() -> None:
    deadlines, record = Deadlines[Record](), Record(0)
    for at in range(10_000):
        deadlines.arm(record, float(at))
        deadlines.arm(record, float(at))
        assert len(deadlines) <= 2 * deadlines.armed + 64
    assert deadlines.pop_due(9998.0) is None
    assert deadlines.pop_due(9999.0) is record
    assert deadlines.pop_due(9999.0) is None


def test_the_same_time_again_and_again_is_one_entry() -> None:
    """V3: also with a disarming in between. (Such a turn once left an entry behind that no clearing out removed.)"""
    deadlines, record, other = Deadlines[Record](), Record(0), Record(1)
    deadlines.arm(other, 2.0)
    for turn in range(1000):
        deadlines.arm(record, 1.0)
        if turn % 2:
            deadlines.disarm(record)
            deadlines.arm(record, 1.0)
        assert len(deadlines) <= 2 * deadlines.armed + 64
    assert deadlines.armed == 2
    assert [deadlines.pop_due(3.0) for _ in range(3)] == [record, other, None]


def test_arming_looks_at_no_other_record() -> None:
    """But when it clears out, and there is enough to clear."""
    looks = 0

    class Watched(Record):
        @property
        def due(self) -> float:
            nonlocal looks
            looks += 1
            return self._due

        @due.setter
        def due(self, at: float) -> None:
            self._due = at

    deadlines, count = Deadlines[Watched](), 300
    for number in range(count):
        deadlines.arm(Watched(number), float(number))
    assert looks <= 2 * count


def test_what_is_armed_already_adds_nothing() -> None:
    deadlines, record = Deadlines[Record](), Record(0)
    for _ in range(3):
        deadlines.arm(record, 1.0)
    assert len(deadlines) == 1


def test_equal_times_fire_in_the_order_of_arming() -> None:
    deadlines, records = Deadlines[Record](), [Record(n) for n in range(5)]
    for record in reversed(records):
        deadlines.arm(record, 1.0)
    assert [deadlines.pop_due(1.0) for _ in records] == records[::-1]


def test_what_is_armed_outlives_what_was_disarmed() -> None:
    """Also when the stale ones are so many that they are cleared out."""
    deadlines, one, other = Deadlines[Record](), Record(0), Record(1)
    deadlines.arm(one, 7.0)
    for at in range(300, 100, -1):
        deadlines.arm(other, float(at))
        assert deadlines.next_at() == 7.0
    assert [deadlines.pop_due(1e3), deadlines.pop_due(1e3), deadlines.pop_due(1e3)] == [one, other, None]


def test_the_order_outlives_a_clearing_out() -> None:
    deadlines, records = Deadlines[Record](), [Record(n) for n in range(60)]
    for record in records:
        deadlines.arm(record, float(record.name * 37 % 60))
    for record in records[::2]:
        deadlines.disarm(record)
    for turn in range(80):
        deadlines.arm(records[1], 100.0 + turn)
    due = []
    while (found := deadlines.pop_due(1e3)) is not None:
        due.append(found.name)
    assert due == [*sorted(range(3, 60, 2), key=lambda name: name * 37 % 60), 1]
