"""Read what shall go wrong in a run, and when.

Decides how faults are written down and which of them name something that exists. It does not decide what a fault does
to an engine or a link: the world does. A file holds one table per fault:

    [[fault]]
    kind = "pause"        # prefill-kill, decode-kill, partition or pause
    target = "D0"         # an engine; for a partition the pair, as "P0-D0"
    at_s = 12.5
    duration_s = 3.0      # left out: for good (a killed engine does not come back)
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pushkv.sim.errors import BadInput, unknown

__all__ = ["Fault", "Kind", "read_faults", "read_toml"]

Kind = Literal["prefill-kill", "decode-kill", "partition", "pause"]

_KEYS = ("kind", "target", "at_s", "duration_s")
_TARGETS: Mapping[str, tuple[str, str]] = {
    "prefill-kill": (r"P(\d+)", "P0"),
    "decode-kill": (r"D(\d+)", "D0"),
    "partition": (r"P(\d+)-D(\d+)", "P0-D0"),
    "pause": (r"[PD](\d+)", "P0 or D0"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at ``at_s`` simulated seconds, for ``duration_s`` (None: for good), on ``target`` ("P0", "P0-D1")."""

    kind: Kind
    target: str
    at_s: float
    duration_s: float | None = None


def read_toml(what: str, path: str) -> dict[str, Any]:
    """Parse a TOML file; ``what`` names it in the `BadInput` of a file that is missing or broken."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be read: {error.strerror}; give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{what} {path} is not TOML: {error}") from None


def read_faults(path: str, prefill: int, decode: int) -> tuple[Fault, ...]:
    """The faults of a file, in order of time, for a cluster of ``prefill`` and ``decode`` engines."""
    content = read_toml("faults", path)
    rows = content.pop("fault", None)
    if content:
        raise unknown(f"faults {path}: key", next(iter(content)), ("fault",), also="(written as [[fault]])")
    if not isinstance(rows, list) or not rows:
        raise BadInput(f"faults {path} has no [[fault]] table; give at least one")
    faults = [_fault(f"faults {path}: fault {number}", row, prefill, decode) for number, row in enumerate(rows, 1)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _fault(where: str, row: object, prefill: int, decode: int) -> Fault:
    if not isinstance(row, Mapping):
        raise BadInput(f"{where} is not a table; write it as [[fault]]")
    for key in row:
        if key not in _KEYS:
            raise unknown(f"{where}: key", key, _KEYS)
    kind, target = cast(Kind, row.get("kind")), row.get("target")
    if kind not in get_args(Kind):
        raise unknown(f"{where}: kind", kind, get_args(Kind))
    pattern, example = _TARGETS[kind]
    if target is None:
        raise BadInput(f"{where}: target is missing; give {example}")
    match = re.fullmatch(pattern, target) if isinstance(target, str) else None
    if match is None:
        raise BadInput(f"{where}: target {target!r} does not fit {kind}; expected {example}")
    for engine in cast(str, target).split("-"):
        count = prefill if engine[0] == "P" else decode
        if int(engine[1:]) >= count:
            raise BadInput(f"{where}: target {engine} does not exist; the last one is {engine[0]}{count - 1}")
    at_s = _seconds(f"{where}: at_s", row.get("at_s"))
    duration = row.get("duration_s")
    duration_s = None if duration is None else _seconds(f"{where}: duration_s", duration)
    if kind == "pause" and duration_s is None:
        raise BadInput(f"{where}: duration_s is missing; expected seconds (a pause for good is a kill)")
    return Fault(kind, cast(str, target), at_s, duration_s)


def _seconds(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise BadInput(f"{where} {value} is not possible: expected seconds from 0 up")
    return float(value)
