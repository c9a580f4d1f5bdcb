"""The picture of one request: what it says, and that it is drawn."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from pushkv.sim import timeline
from pushkv.sim.errors import BadInput
from pushkv.sim.timeline import Story
from pushkv.sim.trace import FIRST_TOKEN, TraceWriter


def recorded(ttft_s: float) -> TraceWriter:
    trace = TraceWriter()
    for request in (6, 7):
        at_s, mine = 10.0 + request, {"request": request}
        trace.span("P0/engine", "prefill", at_s, at_s + 0.3, mine)
        trace.span("P0/engine", "prefill", at_s + 0.3, at_s + 0.6, mine)
        trace.span("P0/transfer", "post", at_s + 0.6, at_s + 0.6001, mine)
        trace.span("wire/P0-D0", "write", at_s + 0.61, at_s + 0.65, mine)
        trace.span("D0/memory", "held", at_s, at_s + 0.65, mine)
        for step in range(100):
            trace.span("D0/engine", "decode", at_s + 0.66 + step * 0.02, at_s + 0.679 + step * 0.02, mine)
        trace.instant("D0/engine", FIRST_TOKEN, at_s + ttft_s, mine)
    trace.span("D0/engine", "decode", 0.0, 1.0)
    return trace


def stories() -> list[Story]:
    return [timeline.story(mode, recorded(ttft_s), 7, note="x") for mode, ttft_s in (("pull", 1.5), ("pushkv", 0.75))]


def test_a_story_is_of_one_request() -> None:
    told = timeline.story("push", recorded(0.7), 7)
    assert told.arrival_s == 17.0
    assert told.ttft_ms == pytest.approx(700)
    assert told.prefilled_ms == pytest.approx(600)
    assert len(told.spans) == 105


def test_a_request_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="mode push does not hold request 99"):
        timeline.story("push", recorded(0.7), 99)


def test_the_title_tells_the_finding() -> None:
    def told(mode: str, ttft_s: float) -> Story:
        return Story(mode, (), 1.0, 1.0 + ttft_s)

    sooner = timeline.finding([told("pull", 1.2), told("push", 0.9), told("pushkv", 0.6)])
    assert sooner == "With pushkv the first token comes after 600 ms, 2.00× sooner than with pull"
    assert "1.50× later than with pull" in timeline.finding([told("pull", 1.0), told("pushkv", 1.5)])
    assert "as soon as with pull" in timeline.finding([told("pull", 1.0), told("pushkv", 1.01)])
    assert timeline.finding([told("push", 0.5)]) == "push: first token after 500 ms"


def test_png_and_svg_are_drawn_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # an extra
    svg, png, again = tmp_path / "t.svg", tmp_path / "t.png", tmp_path / "again.svg"
    timeline.draw(stories(), [svg, png], subtitle="a setting")
    timeline.draw(stories(), [again], subtitle="a setting")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert svg.read_bytes() == again.read_bytes()


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(BadInput, match="cannot be written"):
        timeline.draw(stories(), [tmp_path / "absent" / "t.svg"])
    with pytest.raises(BadInput, match="not supported"):
        timeline.draw(stories(), [tmp_path / "t.xyz"])
