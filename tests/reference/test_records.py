"""Files of records and traces: what is written, and that a file that cannot be written harms nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pushkv.model.protocol import Ledger, Settings
from pushkv.model.protocol import events as ev
from pushkv.reference.trace import RecordLog, Trace, replay

FULL = Path("/dev/full")


def test_one_line_per_hand_over(tmp_path: Path) -> None:
    log = RecordLog(str(tmp_path / "records.jsonl"))
    log.record({"side": "send", "tokens": 3})
    log.close()
    log.record({"side": "send", "tokens": 4})
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"side": "send", "tokens": 3}]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_ends_the_writing_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = RecordLog(str(FULL))
    trace = Trace(str(FULL), Settings(), 1, {0: 7}, "P")
    for _ in range(3):
        log.record({"side": "send"})
        trace.record({"side": "send"})
        trace.verdict(0.0, ev.Finished("t", True, ""))
    assert [record.getMessage() for record in caplog.records] == ["/dev/full: no more is written"] * 2
    log.close()
    trace.close()


def life(path: Path, names: str) -> None:
    """An engine that is told of prompts and gives each up again, and ends well."""
    ledger, trace = Ledger(Settings()), Trace(str(path), Settings(), 1, {0: 7}, "P")
    for number, name in enumerate(names):
        for event in (ev.Hold(name, 16), ev.FromRank(0, ev.Sent(name, False, "aborted"))):
            out: list[ev.Record] = []
            trace.step("ledger", float(number), (event,))
            ledger.step((event,), float(number), out)
            for action in out:
                if not isinstance(action, (ev.ToRank, ev.ToRanks)):
                    trace.verdict(float(number), action)
    trace.close()


def test_a_trace_goes_on_where_a_killed_engine_left_it(tmp_path: Path) -> None:
    """Cut at any byte; the second life ends well."""
    path = tmp_path / "P.jsonl"
    life(path, "abc")
    whole = path.read_bytes()
    verdicts = [line for line in whole.splitlines() if line.startswith(b'["verdict"')]
    assert len(verdicts) in (3, 6)
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        life(path, "de")
        told, expected = replay(path)
        assert told == expected
        kept = whole[: whole[:cut].rfind(b"\n") + 1]
        assert len(expected) == kept.count(b'["verdict"') + 2 * len(verdicts) // 3


def test_a_trace_whose_verdicts_are_others_is_not_the_same(tmp_path: Path) -> None:
    """Also where one more would follow: an engine that ended well has said all."""
    path = tmp_path / "P.jsonl"
    life(path, "abc")
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.startswith(b'["verdict"'))
    path.write_bytes(b"".join(lines[:last] + lines[last + 1 :]))
    told, expected = replay(path)
    assert told != expected
