"""What one engine's machines were told, as a file that can be played again: one JSON document per line.

A line is ``["start", {...}]``; ``["step", at_s, who, [[kind, {...}], ...]]``, what ``ledger`` or ``rank N`` was told in
one step, a frame as it came; ``["claim", at_s, who, handle, granted]``; ``["verdict", at_s, kind, {...}]``, what the
ledger told vLLM; ``["record", {...}]``, one hand-over's times; or ``["end"]``. An engine that is started again goes
on in the same file. ``replay`` feeds the events to new machines and compares the verdicts.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from pushkv.model.protocol import Endpoint, Ledger, LocalProtocolError, Settings
from pushkv.model.protocol import events as ev
from pushkv.reference.wire import plain, record

log = logging.getLogger(__name__)

SCHEMA = 1


class TraceError(ValueError):
    """A file that is no trace."""


class _Lines:
    """JSON lines appended to ``path``. A file that cannot be written (a full disk) ends the writing, nothing else."""

    def __init__(self, path: str) -> None:
        self._path = path
        _cut_half_line(Path(path))
        self._file = Path(path).open("ab")  # noqa: SIM115 - closed by ``close``

    def write(self, line: Any, *, flush: bool = False) -> None:
        """Append ``line``."""
        if self._file.closed:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            if flush:
                self._file.flush()
        except OSError:
            log.exception("%s: no more is written", self._path)
            self.close()

    def close(self) -> None:
        """No more."""
        with contextlib.suppress(OSError):
            self._file.close()


def _cut_half_line(path: Path) -> None:
    """A killed process leaves one at the end of a file."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            with mmap.mmap(file.fileno(), 0) as seen:
                whole = seen.rfind(b"\n") + 1
            file.truncate(whole)


class Trace(_Lines):
    """Writes ``path``. Used from the transfer thread (and, with several ranks, the office's); lines are flushed as
    verdicts fall, so that a killed process leaves all that was decided.
    """

    def __init__(self, path: str, settings: Settings, ranks: int, incarnations: dict[int, int], engine: str) -> None:
        super().__init__(path)
        incarnation = {f"rank {rank}": number for rank, number in incarnations.items()}
        start = {"schema": SCHEMA, "engine": engine, "settings": asdict(settings), "ranks": ranks, "who": incarnation}
        self.write(["start", start])

    def step(self, who: str, now: float, events: Iterable[ev.Record]) -> None:
        """``who`` is told ``events``, in one step; none: a timer goes off."""
        self.write(["step", now, who, [plain(event) for event in events]])

    def claim(self, who: str, now: float, handle: int, granted: bool) -> None:
        """``who`` was asked at the moment of posting."""
        self.write(["claim", now, who, handle, granted])

    def verdict(self, now: float, action: ev.Record) -> None:
        """The ledger tells vLLM ``action``."""
        self.write(["verdict", now, *plain(action)], flush=True)

    def record(self, record: dict[str, Any]) -> None:
        """One hand-over."""
        self.write(["record", record], flush=True)

    def close(self) -> None:
        self.write(["end"])
        super().close()


class RecordLog(_Lines):
    """Writes one JSON document per hand-over into ``path``, and nothing else: light enough to measure with."""

    def record(self, record: dict[str, Any]) -> None:
        """One hand-over."""
        self.write(record, flush=True)


def lines(path: Path) -> Iterator[list[Any]]:
    """The lines of a trace, but for half a line at its end. Raises ``TraceError`` that names the line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = msgspec.json.decode(raw)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}:{number}: {error}") from None
            if not isinstance(line, list) or not line or not isinstance(line[0], str):
                raise TraceError(f"{path}:{number}: not a line of a trace")
            yield line


def replay(path: Path) -> tuple[list[str], list[str]]:
    """(told, expected): the verdicts of new machines that are told what the file says, and those in the file.

    The machines' reports travel between rank and ledger as they did: both are in the file. Of a life without an end
    (the engine was killed, or runs) the last steps may be there without their verdicts. Raises ``TraceError``.
    """
    endpoints: dict[str, Endpoint] = {}
    ledger: Ledger | None = None
    told: list[str] = []
    expected: list[str] = []
    ended = True
    for line in lines(path):
        word = line[0]
        if word == "start":
            if not ended:
                del told[len(expected) :]
            ended = False
            settings = Settings(**line[1]["settings"])
            ledger = Ledger(settings, line[1]["ranks"])
            endpoints = {who: Endpoint(number, settings) for who, number in line[1]["who"].items()}
        elif ledger is None:
            raise TraceError(f"{path}: begins without a start")
        elif word == "step":
            _, now, who, events = line
            out: list[ev.Record] = []
            machine: Endpoint | Ledger = ledger if who == "ledger" else endpoints[who]
            try:
                with contextlib.suppress(LocalProtocolError):  # refused then, refused now
                    machine.step([_read(*event) for event in events], now, out)
            except KeyError as error:
                raise TraceError(f"{path}: {who} knows nothing of {error}; is this the trace of one engine?") from None
            if who == "ledger":
                told += [_text(action) for action in out if not isinstance(action, (ev.ToRank, ev.ToRanks))]
        elif word == "claim":
            _, now, who, handle, granted = line
            if endpoints[who].sender.claim(handle, now) is not granted:
                told.append(f"claim of {handle} by {who}: {not granted}")
                expected.append(f"claim of {handle} by {who}: {granted}")
        elif word == "verdict":
            expected.append(_text(_read(line[2], line[3])))
        elif word == "end":
            ended = True
    if not ended:
        del told[len(expected) :]
    return told, expected


def _read(kind: str, fields: dict[str, Any]) -> ev.Record:
    try:
        event = record(kind, fields)
    except (KeyError, msgspec.ValidationError) as error:
        raise TraceError(f"no event: {kind} {error}") from None
    assert isinstance(event, ev.Record)
    return event


def _text(action: ev.Record) -> str:
    kind, fields = plain(action)
    return f"{kind} {msgspec.json.encode(fields).decode()}"
