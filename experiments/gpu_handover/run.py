"""Hand-over on two GPUs: vLLM's pull and push and pushkv's ways, one after the other, on the same prompts and arrivals.

    python experiments/gpu_handover/run.py --model 8b --modes chunk,packed,push,pull --rows open:16000:0.5:24

Needs vLLM, NIXL and pushkv installed, and two GPUs of one host. Every mode gets a fresh pair of servers, with random
weights that are equal on both sides. Rows:

    open:LENGTH:QPS:N    N requests by themselves, 64 tokens each
    busy:LENGTH:QPS:N    the same, 2 tokens each, with --decodes decodes on D, which are measured without them first;
                         busy:LENGTH:QPS:N:TOKENS sets their length (200): D computes the next one's short prompt itself
    loop:LENGTH:N        P is never idle: two requests at a time; P computes the same prompts alone first
    mixed:QPS:N          lengths of every kind, and how many are lost

What is known is printed and written at once into ``--out``: ``rows.jsonl``, ``requests.csv`` (one line per request,
with the stages of its hand-over), ``counters.jsonl`` (what our connectors counted), the servers' records and logs.
``--check N`` first compares the log-probabilities of N prompts with those that D computes alone. ``--modes`` and
``--rows`` go from left to right until ``--budget-s`` is spent.
``--device cpu --model tiny`` tries the script on a machine without GPUs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import report
from load import MIX, Served, arrivals, check, decodes, loop, one, prompt_of, prompts_of
from servers import OURS, SHAPES, URL, counters, make_model, records, serve, stop, up


class Run:
    """One mode on one pair of servers."""

    def __init__(self, session: aiohttp.ClientSession, mode: str, options: argparse.Namespace) -> None:
        self.session, self.mode, self.options = session, mode, options
        self.step_ms: float | None = None

    async def row(self, row: str) -> dict[str, Any]:
        """Measure one row; its line, printed and written."""
        kind, *numbers = row.split(":")
        extra: dict[str, Any] = {}
        if kind == "open":
            found = await self._open(row, [int(numbers[0])] * int(numbers[2]), float(numbers[1]), self.options.tokens)
        elif kind == "mixed":
            lengths = random.Random(3).choices(*zip(*MIX, strict=True), k=int(numbers[1]))
            lengths = [min(length, self.options.max_len - 100) for length in lengths]
            found = await self._open(row, lengths, float(numbers[0]), 16)
        elif kind == "busy":
            found, extra = await self._busy(row, int(numbers[0]), float(numbers[1]), *map(int, numbers[2:]))
        elif kind == "loop":
            found, extra = await self._loop(row, int(numbers[0]), int(numbers[1]))
        else:
            raise SystemExit(f"{row}: rows are open, busy, loop and mixed")
        await asyncio.sleep(0.3)  # the last records
        names = [records(self.options.out, self.mode, name) for name in "PD"] if self.mode in OURS else []
        known = report.read_records(names)
        of = {served.number: report.stages(served, known.get(served.number, {})) for served in found}
        line = report.row_of(self.mode, row, found, of) | extra
        if kind == "open" and "own_tpot" in line:
            self.step_ms = line["own_tpot"]
        line = report.finish(line, extra.get("tpot_alone") or self.step_ms)
        report.append_csv(self.options.out / "requests.csv", found, of)
        with (self.options.out / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        report.print_stages(self.mode, row, [of[served.number] for served in found if not served.error])
        return line

    async def _open(self, row: str, lengths: list[int], qps: float, tokens: int) -> list[Served]:
        prompts = prompts_of(row, lengths, self.options.seed)
        return await arrivals(self.session, self.mode, row, prompts, qps, tokens, self.options.seed)

    async def _busy(
        self, row: str, length: int, qps: float, count: int, tokens: int = 200
    ) -> tuple[list[Served], dict[str, Any]]:
        extra: dict[str, Any] = {"decodes": self.options.decodes}
        prompts = prompts_of(row, [length] * count, self.options.seed)
        async with decodes(self.session, self.options.decodes, tokens) as ended:
            await asyncio.sleep(self.options.baseline_s)
            alone = [1e3 * served.tpot_s for served in ended if not served.error]
            ended.clear()
            found = await arrivals(self.session, self.mode, row, prompts, qps, 2, self.options.seed)
            beside = [1e3 * served.tpot_s for served in ended if not served.error]
        extra["tpot_alone"], extra["tpot_alone_ci"] = report.mean_and_interval(alone)
        extra["tpot"], extra["tpot_ci"] = report.mean_and_interval(beside)
        extra["tpot_n"], extra["tpot_alone_n"] = len(beside), len(alone)
        extra["slower_pct"] = 100 * (extra["tpot"] / extra["tpot_alone"] - 1)
        return found, extra

    async def _loop(self, row: str, length: int, count: int) -> tuple[list[Served], dict[str, Any]]:
        _, alone_s = await loop(self.session, "prefill", row, length, count, 2, 1)
        found, each_s = await loop(self.session, self.mode, row, length, count, 2, 2)
        return found, {
            "prefill_each": 1e3 * each_s,
            "prefill_each_alone": 1e3 * alone_s,
            "prefill_slower_pct": 100 * (each_s / alone_s - 1),
        }


async def run_mode(
    session: aiohttp.ClientSession, mode: str, model: Path, options: argparse.Namespace, begun: float
) -> list[dict[str, Any]]:
    """One mode: servers up, warm, check, load, servers down."""
    for url in URL.values():
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url + "/health"):
                raise SystemExit(f"{url} is served already: end what runs there")
    servers = {name: serve(mode, name, model, options) for name in "PD"}
    lines: list[dict[str, Any]] = []
    try:
        ready = [await up(session, name, process, options.start_s) for name, process in servers.items()]
        spent = time.monotonic() - begun
        print(f"# {mode}: servers {'up' if all(ready) else 'FAILED'} after {spent:.0f} s", flush=True)
        if not all(ready):
            for name in "PD":
                text = (options.out / f"{mode}_{name}.log").read_text(encoding="utf-8", errors="replace")
                print(f"# end of {mode}_{name}.log:", *text.splitlines()[-15:], sep="\n  ", flush=True)
            return []
        chance = random.Random(1)
        for length in (600, 600, *(options.warm or ())):
            served = await one(session, mode, prompt_of(length, chance), 8)
            print(f"# warm {length}: {served.error or f'{1e3 * served.ttft_s:.1f} ms'}", flush=True)
            if served.error:
                return []
        if options.check:
            print(await check(session, mode, options.check, options.max_len - 100, options.seed), flush=True)
        run = Run(session, mode, options)
        for row in options.rows.split(",") if options.rows else ():
            if time.monotonic() - begun > options.budget_s:
                print("# out of time", flush=True)
                break
            lines.append(await run.row(row))
        if mode in OURS:
            counted = {"mode": mode} | {name: await counters(session, name) for name in "PD"}
            print(json.dumps(counted), flush=True)
            with (options.out / "counters.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(counted) + "\n")
    finally:
        stop(servers.values())
    return lines


async def main(options: argparse.Namespace) -> int:
    """All modes."""
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.out / "model"
    make_model(options.model, model)
    begun, lines = time.monotonic(), []
    limits = aiohttp.ClientTimeout(total=options.patience_s)
    connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)  # the servers close idle ones after five seconds
    async with aiohttp.ClientSession(timeout=limits, connector=connections) as session:
        for mode in options.modes.split(","):
            if time.monotonic() - begun > options.budget_s:
                print(f"# out of time before {mode}", flush=True)
                break
            lines += await run_mode(session, mode, model, options, begun)
    report.print_table(lines)

    return 0 if lines else 1


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--modes", default="chunk,packed,push,pull,direct")
    parser.add_argument("--rows", default="open:16000:0.5:20,open:1024:4:24,busy:16000:0.5:16,loop:16000:12")
    parser.add_argument("--tokens", type=int, default=64, help="per request of an open row")
    parser.add_argument("--decodes", type=int, default=8, help="running on D in a busy row")
    parser.add_argument("--baseline-s", type=float, default=10, help="how long they are measured alone")
    parser.add_argument("--check", type=int, default=0, help="prompts whose log-probabilities are compared first")
    parser.add_argument("--warm", type=lambda text: [int(n) for n in text.split(",")], help="prompts to warm up with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="vLLM's default compilation")
    parser.add_argument("--memory", type=float, default=0.88, help="vLLM's part of the GPU")
    parser.add_argument("--max-len", type=int, default=33000)
    parser.add_argument("--seqs", type=int, default=128)
    parser.add_argument("--device", default="cuda", help="where the caches lie, for vLLM's own connectors")
    parser.add_argument("--connections", type=int, default=32, help="CUDA_DEVICE_MAX_CONNECTIONS of the servers")
    parser.add_argument("--layout", default="", help="VLLM_KV_CACHE_LAYOUT of our servers; vLLM's own ask for HND")
    parser.add_argument("--queues", default="4x", help="CUDA_SCALE_LAUNCH_QUEUES of the servers; '' leaves it alone")
    parser.add_argument("--landing-bytes", type=int, default=5 << 30)
    parser.add_argument("--staging-bytes", type=int, default=2 << 30)
    parser.add_argument("--connector", default="pushkv.reference.connector:PushConnector", metavar="MODULE:CLASS")
    parser.add_argument("--settings", default="{}", help="further settings of pushkv, as JSON")
    parser.add_argument("--serve", default="", help="further arguments of both servers")
    parser.add_argument("--serve-p", default="", help="further arguments of the prefill server")
    parser.add_argument("--start-s", type=float, default=240)
    parser.add_argument("--budget-s", type=float, default=480, help="no further row begins after this")
    parser.add_argument("--patience-s", type=float, default=120, help="until a request counts as lost")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_handover"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    sys.exit(asyncio.run(main(options())))
