"""Single decisions of the receiving half: what is noted of a word, how much is planned, and when a load is over."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from pushkv.model.layout import Part
from pushkv.model.protocol import events as ev
from pushkv.model.protocol import messages as msg
from pushkv.reference import landing as landing_
from pushkv.reference.device_copies import DeviceCopier
from pushkv.reference.landing import Landing
from pushkv.reference.loading import Loading
from pushkv.reference.office import Loaded
from pushkv.reference.ports import Load

from .device_like import Event, LateCopy

ME, P, PREDECESSOR = 7, 8, 9
LINK = ("P", 0)
LOAD = Load("r", "t", ([1],), 0, 4)


class Rank:
    """What the receiving half asks of a rank."""

    incarnation = ME
    bell = None

    def __init__(self, arrival: str = "completion") -> None:
        self.facts = SimpleNamespace(layout=SimpleNamespace(views=()))
        fellow = SimpleNamespace(
            incarnation=P,
            incoming=SimpleNamespace(part_bytes=lambda part: 0),
            covers=0,
            facts=SimpleNamespace(arrival=arrival),
            misnamed=lambda *links: "",
        )
        self.fellows = {LINK: fellow}
        self.pending: deque[Any] = deque()
        self.counters: dict[str, int] = {}
        self.told: list[Any] = []
        self.records: list[Any] = []
        self.looks = 0

    def count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def tell_office(self, report: Any, now: float) -> None:
        self.told.append(report)

    def record(self, record: Any) -> None:
        self.records.append(record)

    def look_again(self) -> None:
        self.looks += 1


class Half(DeviceCopier):
    """Launches what was planned ahead, and cannot do the rest."""

    def __init__(self) -> None:
        self.event = Event()

    def scatter_ahead(self, *args: Any) -> Any:
        return LateCopy(self.event)


def expecting(arrival: str = "completion", copier: Any = None) -> tuple[Landing, Rank]:
    """``t`` is expected from P, whose first registration is on its way."""
    rank = Rank(arrival)
    made = Landing(rank, copier)  # type: ignore[arg-type]
    made.commanded(ev.Expect("t", (LINK,), 4, True), 0.0)
    made.named(LINK, msg.Register(ME, P, 1, "t", 4, 1, True, 1), 0.0)
    return made, rank


@pytest.mark.parametrize("arrival", ["completion", "notification"])
@pytest.mark.parametrize(("src", "dst"), [(PREDECESSOR, ME), (P, PREDECESSOR)])
def test_words_of_others_are_not_noted(arrival: str, src: int, dst: int) -> None:
    """A predecessor of P said how long its part 0 was, or P said it to ours, and the word comes late: it goes on to the
    machines, which do not believe it, and leaves nothing behind.
    """
    made, _ = expecting(arrival)
    inbound = made.inbound["t"]
    assert made.heard(LINK, msg.Written(src, dst, 1, 0, 3, False))
    assert inbound.parts == {LINK: {}} and not inbound.early and not inbound.heard_s
    assert made.heard(LINK, msg.Written(P, ME, 1, 0, 4, True)) == (arrival == "completion")
    assert inbound.parts == {LINK: {0: 4}}


def test_a_word_of_who_is_not_connected_is_not_noted() -> None:
    made, rank = expecting()
    rank.fellows.clear()
    assert made.heard(LINK, msg.Written(P, ME, 1, 0, 4, True))
    assert made.inbound["t"].parts == {LINK: {}}


def test_one_part_is_planned_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants to load meanwhile does not wait for the rest."""
    made, rank = expecting(copier=Half())
    parts = [(object(), Part(start, start + 1, 0, start == 3), start) for start in range(4)]
    monkeypatch.setattr(made, "_parts", lambda inbound, link: parts[: len(inbound.parts[link])])
    monkeypatch.setattr(made, "_ahead", lambda shard, part, offset: [])
    for number in range(3):
        made.heard(LINK, msg.Written(P, ME, 1, number, 1, False))
    ahead = made.inbound["t"].ahead
    for planned in (1, 2, 3):
        made.plan_ahead()
        assert (len(ahead), rank.looks) == (planned, planned)
    made.plan_ahead()
    assert rank.looks == 3
    made.heard(LINK, msg.Written(P, ME, 1, 3, 1, True))
    made.forget("t")
    made.plan_ahead()
    assert len(ahead) == 3 and rank.looks == 3


def test_a_load_that_fails_half_way_is_over_when_its_first_half_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was launched still reads the landing memory and writes the blocks: neither is free before."""
    copier = Half()
    made, rank = expecting(copier=copier)
    inbound = made.inbound["t"]
    inbound.memory, inbound.landed_s = (0,), 1.0

    def refuse(*args: Any) -> Any:
        raise landing_.CopyError("a block leaves its region of the cache")

    monkeypatch.setattr(made, "_split", lambda inbound, first: ([object()], [(None, Part(0, 4, 0, True), 0)]))
    monkeypatch.setattr(landing_, "plan_scatter", refuse)
    loading = Loading([LOAD])
    made.load(loading)
    assert rank.counters == {"scatter failed": 1} and rank.told == []
    ended: list[Any] = []
    waiting = threading.Thread(target=lambda: ended.append(loading.wait(5.0)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and made.sizes()["loads"] == 1
    made.poll(0.0)
    assert rank.told == []
    copier.event.set()
    waiting.join(5.0)
    made.poll(0.0)
    assert ended == [[LOAD]] and "leaves its region" in caplog.text
    assert rank.told == [Loaded("t")] and rank.records == [] and made.sizes()["loads"] == 0


def test_one_load_that_cannot_begin_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rank = expecting()
    other = Load("s", "u", ([2],), 0, 4)

    def scatter(load: Load, after: Any, copies: list[Any]) -> None:
        if load is LOAD:
            raise landing_.CopyError("a block leaves its region of the cache")

    monkeypatch.setattr(made, "_scatter", scatter)
    loading = Loading([LOAD, other])
    made.load(loading)
    assert loading.wait(0.1) == [LOAD]
    made.poll(0.0)
    assert rank.told == [], "the engine's thread goes first"
    made.poll(0.0)
    assert rank.told == [Loaded("t"), Loaded("u")]
    assert [record["transfer_id"] for record in rank.records] == ["u"]


def test_all_scatters_of_a_step_come_behind_what_the_engine_has_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: one event on the engine's stream, recorded before the first of them."""
    made, _ = expecting()
    recorded: list[tuple[Any, Any]] = []
    behind: list[Any] = []

    class Mark:
        def record(self, stream: Any) -> None:
            assert not behind
            recorded.append((self, stream))

    monkeypatch.setattr("torch.cuda.Event", Mark)
    monkeypatch.setattr(made, "_scatter", lambda load, after, copies: behind.append(after))
    stream = object()
    loading = Loading([LOAD, Load("s", "u", ([2],), 0, 4)], stream)
    made.load(loading)
    assert not loading.wait(0.1)
    assert [found for _, found in recorded] == [stream]
    assert behind == [recorded[0][0]] * 2


def test_loads_that_nobody_waits_for_are_over() -> None:
    made, rank = expecting()
    loading = Loading([LOAD, Load("s", "u", ([2],), 0, 4)])
    assert loading.wait(0.01)
    made.load(loading)
    assert rank.told == [Loaded("t"), Loaded("u")] and rank.counters == {"scatter too late": 2}
    assert not rank.records


def test_a_load_that_cannot_begin_is_over(caplog: pytest.LogCaptureFixture) -> None:
    made, rank = expecting(copier=Half())
    loading = Loading([LOAD])
    made.load(loading)
    assert loading.wait(0.1) == [LOAD] and "has not landed here" in caplog.text
    made.poll(0.0)
    made.poll(0.0)
    assert rank.told == [Loaded("t")] and rank.records == []
