"""When requests arrive and how long they are: Poisson, evenly spaced, or read from a trace.

Decides the arrivals of one run, as three numpy columns (16 bytes per request), from the scenario and its seed alone;
so two modes with the same seed see the same requests. It does not decide where a request goes: the router does.
"""

from __future__ import annotations

import csv
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pushkv.sim.catalog import check_lengths
from pushkv.sim.errors import BadInput

if TYPE_CHECKING:
    from pushkv.sim.scenario import Scenario

__all__ = ["TRACE_COLUMNS", "Workload", "generate", "poisson", "read_trace", "uniform"]

TRACE_COLUMNS = ("arrival_s", "input_len", "output_len")

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival: seconds since the start, prompt tokens, output tokens.

    ``width``: above 0, so many are under way at a time; each of the others is sent when one has ended, not at its
    ``arrival_s``. ``ids``: whether answers carry the prompt's token ids. ``beside``: (how many, prompt tokens, output
    tokens) of requests that each D computes by itself meanwhile; one that ends is followed by the next.
    """

    arrival_s: NDArray[np.float64]
    input_len: NDArray[np.int32]
    output_len: NDArray[np.int32]
    width: int = 0
    ids: bool = True
    beside: tuple[int, int, int] = (0, 0, 0)

    def __len__(self) -> int:
        return len(self.arrival_s)


NONE = Workload(np.zeros(0), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
"""Nothing to do."""


def generate(scenario: Scenario) -> Workload:
    """The arrivals that ``scenario`` describes. Raises `BadInput` for a trace, or a length, that cannot be used."""
    if scenario.arrival == "trace":
        read = read_trace(scenario.trace or "", scenario.requests)
        longest = int((read.input_len.astype(np.int64) + read.output_len).max())
        check_lengths(scenario, int(read.input_len.max()), longest)
        return read
    check_lengths(scenario, scenario.input_len, scenario.input_len + scenario.output_len)
    count, qps = scenario.requests or 0, scenario.qps
    if scenario.arrival == "poisson":
        arrival_s = poisson(count, qps, np.random.Generator(np.random.PCG64(scenario.seed)))
    else:
        arrival_s = uniform(count, qps)
    return Workload(
        arrival_s,
        np.full(count, scenario.input_len, dtype=np.int32),
        np.full(count, scenario.output_len, dtype=np.int32),
    )


def poisson(count: int, qps: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Arrival times in seconds, the first at 0, with independent exponential gaps of mean 1/``qps``."""
    gaps_s = rng.standard_exponential(count)
    gaps_s /= qps
    gaps_s[:1] = 0.0
    return np.cumsum(gaps_s, out=gaps_s)


def uniform(count: int, qps: float) -> NDArray[np.float64]:
    """Arrival times in seconds, the first at 0, one every 1/``qps``."""
    return np.arange(count, dtype=np.float64) / qps


def read_trace(path: str, limit: int | None = None) -> Workload:
    """Read a CSV with the columns `TRACE_COLUMNS` (others are ignored), at most ``limit`` rows of it.

    Raises `BadInput`, naming the line, for a file that is missing, empty, unsorted, or holds an impossible value.
    """
    arrival_s, input_len, output_len = array("d"), array("i"), array("i")
    last_s = 0.0
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            at = _columns(path, next(reader, []))
            for row in reader:
                if not row:
                    continue
                if limit is not None and len(arrival_s) >= limit:
                    break
                line = reader.line_num
                if len(row) <= max(at):
                    raise BadInput(f"trace {path} line {line}: {len(row)} values, expected {max(at) + 1} or more")
                now_s = _seconds(path, line, row[at[0]])
                if now_s < last_s:
                    raise BadInput(
                        f"trace {path} line {line}: arrival_s {now_s:g} comes after {last_s:g}; sort the rows"
                    )
                last_s = now_s
                arrival_s.append(now_s)
                input_len.append(_tokens(path, line, "input_len", row[at[1]]))
                output_len.append(_tokens(path, line, "output_len", row[at[2]]))
    except OSError as error:
        raise BadInput(f"trace {path} cannot be read: {error.strerror}; give a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"trace {path} is not CSV text: {error}") from None
    if not arrival_s:
        raise BadInput(f"trace {path} has no rows; give at least one request after the line {','.join(TRACE_COLUMNS)}")
    if limit is not None and len(arrival_s) < limit:
        raise BadInput(
            f"trace {path} has {len(arrival_s)} rows, fewer than requests = {limit}; lower it or leave it out"
        )
    return Workload(
        np.frombuffer(arrival_s, dtype=np.float64),
        np.frombuffer(input_len, dtype=np.int32),
        np.frombuffer(output_len, dtype=np.int32),
    )


def _columns(path: str, header: list[str]) -> tuple[int, int, int]:
    names = [name.strip() for name in header]
    if not names:
        raise BadInput(f"trace {path} is empty; expected the columns {','.join(TRACE_COLUMNS)}")
    missing = [name for name in TRACE_COLUMNS if names.count(name) != 1]
    if missing:
        raise BadInput(
            f"trace {path} has the columns {','.join(names)}; expected {','.join(TRACE_COLUMNS)}, each once"
            f" (look at {', '.join(missing)})"
        )
    first, second, third = (names.index(name) for name in TRACE_COLUMNS)
    return first, second, third


def _seconds(path: str, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BadInput(f"trace {path} line {line}: arrival_s {text!r} is not a time; expected seconds from 0 up")
    return value


def _tokens(path: str, line: int, column: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= _MAX_TOKENS:
        raise BadInput(f"trace {path} line {line}: {column} {text!r} is not a length; expected whole tokens from 1 up")
    return value
