"""How fast the simulator is, where its time goes, and how much memory a long run takes.

    .venv/bin/python benchmarks/simulator.py                # speed and shares, a minute
    .venv-fast/bin/python benchmarks/simulator.py           # the same compiled, after `make fast`
    .venv/bin/python benchmarks/simulator.py --million      # and a million requests, for the memory: minutes

Scenario: Qwen3-32B at TP4, 4,096 tokens in, 256 out, 4 requests per second, 1P1D on H200s over EFA. Speed is requests
per second of CPU time, the median of several runs; shares are of the functions' own time under cProfile, by part of
the program.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from pushkv.sim import scenario, world

PARTS = (
    ("protocol", "/model/protocol/"),
    ("timing", "/model/timing/"),
    ("engines", "/sim/engine.py", "/sim/scheduler.py", "/sim/blocks.py", "/sim/costs.py"),
    ("connectors and host", "/sim/baselines.py", "/sim/pushkv.py", "/sim/connector.py", "/sim/host.py"),
    ("transfers and wires", "/sim/transfers.py", "/sim/fabric.py", "/sim/network.py"),
    ("clients and log", "/sim/world.py", "/sim/metrics.py", "/sim/workload.py", "/sim/request.py", "/model/routing/"),
    ("simpy and clock", "/simpy/", "/sim/clock.py"),
)


def plan(mode: str, requests: int) -> scenario.Scenario:
    """The scenario above in ``mode``."""
    flags = {
        "mode": mode,
        "model": "qwen3-32b",
        "fabric": "efa-p5en",
        "prefill_tp": 4,
        "decode_tp": 4,
        "input_len": 4096,
        "output_len": 256,
        "qps": 4.0,
        "requests": requests,
    }
    return scenario.load(None, flags)


def speed(mode: str, requests: int, repeats: int) -> tuple[float, float, float, int, int]:
    """Requests per CPU second (median, least, most), events and machine steps of one run."""
    rates = []
    for _ in range(repeats):
        start = time.process_time()
        result = world.run(plan(mode, requests))
        rates.append(requests / (time.process_time() - start))
    return statistics.median(rates), min(rates), max(rates), result.totals.events, result.totals.machine_steps


def shares(mode: str, requests: int) -> dict[str, float]:
    """Part of the functions' own time per part of the program."""
    profile = cProfile.Profile()
    profile.enable()
    world.run(plan(mode, requests))
    profile.disable()
    own: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        name = next((part[0] for part in PARTS if any(place in file for place in part[1:])), "builtins and the rest")
        own[name] += own_s
    total = sum(own.values())
    return {name: part / total for name, part in sorted(own.items(), key=lambda item: -item[1])}


def million(mode: str, requests: int) -> None:
    """Run in this process and print its peak memory."""
    start = time.process_time()
    result = world.run(plan(mode, requests))
    cpu_s = time.process_time() - start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{mode:8} {len(result.log):>9,} requests  {cpu_s:7.0f} s CPU  peak {peak_mb:.0f} MB")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", default="pull,push,pushkv")
    parser.add_argument("--million", action="store_true", help="also one million requests, for the memory")
    parser.add_argument("--in-this-process", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        million(options.in_this_process, options.requests)
        return
    compiled = not str(world.__file__).endswith(".py")
    print(f"{'compiled' if compiled else 'interpreted'}, Python {platform.python_version()}")
    print(f"Qwen3-32B TP4, 4096 in, 256 out, 4 requests/s, 1P1D, {options.requests:,} requests")
    print(f"{'mode':8}{'requests per CPU second':>34}{'events':>12}{'machine steps':>16}")
    modes = options.modes.split(",")
    for mode in modes:
        median, least, most, events, steps = speed(mode, options.requests, options.repeats)
        print(f"{mode:8}{median:>10,.0f} (least {least:,.0f}, most {most:,.0f}){events:>16,}{steps:>14,}")
    for mode in [] if compiled else modes:  # a profiler sees no compiled function
        print(f"\nshare of own time, {mode}")
        for name, share in shares(mode, min(2_000, options.requests)).items():
            print(f"  {name:24}{share:6.1%}")
    if options.million:
        print()
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, "--in-this-process", modes[-1], "--requests", "1000000"], check=True)


if __name__ == "__main__":
    main()
