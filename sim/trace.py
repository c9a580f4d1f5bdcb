"""Record what each actor did when, and write it for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Decides the file format and the names of the tracks. It does not decide what is worth recording: the world calls `span`,
`instant` and `flow`, and passes no writer where nobody asked for a trace.

A track is "process/thread", as in "P0/engine"; the constants below name the threads, and what the timeline picture
looks for. A span that belongs to one request says so in its arguments: ``args={"request": id}``; the picture is drawn
from exactly these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from pushkv.sim.errors import BadInput

__all__ = [
    "ENGINE", "FIRST_TOKEN", "MEMORY", "PREFILL", "QUEUE", "STEPS", "TRANSFER", "WIRE", "Flow", "Instant", "Span",
    "TraceWriter",
]  # fmt: skip

ENGINE = "engine"  # what runs on the engine's thread, and what its steps do for a request
STEPS = "steps"  # every step of the engine, on the device
QUEUE = "queue"  # requests that wait: on their way to the engine, for a place, for a batch
TRANSFER = "transfer"  # the connector's transfer thread: posting, gather and scatter
MEMORY = "memory"  # KV blocks or landing segments that are held for a request
WIRE = "wire"  # process of the links; one thread per link

FIRST_TOKEN = "first token"
"""Name of the instant, with ``args={"request": id}``, at which a request's first token is out."""

PREFILL = "prefill"
"""Name of the spans on a P engine that compute a request's prompt."""

Phase = Literal["s", "t", "f"]

_US_PER_S = 1e6


class Span(NamedTuple):
    """Something that an actor did from ``start_s`` to ``end_s``."""

    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] | None


class Instant(NamedTuple):
    """Something that happened at ``at_s``."""

    track: str
    name: str
    at_s: float
    args: Mapping[str, Any] | None


class Flow(NamedTuple):
    """One point of an arrow between tracks: ``phase`` s starts it, t passes through, f ends it."""

    id: int | str
    track: str
    at_s: float
    phase: Phase


class TraceWriter:
    """Collects spans, instants and flows in memory; `write` makes the JSON file. All times in simulated seconds."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.instants: list[Instant] = []
        self.flows: list[Flow] = []

    def span(self, track: str, name: str, start_s: float, end_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Record work on ``track`` from ``start_s`` to ``end_s``."""
        self.spans.append(Span(track, name, start_s, end_s, args))

    def instant(self, track: str, name: str, at_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Record a point in time on ``track``."""
        self.instants.append(Instant(track, name, at_s, args))

    def flow(self, id: int | str, track: str, at_s: float, phase: Phase) -> None:
        """Record a point of the arrow ``id``; viewers hang it on the span that covers ``at_s`` on ``track``."""
        self.flows.append(Flow(id, track, at_s, phase))

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace as Chrome trace events, the names of the tracks first."""
        tracks = {row.track for rows in (self.spans, self.instants, self.flows) for row in rows}
        lane_of, lanes = self._lanes()
        processes: dict[str, int] = {}
        places: dict[tuple[str, int], dict[str, int]] = {}
        for track in sorted(tracks, key=_order):
            process, _, thread = track.partition("/")
            if process not in processes:
                processes[process] = len(processes) + 1
                yield _named("process", {"pid": processes[process]}, process)
            for lane in range(lanes.get(track, 1)):
                place = {"pid": processes[process], "tid": len(places) + 1}
                places[track, lane] = place
                yield _named("thread", place, (thread or process) + (f" {lane + 1}" if lane else ""))
        covering: dict[tuple[str, object], list[tuple[Span, int]]] = {}
        for span, lane in zip(self.spans, lane_of, strict=True):
            place = places[span.track, lane]
            if span.args and "request" in span.args:
                covering.setdefault((span.track, span.args["request"]), []).append((span, lane))
            event = {"ph": "X", "name": span.name, "cat": "kv", "ts": span.start_s * _US_PER_S, **place}
            event["dur"] = (span.end_s - span.start_s) * _US_PER_S
            if span.args:
                event["args"] = dict(span.args)
            yield event
        for instant in self.instants:
            event = {"ph": "i", "s": "t", "name": instant.name, "cat": "kv", "ts": instant.at_s * _US_PER_S}
            event |= places[instant.track, 0]
            if instant.args:
                event["args"] = dict(instant.args)
            yield event
        for flow in self.flows:
            event = {"ph": flow.phase, "id": flow.id, "name": "transfer", "cat": "kv", "ts": flow.at_s * _US_PER_S}
            own = covering.get((flow.track, flow.id), ())
            event |= places[flow.track, next((lane for s, lane in own if s.start_s <= flow.at_s <= s.end_s), 0)]
            if flow.phase == "f":
                event["bp"] = "e"  # end on the span around this point, not on the next one
            yield event

    def _lanes(self) -> tuple[list[int], dict[str, int]]:
        """A lane for every span, and how many lanes each track has: spans that overlap without one holding the other
        would be drawn wrongly in one lane.
        """
        lane_of = [0] * len(self.spans)
        open_ends: dict[str, list[list[float]]] = {}
        order = sorted(range(len(self.spans)), key=lambda i: (self.spans[i].start_s, -self.spans[i].end_s))
        for i in order:
            span = self.spans[i]
            lanes = open_ends.setdefault(span.track, [])
            for ends in lanes:
                while ends and ends[-1] <= span.start_s:
                    ends.pop()
            free = (lane for lane, ends in enumerate(lanes) if not ends or span.end_s <= ends[-1])
            lane_of[i] = next(free, len(lanes))
            if lane_of[i] == len(lanes):
                lanes.append([])
            lanes[lane_of[i]].append(span.end_s)
        return lane_of, {track: len(lanes) for track, lanes in open_ends.items()}

    def write(self, path: str | Path) -> None:
        """Write the trace; raises `BadInput` where the file cannot be written."""
        encode = msgspec.json.Encoder().encode
        try:
            with Path(path).open("wb") as file:
                file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
                separator = b"\n"
                for event in self.events():
                    file.write(separator + encode(event))
                    separator = b",\n"
                file.write(b"\n]}\n")
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from None


def _named(kind: str, place: Mapping[str, int], name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", **place, "args": {"name": name}}


def _order(track: str) -> tuple[int, str, int, str]:
    """P engines first, then the wires, then D engines, each in order of their number."""
    process, _, thread = track.partition("/")
    letters = process.rstrip("0123456789")
    number = process[len(letters) :]
    rank = {"router": 0, "P": 1, WIRE: 2, "D": 3}.get(letters, 4)
    return rank, letters, int(number or 0), thread
