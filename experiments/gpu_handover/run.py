"""Hand-over on two GPUs: vLLM's pull, vLLM's push and pushkv, one after the other, on the same prompts and arrivals.

    python experiments/gpu_handover/run.py --model 8b --modes pull,push,packed,direct --points 1024:4,16000:0.5

Needs vLLM, NIXL and pushkv installed, and two GPUs of one host. Every mode gets a fresh pair of servers, with random
weights that are equal on both sides. Prints one row per mode and point, and writes ``requests.csv`` (one line per
request), ``summary.json`` and the servers' logs into ``--out``. ``--check N`` first compares the log-probabilities of N
prompts with those that D computes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
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
CSV = ("mode", "input_len", "qps", "sent_s", "prefill_ms", "ttft_ms", "tpot_ms", "tokens", "error")
TABLE = (
    "mode",
    "input_len",
    "qps",
    "n",
    "lost",
    "prefill_p50",
    "ttft_mean",
    "handover_p50",
    "handover_p99",
    "tpot_mean",
)
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
    config: dict[str, Any] = {
        "kv_connector": {"pull": "NixlConnector", "push": "NixlPushConnector"}.get(mode, "PushConnector"),
        "kv_role": "kv_producer" if name == "P" else "kv_consumer",
        "engine_id": name,
        "kv_buffer_device": "cuda",
    }
    if mode in ("packed", "direct"):
        config["kv_connector_module_path"] = "pushkv.reference.connector"
        config["kv_connector_extra_config"] = {
            "host": "127.0.0.1",
            "port": SIDE[name],
            "path": mode,
            "landing_bytes": options.landing_bytes,
            "staging_bytes": options.staging_bytes,
            **json.loads(options.settings),
        }
    return config


def serve(mode: str, name: str, model: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start server ``name`` on its GPU."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str("PD".index(name)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE[name]),
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURE}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "m", "--host", "127.0.0.1", "--port", URL[name].rsplit(":", 1)[1]),
        *("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "33000", "--max-num-seqs", "128"),
        *("--no-enable-prefix-caching", "--gpu-memory-utilization", str(options.memory)),
        *("--kv-transfer-config", json.dumps(transfer_config(mode, name, options))),
        *(() if options.compiled else ("--compilation-config", json.dumps(compilation))),
        *options.serve.split(),
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


@dataclass
class Served:
    """One request. Times are seconds; those of tokens count from the dispatch."""

    mode: str = ""
    input_len: int = 0
    qps: float = 0.0
    sent_s: float = 0.0
    prefill_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)


async def complete(
    session: aiohttp.ClientSession,
    name: str,
    number: str,
    prompt: list[int],
    tokens: int,
    params: Any,
    *,
    logprobs: bool = False,
) -> tuple[Any, list[float], list[Any]]:
    """(kv_transfer_params of the answer, time of each token, log-probabilities) of one leg of request ``number``."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": name == "D",
        "return_token_ids": True,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    if logprobs:
        body["logprobs"] = 5
    times, found = [], []
    headers = {"X-Request-Id": number}
    async with session.post(URL[name] + "/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{name}: {answer.status} {(await answer.text())[:200]}")
        if name == "P":
            return (await answer.json()).get("kv_transfer_params"), [], []
        async for line in answer.content:
            if line.startswith(b"data: {"):
                choice = (json.loads(line[6:]).get("choices") or [{}])[0]
                if choice.get("token_ids"):
                    times += [time.perf_counter()] * len(choice["token_ids"])
                    found += (choice.get("logprobs") or {}).get("top_logprobs") or []
    return None, times, found


async def one(
    session: aiohttp.ClientSession, mode: str, prompt: list[int], tokens: int, *, logprobs: bool = False
) -> Served:
    """One request through both servers (``alone``: D by itself)."""
    served, number, begun = Served(mode, len(prompt)), uuid.uuid4().hex, time.perf_counter()
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": number}
    decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "tp_size": 1,
        "remote_host": "127.0.0.1",
        "remote_port": SIDE["P"],
        "remote_request_id": f"cmpl-{number}-0",
        "transfer_id": number,
    }

    async def first() -> Any:
        params, _, _ = await complete(session, "P", number, prompt, 1, prefill)
        served.prefill_s = time.perf_counter() - begun
        return params

    try:
        if mode == "alone":
            _, times, found = await complete(session, "D", number, prompt, tokens, None, logprobs=logprobs)
        elif mode == "pull":
            params = await first()
            _, times, found = await complete(session, "D", number, prompt, tokens, params, logprobs=logprobs)
        else:
            second = complete(session, "D", number, prompt, tokens, decode, logprobs=logprobs)
            _, (_, times, found) = await asyncio.gather(first(), second)
        served.token_s, served.logprobs = [at - begun for at in times], found
        if len(times) != tokens:
            served.error = f"{len(times)} of {tokens} tokens"
    except (TimeoutError, RuntimeError, aiohttp.ClientError) as error:
        served.error = repr(error)[:200]
    return served


def prompt_of(length: int, chance: random.Random) -> list[int]:
    """Tokens at random."""
    return [chance.randrange(4, 150000) for _ in range(length)]


async def point(session: aiohttp.ClientSession, mode: str, length: int, qps: float, options: Any) -> list[Served]:
    """An open-loop Poisson load: the same prompts and arrivals for every mode."""
    chance = random.Random(f"{length}:{qps}:{options.seed}")
    tasks, begun = [], time.perf_counter()
    for _ in range(options.requests):
        tasks.append(asyncio.create_task(one(session, mode, prompt_of(length, chance), options.tokens)))
        tasks[-1].set_name(str(time.perf_counter() - begun))
        await asyncio.sleep(chance.expovariate(qps))
    found = await asyncio.gather(*tasks)
    for served, task in zip(found, tasks, strict=True):
        served.qps, served.sent_s = qps, float(task.get_name())
    return found


def distance(one: Served, other: Served) -> float:
    """Largest difference of a log-probability that both answers name; infinite when they name nothing in common."""
    worst = 0.0
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=False):
        common = mine.keys() & theirs.keys()
        worst = max([worst, *(abs(mine[t] - theirs[t]) for t in common)]) if common else float("inf")
    return worst if one.logprobs and len(one.logprobs) == len(other.logprobs) else float("inf")


async def check(session: aiohttp.ClientSession, mode: str, options: Any) -> str:
    """Answers of handed-over prompts against those of D alone."""
    chance, found = random.Random(options.seed), []
    for start in range(0, options.check, 8):
        prompts = [prompt_of(chance.choice((1, 15, 16, 17, 100, 1000, 3000)), chance) for _ in range(8)]
        alone = await asyncio.gather(*(one(session, "alone", p, 8, logprobs=True) for p in prompts))
        through = await asyncio.gather(*(one(session, mode, p, 8, logprobs=True) for p in prompts))
        found += [distance(a, b) for a, b in zip(alone, through, strict=True)]
        failed = [served.error for served in (*alone, *through) if served.error]
        if failed:
            return f"check {mode}: FAILED at {start}: {failed[0]}"
    far = sum(each > 0.25 for each in found)
    return f"check {mode}: {len(found)} prompts, median distance {statistics.median(found):.4f}, {far} above 0.25"


def row(mode: str, length: int, qps: float, found: list[Served]) -> dict[str, Any]:
    """One line of the table; milliseconds."""
    good = [served for served in found if not served.error]
    line: dict[str, Any] = {
        "mode": mode,
        "input_len": length,
        "qps": qps,
        "n": len(good),
        "lost": len(found) - len(good),
    }
    if not good:
        return {**line, "said": found[0].error}
    handover = sorted(1e3 * (served.ttft_s - served.prefill_s) for served in good)
    line["ttft_mean"] = statistics.fmean(1e3 * served.ttft_s for served in good)
    line["prefill_p50"] = statistics.median(1e3 * served.prefill_s for served in good)
    line["handover_p50"] = statistics.median(handover)
    line["handover_p99"] = handover[min(len(handover) - 1, int(0.99 * len(handover)))]
    line["tpot_mean"] = statistics.fmean(1e3 * served.tpot_s for served in good)
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()}


async def run_mode(session: aiohttp.ClientSession, mode: str, model: Path, options: Any, begun: float) -> list[Any]:
    """One mode: servers up, warm, check, load, servers down."""
    for url in URL.values():
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url + "/health"):
                raise SystemExit(f"{url} is served already: end what runs there")
    servers = {name: serve(mode, name, model, options) for name in "PD"}
    lines, requests = [], []
    try:
        ready = [await up(session, name, process, options.start_s) for name, process in servers.items()]
        print(
            f"# {mode}: servers {'up' if all(ready) else 'FAILED'} after {time.monotonic() - begun:.0f} s", flush=True
        )
        if not all(ready):
            return []
        chance = random.Random(1)
        for length in (600, 600, *(options.warm or ())):
            served = await one(session, mode, prompt_of(length, chance), 8)
            print(f"# warm {length}: {served.error or f'{1e3 * served.ttft_s:.1f} ms'}", flush=True)
            if served.error:
                return []
        if options.check:
            print(await check(session, mode, options), flush=True)
        for text in options.points.split(",") if options.points else ():
            length, qps = int(text.split(":")[0]), float(text.split(":")[1])
            if time.monotonic() - begun > options.budget_s:
                print("# out of time", flush=True)
                break
            found = await point(session, mode, length, qps, options)
            requests += found
            lines.append(row(mode, length, qps, found))
            print(json.dumps(lines[-1]), flush=True)
    finally:
        stop(servers.values())
        write(requests, options.out / "requests.csv")
    return lines


def stop(servers: Any) -> None:
    """End the servers and everything that they started."""
    for process in servers:
        process.send_signal(signal.SIGINT)
    for process in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def write(requests: list[Served], path: Path) -> None:
    """Append one line per request."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(
                ["mode", "input_len", "qps", "sent_s", "prefill_ms", "ttft_ms", "tpot_ms", "tokens", "error"]
            )
        for served in requests:
            good = not served.error
            ttft, tpot = (f"{1e3 * served.ttft_s:.3f}", f"{1e3 * served.tpot_s:.4f}") if good else ("", "")
            shared = [
                served.mode,
                served.input_len,
                served.qps,
                f"{served.sent_s:.4f}",
                f"{1e3 * served.prefill_s:.3f}",
            ]
            writer.writerow([*shared, ttft, tpot, len(served.token_s), served.error])


async def main(options: argparse.Namespace) -> int:
    """All modes."""
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.out / "model"
    make_model(options.model, model)
    begun, lines = time.monotonic(), []
    limits = aiohttp.ClientTimeout(total=options.patience_s)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        for mode in options.modes.split(","):
            lines += await run_mode(session, mode, model, options, begun)
    (options.out / "summary.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    print("  ".join(f"{name:>12}" for name in TABLE))
    for line in lines:
        print("  ".join(f"{line.get(name, '')!s:>12}" for name in TABLE))
    return 0


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--modes", default="pull,push,packed,direct")
    parser.add_argument("--points", default="1024:4,4096:2,16000:0.5", help="LENGTH:QPS,...")
    parser.add_argument("--requests", type=int, default=40, help="per point")
    parser.add_argument("--tokens", type=int, default=64, help="per request")
    parser.add_argument("--check", type=int, default=0, help="prompts whose log-probabilities are compared first")
    parser.add_argument("--warm", type=lambda text: [int(n) for n in text.split(",")], help="prompts to warm up with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="vLLM's default compilation")
    parser.add_argument("--memory", type=float, default=0.88, help="vLLM's part of the GPU")
    parser.add_argument("--landing-bytes", type=int, default=5 << 30)
    parser.add_argument("--staging-bytes", type=int, default=2 << 30)
    parser.add_argument("--settings", default="{}", help="further settings of pushkv, as JSON")
    parser.add_argument("--serve", default="", help="further arguments of both servers")
    parser.add_argument("--start-s", type=float, default=240)
    parser.add_argument("--budget-s", type=float, default=480)
    parser.add_argument("--patience-s", type=float, default=120, help="until a request counts as lost")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_handover"))
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    sys.exit(asyncio.run(main(options())))
