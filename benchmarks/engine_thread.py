"""What hand-overs cost vLLM's engine thread: CPU time per request and side, beside vLLM's own push connector.

    .venv-e2e/bin/python benchmarks/engine_thread.py

A prefill and a decode engine, each a process with vLLM's own scheduler, the connector's real scheduler and worker side,
NIXL and a real cache in memory (`bare_engine.py`) or, with `--device cuda`, on a GPU each; only the model is missing.
Every hook that the engine's thread calls is timed on that thread (`time.thread_time_ns`, the cost of reading the clock
taken off), from the arrival of a batch of requests until nothing of them is left. The engine is a busy one: other
requests decode all the time, `--at-once` requests share the steps, a step comes every `--step-ms`, and the thread does
not sleep in between.

Such an engine makes its steps anyway, and each costs something with a connector that has nothing to do. So there are
two numbers: `all` is everything that was spent in the hooks, per request. `own` is what the request has cost: of steps
in which something moves for one of the batch all that is beyond the price of a step, of the others what vLLM asks about
the requests that wait. That price is the median of the others (`waiting`: threads of the connector copy and post
meanwhile, on the same cores); `quiet` is what a step costs with nothing open. `calls` is how many functions, of Python
and of C, the hooks called for a request beyond those of quiet steps: a number that neither caches nor neighbours
change. Medians over `--batches`. Times are of this machine: compare within a run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bare_engine import BLOCK, DIM, HEADS, ROOM, Cost, serve

KINDS: dict[str, dict[str, Any]] = {
    "vLLM push": {"kv_connector": "NixlPushConnector"},
    "pushkv direct": {"kv_connector": "PushConnector", "path": "direct"},
    "pushkv packed": {"kv_connector": "PushConnector", "path": "packed"},
    "pushkv chunk": {"kv_connector": "PushConnector", "path": "packed", "chunks": 4},
}
"""`chunks`: steps in which each prompt is computed."""
WARM = 2
"""Batches of each size before those that count."""


class Side:
    """The parent's end of one engine."""

    def __init__(self, name: str, *engine: Any, device: str) -> None:
        self._pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self._process = context.Process(target=serve, args=(name, there, *engine, device))
        self._process.start()

    def ask(self, what: Any) -> None:
        self._pipe.send(what)

    def answer(self, limit_s: float = 120.0) -> Any:
        if not self._pipe.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:.0f} s")
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(5.0)
        self._process.kill()
        self._process.join()


@dataclass
class Costs:
    """Of one connector, size and side: every batch, the batch whose calls were counted, and an empty step of each."""

    batches: list[Cost]
    counted: Cost
    empty: Cost
    empty_counted: Cost

    @property
    def waiting(self) -> float:
        """µs of a step in which nothing moves, while transfers are open."""
        return statistics.median([us for cost in self.batches for us in cost.waits] or [self.empty.sum])

    def own(self, at_once: int) -> list[float]:
        """µs per request without those of steps in which nothing moves, ascending."""
        return sorted(cost.own(self.waiting) / at_once for cost in self.batches)

    def all(self, at_once: int) -> list[float]:
        """µs per request, ascending."""
        return sorted(cost.sum / at_once for cost in self.batches)

    def calls(self, at_once: int) -> float:
        """Of functions, per request, without those of empty steps."""
        return (self.counted.sum - self.counted.steps * self.empty_counted.sum) / at_once


def measure(
    kind: dict[str, Any], sizes: list[int], batches: int, at_once: int, model: Path, step_s: float, device: str
) -> dict[tuple[int, str], Costs]:
    """By size and side."""
    from e2e.servers import free_ports  # type: ignore[import-not-found]

    ports = free_ports(2)
    sides = {
        name: Side(name, kind, port, model, max(sizes), at_once, step_s, device=device)
        for name, port in zip(("P", "D"), ports, strict=True)
    }
    numbers = itertools.count(0, at_once)

    def both(counting: bool, what: Any) -> dict[str, Cost]:
        for side in sides.values():
            side.ask((counting, what))
        return {name: side.answer() for name, side in sides.items()}

    try:
        for side in sides.values():
            side.answer()
        found: dict[int, list[dict[str, Cost]]] = {}
        counted: dict[int, dict[str, Cost]] = {}
        for size in sizes:
            found[size] = [both(False, (next(numbers), at_once, size)) for _ in range(WARM + batches)][WARM:]
            counted[size] = both(True, (next(numbers), at_once, size))
        empty, empty_counted = both(False, "idle"), both(True, "idle")
    finally:
        for side in sides.values():
            side.close()
    return {
        (size, name): Costs([turn[name] for turn in found[size]], counted[size][name], empty[name], empty_counted[name])
        for size in sizes
        for name in sides
    }


def make_config(folder: Path, tokens: int) -> Path:
    """A model's configuration; no weights are needed."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM, "intermediate_size": 64,
        "vocab_size": 50001, "max_position_embeddings": tokens, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def table(results: dict[str, dict[tuple[int, str], Costs]], batches: int, at_once: int) -> None:
    print(f"engine thread, per request: median (90 %) of {batches} batches of {at_once}; times in µs of CPU")
    print("| connector | blocks | side | own | all | calls | steps of a batch | waiting | quiet |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind, found in results.items():
        for (size, side), costs in found.items():
            own, every = (f"{_at(of, 0.5):.0f} ({_at(of, 0.9):.0f})" for of in (costs.own(at_once), costs.all(at_once)))
            steps = statistics.median_low(cost.steps for cost in costs.batches)
            row = (kind, f"{size:,}", side, own, every, f"{costs.calls(at_once):.0f}", steps, f"{costs.waiting:.0f}",
                   f"{costs.empty.sum:.0f}")  # fmt: skip
            print("| " + " | ".join(str(cell) for cell in row) + " |")


def hooks(results: dict[str, dict[tuple[int, str], Costs]], at_once: int) -> None:
    """What each hook cost in the median batch."""
    for kind, found in results.items():
        for (size, side), costs in found.items():
            middle = sorted(costs.batches, key=lambda cost: cost.sum)[len(costs.batches) // 2]
            for what, cost, empty in (("µs", middle, costs.empty), ("calls", costs.counted, costs.empty_counted)):
                own = {name: spent - cost.steps * empty.by_hook.get(name, 0.0) for name, spent in cost.by_hook.items()}
                parts = sorted(own.items(), key=lambda part: -part[1])
                told = ", ".join(f"{name} {spent / at_once:.1f}" for name, spent in parts)
                print(f"{kind}, {size:,} blocks, {side}, {what}: {told}")
                told = ", ".join(f"{name} {spent:.1f}" for name, spent in empty.by_hook.items())
                print(f"{kind}, a step in which nothing happens, {side}, {what}: {told}")


def _at(ascending: list[float], share: float) -> float:
    return ascending[int(share * (len(ascending) - 1))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=8, help="requests of a batch")
    parser.add_argument("--step-ms", type=float, default=20.0, help="from one step to the next")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: P on GPU 0, D on GPU 1")
    parser.add_argument("--hooks", action="store_true", help="say what each hook cost in the median batch")
    chosen = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                       "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING"})  # fmt: skip
    if chosen.device == "cpu":
        import vllm.v1.core.sched.scheduler  # noqa: F401 - imported once, before the forks

    results = {}
    with tempfile.TemporaryDirectory(prefix="pushkv-config-") as folder:
        model = make_config(Path(folder), max(*chosen.blocks, ROOM) * BLOCK + 8 * BLOCK)
        for kind in chosen.kinds:
            begun = time.monotonic()
            results[kind] = measure(
                KINDS[kind], chosen.blocks, chosen.batches, chosen.at_once, model, chosen.step_ms / 1e3, chosen.device
            )
            print(f"{kind}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    table(results, chosen.batches, chosen.at_once)
    if chosen.hooks:
        hooks(results, chosen.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
