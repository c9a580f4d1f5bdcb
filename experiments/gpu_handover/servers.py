"""A prefill and a decode server of vLLM on two GPUs, with random weights that are equal on both sides."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp

SHAPES = {
    "tiny": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
URL = {"P": "http://127.0.0.1:9100", "D": "http://127.0.0.1:9200"}
SIDE = {"P": 5600, "D": 5700}
UPSTREAM = {"pull": "NixlConnector", "push": "NixlPushConnector"}
OURS: dict[str, dict[str, Any]] = {
    "direct": {"path": "direct"},
    "packed": {"path": "packed", "overlap": "none"},
    "chunk": {"path": "packed", "overlap": "chunk"},
    "auto": {"path": "auto", "overlap": "chunk"},
}
"""Modes of this project's connector, and the settings that make them."""
CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""What servers on a small machine need."""
CAPTURE = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]


def make_model(name: str, folder: Path) -> None:
    """A Qwen3 of shape ``name`` without weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_window_layers": 64,
        "use_sliding_window": False,
        **SHAPES[name],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{n}": n + 4 for n in range(508)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)


def transfer_config(mode: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """``--kv-transfer-config`` of server ``name``."""
    role = getattr(options, "role", "") or ("kv_producer" if name == "P" else "kv_consumer")
    config: dict[str, Any] = {
        "kv_connector": UPSTREAM.get(mode, "PushConnector"),
        "kv_role": role,
        "engine_id": name,
        "kv_buffer_device": options.device,
    }
    if mode in OURS:
        module, config["kv_connector"] = options.connector.split(":")
        config["kv_connector_module_path"] = module
        config["kv_connector_extra_config"] = {
            "host": "127.0.0.1",
            "port": SIDE[name],
            "landing_bytes": options.landing_bytes,
            "staging_bytes": options.staging_bytes,
            "records": str(records(options.out, mode, name).absolute()),
            **OURS[mode],
            **json.loads(options.settings),
        }
    stored = getattr(options, "offload_bytes", 0)
    return beside_offloading(config, stored) if stored else config


def beside_offloading(config: dict[str, Any], cpu_bytes: int) -> dict[str, Any]:
    """The same connector and vLLM's offloading to CPU memory, under its ``MultiConnector``."""
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"cpu_bytes_to_use": cpu_bytes}
    ours = {key: value for key, value in config.items() if key != "engine_id"}  # vLLM gives it to both
    return {
        "kv_connector": "MultiConnector",
        "kv_role": config["kv_role"],
        "engine_id": config["engine_id"],
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }


def records(out: Path, mode: str, name: str) -> Path:
    """Where server ``name`` writes down its hand-overs."""
    return out / f"records_{mode}_{name}.jsonl"


def serve(mode: str, name: str, model: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start server ``name`` on its GPU; mode ``none`` is vLLM without a connector."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))),
        "CUDA_VISIBLE_DEVICES": str("PD".index(name)),
        "CUDA_DEVICE_MAX_CONNECTIONS": str(options.connections),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE[name]),
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # `/reset_prefix_cache`
    }
    if options.device == "cpu":
        environment |= CPU
    if options.layout and mode in OURS:
        environment["VLLM_KV_CACHE_LAYOUT"] = options.layout
    if options.queues:
        environment["CUDA_SCALE_LAUNCH_QUEUES"] = options.queues
    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURE}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "m", "--host", "127.0.0.1", "--port", URL[name].rsplit(":", 1)[1]),
        *("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", str(options.max_len)),
        *("--max-num-seqs", str(options.seqs)),
        *(() if getattr(options, "offload_bytes", 0) else ("--no-enable-prefix-caching",)),
        *("--gpu-memory-utilization", str(options.memory)),
        *(() if mode == "none" else ("--kv-transfer-config", json.dumps(transfer_config(mode, name, options)))),
        *(("--enforce-eager", "--block-size", "32") if options.device == "cpu" else ()),
        *(() if options.compiled or options.device == "cpu" else ("--compilation-config", json.dumps(compilation))),
        *options.serve.split(),
        *(options.serve_p.split() if name == "P" else ()),
    ]
    log = (options.out / f"{mode}_{name}.log").open("wb")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


async def up(session: aiohttp.ClientSession, name: str, process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether server ``name`` answers within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            async with session.get(URL[name] + "/health") as answer:
                if answer.status == 200:
                    return True
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    return False


async def counters(session: aiohttp.ClientSession, name: str) -> dict[str, float]:
    """What the connector of server ``name`` has counted, as its ``/metrics`` says: paths and why, failures."""
    async with session.get(URL[name] + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = {}
    for line in lines:
        if line.startswith("pushkv:") and "_total{" in line:
            series, value = line.rsplit(" ", 1)
            what = re.search(r'what="([^"]+)"', series)
            counter = series.split("{")[0].removeprefix("pushkv:")
            found[f"{counter} {what[1]}" if what else counter] = float(value)
    return {series: value for series, value in found.items() if value}


def stop(servers: Iterable[subprocess.Popen[bytes]]) -> None:
    """End the servers and everything that they started."""
    kept = list(servers)
    for process in kept:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 12
    for process in kept:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
