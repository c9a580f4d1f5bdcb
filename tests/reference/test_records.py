"""Files of records and traces: what is written, and that a file that cannot be written harms nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pushkv.model.protocol import Settings
from pushkv.model.protocol import events as ev
from pushkv.reference.trace import RecordLog, Trace

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
