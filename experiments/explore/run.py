"""A million seeds against the protocol's properties, in portions that can be stopped, resumed and spread.

    .venv/bin/python experiments/explore/run.py --jobs 32
    .venv/bin/python experiments/explore/run.py --seeds 0:500000 --jobs 16      # one machine's half
    .venv/bin/python experiments/explore/run.py --merge-only                    # adds up what lies in results/

Each portion is a file in ``results/portions/``, in the form of ``pushkv explore --json``; a portion that is there is
not played again. ``results/million.json`` and ``results/million.txt`` are their sum. Exit code 1 when a property broke.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pushkv.sim.explore import runner, tally
from pushkv.sim.explore.summary import summary

RESULTS = Path(__file__).parent / "results"
PORTIONS = RESULTS / "portions"


def play(seeds: range, portion: int, jobs: int) -> bool:
    """Play what is not there yet; ``False`` when interrupted."""
    PORTIONS.mkdir(parents=True, exist_ok=True)
    for start in range(seeds.start, seeds.stop, portion):
        stop = min(start + portion, seeds.stop)
        path = PORTIONS / f"{start}-{stop}.json"
        if path.exists():
            continue
        found = runner.explore(range(start, stop), jobs=jobs)
        if found.interrupted:
            return False
        path.write_text(json.dumps(tally.document(found)) + "\n", encoding="utf-8")
        total = found.total
        print(
            f"{time.strftime('%H:%M:%S')} {start}:{stop} {len(found.violations)} violations, {found.wall_s:.0f} s,"
            f" {total.runs / found.wall_s:,.0f} runs/s, {total.events / total.cpu_s:,.0f} events per CPU second",
            flush=True,
        )
    return True


def merge() -> tally.Exploration | None:
    """The sum of all portions; ranges that touch become one."""
    found: tally.Exploration | None = None
    for path in sorted(PORTIONS.glob("*.json"), key=lambda path: int(path.stem.split("-")[0])):
        portion = tally.from_json(path.read_bytes())
        if found is None:
            found = portion
        else:
            found.add(portion)
    return found


def main() -> int:
    """Play, add up, write down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0:1000000", metavar="A:B")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--portion", type=int, default=50_000, metavar="N", help="seeds of one file")
    parser.add_argument("--merge-only", action="store_true")
    options = parser.parse_args()
    start, stop = map(int, options.seeds.split(":"))
    whole = options.merge_only or play(range(start, stop), options.portion, options.jobs)
    found = merge()
    if found is None:
        print("nothing was played yet", file=sys.stderr)
        return 2
    text = summary(found)
    (RESULTS / "million.json").write_text(json.dumps(tally.document(found), indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items())
    (RESULTS / "million.txt").write_text(f"{text}\n\n{versions}; {found.jobs} workers\n", encoding="utf-8")
    print(text)
    return 1 if found.violations else 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())
