"""Progress bars: on a terminal only, on stderr only."""

from __future__ import annotations

import io
import sys

import pytest

from pushkv.sim import progress
from pushkv.sim.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_none_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bar("x") as report:
        assert report is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("x", wanted=False) as report:
        assert report is None


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")  # an extra; without it there is no bar
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_DELAY_S", 0.0)
    with progress_bar("pushkv") as report:
        assert report is not None
        report(5, 10)
        report(10, 10)
    assert "pushkv" in terminal.getvalue()
    assert capsys.readouterr().out == ""
