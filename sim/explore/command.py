"""The commands ``pushkv explore`` and ``pushkv replay``: flags, what is printed, exit codes (0 clean, 1 a violation, 2
bad input, 130 interrupted).
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
from pathlib import Path
from typing import Any

from pushkv.sim.errors import BadInput, unknown
from pushkv.sim.output import check_writable, emit
from pushkv.sim.progress import progress_bar

_PROFILES = "calm, lossy, crashy, hostile, churn, partition, paused"
_SHAPES = "plain, tp2, fan-in, fan-out, both-parts"
_ALL = "all"
_TRANSFERS = 8
_INTERRUPTED = 130
_OF_SEEDS = ("seeds", "jobs", "profile", "shape", "transfers", "until_failure", "out", "json")
_SHRUNK = 3
"""Violations that are shrunk and told in full: the first of each property."""
_LINES = 100


def add_commands(commands: Any) -> None:
    """Add both to the parser's commands."""
    help = "play random seeds against the protocol's properties"
    parser = commands.add_parser("explore", help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=_explore)
    parser.add_argument(
        "--seeds", metavar="A:B", default="0:1000", help="seeds from A to B, without B (default: 0:1000)"
    )
    parser.add_argument("--jobs", metavar="N", default="1", help="worker processes (default: 1)")
    _world_flags(parser, _ALL)
    parser.add_argument("--until-failure", action="store_true", help="stop at the first seed that breaks a property")
    parser.add_argument("--out", metavar="DIR", help="write each case that breaks a property, shrunk, as a file there")
    parser.add_argument("--json", metavar="FILE|-", help="write JSON; - is stdout, which then holds nothing else")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar on stderr")
    parser.add_argument(
        "--exhaustive", action="store_true", help="no seeds: every interleaving of small worlds, until none is left"
    )
    parser.add_argument("--deep", action="store_true", help="exhaustive: larger worlds too, never searched to the end")
    parser.add_argument("--only", metavar="NAME", help="exhaustive: worlds with this in their name")
    parser.add_argument("--limit", metavar="STATES", help="exhaustive: cut a world off after so many states")
    parser.set_defaults(unset={name: parser.get_default(name) for name in _OF_SEEDS})

    help = "play one seed or case of explore again, and tell what happens"
    parser = commands.add_parser("replay", help=help, description=help.capitalize() + ".", allow_abbrev=False)
    parser.set_defaults(command=_replay)
    parser.add_argument("case", metavar="SEED|FILE", help="a seed, or a file that explore --out has written")
    _world_flags(parser, None)
    parser.add_argument(
        "--full", action="store_true", help="tell the whole run, not the least that breaks the property"
    )


def _world_flags(parser: Any, default: str | None) -> None:
    text = f"; default: {default}, seeds take turns" if default else ""
    parser.add_argument(
        "--profile", metavar="NAME", default=default, help=f"how unkind the world is: {_PROFILES}{text}"
    )
    parser.add_argument("--shape", metavar="NAME", default=default, help=f"engines and ranks: {_SHAPES}{text}")
    parser.add_argument("--transfers", metavar="N", help=f"requests of a seed (default: {_TRANSFERS})")


# ---- explore -------------------------------------------------------------------------------------------------------


def _explore(options: argparse.Namespace) -> int:
    if options.exhaustive:
        return _exhaustive(options)
    for flag in ("deep", "only", "limit"):
        if getattr(options, flag):
            raise BadInput(f"--{flag} belongs to --exhaustive")
    seeds, jobs = _seeds(options.seeds), _whole("--jobs", options.jobs)
    transfers = _transfers(options.transfers)
    if options.json not in (None, "-"):
        check_writable("--json", options.json)
    if options.out is not None and not (Path(options.out).is_dir() and os.access(options.out, os.W_OK)):
        raise BadInput(f"--out {options.out} is not a folder that can be written to; make it first")

    from pushkv.sim.explore import runner, tally
    from pushkv.sim.explore.profiles import CONFIGS, PROFILES
    from pushkv.sim.explore.summary import summary

    for flag, value, known in (("--profile", options.profile, PROFILES), ("--shape", options.shape, CONFIGS)):
        if value != _ALL and value not in known:
            raise unknown(flag, value, [*known, _ALL])
    with progress_bar("explore", wanted=not options.no_progress, unit="seeds") as progress:
        found = runner.explore(
            seeds,
            profile=options.profile,
            shape=options.shape,
            transfers=transfers,
            jobs=jobs,
            until_failure=options.until_failure,
            progress=progress,
        )
    text = summary(found)
    if found.violations:
        text += "\n\n" + _tell(found, options.out)
    emit(options.json, tally.document(found), text)
    return 1 if found.violations else _INTERRUPTED if found.interrupted else 0


def _exhaustive(options: argparse.Namespace) -> int:
    for name in _OF_SEEDS:
        if getattr(options, name) != options.unset[name]:
            raise BadInput(f"--{name.replace('_', '-')} belongs to random seeds, not to --exhaustive")
    limit = None if options.limit is None else _whole("--limit", options.limit, most=1_000_000_000)

    from pushkv.sim.explore import exhaustive, tally

    if tally.versions()["build"] == "compiled":
        raise BadInput("--exhaustive copies the machines, which the compiled build does not allow: use the sources")
    scopes = exhaustive.chosen(options.only or "", deep=options.deep)
    if not scopes:
        raise BadInput(f"--only {options.only}: no world has that in its name")
    return exhaustive.main(scopes, limit, whole=not options.only)


def _tell(found: Any, out: str | None) -> str:
    """All violations; the first of each property are shrunk, in place."""
    from pushkv.sim.explore.case import play_case, to_json
    from pushkv.sim.explore.shrink import shrink
    from pushkv.sim.explore.transcript import shorten

    parts, told = [], set[str]()
    for index, case in enumerate(found.violations):
        lines = [f"seed {case.seed} ({case.profile}, {case.shape}, {case.check}) breaks {case.violation}"]
        lines.append(f"  {case.command}")
        if case.broken not in told and len(told) < _SHRUNK:
            told.add(case.broken)
            least = found.violations[index] = shrink(case)
            played = play_case(least, transcript=True)
            lines += ["", _least(least), *shorten(played.lines, _LINES), f"breaks {played.violation}"]
            if out is not None:
                path = Path(out) / f"{least.broken}-{least.profile}-{least.seed}.json"
                path.write_text(to_json(least), encoding="utf-8")
                lines.append(f"  pushkv replay {path}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _least(case: Any) -> str:
    actions, faults = len(case.actions or ()), len(case.faults or ())
    return f"The least of it that was found ({actions} actions, {faults} faults by chance):\n"


# ---- replay --------------------------------------------------------------------------------------------------------


def _replay(options: argparse.Namespace) -> int:
    from pushkv.sim.explore.case import Case, from_json, play_case
    from pushkv.sim.explore.shrink import shrink
    from pushkv.sim.explore.transcript import LEGEND

    chosen: list[Case]
    if re.fullmatch(r"\d+", options.case):
        chosen = _cases_of_seed(options)
    else:
        for flag in ("profile", "shape", "transfers"):
            if getattr(options, flag) is not None:
                raise BadInput(f"--{flag} belongs to a seed; a file says it itself")
        raw = _read(options.case)
        if raw.startswith(b'["start"'):
            return _replay_trace(options.case)
        chosen = [from_json(options.case, raw)]
    for case in chosen:
        played = play_case(case)
        if played.violation:
            if case.actions is None and not options.full:
                case = shrink(case)
                print(_least(case))
            played = play_case(case, transcript=True)
            print(LEGEND + "\n" + "\n".join(played.lines))
            print(f"\nbreaks {played.violation}")
            return 1
    if options.full:
        print(LEGEND + "\n" + "\n".join(play_case(chosen[0], transcript=True).lines) + "\n")
    print("no property is violated" + (" any more" if chosen[0].violation else ""))
    return 0


def _replay_trace(path: str) -> int:
    """What a connector's machines were told (``PUSHKV_TRACE``), told to new machines: the verdicts must be the same."""
    from pushkv.reference.trace import TraceError, replay

    try:
        told, expected = replay(Path(path))
    except TraceError as error:
        raise BadInput(str(error)) from None
    for number, (one, other) in enumerate(itertools.zip_longest(told, expected, fillvalue="nothing"), 1):
        if one != other:
            print(f"verdict {number} differs\n  the machines now say {one}\n  the trace says      {other}")
            return 1
    print(f"{len(expected)} verdicts, the machines say the same")
    return 0


def _cases_of_seed(options: argparse.Namespace) -> list[Any]:
    from pushkv.sim.explore import pairs
    from pushkv.sim.explore.case import EARLIER, RUN, SCHEMA, STALLED, Case
    from pushkv.sim.explore.profiles import CONFIGS, PROFILES

    for flag, value, known in (("--profile", options.profile, PROFILES), ("--shape", options.shape, CONFIGS)):
        if value is None:
            raise BadInput(f"a seed needs {flag}: choose from {', '.join(known)}")
        if value not in known:
            raise unknown(flag, value, known)
    profile, shape, transfers = options.profile, options.shape, _transfers(options.transfers)
    return [
        Case(schema=SCHEMA, seed=int(options.case), profile=profile, shape=shape, transfers=transfers, check=check)
        for check in (RUN, STALLED, EARLIER)
        if check == RUN or pairs.possible(check, CONFIGS[shape])
    ]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None


# ---- values --------------------------------------------------------------------------------------------------------


def _seeds(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise BadInput(f"--seeds {text} is not possible: expected A:B with A below B, as 0:1000")
    return range(int(match[1]), int(match[2]))


def _transfers(text: str | None) -> int:
    return _TRANSFERS if text is None else _whole("--transfers", text)


def _whole(flag: str, text: str, most: int = 10_000) -> int:
    if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= most:
        raise BadInput(f"{flag} {text} is not possible: expected a whole number from 1 to {most}")
    return int(text)
