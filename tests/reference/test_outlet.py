"""Metrics of an engine that takes no step reach its API server all the same, once, and nothing waits for them."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.reference.metric_names import Meter
from pushkv.reference.outlet import OFFICE, Intake, Outlet, address, parts_of

NEVER_S = 3600.0
"""The outlet's own thread stays out of it: a test looks by hand."""
PATIENCE_S = 20.0


class Side:
    """Counters and gauges that a test changes."""

    def __init__(self) -> None:
        self.counters = {"bytes_sent": 0.0}
        self.gauges = {"quarantined": 1.0}
        self.meter = Meter("office")

    def readings(self) -> Any:
        return self.counters, self.gauges, ()

    def step(self) -> Any:
        """What a step of the engine fetches, as the connector does."""
        self.meter.due(time.monotonic())
        with self.meter.lock:
            return self.meter.read(*self.readings())

    def sleeps(self) -> None:
        """For long."""
        self.meter._asked_at = time.monotonic() - 2 * NEVER_S


class Server:
    def __init__(self, *where: str) -> None:
        self.got: list[tuple[dict[str, Any], int]] = []
        self._more = threading.Condition()
        Intake({7: where}, self._observe)

    def _observe(self, data: dict[str, Any], engine: int) -> None:
        with self._more:
            self.got.append((data, engine))
            self._more.notify()

    def wait(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.got) >= count, PATIENCE_S)


@pytest.fixture
def where(tmp_path: Path) -> str:
    (tmp_path / "m").mkdir(mode=0o700)
    return address("P0", OFFICE, folder=str(tmp_path / "m"))


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.fixture
def outlet(side: Side, where: str) -> Iterator[Outlet]:
    made = Outlet(where, side.meter, side.readings, look_s=NEVER_S)
    yield made
    made.close()
    made.close()
    assert not made._thread.is_alive()


def listened_to(outlet: Outlet) -> None:
    import zmq

    assert outlet._socket.poll(1000 * PATIENCE_S, zmq.POLLOUT)


def test_a_quarantine_that_ends_while_the_engine_sleeps_is_told(side: Side, where: str, outlet: Outlet) -> None:
    assert side.step() is not None
    server = Server(where)
    listened_to(outlet)
    side.sleeps()
    side.gauges, side.counters = {"quarantined": 0.0}, {"bytes_sent": 5.0}
    outlet._look()
    server.wait(1)
    told = {"counters": {"bytes_sent": 5.0}, "gauges": {"quarantined|office": 0.0}, "times": {}}
    assert server.got == [(told, 7)]
    outlet._look()
    assert side.step() is None, "it would be counted twice"
    assert len(server.got) == 1


def test_steps_go_first(side: Side, where: str, outlet: Outlet) -> None:
    """An engine that steps is asked by vLLM, and its log line shows what has happened."""
    Server(where)
    listened_to(outlet)
    side.step()
    side.counters = {"bytes_sent": 5.0}
    outlet._look()
    found = side.step()
    assert found is not None and found.data["counters"] == {"bytes_sent": 5.0}


def test_where_nobody_listens_it_waits_for_the_next_step(side: Side, outlet: Outlet) -> None:
    side.sleeps()
    side.counters = {"bytes_sent": 5.0}
    outlet._look()
    found = side.step()
    assert found is not None and found.data["counters"] == {"bytes_sent": 5.0}


def test_the_thread_looks_by_itself(side: Side, where: str) -> None:
    made = Outlet(where, side.meter, side.readings, look_s=0.01)
    try:
        server = Server(where)
        server.wait(1)
        side.counters = {"bytes_sent": 9.0}
        server.wait(2)
        assert server.got[1][0]["counters"] == {"bytes_sent": 9.0}
    finally:
        made.close()


def test_a_reading_that_fails_costs_no_later_one(side: Side, where: str, caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def readings() -> Any:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("changed while it was read")
        return side.readings()

    made = Outlet(where, side.meter, readings, look_s=0.01)
    try:
        Server(where).wait(1)
        assert "changed while it was read" in caplog.text
    finally:
        made.close()


def test_only_this_user_can_listen(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="this user alone"):
        address("P0", OFFICE, folder=str(folder))
    other = tmp_path / "link"
    other.symlink_to(tmp_path / "open")
    with pytest.raises(PermissionError):
        address("P0", OFFICE, folder=str(other))


def test_every_part_has_an_address_of_its_own_that_is_short_enough() -> None:
    found = {address("x" * 300, part) for part in parts_of(8)} | {address("y", part) for part in parts_of(8)}
    assert len(found) == 18
    assert max(len(one.removeprefix("ipc://")) for one in found) < 108


def test_a_folder_whose_name_is_too_long_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir(mode=0o700)
    with pytest.raises(OSError, match="set TMPDIR to a shorter one"):
        address("P0", OFFICE, folder=str(folder))


def test_prometheus_shows_what_has_ended_while_the_engines_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines of a data-parallel pair, each with an office and two ranks."""
    pytest.importorskip("vllm")
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from pushkv.reference.metrics import PushPromMetrics

    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory(prefix="pushkv-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        sides = {}
        for engine in range(2):
            for part in parts_of(2):
                side = sides[engine, part] = Side()
                side.meter, side.gauges = Meter(part), {"peers": 1.0 + engine} if part != OFFICE else side.gauges
        outlets = [
            Outlet(address(f"e_dp{engine}", part), side.meter, side.readings, look_s=0.01)
            for (engine, part), side in sides.items()
        ]
        PushPromMetrics(
            SimpleNamespace(
                kv_transfer_config=SimpleNamespace(engine_id="e"),
                parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_size=2),
            ),
            {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)},
            ["engine"],
            {0: ["0"], 1: ["1"]},
        )

        def shows(name: str, engine: int, value: float) -> bool:
            end = time.monotonic() + PATIENCE_S
            while registry.get_sample_value(f"pushkv:{name}", {"engine": str(engine)}) != value:
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
            return True

        try:
            assert shows("quarantined", 0, 1.0) and shows("quarantined", 1, 1.0)
            assert shows("peers", 0, 2.0) and shows("peers", 1, 4.0), "the sum of both ranks"
            sides[1, OFFICE].gauges = {"quarantined": 0.0}
            sides[0, "rank-1"].gauges = {"peers": 0.0}
            assert shows("quarantined", 1, 0.0) and shows("peers", 0, 1.0)
            assert shows("quarantined", 0, 1.0) and shows("peers", 1, 4.0)
        finally:
            for outlet in outlets:
                outlet.close()
