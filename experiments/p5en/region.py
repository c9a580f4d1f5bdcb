"""Where the published TTFT pair (1744 ms pull, 540 ms push) holds: over the number of prompts and P's prefill time.

Writes results/region.csv, results/region.svg and .png, and prints the sentence.
Run: .venv/bin/python experiments/p5en/region.py [--plot] [--first-seed 20]
--plot draws and prints from the CSV that is there. Another first seed takes other
arrivals, writes results/region_seed20.csv and draws nothing.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from point import (
    HISTORIES,
    MODES,
    PROMPTS,
    PUBLISHED_TTFT_MS,
    WITHIN,
    cached_for,
    history,
    history_of,
    load,
    parallel,
    prefill_ms,
    score,
)

RESULTS = Path(__file__).parent / "results"
SEEDS = 20
COUNTS = (20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 48)
TIMES_MS = (0.0, 30.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 110.0, 120.0, 130.0, 145.0)

Cell = tuple[int, float, int]
Row = dict[str, float]


def cell(where: Cell) -> Row:
    """20 runs of both modes."""
    count, time_ms, first = where
    cached = cached_for(time_ms)
    row: Row = {"prompts": count, "cached_fraction": round(cached, 4), "prefill_ms": round(prefill_ms(cached), 1)}
    ttft: dict[str, np.ndarray] = {}
    for mode in MODES:
        runs = [
            score(mode, cached, load(count, 8, seed), history(*history_of(mode, seed)))
            for seed in range(first, first + SEEDS)
        ]
        ttft[mode] = np.array([run.ttft_ms for run in runs])
        row |= {
            f"{mode}_ttft_ms": round(float(ttft[mode].mean()), 1),
            f"{mode}_ttft_sd_ms": round(float(ttft[mode].std()), 1),
            f"{mode}_tpot_ms": round(float(np.mean([run.tpot_ms for run in runs])), 2),
        }
    both = np.logical_and.reduce([abs(ttft[mode] / PUBLISHED_TTFT_MS[mode] - 1) <= WITHIN for mode in MODES])
    return row | {"seeds_with_both": int(both.sum()), "seeds": SEEDS}


def holds(row: Row) -> bool:
    """Whether both means are within 15 %."""
    return worst(row) <= WITHIN


def worst(row: Row) -> float:
    """The larger of the two relative errors."""
    return max(abs(row[f"{mode}_ttft_ms"] / PUBLISHED_TTFT_MS[mode] - 1) for mode in MODES)


def table(first: int) -> Path:
    """The CSV of the runs whose first seed is ``first``."""
    return RESULTS / ("region.csv" if first == 0 else f"region_seed{first}.csv")


def scan(first: int) -> list[Row]:
    """Every cell, written to its CSV."""
    cells = [(count, time_ms, first) for count in COUNTS for time_ms in TIMES_MS] + [(PROMPTS, 0.0, first)]
    needed = [history_of(mode, seed) for mode in MODES for seed in range(HISTORIES)]
    rows = []
    for done, row in enumerate(parallel(cell, cells, needed), 1):
        rows.append(row)
        print(f"\r{done} of {len(cells)} cells", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    with table(first).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def read(first: int = 0) -> list[Row]:
    """What an earlier scan has found."""
    with table(first).open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def sentence(rows: list[Row]) -> str:
    """The region in words."""
    inside = [row for row in rows if holds(row)]
    if not inside:
        return "No cell of the scan holds both means within 15 %."
    counts = [row["prompts"] for row in inside]
    times = [row["prefill_ms"] for row in inside]
    best = min(inside, key=worst)
    stated = next(row for row in rows if row["prompts"] == PROMPTS and row["cached_fraction"] == 1.0)
    return (
        f"Both means hold within 15 % over {SEEDS} seeds for {min(counts):.0f} to {max(counts):.0f} prompts"
        f" with P taking {min(times):.0f} to {max(times):.0f} ms\nper prompt ({len(inside)} of {len(rows)} cells);"
        f" closest: {best['prompts']:.0f} prompts, {best['prefill_ms']:.0f} ms: pull {best['pull_ttft_ms']:.0f}, push"
        f" {best['push_ttft_ms']:.0f} ms ({worst(best):.1%} off at most).\n"
        f"With {PROMPTS} prompts, all of them cached on P ({stated['prefill_ms']:.0f} ms): pull"
        f" {stated['pull_ttft_ms']:.0f}, push {stated['push_ttft_ms']:.0f} ms."
    )


def main() -> int:
    """Scan unless told to only draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="draw from the CSV, do not scan")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of the 20 seeds")
    options = parser.parse_args()
    first = options.first_seed
    rows = read(first) if options.plot else scan(first)
    print(sentence(rows))
    if first:
        return 0
    from region_plot import draw

    for path in draw(rows, RESULTS):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
