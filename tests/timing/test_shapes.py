"""Byte and parameter counts of model shapes, and what a broken config says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pushkv.model.timing import ModelShape, ProfileError, profiles

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
}


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("qwen3-8b", 8.19, 147456),
        ("qwen3-14b", 14.77, 163840),
        ("qwen3-32b", 32.76, 262144),
        ("llama-3.1-8b", 8.03, 131072),
        ("llama-3.3-70b", 70.55, 327680),
    ],
)
def test_built_in_shapes_have_their_published_size(name: str, billions: float, kv_bytes: int) -> None:
    shape = profiles.model(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert shape.kv_bytes_per_token == kv_bytes


def test_config_of_hugging_face_is_read_and_other_keys_are_ignored() -> None:
    assert ModelShape.from_config("qwen3-8b", CONFIG) == profiles.model("qwen3-8b")
    assert ModelShape.from_config("qwen3-8b", {"text_config": CONFIG}) == profiles.model("qwen3-8b")


def test_absent_optional_fields_take_the_transformers_defaults() -> None:
    config = {k: v for k, v in CONFIG.items() if k not in ("head_dim", "num_key_value_heads", "torch_dtype")}
    shape = ModelShape.from_config("m", config)
    assert (shape.head_dim, shape.kv_heads, shape.dtype_bytes) == (128, 32, 2)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_share_the_cache_evenly_up_to_one_kv_head_each(tp: int) -> None:
    shape = profiles.model("qwen3-32b")
    assert shape.kv_bytes_per_token_rank(tp) * tp == shape.kv_bytes_per_token
    assert shape.weight_bytes_rank(tp) * tp == pytest.approx(2 * shape.parameters)


def test_kv_heads_are_replicated_past_their_number() -> None:
    shape = profiles.model("qwen3-32b")
    assert shape.kv_bytes_per_token_rank(16) == shape.kv_bytes_per_token_rank(8)
    assert shape.weight_bytes_rank(16) * 16 > 2 * shape.parameters


def test_tied_embeddings_are_stored_once_and_read_all_the_same() -> None:
    tied = ModelShape.from_config("m", {**CONFIG, "tie_word_embeddings": True})
    free = ModelShape.from_config("m", CONFIG)
    assert free.parameters - tied.parameters == CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert free.active_parameters == tied.active_parameters
    assert free.read_bytes_rank(1) == tied.read_bytes_rank(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a finite number above 0"),
        ({"num_hidden_layers": 1.5}, "expected a whole number"),
        ({"vocab_size": math.nan}, "vocab_size is nan"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"vocab_size": "many"}, "expected a number"),
        ({"vocab_size": True}, "expected a number"),
        ({"num_key_value_heads": 5}, "not a multiple of 5 KV heads"),
        ({"torch_dtype": "int3"}, "dtype is 'int3', expected one of"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"num_experts": 128}, "only dense models"),
        ({"kv_lora_rank": 512}, "only dense models"),
        ({"quantization_config": {"quant_method": "fp8"}}, "only unquantised weights"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
    ],
)
def test_unusable_config_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ProfileError, match=says) as caught:
        ModelShape.from_config("m", {**CONFIG, **change})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("model m:")


@pytest.mark.parametrize("config", [None, [], 3])
def test_config_that_is_no_mapping_is_refused(config: Any) -> None:
    with pytest.raises(ProfileError, match="must be a table"):
        ModelShape.from_config("m", config)


@pytest.mark.parametrize(("tp", "says"), [(3, "does not divide 32"), (0, "TP is 0"), (64, "does not divide 32")])
def test_tp_that_does_not_fit_is_refused(tp: int, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        profiles.model("qwen3-8b").check_tp(tp)


def test_tp_that_splits_no_kv_head_evenly_is_refused() -> None:
    shape = ModelShape.from_config("m", {**CONFIG, "num_attention_heads": 24, "num_key_value_heads": 8})
    with pytest.raises(ProfileError, match="one must be a multiple of the other"):
        shape.check_tp(12)
