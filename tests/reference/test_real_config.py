"""What vLLM's own configurations say: what is refused at start, and the caches of draft models; and how vLLM finds the
connector. Skipped without vLLM.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.utils import allocate_kv_cache

from pushkv.model.layout import GroupKind
from pushkv.reference.caches import Ranks, layouts_of
from pushkv.reference.connector_setup import rules_of, setup_of
from pushkv.reference.settings import SettingsError

from .test_caches import agrees, copy

BLOCK, HEAD = 32, 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "intermediate_size": 64, "vocab_size": 100,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 64,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "vocab_size": 100,
    "first_k_dense_replace": 1, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 3,
}  # fmt: skip


class Models:
    """Models by their configuration alone, and vLLM's configuration of an engine that serves them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, config: dict[str, Any]) -> str:
        found = self._folder / f"{config['model_type']}-{config['num_hidden_layers']}"
        found.mkdir(exist_ok=True)
        (found / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(found)

    def model(self, config: dict[str, Any], **more: Any) -> ModelConfig:
        name = self.folder(config)
        return ModelConfig(
            model=name, tokenizer=name, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64,
            enforce_eager=True, **more,
        )  # fmt: skip

    def engine(self, model: ModelConfig, layout: str = "LBHNC", **more: Any) -> VllmConfig:
        cache = CacheConfig(block_size=BLOCK)
        cache.kv_cache_layout = layout  # the engine core resolves it before it plans caches
        return VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            kv_transfer_config=KVTransferConfig(kv_connector="PushConnector", kv_role="kv_both", engine_id="e",
                kv_connector_module_path="pushkv.reference.connector",
            ),
            device_config=DeviceConfig(device="cpu"),
            **more,
        )  # fmt: skip

    def drafted(self, method: str, tokens: int, config: dict[str, Any] = LLAMA, **more: Any) -> VllmConfig:
        """An engine with a draft model: one layer of the same kind, or the model's own MTP layers."""
        model = self.model(config)
        draft = {} if method == "mtp" else {"model": self.folder({**config, "num_hidden_layers": 1})}
        speculative = SpeculativeConfig(
            method=method, num_speculative_tokens=tokens, target_model_config=model,
            target_parallel_config=ParallelConfig(), **draft,
        )  # fmt: skip
        return self.engine(model, speculative_config=speculative, **more)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def test_what_vllm_makes_by_default_is_served(models: Models) -> None:
    config = models.engine(models.model(LLAMA))
    setup = setup_of(config, {})
    assert (setup.tp_size, setup.block_tokens, setup.dtype) == (1, BLOCK, "bfloat16")


def test_sleep_mode_is_refused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 and 0.32 do not ask a connector whether it supports sleep."""
    from vllm.platforms import current_platform

    for able in ("is_sleep_mode_available", "is_cumem_allocator_available"):
        monkeypatch.setattr(type(current_platform), able, lambda self: True)
    config = models.engine(models.model(LLAMA, enable_sleep_mode=True))
    with pytest.raises(SettingsError, match=r"peers write into memory .* without --enable-sleep-mode"):
        setup_of(config, {})


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2: pushkv does not support decode context parallelism; set it to 1",
        ),
        (
            {"prefill_context_parallel_size": 2},
            "prefill_context_parallel_size is 2: pushkv does not support prefill context parallelism; set it to 1",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
    ],
)
def test_parallelism_that_is_refused(models: Models, parallel: dict[str, int], says: str) -> None:
    config = models.engine(models.model(LLAMA))
    config.parallel_config = ParallelConfig(**parallel)  # not every one passes vLLM's own checks on a CPU
    with pytest.raises(SettingsError, match=says):
        setup_of(config, {})


# ---------------------------------------------------------------- draft models


def full(heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=HEAD, dtype=torch.bfloat16)


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=HEAD, dtype=torch.bfloat16, sliding_window=64
    )  # fmt: skip


def layers(*specs: Any) -> dict[str, Any]:
    """A draft model's layers are numbered behind the target's."""
    return {f"model.layers.{number}.self_attn.attn": spec for number, spec in enumerate(specs)}


def caches_of(config: VllmConfig, specs: dict[str, Any], seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """vLLM's cache configuration, and the tensors that its model runner allocates for it, filled."""
    (caches,) = get_kv_cache_configs(config, [specs], [1 << 18])
    tensors = allocate_kv_cache(caches, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout())
    storage = next(iter(tensors.values())).untyped_storage()
    whole = torch.empty(0, dtype=torch.int8).set_(storage)
    whole.copy_(torch.randint(-100, 100, (whole.numel(),), generator=torch.Generator().manual_seed(seed)))
    return caches, tensors


LAYOUTS = pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
DRAFTS = {
    "as the target": ([full()] * 2, full()),
    "more heads": ([full()] * 2, full(4)),
    "behind windows": ([full(), window(), full(), window()], full()),
    "a window of its own": ([full()] * 2, window()),
}


@LAYOUTS
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_layers_of_a_draft_model_are_handed_over(models: Models, draft: str, layout: str) -> None:
    target, own = DRAFTS[draft]
    config = models.drafted("eagle", 2, layout=layout)
    specs = layers(*target, own)
    name = list(specs)[-1]
    made = []
    for seed in range(2):
        caches, tensors = caches_of(config, specs, seed)
        read, regions = layouts_of(tensors, caches, name=f"e{seed}", ranks=Ranks())
        assert {view.layer for view in read.views} == set(specs)
        for layer, spec in specs.items():
            numbers = tensors[layer].view(torch.int16)
            if layer == name or len(made) == 0:
                assert numbers.shape[-1] == 2 * HEAD and numbers.shape[1] == spec.num_kv_heads
                agrees(read, regions, layer, "k", lambda b, h, t, n=numbers: n[b, h, t, :HEAD])
                agrees(read, regions, layer, "v", lambda b, h, t, n=numbers: n[b, h, t, HEAD:])
        made.append((read, regions, tensors))
    if len(made[0][0].groups) > 1:
        return  # block lists per group: tests/layout
    (p, p_regions, sent), (d, d_regions, got) = made
    copy(p, p_regions, d, d_regions, [2, 3], [1, 4], 2 * BLOCK, 2 * BLOCK)
    for layer in specs:
        assert torch.equal(got[layer].view(torch.int16)[[1, 4]], sent[layer].view(torch.int16)[[2, 3]])


def test_a_draft_model_that_is_not_there_on_the_other_side_is_refused(models: Models) -> None:
    from pushkv.model.layout import pair

    sides = []
    for specs in (layers(full(), full(), full()), layers(full(), full())):
        caches, tensors = caches_of(models.drafted("eagle", 2), specs)
        sides.append(layouts_of(tensors, caches, name="e", ranks=Ranks())[0])
    with pytest.raises(ValueError, match=r"model\.layers\.2"):
        pair([sides[1]], [sides[0]])


@pytest.mark.parametrize(
    ("method", "config", "tokens", "backoff"),
    [("eagle", LLAMA, 3, 0), ("mtp", DEEPSEEK, 1, 0), ("mtp", DEEPSEEK, 3, 2)],
)
def test_what_several_draft_modules_read_ahead_is_computed_on_the_decode_engine(
    models: Models, method: str, config: dict[str, Any], tokens: int, backoff: int
) -> None:
    """Each module of a chain reads one token further than the one before it."""
    engine = models.drafted(method, tokens, config)
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=80, dtype=torch.bfloat16)
    specs = layers(*[latent if config is DEEPSEEK else full()] * 3)
    caches, tensors = caches_of(engine, specs)
    rules = rules_of(engine, caches, setup_of(engine, {}), KVConnectorBase_V1)
    assert rules.backoff == backoff
    assert rules.moved(40) == 40 - backoff and rules.moved(backoff) == 0
    read, _ = layouts_of(tensors, caches, name="e", ranks=Ranks())
    assert {view.layer for view in read.views} == set(specs)
    assert {group.kind for group in read.groups} == {GroupKind.FULL}


# ---------------------------------------------------------------- by its name alone

BY_NAME = """
import json, sys
from vllm.plugins import load_general_plugins
assert "pushkv.reference.connector" not in sys.modules
load_general_plugins()
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(kv_connector="PushConnector", kv_role="kv_producer")
found = KVConnectorFactory.get_connector_class(config)
print(json.dumps([found.__module__, found.__name__]))
"""


def test_vllm_finds_the_connector_by_its_name_through_its_entry_point() -> None:
    """In a process of its own, as vLLM's are: nothing but the installed package says where the connector is."""
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "pushkv" not in {entry.name for entry in entries}:
        pytest.skip("pushkv is not installed here")
    done = subprocess.run([sys.executable, "-c", BY_NAME], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["pushkv.reference.connector", "PushConnector"]


def test_vllm_makes_both_sides_by_the_name(models: Models) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from pushkv.reference.connector import PushConnector, register

    register()
    config = models.engine(models.model(LLAMA))
    config.kv_transfer_config.kv_connector_module_path = None
    caches, _ = caches_of(config, layers(full()))
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
    assert type(made) is PushConnector
    made.shutdown()
