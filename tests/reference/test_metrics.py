"""What is counted adds up over ranks and steps, and reaches Prometheus."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import Settings
from pushkv.reference.metric_names import COUNTERS, GAUGES, REASONS, TIMES, Meter, Tally, label
from pushkv.reference.office import Office
from pushkv.reference.ports import Address

from .said import wanted


def test_a_meter_gives_what_has_happened_since() -> None:
    meter = Meter("rank 0")
    first = meter.read({"bytes_sent": 10}, {"peers": 1}, [{"wire_s": 0.5, "gather_s": 0.0}])
    assert first is not None
    assert first.data["counters"] == {"bytes_sent": 10}
    assert first.data["times"] == {"wire_s": [0.5]}
    assert meter.read({"bytes_sent": 10}, {"peers": 1}) is None
    second = meter.read({"bytes_sent": 15}, {"peers": 0})
    assert second is not None
    assert second.data == {"counters": {"bytes_sent": 5}, "gauges": {"peers|rank 0": 0}, "times": {}}


def test_a_meter_is_due_now_and_then_or_when_it_is_urgent() -> None:
    meter = Meter("office")
    assert meter.due(100.0) and not meter.due(100.2) and meter.due(100.6)
    assert not meter.stale({}, {}) and meter.stale({"a": 1}, {}) and meter.stale({}, {"b": 1.0})
    meter.urgent = True
    assert meter.due(100.7) and not meter.due(100.8)


@pytest.mark.parametrize(
    ("path", "tokens", "counted"),
    [
        ("packed", 9, "path:packed, by setting"),
        ("direct", 9, "path:direct, by setting"),
        ("auto", 9, "path:packed, costs less"),
        ("auto", 99, "path:direct, larger than the landing memory"),
        ("packed", 0, ""),
    ],
)
def test_each_path_is_counted_once_with_its_reason(path: str, tokens: int, counted: str) -> None:
    office = Office(
        Settings(landing_segments=50), 1, path=path, segment_bytes=1, token_bytes=1,
        landing_bytes=lambda tokens, links: tokens, deliver=lambda rank, word: None, wake=lambda: None,
        stop=lambda drain_s: None,
    )  # fmt: skip
    office.inbox.append(wanted("t", Address("P", "h", 1, 1), tokens, max(1, tokens), None))
    office.turn(1.0)
    paths = {name: value for name, value in office.counters.items() if name.startswith("path")}
    assert paths == ({counted: 1} if counted else {})


def test_ranks_add_up_and_later_readings_replace() -> None:
    total = Tally()
    for rank, used in ((0, 3), (1, 4), (0, 5)):
        one = Tally()
        one.gauge(f"rank {rank}", {"landing_segments_used": used})
        one.count({"descriptors": used})
        total.add(one.data)
    assert total.gauges() == {"landing_segments_used": 9}
    assert total.data["counters"] == {"descriptors": 12}
    assert total.summary() == {"descriptors": 12, "landing_segments_used": 9}


def test_labels_come_from_a_closed_list() -> None:
    assert label("aborted") == "aborted"
    assert label("what a peer has made up") == "other"
    assert len(set(REASONS)) == len(REASONS)


def test_names_are_told_apart() -> None:
    names = [*COUNTERS, *GAUGES, *TIMES]
    assert len(set(names)) == len(names)
    assert all(name.endswith("_s") for name in TIMES)


def test_prometheus() -> None:
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from pushkv.reference.metrics import PushPromMetrics, PushStats

    stats = PushStats()
    assert stats.is_empty()
    tally = Tally()
    tally.count({"bytes_sent": 7, "transfers_failed:peer unreachable": 2, "not known": 1})
    tally.gauge("rank 0", {"peers": 3})
    tally.record([{"wire_s": 0.1}])
    both = stats.aggregate(PushStats(tally.data)).aggregate(PushStats(tally.data))
    assert both.reduce()["bytes_sent"] == 14 and not both.is_empty()
    prom = PushPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    prom.observe(both.data)
    labels = {"model_name": "m", "engine": "0"}
    assert REGISTRY.get_sample_value("pushkv:bytes_sent_total", {**labels, "what": ""}) == 14
    assert REGISTRY.get_sample_value("pushkv:transfers_failed_total", {**labels, "what": "peer unreachable"}) == 4
    assert REGISTRY.get_sample_value("pushkv:peers", labels) == 3
    assert REGISTRY.get_sample_value("pushkv:wire_seconds_count", labels) == 2
    stats.reset()
    assert stats.is_empty()
