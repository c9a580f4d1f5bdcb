"""Fit the hand-over constants of the H200 pair to its rows at 1024 tokens and 4 requests per second, and nothing else.

Prints one posting constant (``allocated_s`` of the fabric profile nvlink-ucx) and a launch factor for each run
(``launch_factor`` of the h200 calibrations), then which limits of ``pushkv validate`` other choices would miss.

    .venv/bin/python experiments/h200_pair/fit.py
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from pushkv.model.timing import profiles
from pushkv.sim import catalog
from pushkv.sim.h200_pair import replay
from pushkv.sim.measured import TABLE_CALIBRATION, Server, find_data, read_servers
from pushkv.sim.report import Check
from pushkv.sim.scenario import Scenario
from pushkv.sim.validate import serving_checks

DATA = Path(__file__).parent / "data"
FITTED_AT = (1024, 4.0)
WINDOWS = {("pull", "33"): "READ", ("push", "42"): "WRITE"}  # mode and requests of the windows of that point

Run = tuple[str, str]  # configuration ("" is eager), mode


def posting() -> dict[str, float]:
    """Seconds per descriptor by operation, and of both pooled ("both")."""
    nvlink = profiles.fabric("nvlink-ucx")
    post_s: dict[str, float] = {}
    descriptors: dict[str, float] = {}
    with (DATA / "h200_transfer_windows.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            op = WINDOWS.get((row["mode"], row["n"]))
            if op is None or float(row["avg_MB"]) > 144.0:
                continue
            n = int(row["n"])
            post_s[op] = n * (float(row["avg_post_ms"]) * 1e-3 - (nvlink.read if op == "READ" else nvlink.write).call_s)
            descriptors[op] = n * float(row["avg_descs"])
    found = {op: post_s[op] / descriptors[op] for op in post_s}
    return found | {"both": sum(post_s.values()) / sum(descriptors.values())}


@contextmanager
def constants(read_s: float, write_s: float, factor: float) -> Iterator[None]:
    """Simulate with these, whatever the profiles say."""
    resolve = catalog.resolve

    def changed(plan: Scenario) -> catalog.Parts:
        parts = resolve(plan)
        fabric = parts.fabric
        fabric = replace(
            fabric, read=replace(fabric.read, allocated_s=read_s), write=replace(fabric.write, allocated_s=write_s)
        )
        calibration = replace(parts.hardware.calibration, launch_factor=factor)
        return replace(parts, fabric=fabric, hardware=parts.hardware.with_calibration(calibration))

    with mock.patch.object(catalog, "resolve", changed):
        yield


def launch_factor(server: Server, post_s: float) -> float:
    """The factor that gives the measured mean TTFT of the first point, by bisection."""
    (point,) = (p for p in server.points if (p.input_len, p.qps) == FITTED_AT)
    alone = replace(server, points=[point])
    low, high = 0.5, 5.0
    while high - low > 0.002:
        middle = (low + high) / 2
        with constants(post_s, post_s, middle):
            (found,) = replay(alone, TABLE_CALIBRATION[server.configuration])
        if found.ttft_ms.mean() < np.nanmean(point.ttft_ms):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def checks(servers: list[Server], read_s: float, write_s: float, factors: dict[Run, float]) -> list[Check]:
    """All checks with a limit, with these constants; Qwen3-32B never has a factor."""
    found = []
    for server in servers:
        factor = factors.get((server.configuration, server.mode), 1.0) if server.model == "qwen3-8b" else 1.0
        with constants(read_s, write_s, factor):
            for point, predicted in zip(
                server.points, replay(server, TABLE_CALIBRATION[server.configuration]), strict=True
            ):
                found += serving_checks(server, point, predicted)
    return [check for check in found if check.limit is not None]


def main() -> None:
    """Print the fit and its alternatives."""
    each = posting()
    print("us per descriptor: " + ", ".join(f"{op} {s * 1e6:.3f}" for op, s in each.items()))
    servers = read_servers(find_data(None))
    runs = {(s.configuration, s.mode): s for s in servers if s.model == "qwen3-8b"}
    factors = {run: launch_factor(server, each["both"]) for run, server in runs.items()}
    print("launch factors:    " + ", ".join(f"{c or 'eager'} {mode} {f:.3f}" for (c, mode), f in factors.items()))

    nvlink = profiles.fabric("nvlink-ucx")
    table = (nvlink.read.shuffled_s, nvlink.write.shuffled_s)
    two, one = (each["READ"], each["WRITE"]), (each["both"], each["both"])
    compiled = {run: f for run, f in factors.items() if run[0]}
    shared = {run: (factors["", "pull"] + factors["", "push"]) / 2 for run in factors if not run[0]}
    for label, post, used in (
        ("tables alone", table, {}),
        ("posting, READ and WRITE apart", two, {}),
        ("posting", one, {}),
        ("posting apart; compiled: factor per mode", two, compiled),
        ("posting and one eager factor; compiled: per mode", one, compiled | shared),
        ("eager and compiled: factor per mode, posting by the table", table, factors),
        ("posting and a push factor; compiled: per mode (used)", one, compiled | {("", "push"): factors["", "push"]}),
    ):
        found = checks(servers, *post, used)
        missed = [check for check in found if not check.passed]
        print(f"\n{label}: {len(missed)} of {len(found)} missed")
        for check in missed:
            print(f"    {check.name}{' (compiled)' * ('compiled' in check.group)} {check.error:+.1%}")


if __name__ == "__main__":
    main()
