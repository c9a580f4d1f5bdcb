"""The shape of a dense decoder model, and the byte and operation counts that follow from it.

Decides how many bytes of weights and KV cache a rank holds and how many operations a token costs. Does not decide how
long any of it takes (`compute`), and knows nothing of mixtures of experts, latent attention or quantised caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .fields import Fields, ProfileError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
_UNSUPPORTED = ("num_experts", "n_routed_experts", "num_local_experts", "kv_lora_rank", "layers_block_type")
_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense transformer decoder with grouped-query attention and a gated (three-matrix) MLP.

    `dtype_bytes` is the size of one weight and of one KV element. All counts are exact but for norms and biases,
    which are left out (under 0.01 %).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "dtype_bytes"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ProfileError(f"model {self.name}: {key} is {value!r}, expected a whole number above 0")
        if self.heads % self.kv_heads:
            raise ProfileError(
                f"model {self.name}: {self.heads} attention heads are not a multiple of {self.kv_heads} KV heads"
            )

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face `config.json` that has been parsed into a mapping (a nested `text_config` is followed).

        Errors: `ProfileError` for a missing or unusable field, and for models whose cost this shape cannot describe.
        """
        if isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        fields = Fields(f"model {name}", config)
        for key in _UNSUPPORTED:
            if config.get(key) not in (None, 0, 1):
                raise ProfileError(f"model {name}: {key} is set; only dense models with full attention are described")
        if config.get("quantization_config"):
            raise ProfileError(f"model {name}: quantization_config is set; only unquantised weights are described")
        odd = [kind for kind in config.get("layer_types") or () if kind != _FULL]
        if odd:
            raise ProfileError(f"model {name}: layer_types has {odd[0]!r}; only {_FULL} is described")
        hidden = fields.count("hidden_size")
        heads = fields.count("num_attention_heads")
        head_dim = fields.count("head_dim") if config.get("head_dim") is not None else hidden // heads
        kv_heads = fields.count("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
        dtype = fields.text("torch_dtype" if config.get("torch_dtype") is not None else "dtype", "bfloat16")
        if dtype not in _DTYPE_BYTES:
            raise ProfileError(f"model {name}: dtype is {dtype!r}, expected one of {', '.join(_DTYPE_BYTES)}")
        tied = config.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise ProfileError(f"model {name}: tie_word_embeddings is {tied!r}, expected true or false")
        return cls(
            name=name,
            layers=fields.count("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.count("intermediate_size"),
            vocab=fields.count("vocab_size"),
            dtype_bytes=_DTYPE_BYTES[dtype],
            tied_embeddings=tied,
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one generated token is multiplied with: all layers and the output head, not the lookup."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers, all heads, no replication."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def check_tp(self, tp: int) -> None:
        """Errors: `ProfileError` unless `tp` ranks can share the heads, as vLLM demands."""
        if isinstance(tp, bool) or not isinstance(tp, int) or tp <= 0:
            raise ProfileError(f"model {self.name}: TP is {tp!r}, expected a whole number above 0")
        if self.heads % tp:
            good = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ProfileError(f"model {self.name}: TP {tp} does not divide {self.heads} attention heads; use {good}")
        if max(tp, self.kv_heads) % min(tp, self.kv_heads):
            raise ProfileError(
                f"model {self.name}: TP {tp} and {self.kv_heads} KV heads: one must be a multiple of the other"
            )

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads that each rank holds: one, replicated, where ranks outnumber KV heads."""
        self.check_tp(tp)
        return max(1, self.kv_heads // tp)

    def kv_bytes_per_token_rank(self, tp: int) -> int:
        """Bytes of K and V of one token on one rank, all layers."""
        return 2 * self.layers * self.kv_heads_per_rank(tp) * self.head_dim * self.dtype_bytes

    def layer_parameters_rank(self, tp: int) -> float:
        """Matrix parameters of one layer on one rank, with the replicated K and V projections."""
        attention = self.hidden * self.head_dim * (2 * self.heads / tp + 2 * self.kv_heads_per_rank(tp))
        return attention + 3 * self.hidden * self.intermediate / tp

    def head_parameters_rank(self, tp: int) -> float:
        """Parameters of the output head on one rank (sharded over the vocabulary)."""
        return self.vocab * self.hidden / tp

    def weight_bytes_rank(self, tp: int) -> float:
        """Bytes of weights that one rank holds, the embedding lookup included."""
        heads = self.head_parameters_rank(tp) * (1 if self.tied_embeddings else 2)
        return (self.layers * self.layer_parameters_rank(tp) + heads) * self.dtype_bytes

    def read_bytes_rank(self, tp: int) -> float:
        """Bytes of weights that one step reads on one rank: the lookup of embeddings reads next to nothing."""
        per_rank = self.layers * self.layer_parameters_rank(tp) + self.head_parameters_rank(tp)
        return per_rank * self.dtype_bytes
