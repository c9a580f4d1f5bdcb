"""The scheduler side under vLLM's own scheduler: what `vllm_like.py` says of it is so. Skipped without vLLM."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pushkv.reference.caches import Ranks
from pushkv.reference.rules import Rules
from pushkv.reference.scheduler import SchedulerSide
from pushkv.reference.worker import WorkerSide

from .engines import Cluster, Engine

pytest.importorskip("vllm")

BLOCK = 32
PATHS = pytest.mark.parametrize("path", ["packed", "chunks", "direct", "groups"])
"""groups: packed, and two groups of the cache."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
        "vocab_size": 1000, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Vllm:
    """One engine: vLLM's scheduler, our connector, a forward pass that writes token ids."""

    def __init__(self, cluster: Cluster, name: str, model: Path, *, path: str, policy: str, blocks: int = 20) -> None:
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
        )  # fmt: skip
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        blocks = 20
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        cache.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), tokenizer=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
                enforce_eager=True,
            ),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=48, max_model_len=512, is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="PushConnector", kv_connector_module_path="pushkv.reference.connector", engine_id=name,
                kv_role="kv_both", kv_load_failure_policy=policy,
            ),
            device_config=DeviceConfig(device="cpu"),
        )  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec([layer], spec) for layer in (["l", "m"] if path == "groups" else ["l"])]
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.connector: Any = self.scheduler.connector
        self.engine = Engine(cluster, name, packed=path != "direct", block_tokens=BLOCK)
        rules = self._rules(config, caches)
        assert rules.recompute == (policy == "recompute") and rules.failed_requests and rules.unit_tokens in (1, BLOCK)
        assert rules.loads_apart == (path == "groups")
        rules = replace(rules, chunked=path == "chunks")
        self.connector._scheduler = SchedulerSide(self.engine, rules)
        self.connector._scheduler.decode.pool = self.connector._pool
        self.worker = WorkerSide(self.connector._setup, Ranks(), lambda *arguments: self.engine)
        self.worker.rank = self.engine  # type: ignore[assignment]
        self.blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.ended: dict[str, str] = {}
        self.returned: dict[str, Any] = {}

    def _rules(self, config: Any, caches: Any) -> Rules:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        from pushkv.reference.connector_setup import rules_of

        return rules_of(config, caches, self.connector._setup, KVConnectorBase_V1)

    def add(self, name: str, prompt: list[int], params: dict[str, Any], max_tokens: int) -> str:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params}, ignore_eos=True)
        self.scheduler.add_request(Request(name, list(prompt), sampling, None))
        return name

    def step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        out = self.scheduler.schedule()
        orders = out.kv_connector_metadata.orders
        self.engine.fence(orders.preempted, orders.step)
        assert orders.early is bool(orders.load)  # a plain cache: nothing is zeroed or copied before the forward
        assert out.has_sync_kv_loads == (bool(orders.load) and not orders.apart)
        self.worker.begin(orders)
        self.worker.load(orders)
        names, sampled = list(out.num_scheduled_tokens), []
        for name in names:
            request = self.scheduler.requests[name]
            done, new = request.num_computed_tokens - out.num_scheduled_tokens[name], out.num_scheduled_tokens[name]
            table = self.scheduler.kv_cache_manager.get_block_ids(name)
            tokens = list(request.all_token_ids)
            for token in range(done) if not self.engine.broken else ():
                assert self.engine.cache[self.engine._cell(table, token)] == tokens[token], (name, token)
            for token in range(done, done + new):
                self.engine.cache[self.engine._cell(table, token)] = tokens[token]
            sampled.append([900] if done + new == len(tokens) else [])
        if orders.chunks:
            self.engine.enqueued(orders.step)
        reports = KVConnectorOutput()
        reports.finished_sending, reports.finished_recving, reports.failed_recving = self.worker.results()
        reports.invalid_block_ids = self.worker.invalid()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=reports,
        )
        for outputs in self.scheduler.update_from_output(out, result).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.ended[one.request_id] = one.finish_reason.name
                    self.returned[one.request_id] = one.kv_transfer_params

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def check_empty(self) -> None:
        assert not self.scheduler.requests
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.blocks
        self.connector._scheduler._hear()
        for _ in range(2):  # the second time there is nothing new
            pending = self.connector.has_pending_push_work()
            self.connector.get_kv_connector_stats()
        assert not pending
        assert self.engine.ledger.open() == (0, 0)


class Both:
    def __init__(self, model: Path, *, path: str, policy: str = "fail") -> None:
        self.cluster = Cluster()
        self.p = Vllm(self.cluster, "P", model, path=path, policy=policy)
        self.d = Vllm(self.cluster, "D", model, path=path, policy=policy)
        self.prompt = list(range(100, 170))

    def prefill(self) -> str:
        return self.p.add("cmpl-p-0-00000001", self.prompt, {"do_remote_decode": True, "transfer_id": "t"}, 1)

    def decode(self, max_tokens: int = 3) -> str:
        params = {
            "do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "P", "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1,
        }  # fmt: skip
        return self.d.add("cmpl-d-0-00000002", self.prompt, params, max_tokens)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for one in (self.p, self.d):
                one.step()
                self.cluster.settle()

    def until_quiet(self) -> None:
        self.cluster.settle()
        for _ in range(60):
            if not (self.p.scheduler.has_requests() or self.d.scheduler.has_requests()):
                break
            self.steps(1)
        self.p.check_empty()
        self.d.check_empty()


@PATHS
def test_a_prompt_is_handed_over(model: Path, path: str) -> None:
    both = Both(model, path=path)
    d, p = both.decode(), both.prefill()
    both.until_quiet()
    assert both.p.ended[p] == both.d.ended[d] == "LENGTH"
    assert both.p.returned[p]["remote_num_tokens"] == 70
    scattered = [one for one in both.d.engine.told if type(one).__name__ == "Loaded"]
    assert len(scattered) == 1


def test_an_idle_engine_steps_until_its_metrics_are_out(model: Path) -> None:
    both = Both(model, path="packed")
    both.decode(), both.prefill()
    both.until_quiet()
    connector, engine = both.d.connector, both.d.engine
    engine.counters = {"path:packed, setting": 1}
    assert both.d.scheduler.has_requests()  # something is new, and vLLM would sleep on it
    reported = connector.get_kv_connector_stats()
    assert reported is not None and reported.data["counters"] == {"path:packed, setting": 1}
    assert not both.d.scheduler.has_requests()
    engine.counters = {"path:packed, setting": 2}
    connector._busy_at -= 10.0
    engine.gauges = {"quarantined": 1.0}
    assert not both.d.scheduler.has_requests()  # idle for long: vLLM may pause or stop it; metrics leave by the outlet


def test_an_engine_whose_metrics_cannot_leave_by_themselves_serves_all_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(model, path="packed")
    connector = both.d.connector
    connector._open_outlet("office")
    thread = connector._outlet._thread
    assert thread.is_alive()
    connector.shutdown()
    assert not thread.is_alive()
    connector._outlet = None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    connector._open_outlet("office")
    assert connector._outlet is None and "with the engine's steps alone" in caplog.text
    both.decode(), both.prefill()
    both.until_quiet()


@pytest.mark.parametrize("steps", range(7))
@PATHS
def test_the_decode_leg_may_be_aborted_at_any_step(model: Path, path: str, steps: int) -> None:
    both = Both(model, path=path)
    both.prefill()
    d = both.decode()
    both.steps(steps)
    both.d.abort(d)
    both.until_quiet()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("path", ["packed", "groups"])
def test_a_load_that_fails(model: Path, path: str, policy: str) -> None:
    """Only the request itself is told of it, and the engine goes on."""
    both = Both(model, path=path, policy=policy)
    both.d.engine.broken = True
    p, d = both.prefill(), both.decode()
    for _ in range(60):
        both.steps(1)
    assert both.p.ended[p] == "LENGTH"
    assert both.d.ended[d] == ("ERROR" if policy == "fail" else "LENGTH")
    both.until_quiet()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@PATHS
def test_a_prefill_that_is_aborted(model: Path, path: str, policy: str) -> None:
    both = Both(model, path=path, policy=policy)
    p, d = both.prefill(), both.decode()
    both.steps(1)
    both.p.abort(p)
    both.until_quiet()
    assert both.d.ended[d] == ("ERROR" if policy == "fail" else "LENGTH")


@PATHS
def test_a_decode_that_is_preempted_after_its_load_computes_here(model: Path, path: str) -> None:
    both = Both(model, path=path)
    both.prefill()
    d = both.decode(max_tokens=12)
    both.steps(6)
    assert both.d.scheduler.running
    both.d.scheduler.reset_prefix_cache(reset_running_requests=True)
    both.until_quiet()
    assert both.d.ended[d] == "LENGTH"


@PATHS
def test_a_reset_of_the_prefill_engine_drops_what_it_holds(model: Path, path: str) -> None:
    """`reset_prefix_cache` says no while blocks are held, and resets the connector all the same: then they are not."""
    both = Both(model, path=path, policy="recompute")
    p = both.prefill()
    both.steps(4)
    assert both.p.ended[p] == "LENGTH" and both.p.scheduler.has_requests()
    assert not both.p.scheduler.reset_prefix_cache(reset_connector=True)
    both.steps(2)
    assert both.p.scheduler.reset_prefix_cache(reset_connector=True)
    d = both.decode()
    both.until_quiet()
    assert both.d.ended[d] == "LENGTH"
    assert not [one for one in both.d.engine.told if type(one).__name__ == "Loaded"]


@PATHS
def test_a_direct_write_in_flight_keeps_the_blocks_of_an_aborted_request(model: Path, path: str) -> None:
    both = Both(model, path=path)
    both.prefill()
    d = both.decode()
    both.cluster.stuck = True
    both.steps(5)
    both.d.abort(d)
    both.steps(3)
    free = both.d.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert (free == both.d.blocks) == (path != "direct")
    both.cluster.stuck = False
    both.p.engine.release_writes()
    both.until_quiet()


def test_an_unsettled_failure_is_computed_in_other_blocks_at_once(model: Path) -> None:
    """Direct, `recompute`: the blocks that may still be written are kept from everybody, and the request goes on."""
    both = Both(model, path="direct", policy="recompute")
    both.prefill()
    d = both.decode()
    both.cluster.stuck = True
    both.steps(5)
    both.cluster.cut.add("P")
    pool = both.d.scheduler.kv_cache_manager.block_pool
    for _ in range(40):
        both.d.step()
        both.cluster.wait(0.5)
    assert both.d.ended[d] == "LENGTH"
    assert pool.get_num_free_blocks() == both.d.blocks - 3  # 70 tokens
    assert both.d.scheduler.has_requests(), "nobody would give the blocks back"
    both.cluster.cut.clear()
    both.cluster.stuck = False
    both.p.engine.release_writes()
    for _ in range(10):
        both.cluster.wait(1.0)
        both.steps(1)
    both.d.check_empty()


@pytest.mark.parametrize("steps", range(1, 4))
@PATHS
def test_a_prefill_that_is_preempted_goes_on_later(model: Path, path: str, steps: int) -> None:
    """After each of its chunks but the last, with chunks under way to a peer that does not answer."""
    both = Both(model, path=path)
    both.prompt = list(range(100, 270))
    p, d = both.prefill(), both.decode()
    both.cluster.stuck = True
    for _ in range(steps):
        both.p.step()
        if steps != 2:
            both.cluster.settle()
    both.p.scheduler.reset_prefix_cache(reset_running_requests=True)
    both.cluster.stuck = False
    both.p.engine.release_writes()
    both.until_quiet()
    assert both.p.ended[p] == both.d.ended[d] == "LENGTH"
