"""A million seeds against the protocol's properties, in portions that can be stopped, resumed and spread.

    .venv-fast/bin/python experiments/explore/run.py --jobs 32                  # `make fast` makes .venv-fast
    .venv-fast/bin/python experiments/explore/run.py --seeds 0:500000 --jobs 16 # one machine's half
    .venv-fast/bin/python experiments/explore/run.py --merge-only               # adds up what lies in results/portions

Each portion is a file in ``results/portions/``, in the form of ``pushkv explore --json``; a portion that is there, and
was played with the same sources of protocol and explorer, is not played again. ``results/million.json`` and
``results/million.txt`` are their sum; portions of different sources, or with seeds in common, are not added up. Where
no portion is left, a sum of the same sources is where it goes on from. SIGINT and SIGTERM stop it; the portion that was
being played is then lost, and nothing is half written.

Exit code 1 when a property broke, 2 when there is nothing that could be added up, 130 when stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pushkv.sim.explore import runner, tally
from pushkv.sim.explore.summary import summary

RESULTS = Path(__file__).parent / "results"


class NotOneSum(Exception):
    """Portions that cannot be added up."""


def write(path: Path, text: str) -> None:
    """All of ``text`` or nothing."""
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def is_played(path: Path) -> bool:
    """Whether the portion at ``path`` is there, of these sources and whole."""
    try:
        found = tally.from_json(path.read_bytes())
    except FileNotFoundError:
        return False
    return found.versions.get("sources") == tally.sources() and not found.interrupted


def adopt(sum_of_all: Path, portions: Path) -> None:
    """Make ``sum_of_all``, of these sources and in one piece, the only portion where there is none."""
    if not any(portions.glob("*.json")) and is_played(sum_of_all):
        text = sum_of_all.read_text(encoding="utf-8")
        ranges = tally.from_json(text.encode()).seeds
        if len(ranges) == 1:
            portions.mkdir(parents=True, exist_ok=True)
            write(portions / "{}-{}.json".format(*ranges[0]), text)


def play(seeds: range, portion: int, jobs: int, portions: Path) -> bool:
    """Play what is not there yet; ``False`` when interrupted."""
    portions.mkdir(parents=True, exist_ok=True)
    played = [range(*map(int, path.stem.split("-"))) for path in portions.glob("*.json") if is_played(path)]
    for start in range(seeds.start, seeds.stop, portion):
        stop = min(start + portion, seeds.stop)
        path = portions / f"{start}-{stop}.json"
        if any(start in part and stop - 1 in part for part in played):
            continue
        found = runner.explore(range(start, stop), jobs=jobs)
        if found.interrupted:
            return False
        write(path, json.dumps(tally.document(found)) + "\n")
        total = found.total
        print(
            f"{time.strftime('%H:%M:%S')} {start}:{stop} {len(found.violations)} violations, {found.wall_s:.0f} s,"
            f" {total.runs / found.wall_s:,.0f} runs/s, {total.events / total.cpu_s:,.0f} events per CPU second",
            flush=True,
        )
    return True


def merge(portions: Path) -> tally.Exploration:
    """The sum of all portions; ranges that touch become one. Raises `NotOneSum`."""
    found: tally.Exploration | None = None
    versions: dict[str, set[str]] = {}
    names: dict[str, list[str]] = {}
    stop = 0
    for path in sorted(portions.glob("*.json"), key=lambda path: int(path.stem.split("-")[0])):
        portion = tally.from_json(path.read_bytes())
        names.setdefault(portion.versions.get("sources", "no"), []).append(path.name)
        for name, value in portion.versions.items():
            versions.setdefault(name, set()).add(value)
        if portion.seeds[0][0] < stop:
            raise NotOneSum(f"{path.name} has seeds in common with the portion before it")
        stop = portion.seeds[-1][1]
        if found is None:
            found = portion
        else:
            found.add(portion)
    if found is None:
        raise NotOneSum("nothing was played yet")
    if len(names) > 1:
        kinds = "; ".join(f"{source}: {len(files)}, the first is {files[0]}" for source, files in names.items())
        raise NotOneSum(f"the portions were played with different sources ({kinds})")
    found.versions = {name: ", ".join(sorted(values)) for name, values in versions.items()}
    return found


def stop_at_sigterm() -> None:
    """SIGTERM does what SIGINT does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def main() -> int:
    """Play, add up, write down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0:1000000", metavar="A:B")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--portion", type=int, default=10_000, metavar="N", help="seeds of one file")
    parser.add_argument("--merge-only", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the files are")
    options = parser.parse_args()
    start, stop = map(int, options.seeds.split(":"))
    stop_at_sigterm()
    portions = options.results / "portions"
    try:
        adopt(options.results / "million.json", portions)
        whole = options.merge_only or play(range(start, stop), options.portion, options.jobs, portions)
        found = merge(portions)
        text = summary(found)
        write(options.results / "million.json", json.dumps(tally.document(found), indent=1) + "\n")
        versions = ", ".join(f"{name} {value}" for name, value in found.versions.items())
        write(options.results / "million.txt", f"{text}\n\n{versions}; {found.jobs} workers\n")
    except KeyboardInterrupt:
        return 130
    except NotOneSum as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 1 if found.violations else 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())
