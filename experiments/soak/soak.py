"""Hours of requests against two real servers that are killed, restarted, overfilled and left by their clients.

    .venv-e2e/bin/python experiments/soak/soak.py --minutes 60

Every round sends a batch of requests with both legs at once, aborts some legs, kills one of the servers now and then
(it comes back under its name), and waits until both caches are empty. It fails at the first wrong answer, at a client
that is told nothing within the bound, at memory that stays, and at the end if resident memory has grown. The log goes
to ``results/``, a line of JSON per round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from e2e.answers import TOLERANCE, distance
from e2e.cluster import Cluster, Pair
from e2e.dispatch import Answer, Client, for_decode, for_prefill, fresh, words
from e2e.kinds import KINDS, Knobs
from e2e.model import make_model
from e2e.servers import Server, start_all

HERE = Path(__file__).parent
BOUND_S = 30.0
PROMPTS = 40
"""Different prompts; each comes back, so that prefix caches are hit."""
GROWTH_MIB = 150.0
"""Resident memory of one server may lie this much above what it was when warm."""


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
    rss_mib: dict[str, list[float]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        return self.wrong + self.silent + self.stuck


class Soak:
    """One run."""

    def __init__(self, cluster: Cluster, pair: Pair, draw: random.Random, kill_every: int) -> None:
        self.cluster = cluster
        self.pair = pair
        self.draw = draw
        self.kill_every = kill_every
        self.totals = Totals()

    async def one(self, client: Client, killing: bool) -> None:
        """One request; its legs may be aborted at any time."""
        index = self.draw.randrange(PROMPTS)
        prompt, tokens, tid = words(20 + 13 * index, 5000 + index), self.draw.choice((1, 8, 40)), fresh()
        fate = self.draw.choices(("none", "decode", "prefill", "both", "no prefill"), (16, 2, 2, 1, 1))[0]
        delay_s, after_s = self.draw.uniform(0, 0.4), self.draw.uniform(0, 0.6)
        params = for_decode(self.pair.prefill, tid)
        legs = {"decode": client.complete(self.pair.decode, prompt, tokens, params, request_id=tid)}
        if fate != "no prefill":
            legs["prefill"] = client.complete(self.pair.prefill, prompt, 1, for_prefill(tid), request_id=tid)
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

    async def round(self, number: int, at_once: int) -> None:
        """One batch, with a kill in every ``kill_every``-th."""
        killing = bool(self.kill_every) and number % self.kill_every == self.kill_every - 1
        async with Client(BOUND_S) as client:
            requests = [asyncio.create_task(self.one(client, killing)) for _ in range(at_once)]
            if killing:
                victim = self.draw.choice(self.pair.servers)
                await asyncio.sleep(self.draw.uniform(0.05, 0.8))
                self._count_preemptions()
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
        for server in self.pair.servers:
            self._note_memory(server)

    def _count_preemptions(self) -> None:
        self.totals.preemptions += int(self.pair.decode.metrics().get("vllm:num_preemptions_total", 0))

    def _note_memory(self, server: Server) -> None:
        """By start of the server: a restarted one begins anew."""
        self.totals.rss_mib.setdefault(f"{server.name}.{server.starts}", []).append(round(server.rss_mib(), 1))

    def growth(self) -> dict[str, float]:
        """Resident memory at the end above that after the third round, per start of a server, in MiB."""
        return {
            name: round(values[-1] - values[2], 1) for name, values in self.totals.rss_mib.items() if len(values) > 3
        }


async def run(soak: Soak, chosen: argparse.Namespace, log: TextIO) -> int:
    end, number = time.monotonic() + 60 * chosen.minutes, 0
    began = time.monotonic()
    while time.monotonic() < end and not soak.totals.bad:
        await soak.round(number, chosen.at_once)
        number += 1
        totals = soak.totals
        row: dict[str, Any] = {"round": number, "s": round(time.monotonic() - began, 1)}
        row |= {name: getattr(totals, name) for name in Totals.__slots__ if name != "rss_mib"}
        row["rss_mib"] = {name: values[-1] for name, values in totals.rss_mib.items() if name in soak_names(soak)}
        print(json.dumps(row), file=log, flush=True)
        print(
            f"\r{row['s']:7.0f} s  {totals.requests} requests, {totals.right} right, {totals.failed} failed, "
            f"{totals.aborted} aborted, {totals.kills} kills, {totals.bad} bad ",
            end="",
            file=sys.stderr,
        )
    print(file=sys.stderr)
    soak._count_preemptions()
    growth = soak.growth()
    bad = soak.totals.bad or any(value > GROWTH_MIB for value in growth.values())
    verdict = {"verdict": "bad" if bad else "good", "growth_mib": growth, "preemptions": soak.totals.preemptions}
    print(json.dumps(verdict), file=log, flush=True)
    print(json.dumps(verdict))
    return 1 if bad else 0


def soak_names(soak: Soak) -> set[str]:
    """The servers that run now, by name and start."""
    return {f"{server.name}.{server.starts}" for server in soak.pair.servers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", choices=sorted(KINDS), default="pushkv")
    parser.add_argument("--path", choices=("packed", "direct"), default="packed")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--at-once", type=int, default=10, help="requests of one round")
    parser.add_argument("--kill-every", type=int, default=8, help="a kill in every such round; 0: none")
    parser.add_argument("--blocks", type=int, default=72, help="KV blocks of each server")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pushkv-soak-"))
    kind = KINDS[chosen.connector]
    cluster = Cluster(kind, make_model(), folder)
    (HERE / "results").mkdir(exist_ok=True)
    path = HERE / "results" / f"{kind.name}-{chosen.path}-seed{chosen.seed}.jsonl"
    try:
        knobs = Knobs(path=chosen.path, lease_s=10.0, dead_peer_s=3.0)
        pair = cluster.pair(knobs, blocks=chosen.blocks, max_tokens=1024, batch_tokens=256)
        with open(path, "w", encoding="utf-8") as log:
            print(json.dumps(vars(chosen)), file=log)
            soak = Soak(cluster, pair, random.Random(chosen.seed), chosen.kill_every)
            return asyncio.run(run(soak, chosen, log))
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(main())
