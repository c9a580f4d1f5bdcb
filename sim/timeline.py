"""A picture of one request in each mode: who worked for it when, what was held meanwhile, when its first token came.

Decides how the spans of a trace are laid out and labelled. What a span means is decided where it is recorded; the
tracks are those of `pushkv.sim.trace`. Drawing needs matplotlib: pip install 'pushkv[plot]'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pushkv.sim.errors import BadInput
from pushkv.sim.trace import (
    ENGINE,
    FIRST_TOKEN,
    MEMORY,
    PREFILL,
    QUEUE,
    STEPS,
    TRANSFER,
    WIRE,
    Span,
    TraceWriter,
)  # fmt: skip

__all__ = ["Story", "draw", "finding", "story"]

_ALWAYS = ("P engine", "P transfer", "wire", "D engine", "D memory held")
_LANES = (
    "P waits", "P engine", "P transfer", "P memory held", "wire", "D transfer", "D memory held", "D waits", "D engine",
)  # fmt: skip
_THREADS = {ENGINE: "engine", STEPS: "engine", TRANSFER: "transfer", MEMORY: "memory held", QUEUE: "waits"}

_FOR_OTHERS = "post for others"
# Okabe-Ito hues, toned down; what is moved is warm, what is computed is cool, what merely waits is pale.
_COLOURS = {
    "prefill": "#3b6ea5",
    "decode": "#4f8a70",
    "gather": "#e3a54a",
    "scatter": "#e3a54a",
    "post": "#c8553d",
    "write": "#d98c3f",
    "read": "#d98c3f",
    _FOR_OTHERS: "#e5a998",
}
_STEP_COLOURS = {"P engine": "#c5d4e5", "D engine": "#bcd6ca"}
_LANE_COLOURS = {
    "P engine": "#3b6ea5",
    "P transfer": "#c8553d",
    "P memory held": "#e4c9d3",
    "wire": "#d98c3f",
    "D transfer": "#c8553d",
    "D engine": "#4f8a70",
    "D memory held": "#e4c9d3",
    "P waits": "#d9dde2",
    "D waits": "#d9dde2",
}

_PALE = ("memory held", "waits")
_INK = "#22272e"
_SOFT = "#6b7480"
_RULE = "#e6e9ed"
_EXPOSED = "#fbf1e4"


@dataclass(frozen=True, slots=True)
class Story:
    """One request in one mode: its spans, its arrival and its first token, in simulated seconds.

    ``note`` is half a sentence on what the mode does, printed beside its name.
    """

    mode: str
    spans: Sequence[Span]
    arrival_s: float
    first_token_s: float
    note: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time to first token, milliseconds."""
        return (self.first_token_s - self.arrival_s) * 1e3

    @property
    def prefilled_ms(self) -> float | None:
        """When the last prefill step ended, milliseconds after the arrival."""
        ends_s = [span.end_s for span in self.spans if _lane(span.track) == "P engine" and span.name == PREFILL]
        return (max(ends_s) - self.arrival_s) * 1e3 if ends_s else None


def story(mode: str, trace: TraceWriter, request: int | str, note: str = "") -> Story:
    """The spans of ``trace`` that belong to ``request``, and what its engines do for others until its first token.

    It arrives where the first of its spans starts.

    Raises `BadInput` where the trace does not hold the request or its first token.
    """
    spans = [span for span in trace.spans if span.args and span.args.get("request") == request]
    tokens = [
        instant
        for instant in trace.instants
        if instant.name == FIRST_TOKEN and instant.args and instant.args.get("request") == request
    ]
    if not spans or not tokens:
        raise BadInput(f"the trace of mode {mode} does not hold request {request} up to its first token; pick another")
    start_s, token_s = min(span.start_s for span in spans), tokens[0].at_s
    engines = {span.track.partition("/")[0] for span in spans if span.track.partition("/")[0] != WIRE}
    steps = {f"{engine}/{STEPS}" for engine in engines}
    posting = {f"{engine}/{ENGINE}" for engine in engines}
    for span in trace.spans:
        if span.end_s <= start_s or span.start_s >= token_s:
            continue
        if span.track in steps:
            spans.append(span)
        elif span.track in posting and span.name == "post" and (span.args or {}).get("request") != request:
            spans.append(span._replace(name=_FOR_OTHERS))
    return Story(mode, spans, start_s, token_s, note)


def finding(stories: Sequence[Story], subject: str = "the first token") -> str:
    """The picture's title: what the last mode does to ``subject``, against the first."""
    base, last = stories[0], stories[-1]
    if len(stories) == 1 or base.ttft_ms <= 0 or last.ttft_ms <= 0:
        return f"{last.mode}: first token after {_duration(last.ttft_ms)}"
    ratio = base.ttft_ms / last.ttft_ms
    if ratio >= 1.02:
        said = (
            f"{ratio:.2f}× sooner than with {base.mode}" if ratio < 10 else f"{ratio:.0f}× sooner than with {base.mode}"
        )
    elif ratio <= 0.98:
        said = f"{1 / ratio:.2f}× later than with {base.mode}"
    else:
        said = f"as soon as with {base.mode}"
    return f"With {last.mode} {subject} comes after {_duration(last.ttft_ms)}, {said}"


def draw(stories: Sequence[Story], paths: Iterable[str | Path], *, subtitle: str = "", title: str = "") -> None:
    """Draw ``stories`` as stacked panels on one time axis and save the picture under each of ``paths`` (.svg, .png, …).

    ``title`` replaces the finding; ``subtitle`` states the setting. Raises `BadInput` without matplotlib.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("drawing a timeline needs matplotlib: pip install 'pushkv[plot]'") from None
    end_ms = max(story.ttft_ms for story in stories) * 1.14
    lanes = [
        name for name in _LANES if name in _ALWAYS or any(_lane(s.track) == name for t in stories for s in t.spans)
    ]
    style: dict[Any, Any] = {
        "font.family": ["DejaVu Sans"],
        "font.size": 8.5,
        "svg.fonttype": "path",
        "svg.hashsalt": "pushkv",
    }
    with mpl.rc_context(style):
        height = 0.98 + len(stories) * (0.62 + 0.27 * len(lanes))
        figure = Figure(figsize=(9.6, height), facecolor="white")
        grid = figure.subplots(len(stories), 1, sharex=True, squeeze=False)
        top, bottom = 1 - 1.10 / height, 0.46 / height
        figure.subplots_adjust(left=0.125, right=0.985, top=top, bottom=bottom, hspace=0.62 / (0.27 * len(lanes)))
        figure.text(
            0.012, 1 - 0.10 / height, title or finding(stories), va="top", fontsize=12.5, weight="bold", color=_INK
        )
        figure.text(0.012, 1 - 0.37 / height, subtitle, va="top", fontsize=8.5, color=_SOFT)
        for axes, told in zip(grid[:, 0], stories, strict=True):
            _panel(axes, told, lanes, end_ms)
        grid[-1, 0].set_xlabel("milliseconds since the request arrived", color=_SOFT)
        for path in paths:
            # No date in the file: the same run draws the same bytes.
            metadata = {"Date": None} if str(path).endswith(".svg") else None
            try:
                figure.savefig(path, dpi=200, metadata=metadata)
            except OSError as error:
                raise BadInput(f"{path} cannot be written: {error.strerror}") from None
            except ValueError as error:
                raise BadInput(f"{path}: {error}") from None


def _panel(axes: Any, told: Story, lanes: Sequence[str], end_ms: float) -> None:
    axes.set_xlim(0, end_ms)
    axes.set_ylim(len(lanes) - 0.42, -0.58)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.tick_params(length=0, labelcolor=_SOFT, pad=4)
    axes.grid(axis="x", color=_RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    head = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(told.mode, (0.012, 1), xytext=(0, 19), fontsize=10.5, weight="bold", color=_INK, **head)
    axes.annotate(told.note, (0.125, 1), xytext=(0, 19), color=_SOFT, **head)
    for y, lane in enumerate(lanes):
        spans = sorted((s for s in told.spans if _lane(s.track) == lane), key=lambda s: s.start_s)
        axes.axhline(y, color=_RULE, linewidth=0.7, zorder=0.5)
        steps = [span for span in spans if span.track.endswith(STEPS)]
        spans = [span for span in spans if not span.track.endswith(STEPS)]
        _steps(axes, y, _STEP_COLOURS.get(lane, _RULE), steps, told, end_ms)
        _bars(axes, y, lane, spans, told.arrival_s, end_ms)
    token_ms = told.ttft_ms
    said = f"first token {_duration(token_ms)}"
    prefilled_ms = told.prefilled_ms
    if prefilled_ms is not None and prefilled_ms < token_ms:
        axes.axvspan(prefilled_ms, token_ms, color=_EXPOSED, linewidth=0, zorder=0)
        said += f", {_duration(token_ms - prefilled_ms)} after its prefill"
    axes.plot([token_ms, token_ms], [-0.5, len(lanes) - 0.5], color=_INK, linewidth=1.1, zorder=4)
    axes.plot([token_ms], [-0.5], marker="v", markersize=6, color=_INK, clip_on=False, zorder=5)
    axes.annotate(
        said,
        (token_ms, -0.5),
        xytext=(0, 5.5),
        textcoords="offset points",
        ha="right" if token_ms > 0.8 * end_ms else "center",
        weight="bold",
        color=_INK,
        annotation_clip=False,
    )


def _steps(axes: Any, y: int, colour: str, steps: Sequence[Span], told: Story, end_ms: float) -> None:
    """What the engine computes meanwhile, whoever it is for: a pale texture under the request's own bars."""
    for step in steps:
        left_ms = max((step.start_s - told.arrival_s) * 1e3, 0.0)
        right_ms = min((step.end_s - told.arrival_s) * 1e3, end_ms)
        edge = 0.4 if right_ms - left_ms > end_ms / 300 else 0
        axes.barh(
            y, right_ms - left_ms, left=left_ms, height=0.50, color=colour, edgecolor="white", linewidth=edge, zorder=1
        )


def _bars(axes: Any, y: int, lane: str, spans: Sequence[Span], arrival_s: float, end_ms: float) -> None:
    runs: list[tuple[str, float, float, float]] = []  # name, start, end, busy: neighbours of one name share a label
    colour_of: dict[str, str] = {}
    for span in spans:
        start_ms, stop_ms = ((t - arrival_s) * 1e3 for t in (span.start_s, span.end_s))
        if start_ms >= end_ms:
            break
        start_ms = max(start_ms, 0.0)
        if stop_ms <= start_ms:
            continue
        waits = lane.endswith(_PALE)
        colour = _LANE_COLOURS[lane] if waits else _COLOURS.get(span.name, _LANE_COLOURS[lane])
        colour_of[span.name] = colour
        shown_ms = max(stop_ms - start_ms, end_ms / 900)  # what is shorter than a pixel is still seen
        axes.barh(
            y,
            min(shown_ms, end_ms - start_ms),
            left=start_ms,
            height=0.50 if waits else 0.66,
            color=colour,
            edgecolor="white",
            linewidth=0.5 if shown_ms > end_ms / 150 else 0,
            zorder=2,
        )
        if runs and runs[-1][0] == span.name and start_ms - runs[-1][2] < end_ms / 60:
            name, first_ms, _, busy_ms = runs[-1]
            runs[-1] = (name, first_ms, stop_ms, busy_ms + stop_ms - start_ms)
        else:
            runs.append((span.name, start_ms, stop_ms, stop_ms - start_ms))
    from matplotlib.patheffects import withStroke

    beside = {
        "va": "center_baseline",
        "color": _INK,
        "zorder": 6,
        "path_effects": [withStroke(linewidth=2.2, foreground="white", alpha=0.85)],
    }
    for at, (name, start_ms, stop_ms, busy_ms) in enumerate(runs):
        # A run that goes on past the picture has no duration worth a label.
        text = name if stop_ms > end_ms else f"{name} {_duration(busy_ms)}"
        width_ms = end_ms * 0.0092 * (len(text) + 1)
        right_ms = min(stop_ms, end_ms)
        room_ms = (runs[at + 1][1] if at + 1 < len(runs) else end_ms) - right_ms
        pale = lane.endswith(_PALE) or name == _FOR_OTHERS
        if right_ms - start_ms >= width_ms:
            ink, middle_ms = _INK if pale else "white", (start_ms + right_ms) / 2
            seam = {
                "height": 0.46 if pale else 0.61,
                "color": colour_of[name],
                "zorder": 3,
            }  # hides the seams between steps
            axes.barh(y, width_ms * 0.86, left=middle_ms - width_ms * 0.43, linewidth=0, **seam)
            axes.text(middle_ms, y, text, ha="center", va="center_baseline", zorder=6, color=ink)
        elif room_ms >= width_ms:
            axes.text(right_ms + end_ms * 0.005, y, text, **beside)
        elif start_ms >= width_ms and at == 0:
            axes.text(start_ms - end_ms * 0.005, y, text, ha="right", **beside)


def _lane(track: str) -> str:
    process, _, thread = track.partition("/")
    if process == WIRE:
        return "wire"
    return f"{process[:1]} {_THREADS.get(thread, thread)}"


def _duration(ms: float) -> str:
    if ms >= 10_000:
        return f"{ms / 1e3:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms" if ms >= 0.1 else f"{ms * 1e3:.0f} µs"
