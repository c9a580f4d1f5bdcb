"""What hand-overs cost vLLM's engine thread: CPU time per request and side, beside vLLM's own push connector.

    .venv-e2e/bin/python benchmarks/engine_thread.py

A prefill and a decode engine, each a process with vLLM's own scheduler, the connector's real scheduler and worker side,
NIXL and a real cache in memory; only the model is missing. Every hook that vLLM's engine thread calls is timed on that
thread (`time.thread_time_ns`, the cost of reading the clock taken off): what scheduler and model runner call in each
step, in their order, from the arrival of a batch of requests until nothing of them is left. So the steps in which they
only wait count too, as do those that vLLM would make anyway: the table says how many there were and what a step costs
in which nothing happens. `--at-once` requests share the steps, as in a busy engine; a step comes every `--step-ms`, and
the thread is busy in between. Medians over `--batches`. Absolute numbers are of this machine: compare within a run.
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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BLOCK = 32
"""Tokens of a block; vLLM's CPU attention takes no less."""
HEADS, DIM = 1, 32
LAYER = "model.layers.0.self_attn.attn"
KINDS: dict[str, dict[str, Any]] = {
    "vLLM push": {"kv_connector": "NixlPushConnector"},
    "pushkv direct": {"kv_connector": "PushConnector", "path": "direct"},
    "pushkv packed": {"kv_connector": "PushConnector", "path": "packed"},
}
SCHEDULER_HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "request_finished_all_groups", "update_connector_output", "has_pending_push_work", "get_kv_connector_stats",
)  # fmt: skip
WARM = 2
"""Batches of each size before those that count."""


class Stopwatch:
    """CPU time of one thread, spent inside what is wrapped, in ns."""

    def __init__(self) -> None:
        self.spent_ns = 0.0
        self.calls: dict[str, float] = {}
        self._clock_ns = 0.0
        for _ in range(3):
            laps = [self._lap(lambda: None) for _ in range(2000)]
            self._clock_ns = statistics.median(laps)
        self.spent_ns, self.calls = 0.0, {}

    def _lap(self, what: Callable[[], Any]) -> float:
        begun = time.thread_time_ns()
        what()
        return time.thread_time_ns() - begun

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            begun = time.thread_time_ns()
            found = function(*arguments, **named)
            self.add(name, time.thread_time_ns() - begun)
            return found

        return call

    def add(self, name: str, spent_ns: float) -> None:
        spent_ns -= self._clock_ns
        self.spent_ns += spent_ns
        self.calls[name] = self.calls.get(name, 0.0) + spent_ns


@dataclass
class Cost:
    """Of one request of a batch on one side, which took so many steps in all; or of one idle step."""

    us: float
    steps: int
    by_hook_us: dict[str, float]


class Engine:
    """vLLM's scheduler and both sides of a connector; a step as the engine core and the model runner make it."""

    def __init__(
        self, name: str, kind: dict[str, Any], port: int, model: Path, blocks: int, at_once: int, step_s: float
    ) -> None:
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
            set_current_vllm_config,
        )
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        torch.set_num_threads(1)
        longest, total = (blocks + 2) * BLOCK, (blocks + 2) * at_once
        extra: dict[str, Any] = {"kv_lease_duration": 600}
        module = None
        if kind["kv_connector"] == "PushConnector":
            module = "pushkv.reference.connector"
            size = 2 * total * BLOCK * HEADS * DIM * 4
            extra = {"host": "127.0.0.1", "port": port, "path": kind["path"], "landing_bytes": size,
                     "staging_bytes": size}  # fmt: skip
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        cache.num_gpu_blocks = total + 8
        cache.kv_cache_layout = "LBHNC"
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), tokenizer=str(model), skip_tokenizer_init=True, dtype="bfloat16",
                                     max_model_len=longest, enforce_eager=True),
            cache_config=cache,
            scheduler_config=SchedulerConfig(max_num_seqs=at_once, max_num_batched_tokens=total * BLOCK,
                                             max_model_len=longest, is_encoder_decoder=False,
                                             enable_chunked_prefill=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector=kind["kv_connector"], kv_connector_module_path=module, engine_id=name,
                kv_role="kv_producer" if name == "P" else "kv_consumer", kv_buffer_device="cpu",
                kv_connector_extra_config=extra),
            device_config=DeviceConfig(device="cpu"),
        )  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
        group = KVCacheGroupSpec([LAYER], spec)
        caches = KVCacheConfig(num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        caches.kv_cache_layout = cache.kv_cache_layout
        with set_current_vllm_config(config):
            _one_rank(name)
            self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
            self.worker.register_kv_caches(
                {LAYER: torch.zeros(cache.num_gpu_blocks, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16)}
            )
            self.scheduler = Scheduler(
                vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK, log_stats=False,
            )  # fmt: skip
        self.connector: Any = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self.watch = Stopwatch()
        for hook in SCHEDULER_HOOKS:
            setattr(self.connector, hook, self.watch.timed(hook, getattr(self.connector, hook)))
        self.name, self.port, self.step_s = name, port, step_s
        self._next = time.monotonic()

    def batch(self, first: int, count: int, blocks: int) -> Cost:
        """Requests `first`, `first` + 1 ... of `blocks` blocks, from their arrival until nothing of them is left."""
        requests = [self._request(number, blocks) for number in range(first, first + count)]
        self.watch.spent_ns, self.watch.calls = 0.0, {}
        steps = 0
        for one in requests:
            self.scheduler.add_request(one)
        while self.scheduler.has_requests():
            self.step()
            steps += 1
        return self._cost(steps, count)

    def _request(self, number: int, blocks: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        tid = f"t{number}"
        params: dict[str, Any] = {"do_remote_decode": True, "transfer_id": tid}
        if self.name == "D":
            params = {
                "do_remote_prefill": True, "transfer_id": tid, "remote_engine_id": "P", "remote_host": "127.0.0.1",
                "remote_port": self.port - 1, "tp_size": 1, "remote_request_id": f"cmpl-{tid}-0-00000000",
            }  # fmt: skip
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}, ignore_eos=True)
        prompt = [(number * 7919 + i) % 50000 for i in range(blocks * BLOCK)]
        return Request(f"cmpl-{tid}-0-0000000{self.name == 'D':d}", prompt, sampling, None)

    def idle(self) -> Cost:
        """The median step in which nothing happens."""
        found = []
        for _ in range(200):
            self.watch.spent_ns, self.watch.calls = 0.0, {}
            self.scheduler.has_requests()
            self.step()
            found.append(self._cost(1, 1))
        return sorted(found, key=lambda cost: cost.us)[len(found) // 2]

    def _cost(self, steps: int, count: int) -> Cost:
        calls = {name: ns / 1e3 / count for name, ns in self.watch.calls.items()}
        return Cost(self.watch.spent_ns / 1e3 / count, steps, calls)

    def step(self) -> None:
        """One pass, at its time; until then this thread is busy, as one that computes, and lets others run."""
        while time.monotonic() < self._next:
            time.sleep(0)
        self._next = time.monotonic() + self.step_s
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        out = self.scheduler.schedule()
        names, sampled = list(out.num_scheduled_tokens), []
        for name in names:
            request = self.scheduler.requests[name]
            left = len(request.all_token_ids) - request.num_computed_tokens
            sampled.append([7] if left == 0 or out.num_scheduled_tokens[name] == left else [])
        reports = KVConnectorOutput()
        worker = self.worker
        begun = time.thread_time_ns()
        worker.bind_connector_metadata(out.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(out.finished_req_ids)
        reports.invalid_block_ids = worker.get_block_ids_with_load_errors()
        reports.kv_connector_stats = worker.get_kv_connector_stats()
        reports.kv_cache_events = worker.get_kv_connector_kv_cache_events()
        reports.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        self.watch.add("worker side", time.thread_time_ns() - begun)
        reports.finished_sending = results.finished_sending
        reports.finished_recving = results.finished_recving
        reports.failed_recving = results.failed_recving
        if results.failed_recving or reports.invalid_block_ids:
            raise RuntimeError(f"{self.name}: a hand-over has failed: {results} {reports.invalid_block_ids}")
        done = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=reports,
        )
        for outputs in self.scheduler.update_from_output(out, done).values():
            for one in outputs.outputs:
                if one.finish_reason is not None and one.finish_reason.name != "LENGTH":
                    raise RuntimeError(f"{self.name}: {one.request_id} ended with {one.finish_reason.name}")


def _one_rank(name: str) -> None:
    """vLLM's groups of one process."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    file = tempfile.NamedTemporaryFile(prefix=f"pushkv-{name}-")  # noqa: SIM115 - as long as the process
    init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
    initialize_model_parallel(1, 1)


def serve(name: str, pipe: Connection, *engine: Any) -> None:
    """A child: makes its engine, then answers (first, count, blocks) with what it cost."""
    try:
        os.sched_setaffinity = lambda *_: None  # type: ignore[assignment]  # vLLM's worker takes one core for itself
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(engine[1])
        made = Engine(name, *engine)
        pipe.send("ready")
        while True:
            said = pipe.recv()
            if said is None:
                break
            pipe.send(made.idle() if said == "idle" else made.batch(*said))
    except BaseException as error:
        pipe.send(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        raise
    finally:
        os._exit(0)


class Side:
    """The parent's end of one engine."""

    def __init__(self, name: str, *engine: Any) -> None:
        self._pipe, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=serve, args=(name, there, *engine))
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


def measure(
    kind: dict[str, Any], sizes: list[int], batches: int, at_once: int, model: Path, step_s: float
) -> dict[str, Any]:
    """Costs of every size and side: {"idle": {side: Cost}, size: {side: [Cost, ...]}}."""
    from e2e.servers import free_ports  # type: ignore[import-not-found]

    ports = free_ports(2)
    sides = {
        name: Side(name, kind, port, model, max(sizes), at_once, step_s)
        for name, port in zip(("P", "D"), ports, strict=True)
    }
    found: dict[str, Any] = {}
    try:
        for side in sides.values():
            side.answer()
        numbers = itertools.count(0, at_once)
        for size in sizes:
            costs: dict[str, list[Cost]] = {name: [] for name in sides}
            for turn in range(WARM + batches):
                number = next(numbers)
                for side in sides.values():
                    side.ask((number, at_once, size))
                for name, side in sides.items():
                    cost = side.answer()
                    if turn >= WARM:
                        costs[name].append(cost)
            found[str(size)] = costs
        found["idle"] = {}
        for name, side in sides.items():
            side.ask("idle")
            found["idle"][name] = side.answer()
    finally:
        for side in sides.values():
            side.close()
    return found


def make_config(folder: Path, tokens: int) -> Path:
    """A model's configuration; no weights are needed."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM, "intermediate_size": 64,
        "vocab_size": 50001, "max_position_embeddings": tokens, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def table(results: dict[str, Any], sizes: list[int], batches: int, at_once: int, hooks: bool) -> None:
    print(
        f"CPU of the engine thread, µs per request: median (90 %) of {batches} batches of {at_once}; steps of a batch"
    )
    head = ["connector", "blocks", "prefill", "steps", "idle step", "decode", "steps", "idle step"]
    print(
        "".join(
            f"{word:<16}" if i == 0 else f"{word:>17}" if i in (2, 5) else f"{word:>10}" for i, word in enumerate(head)
        )
    )
    for kind, found in results.items():
        for size in sizes:
            row = f"{kind:<16}{size:>10,}"
            for side in ("P", "D"):
                costs = sorted(found[str(size)][side], key=lambda cost: cost.us)
                middle, high = costs[len(costs) // 2], costs[int(0.9 * (len(costs) - 1))]
                row += f"{f'{middle.us:.0f} ({high.us:.0f})':>17}{middle.steps:>10}{found['idle'][side].us:>10.1f}"
            print(row)
    if not hooks:
        return
    for kind, found in results.items():
        for size in sizes:
            for side in ("P", "D"):
                costs = sorted(found[str(size)][side], key=lambda cost: cost.us)
                parts = sorted(costs[len(costs) // 2].by_hook_us.items(), key=lambda part: -part[1])
                print(f"{kind}, {size:,} blocks, {side}: " + ", ".join(f"{name} {us:.1f}" for name, us in parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=8, help="requests of a batch")
    parser.add_argument("--step-ms", type=float, default=5.0, help="from one step to the next")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--hooks", action="store_true", help="say what each hook cost in the median batch")
    chosen = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                       "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING"})  # fmt: skip
    import vllm.v1.core.sched.scheduler  # noqa: F401 - imported once, before the forks

    results = {}
    with tempfile.TemporaryDirectory(prefix="pushkv-config-") as folder:
        model = make_config(Path(folder), (max(chosen.blocks) + 8) * BLOCK)
        for kind in chosen.kinds:
            results[kind] = measure(
                KINDS[kind], chosen.blocks, chosen.batches, chosen.at_once, model, chosen.step_ms / 1e3
            )
    table(results, chosen.blocks, chosen.batches, chosen.at_once, chosen.hooks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
