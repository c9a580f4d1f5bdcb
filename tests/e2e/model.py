"""A random Qwen3 that a CPU serves at once: 4 layers, hidden 128, 2 KV heads of 32, one token per word.

The weights are wide enough that every prompt gets an answer of its own: what tells right KV from wrong are the
log-probabilities of the answer, and ``tests/e2e/answers.py`` says how far two answers may lie apart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

WORDS = 508
"""Words w0 to w507, beside four special tokens."""
FIRST_WORD = 4
"""Token id of w0."""
VOCABULARY = WORDS + FIRST_WORD


FOLDER = Path(__file__).parents[2] / "out" / "e2e-model"
"""Where it lies between runs; not in git."""


def make_model(folder: Path = FOLDER, seed: int = 7) -> Path:
    """Save the model and its tokenizer into ``folder`` unless they are there already; the same seed gives the same
    weights."""
    done = folder / "complete"
    if done.is_file():
        return folder
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words.update({f"w{i}": i + FIRST_WORD for i in range(WORDS)})
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    done.touch()
    return folder


def make_adapter(model: Path, name: str = "lora", seed: int = 11) -> Path:
    """Save a random LoRA adapter of the model beside it: it changes every key and value."""
    folder = model / f"adapter-{name}"
    if (folder / "complete").is_file():
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dice, rank = torch.Generator().manual_seed(seed), 4
    tensors = {}
    for layer in range(4):
        for part, width in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, 128, generator=dice) * 0.2
            tensors[f"{key}.lora_B.weight"] = torch.randn(width, rank, generator=dice) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["q_proj", "k_proj", "v_proj"], "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "complete").touch()
    return folder
