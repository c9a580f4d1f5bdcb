"""Seeds under a load that provokes giving way: prefills preempted all the time beside finished ones, in tiny caches.

    python experiments/explore/loaded.py --seeds 0:1000 --jobs 2

Every seed is played in each of the worlds below, with 14 requests. Prints what breaks a property, and how many did.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from multiprocessing import Pool

from pushkv.sim.explore.profiles import CALM, CHURN, CONFIGS, HOSTILE, LOSSY, Driver
from pushkv.sim.explore.violation import Violation
from pushkv.sim.explore.world import World

TIGHT = {"modes": ("packed",), "requests": 3.0, "preempts": 1.5, "blocks": 12}
WORLDS = {
    "calm, many": replace(CALM, modes=("packed",), requests=4.0, preempts=1.0),
    "calm, small": replace(CALM, **TIGHT | {"blocks": 10}),
    "calm, slow": replace(CALM, **TIGHT, slow=0.2, parked=0.1),
    "calm, broken": replace(CALM, **TIGHT, broken=0.1, slow=0.2, aborts=0.5),
    "lossy": replace(LOSSY, **TIGHT),
    "hostile": replace(HOSTILE, **TIGHT | {"modes": ("packed", "early")}, slow=0.2),
    "churn": replace(CHURN, modes=("packed",), preempts=2.0, slow=0.2, parked=0.1),
}
SHAPES = list(CONFIGS.values())


def play(what: tuple[str, int]) -> str:
    """What breaks in one world with one seed; ``""`` where nothing does."""
    world, seed = what
    try:
        Driver(World(seed, WORLDS[world], SHAPES[seed % len(SHAPES)]), 14).play()
    except Violation as violation:
        return f"{world}, seed {seed}: {violation}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", metavar="A:B")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    first, stop = map(int, options.seeds.split(":"))
    ahead = [(world, seed) for seed in range(first, stop) for world in WORLDS]
    with Pool(options.jobs) as pool:
        broken = [found for found in pool.imap_unordered(play, ahead, 16) if found]
    print(*broken, f"{len(ahead):,} runs, {len(broken)} broke a property", sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
