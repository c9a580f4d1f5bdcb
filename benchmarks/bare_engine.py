"""vLLM's scheduler with both sides of a connector and no model: an engine whose thread can be watched.

Decides what a step is: what scheduler, engine core and model runner call, in their order. Every call of the connector
goes through a `Stopwatch`. `engine_thread.py` says what is done with it.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

BLOCK = 32
"""Tokens of a block; vLLM's CPU attention takes no less."""
HEADS, DIM = 1, 32
LAYER = "model.layers.0.self_attn.attn"
SCHEDULER_HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "get_loaded_kv_cache_group_ids", "has_pending_block_frees", "request_finished_all_groups",
    "update_connector_output", "take_events", "has_pending_push_work", "get_kv_connector_stats",
)  # fmt: skip
OF_REQUESTS = frozenset(
    ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "get_loaded_kv_cache_group_ids",
     "request_finished_all_groups")
)  # fmt: skip
"""Hooks that are called for a request, the others once in every step."""
OTHERS = 4
"""Requests that decode all the time and are none of the connector's business: the engine is busy."""
ROOM = 512
"""Blocks for each of them."""
WORK = bytes(16 << 10)
"""Large enough that others may run Python meanwhile, small enough for the innermost cache."""
IDLE_STEPS = 100
BEFORE = 5
"""Steps before a batch, so that the thread is as warm as a busy one."""


class Stopwatch:
    """What the engine's thread spends inside the wrapped calls: CPU time in µs, or how many functions it calls.

    The cost of reading the clock is taken off. While `counting`, calls of Python and C functions are counted instead
    (each costs more then, so nothing is timed): a number that neither caches nor neighbours change.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.counting = False
        self._called = 0
        self._clock_us = statistics.median(self._empty() for _ in range(4000))

    @staticmethod
    def _empty() -> float:
        begun = time.thread_time_ns()
        return (time.thread_time_ns() - begun) / 1e3

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.counting:
                return self._counted(name, function, *arguments, **named)
            time.thread_time_ns()  # what follows must not pay for the clock's own code
            begun = time.thread_time_ns()
            found = function(*arguments, **named)
            self._add(name, (time.thread_time_ns() - begun) / 1e3 - self._clock_us)
            return found

        return call

    def _counted(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._called = 0
        sys.setprofile(self._note)
        try:
            return function(*arguments, **named)
        finally:
            sys.setprofile(None)
            self._add(name, self._called - 1)  # but for the end of counting

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        self._called += event in ("call", "c_call")

    def _add(self, name: str, spent: float) -> None:
        self.spent[name] = self.spent.get(name, 0.0) + spent

    def take(self) -> dict[str, float]:
        """By hook, since the last call."""
        found, self.spent = self.spent, {}
        return found


@dataclass
class Cost:
    """Of a batch of requests on one side, or of an idle step: by hook, in µs or in calls, over so many steps.

    waits: what each of those steps cost in which nothing moved, without what vLLM asked about the requests (`asked`).
    """

    by_hook: dict[str, float]
    steps: int
    waits: list[float]
    asked: float = 0.0

    @property
    def sum(self) -> float:
        return sum(self.by_hook.values())

    def own(self, price: float) -> float:
        """What the requests have cost, where a step costs `price` anyway."""
        moved = self.sum - sum(self.waits) - self.asked
        return moved - (self.steps - len(self.waits)) * price + self.asked


class Engine:
    """vLLM's scheduler and both sides of a connector; a step as the engine core and the model runner make it."""

    def __init__(
        self,
        name: str,
        kind: dict[str, Any],
        port: int,
        model: Path,
        blocks: int,
        at_once: int,
        step_s: float,
        device: str,
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
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from pushkv.reference.versions import abilities

        torch.set_num_threads(1)
        longest, total = max(blocks + 2, ROOM) * BLOCK, (blocks + 2) * at_once
        extra: dict[str, Any] = {"kv_lease_duration": 600}
        module = None
        if kind["kv_connector"] == "PushConnector":
            module = "pushkv.reference.connector"
            size = 2 * total * BLOCK * HEADS * DIM * 4
            extra = {"host": "127.0.0.1", "port": port, "path": kind["path"], "landing_bytes": size,
                     "staging_bytes": size, "overlap": "chunk" if kind.get("chunks") else "none"}  # fmt: skip
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        cache.num_gpu_blocks = total + OTHERS * ROOM + 8
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), tokenizer=str(model), skip_tokenizer_init=True, dtype="bfloat16",
                                     max_model_len=longest, enforce_eager=True),
            cache_config=cache,
            scheduler_config=SchedulerConfig(max_num_seqs=at_once + OTHERS, max_num_batched_tokens=total * BLOCK,
                                             max_model_len=longest, is_encoder_decoder=False,
                                             enable_chunked_prefill=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector=kind["kv_connector"], kv_connector_module_path=module, engine_id=name,
                kv_role="kv_producer" if name == "P" else "kv_consumer", kv_buffer_device=device,
                kv_connector_extra_config=extra),
            device_config=DeviceConfig(device=device),
        )  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
        group = KVCacheGroupSpec([LAYER], spec)
        caches = KVCacheConfig(num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        if hasattr(cache, "kv_cache_layout"):
            cache.kv_cache_layout = caches.kv_cache_layout = "LBHNC"
        else:  # vLLM 0.26
            os.environ["VLLM_KV_CACHE_LAYOUT"] = "HND"
        with set_current_vllm_config(config):
            _one_rank(name)
            self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
            shape = cache.num_gpu_blocks, HEADS, BLOCK, 2 * DIM
            self.worker.register_kv_caches({LAYER: torch.zeros(shape, dtype=torch.bfloat16, device=device)})
            self.scheduler = Scheduler(
                vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK, log_stats=False,
            )  # fmt: skip
        self.connector: Any = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self.watch = Stopwatch()
        for hook in SCHEDULER_HOOKS:
            if hasattr(self.connector, hook):  # vLLM 0.26 has fewer
                setattr(self.connector, hook, self.watch.timed(hook, getattr(self.connector, hook)))
        self._work = self.watch.timed("worker side", self._worker_side)
        self._failed_requests = abilities(KVConnectorBase_V1).failed_requests
        self._chunks = kind.get("chunks", 1)
        self.name, self.port, self.step_s = name, port, step_s
        self._next = time.monotonic()
        self._keep_busy()

    def batch(self, first: int, count: int, blocks: int) -> Cost:
        """Requests `first`, `first` + 1 ... of `blocks` blocks, from their arrival until nothing of them is left."""
        requests = [self._request(number, blocks) for number in range(first, first + count)]
        chunk = -(-blocks // self._chunks) * BLOCK if self._chunks > 1 else 0
        self.scheduler.scheduler_config.long_prefill_token_threshold = chunk  # 0: no bound
        for _ in range(BEFORE):
            self.step()
        self.watch.take()
        cost = Cost({}, 0, [])
        for one in requests:
            self.scheduler.add_request(one)
        while any(one.request_id in self.scheduler.requests for one in requests):
            moved = self.step()
            spent = self.watch.take()
            if cost.steps and not moved:
                asked = sum(us for hook, us in spent.items() if hook in OF_REQUESTS)
                cost.waits.append(sum(spent.values()) - asked)
                cost.asked += asked
            for hook, us in spent.items():
                cost.by_hook[hook] = cost.by_hook.get(hook, 0.0) + us
            cost.steps += 1
        return cost

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

    def _keep_busy(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        for number in range(OTHERS):
            sampling = SamplingParams(max_tokens=(ROOM - 2) * BLOCK, ignore_eos=True)
            self.scheduler.add_request(Request(f"other-{number}", [7] * BLOCK, sampling, None))

    def idle(self) -> Cost:
        """The median step in which nothing happens but for the other requests, nothing being open."""
        found = []
        for _ in range(IDLE_STEPS):
            self.watch.take()
            self.step()
            found.append(Cost(self.watch.take(), 1, []))
        return sorted(found, key=lambda cost: cost.sum)[len(found) // 2]

    def step(self) -> bool:
        """One pass, at its time. Until then this thread computes, as one that runs a model: its core is its own, and
        the other threads of this process may run Python. Whether anything has moved for a request of a batch.
        """
        while time.monotonic() < self._next:
            zlib.crc32(WORK)
        self._next = time.monotonic() + self.step_s
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        out = self.scheduler.schedule()
        names, sampled = list(out.num_scheduled_tokens), []
        for name in names:
            request = self.scheduler.requests[name]
            left = len(request.all_token_ids) - request.num_computed_tokens
            sampled.append([7] if left == 0 else [])
        reports = KVConnectorOutput()
        self._work(out, reports)
        failed = getattr(reports, "failed_recving", None)
        if failed or reports.invalid_block_ids:
            raise RuntimeError(f"{self.name}: hand-overs have failed: {failed}, {self.counters()}")
        done = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=reports,
        )
        for outputs in self.scheduler.update_from_output(out, done).values():
            for one in outputs.outputs:
                reason = None if one.finish_reason is None else one.finish_reason.name
                if reason not in (None, "LENGTH") or (reason and one.request_id.startswith("other")):
                    raise RuntimeError(f"{self.name}: {one.request_id} ended with {reason}")
        told = reports.finished_sending or reports.finished_recving or out.finished_req_ids
        return bool(told) or len(names) > OTHERS

    def counters(self) -> dict[str, float]:
        """What pushkv's connector says of itself."""
        rank = getattr(getattr(self.worker, "_worker", None), "rank", None)
        return {} if rank is None else dict(rank.counters) | dict(self.connector._side().readings()[0])

    def _worker_side(self, out: Any, reports: Any) -> None:
        """What the model runner calls around a forward; the hooks of the layers, which do nothing, are left out."""
        worker = self.worker
        worker.handle_preemptions(out.kv_connector_metadata)
        worker.bind_connector_metadata(out.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        if self._failed_requests:
            results = worker.get_transfer_results(out.finished_req_ids)
            reports.finished_sending = results.finished_sending
            reports.finished_recving = results.finished_recving
            reports.failed_recving = results.failed_recving
        else:  # vLLM 0.26
            reports.finished_sending, reports.finished_recving = worker.get_finished(out.finished_req_ids)
        reports.invalid_block_ids = worker.get_block_ids_with_load_errors()
        reports.kv_connector_stats = worker.get_kv_connector_stats()
        reports.kv_cache_events = worker.get_kv_connector_kv_cache_events()
        reports.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()


def _one_rank(name: str) -> None:
    """vLLM's groups of one process."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    file = tempfile.NamedTemporaryFile(prefix=f"pushkv-{name}-")  # noqa: SIM115 - as long as the process
    init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
    initialize_model_parallel(1, 1)


def serve(name: str, pipe: Connection, *engine: Any) -> None:
    """A child: makes its engine, then answers (whether calls are counted, "idle" or (first, count, blocks)) with a
    `Cost`.
    """
    try:
        os.sched_setaffinity = lambda *_: None  # type: ignore[assignment]  # vLLM's worker takes one core for itself
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(engine[1])
        if engine[-1] == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = "01"[name == "D"]
        made = Engine(name, *engine)
        gc.collect()
        gc.freeze()  # as vLLM's engine does
        pipe.send("ready")
        while True:
            said = pipe.recv()
            if said is None:
                break
            counting, what = said
            made.watch.counting = counting
            pipe.send(made.idle() if what == "idle" else made.batch(*what))
    except BaseException as error:
        pipe.send(RuntimeError(f"{name}: {error!r}"))  # not every error can be sent
        raise
    finally:
        os._exit(0)
