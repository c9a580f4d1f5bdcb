"""What is counted adds up over ranks and steps, and reaches Prometheus."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pushkv.model.protocol as protocol
from pushkv.model.protocol import Settings
from pushkv.reference.metric_names import (
    COUNTERS,
    FROM_THE_START,
    GAUGES,
    PARTS,
    REASONS,
    TIMES,
    Meter,
    Tally,
    label,
    merged,
    shown,
    table,
)
from pushkv.reference.office import Office
from pushkv.reference.ports import Address

from .printed import check_table
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
    tally.count({"bytes_sent": 7, "transfers_failed:peer unreachable": 2, "of another version": 1})
    tally.gauge("rank 0", {"peers": 3})
    tally.record([{"wire_s": 0.1}])
    both = stats.aggregate(PushStats(tally.data)).aggregate(PushStats(tally.data))
    assert both.reduce()["bytes_sent"] == 14 and not both.is_empty()
    prom = PushPromMetrics(
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="e"),
            parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_size=1),
        ),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    labels = {"model_name": "m", "engine": "0"}
    for name, what in FROM_THE_START:
        assert REGISTRY.get_sample_value(f"pushkv:{name}_total", {**labels, "what": what}) == 0
    prom.observe(both.data)
    assert REGISTRY.get_sample_value("pushkv:bytes_sent_total", {**labels, "what": ""}) == 14
    assert REGISTRY.get_sample_value("pushkv:transfers_failed_total", {**labels, "what": "peer unreachable"}) == 4
    assert REGISTRY.get_sample_value("pushkv:peers", labels) == 3
    assert REGISTRY.get_sample_value("pushkv:wire_seconds_count", labels) == 2
    alone = Tally()
    alone.gauge("rank 1", {"peers": 2})  # of the other rank nothing has changed
    prom.observe(alone.data)
    assert REGISTRY.get_sample_value("pushkv:peers", labels) == 5
    stats.reset()
    assert stats.is_empty()


SAY = {
    "_fail", "_end", "_end_or_register_again", "_stop", "_closed", "_remember", "link_refused", "Abort", "Aborted",
    "Failed",
}  # fmt: skip
"""Who is given a reason, in the protocol and by the connector."""


def reasons() -> Iterator[str]:
    """What the sources give as a reason: in calls, and by names that hold one."""
    folder = Path(protocol.__file__).parent
    connector = Path(__file__).parents[2] / "reference"
    for path in (*folder.glob("*.py"), connector / "decode_legs.py", connector / "prefill_legs.py"):
        package = "pushkv.model.protocol" if path.parent == folder else "pushkv.reference"
        names = vars(importlib.import_module(f"{package}.{path.stem}"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found: list[ast.expr] = []
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SAY:
                found = list(node.args)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("refusal", "reason"):
                found = [node.value]
            for one in found:
                for part in ast.walk(one):
                    said = getattr(part, "value", None)
                    if isinstance(part, ast.Name):
                        said = names.get(part.id)
                    elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):  # of another module
                        said = getattr(names.get(part.value.id), part.attr, None)
                    if isinstance(said, str) and said not in ("", "fail", "cancel"):
                        yield said


def test_every_reason_that_the_protocol_gives_is_a_label() -> None:
    given = set(reasons())
    assert {"peer silent", "lease", "too many open registrations", "ended", "cache was reset"} <= given
    assert not given - set(REASONS), "an operator would see `other`"


PROTOCOL, CONNECTOR = Path(protocol.__file__).parent, Path(__file__).parents[2] / "reference"
SOURCES = {
    "rank": ("rank", "sending", "landing", "meeting"),
    "side channel": ("side_channel",),
    "transport": ("transport",),
    "endpoint": ("endpoint",),
    "sender": ("sender", "sending"),
    "receiver": ("receiver", "receiving"),
    "ledger": ("ledger",),
    "office": ("office",),
    "": ("scheduler", "decode_legs", "prefill_legs"),
}
"""Which modules count for which part; the last ones count by the names that are shown."""


def source(part: str, module: str) -> Path:
    return (PROTOCOL if part in ("endpoint", "sender", "receiver", "ledger") else CONNECTOR) / f"{module}.py"


def counted(path: Path) -> set[str]:
    """Every name by which the source counts, with its label as far as it is written there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assigned: dict[str, list[ast.expr]] = {}
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("count", "_count", "_drop") and node.args:
            keys.append(node.args[0])
        elif isinstance(node, ast.Subscript) and getattr(node.value, "attr", "").lstrip("_") in ("counters", "counts"):
            keys.append(node.slice)
    found: set[str] = set()
    while keys:
        key = keys.pop()
        if isinstance(key, ast.Name):
            keys += assigned.pop(key.id, [])
        elif isinstance(key, ast.IfExp):
            keys += [key.body, key.orelse]
        elif isinstance(key, ast.JoinedStr):
            found.add("".join(str(part.value) for part in key.values if isinstance(part, ast.Constant)))
        elif isinstance(key, ast.Constant):
            found.add(str(key.value))
    return found


def all_counted() -> Iterator[tuple[str, str]]:
    for part, modules in SOURCES.items():
        for module in modules:
            for name in counted(source(part, module)):
                yield part, name


def test_every_count_is_shown_and_every_counter_counts() -> None:
    found = {(part, PARTS.get(part, {}).get(name, name).partition(":")[0]) for part, name in all_counted()}
    assert {one for one in found if one[1] not in COUNTERS} == set(), "counted, and nobody can see it"
    assert set(COUNTERS) - {short for _, short in found} == set(), "declared, and nothing fills it"


def test_every_name_of_a_part_is_counted_and_has_a_counter() -> None:
    found = set(all_counted())
    decoded = {("side channel", kind) for kind in ("truncated", "unknown")}  # by the protocol's decoder
    named = {(part, name) for part, names in PARTS.items() for name in names}
    assert named - found - decoded == set()
    assert {name.partition(":")[0] for names in PARTS.values() for name in names.values()} <= set(COUNTERS)
    assert {name for name, _ in FROM_THE_START} <= set(COUNTERS)


def test_no_module_counts_that_is_not_looked_at() -> None:
    known = {source(part, module) for part, modules in SOURCES.items() for module in modules}
    for path in (*PROTOCOL.glob("*.py"), *CONNECTOR.glob("*.py")):
        assert path in known or path.stem in ("metric_names", "metrics") or not counted(path) - {"*"}, path


def test_the_search_for_counts_can_fail(tmp_path: Path) -> None:
    made = tmp_path / "made.py"
    made.write_text(
        "class A:\n def f(self, why, bad):\n  self.count('lost' if bad else f'failed:{why}')\n"
        "  name = 'odd'\n  self._counters[name] = 1\n  self.counters['more'] += 1\n  self._drop(why)\n",
        encoding="utf-8",
    )
    assert counted(made) == {"lost", "failed:", "odd", "more"}


def literals(*modules: str) -> set[Any]:
    trees = [ast.parse((CONNECTOR / f"{module}.py").read_text(encoding="utf-8")) for module in modules]
    return {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_every_gauge_and_time_is_read_somewhere() -> None:
    assert set(GAUGES) <= literals("rank", "office", "scheduler")
    assert set(TIMES) <= literals("prompts", "landing")


def test_the_counts_of_parts_add_up_under_the_names_that_are_shown() -> None:
    channel = shown("side channel", {"denied": 2, "malformed": 1, "oversized_out": 1, "nobody": 4})
    assert channel == {
        "connections_refused:denied": 2,
        "messages_refused:malformed": 1,
        "messages_unsent:oversized": 1,
        "messages_unsent:nobody": 4,
    }
    rank = shown(
        "rank", {"oversized": 1, "post failed": 3, "transfers_failed:lease": 1, "messages_refused:malformed": 1}
    )
    assert rank["faults:post failed"] == 3
    both = merged(channel, rank)
    assert both["messages_unsent:oversized"] == both["messages_refused:malformed"] == 2
    assert both["transfers_failed:lease"] == 1


def test_the_table_in_the_docs_is_what_the_command_prints() -> None:
    check_table("metrics.md", "pushkv.reference.metric_names", table())
    assert all(says in table() for says in (*COUNTERS.values(), *GAUGES.values(), *TIMES.values()))
