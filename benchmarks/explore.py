"""How fast the exploration world is, with all checks on.

    .venv/bin/python benchmarks/explore.py
    .venv-fast/bin/python benchmarks/explore.py      # the compiled build, after `make fast`

Events per CPU second and CPU time of one seed, per profile: the best of several runs of the same seeds, over all
shapes. An event is one thing that the world does: a message delivered, a descriptor landed, a timer, a step of a rank,
a ledger or a host.
"""

from __future__ import annotations

import argparse

from pushkv.sim.explore import runner, tally
from pushkv.sim.explore.profiles import CONFIGS, PROFILES


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=25, help="of each profile")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    seeds = range(options.seeds)
    print(f"{options.seeds} seeds of each profile on {len(CONFIGS)} shapes, {runner.TRANSFERS} requests each")
    print(f"{tally.versions()['build']} build")
    print(f"{'profile':12}{'events per CPU second':>24}{'events per seed':>18}{'CPU ms per seed':>18}")
    events = cpu_s = 0.0
    for profile in PROFILES:
        best = min(
            (runner.explore(seeds, profile=profile).total for _ in range(options.repeats)), key=lambda t: t.cpu_s
        )
        events, cpu_s = events + best.events, cpu_s + best.cpu_s
        per_seed = best.events / len(seeds), 1000 * best.cpu_s / len(seeds)
        print(f"{profile:12}{best.events / best.cpu_s:>24,.0f}{per_seed[0]:>18,.0f}{per_seed[1]:>18.1f}")
    print(f"{'all':12}{events / cpu_s:>24,.0f}")


if __name__ == "__main__":
    main()
