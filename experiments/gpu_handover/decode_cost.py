"""What a connector costs decodes that have nothing to do with it: time per token on servers that hand nothing over.

    python experiments/gpu_handover/decode_cost.py --variants none,packed,push,bare,empty,packed

Two servers at a time, one per GPU, each with the next two variants: ``none`` (no connector), vLLM's ``pull`` and
``push``, ``packed`` (pushkv), ``bare`` (pushkv, but the engine's thread calls nothing of it in a step), ``empty`` (no
transfer thread, NIXL agent or memory either), ``hnd`` (pushkv with the cache layout that vLLM's connectors ask for).
Which GPU serves which variant goes by the order, so name one on both. Milliseconds per token: median over the decodes,
mean, and half of its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import time
from typing import Any

import aiohttp
import load
import report
from run import options as run_options
from servers import make_model, serve, stop, up

CONNECTOR = {"bare": "staged:BareConnector", "empty": "staged:EmptyConnector"}


async def measured(session: aiohttp.ClientSession, name: str, count: int, tokens: int, seconds: float) -> list[float]:
    """Milliseconds per token of the decodes that ran on server ``name``, ``count`` at a time."""
    chance, ended = random.Random(7), []  # type: ignore[var-annotated]

    async def endless() -> None:
        while True:
            begun = time.perf_counter()
            _, times, _ = await load.complete(
                session, name, f"{name}-{begun}", load.prompt_of(64, chance), tokens, None
            )
            ended.append(1e3 * (times[-1] - times[0]) / (len(times) - 1))

    tasks = [asyncio.create_task(endless()) for _ in range(count)]
    await asyncio.sleep(2.0)
    ended.clear()
    await asyncio.sleep(seconds)
    failed = [task.exception() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        print(f"# {name}: {failed[0]!r}", flush=True)
    return ended


async def main(own: argparse.Namespace, rest: argparse.Namespace) -> int:
    """All variants, two at a time."""
    rest.out.mkdir(parents=True, exist_ok=True)
    rest.role = "kv_consumer"
    make_model(rest.model, rest.out / "model")
    variants = own.variants.split(",")
    limits, connections = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    async with aiohttp.ClientSession(timeout=limits, connector=connections) as session:
        for start in range(0, len(variants), 2):
            pair = dict(zip("PD", variants[start : start + 2], strict=False))
            servers = {}
            for name, variant in pair.items():
                chosen = copy.copy(rest)
                chosen.connector = CONNECTOR.get(variant, rest.connector)
                chosen.layout = "HND" if variant == "hnd" else rest.layout
                mode = variant if variant in ("none", "pull", "push") else "packed"
                servers[name] = serve(mode, name, rest.out / "model", chosen)
            try:
                ready = await asyncio.gather(*(up(session, n, p, rest.start_s) for n, p in servers.items()))
                if not all(ready):
                    print(f"# {pair}: {ready}", flush=True)
                    continue
                for count in own.decodes:
                    found = await asyncio.gather(
                        *(measured(session, name, count, own.tokens, own.seconds) for name in pair)
                    )
                    for (name, variant), values in zip(pair.items(), found, strict=True):
                        mean, half = report.mean_and_interval(values)
                        line: dict[str, Any] = {"variant": variant, "gpu": "PD".index(name), "decodes": count}
                        line |= {"n": len(values), "median": round(report.quantile(values, 0.5), 3) if values else None}
                        line |= {"mean": round(mean, 3), "ci": round(half, 3)}
                        print(json.dumps(line), flush=True)
                        with (rest.out / "decode_cost.jsonl").open("a", encoding="utf-8") as file:
                            file.write(json.dumps(line) + "\n")
            finally:
                stop(servers.values())
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="none,packed,push,bare,empty,packed")
    parser.add_argument("--decodes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=12)
    own, others = parser.parse_known_args()
    sys.exit(asyncio.run(main(own, run_options(others))))
