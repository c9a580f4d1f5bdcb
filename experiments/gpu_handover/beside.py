"""pushkv beside vLLM's offloading to CPU memory, both under ``MultiConnector``, on two GPUs.

    python experiments/gpu_handover/beside.py --model 8b --count 40

Prompts are handed over; then both servers forget their prefix caches on the GPU and keep those in CPU memory, and the
same prompts are handed over again: P loads them instead of computing them, and sends what it has loaded. A third time
D alone is asked, which loads too. Every answer is compared with one that D computed before anything was stored. Printed
per pass: the largest distance of a log-probability, tokens that came from CPU memory or a peer (vLLM's own counters),
and what was handed over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
from load import Served, distance, one, prompt_of
from run import options as options_of_run
from servers import URL, make_model, serve, stop, up

LENGTHS = (17, 100, 1000, 3000, 9000)
SERIES = ("vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")
OWN = ("pushkv:transfers_sent_total", "pushkv:transfers_received_total", "pushkv:transfers_failed_total")


async def told(session: aiohttp.ClientSession) -> dict[str, float]:
    """Counters of both servers, by server and name."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for name, url in URL.items():
        async with session.get(url + "/metrics") as answer:
            for family in text_string_to_metric_families(await answer.text()):
                for sample in family.samples:
                    if sample.name in SERIES + OWN:
                        key = f"{name} {sample.name.split(':')[1].removesuffix('_total')}"
                        found[key] = found.get(key, 0.0) + sample.value
    return found


async def forget(session: aiohttp.ClientSession) -> None:
    """Both servers forget what is cached on the GPU."""
    for url in URL.values():
        async with session.post(url + "/reset_prefix_cache") as answer:
            assert answer.status == 200, await answer.text()


async def asked(session: aiohttp.ClientSession, mode: str, prompts: list[list[int]]) -> list[Served]:
    """Eight at a time."""
    found: list[Served] = []
    for start in range(0, len(prompts), 8):
        wave = [one(session, mode, prompt, 8, logprobs=True) for prompt in prompts[start : start + 8]]
        found += await asyncio.gather(*wave)
    return found


async def main(chosen: argparse.Namespace) -> int:
    chosen.out.mkdir(parents=True, exist_ok=True)
    model = chosen.out / "model"
    make_model(chosen.model, model)
    chance = random.Random(4)
    prompts = [prompt_of(chance.choice(LENGTHS), chance) for _ in range(chosen.count)]
    lines: list[dict[str, Any]] = []
    limits, failed = aiohttp.ClientTimeout(total=chosen.patience_s), 0
    async with aiohttp.ClientSession(timeout=limits) as session:
        for mode in chosen.modes.split(","):
            servers = {name: serve(mode, name, model, chosen) for name in "PD"}
            try:
                ready = [await up(session, name, process, chosen.start_s) for name, process in servers.items()]
                if not all(ready):
                    for name in "PD":
                        text = (chosen.out / f"{mode}_{name}.log").read_text(encoding="utf-8", errors="replace")
                        print(f"# end of {mode}_{name}.log:", *text.splitlines()[-30:], sep="\n  ", flush=True)
                    return 1
                expected = await asked(session, "alone", prompts)
                for number, how in enumerate(("first", "again, from CPU memory", "D alone")):
                    await forget(session)
                    before = await told(session)
                    got = await asked(session, "alone" if number == 2 else mode, prompts)
                    await asyncio.sleep(1.5)  # statistics come with a step
                    after = await told(session)
                    bad = [served.error for served in got if served.error]
                    failed += len(bad)
                    far = max(distance(a, b) for a, b in zip(expected, got, strict=True))
                    failed += far > 0.25
                    grown = {key: int(value - before.get(key, 0)) for key, value in after.items()}
                    line = {
                        "mode": mode,
                        "pass": how,
                        "prompts": len(got),
                        "failed": len(bad),
                        "distance": round(far, 4),
                    }
                    lines.append(line | {key: value for key, value in grown.items() if value})
                    print(json.dumps(lines[-1]), *bad[:2], flush=True)
            finally:
                stop(servers.values())
    (chosen.out / "beside.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 1 if failed else 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--modes", default="packed,chunk,direct")
    parser.add_argument("--count", type=int, default=40, help="prompts")
    parser.add_argument("--cpu-bytes", type=int, default=16 << 30, help="CPU memory of each server for what is stored")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_beside"))
    mine, rest = parser.parse_known_args()
    chosen = options_of_run(["--model", mine.model, "--modes", mine.modes, "--out", str(mine.out), *rest])
    chosen.count, chosen.offload_bytes = mine.count, mine.cpu_bytes
    return chosen


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    sys.exit(asyncio.run(main(options())))
