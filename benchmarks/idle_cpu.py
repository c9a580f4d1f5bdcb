"""What an idle pair costs beside an idle server without a connector: processor time while nothing happens.

    .venv-e2e/bin/python benchmarks/idle_cpu.py

Starts three real servers, a plain one and a pair with pushkv, has one prompt handed over (so that the two know each
other and every thread has run), waits, and reads the processor time of each server's processes (`/proc/<pid>/stat`,
ticks of 10 ms) over `--seconds`. `--connector vllm` measures vLLM's own push connector instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.cluster import Cluster
from e2e.kinds import KINDS, Knobs
from e2e.model import make_model
from e2e.servers import Server, start_all

SETTLE_S = 5.0
"""After the request, so that what it started has ended."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(server: Server) -> dict[str, float]:
    """Processor time so far, in seconds, of every thread of a server's processes, by the thread's name and number."""
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) != server.pid:
                continue
            for task in (entry / "task").iterdir():
                name, _, rest = (task / "stat").read_text(encoding="utf-8").rpartition(") ")
                fields = rest.split()
                label = f"{name.partition('(')[2]}/{task.name}"
                found[label] = (int(fields[11]) + int(fields[12])) * TICK_S
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", choices=sorted(KINDS), default="pushkv")
    parser.add_argument("--path", choices=("packed", "direct"), default="packed")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--threads", action="store_true", help="say which threads ran")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    cluster = Cluster(KINDS[chosen.connector], make_model(), Path(tempfile.mkdtemp(prefix="pushkv-idle-")))
    try:
        start_all(cluster.oracle.server)
        pair = cluster.pair(Knobs(path=chosen.path, trace=False))
        asyncio.run(pair.right())
        pair.emptied()
        time.sleep(SETTLE_S)
        servers = [cluster.oracle.server, *pair.servers]
        begun, before = time.monotonic(), [cpu_s(server) for server in servers]
        time.sleep(chosen.seconds)
        after, seconds = [cpu_s(server) for server in servers], time.monotonic() - begun
    finally:
        cluster.close()
    print(f"processor time of idle servers over {seconds:.0f} s, connector {chosen.connector}, {chosen.path}")
    print(f"{'server':<10}{'threads':>10}{'CPU s':>10}{'% of a core':>14}{'beyond plain':>14}")
    plain = 0.0
    for server, first, last in zip(servers, before, after, strict=True):
        spent = {name: value - first.get(name, 0.0) for name, value in last.items()}
        share = 100 * sum(spent.values()) / seconds
        plain = plain if server is not servers[0] else share
        row = f"{server.name:<10}{len(last):>10}{sum(spent.values()):>10.2f}{share:>14.2f}"
        print(row + (f"{share - plain:>14.2f}" if server is not servers[0] else ""))
        if chosen.threads:
            for name, value in sorted(spent.items(), key=lambda item: -item[1])[:6]:
                print(f"    {name:<32}{100 * value / seconds:>8.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
