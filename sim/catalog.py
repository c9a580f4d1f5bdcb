"""From the names in a scenario to the model, hardware and fabric that they mean, and the KV blocks that fit.

Decides where a name is looked up (packaged profiles, then files) and whether the model fits the GPUs. Every fault in a
profile or config.json leaves here as `BadInput`. It does not decide what anything costs: `pushkv.model.timing` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pushkv.model.timing import profiles
from pushkv.model.timing.fabric import Fabric
from pushkv.model.timing.fields import ProfileError
from pushkv.model.timing.hardware import Hardware
from pushkv.model.timing.shapes import ModelShape
from pushkv.sim.errors import BadInput, unknown
from pushkv.sim.fault_file import read_toml

if TYPE_CHECKING:
    from pushkv.sim.scenario import Scenario

T = TypeVar("T")

__all__ = [
    "ENGINE_OVERHEAD_BYTES",
    "Parts",
    "check_lengths",
    "hardware",
    "kv_blocks",
    "model",
    "profile_errors",
    "resolve",
]

ENGINE_OVERHEAD_BYTES = 1.5e9
"""What an engine takes per GPU besides weights and KV cache (activations, CUDA context): vLLM 0.26 on an H200 left out
1.2 GB with Qwen3-8B (cache of 797,038 tokens) and 1.9 GB with Qwen3-32B (258,161 tokens)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a scenario is made of."""

    shape: ModelShape
    hardware: Hardware
    fabric: Fabric


@contextmanager
def profile_errors(where: str = "") -> Iterator[None]:
    """Turn a `ProfileError` into `BadInput`, which says ``where`` first."""
    try:
        yield
    except ProfileError as error:
        raise BadInput(f"{where}: {error}" if where else str(error)) from None


def resolve(scenario: Scenario) -> Parts:
    """Look everything up and check that it goes together. Raises `BadInput`."""
    with profile_errors():
        parts = Parts(
            model(scenario.model),
            _calibrated(scenario),
            _look_up("fabric", "fabric", scenario.fabric, profiles.fabric, _fabric_file, "or a path to a TOML profile"),
        )
    for side, tp in (("prefill", scenario.prefill_tp), ("decode", scenario.decode_tp)):
        _check_tp(parts.shape, side, tp)
        _check_memory(scenario, parts, side, tp)
    return parts


def model(name: str) -> ModelShape:
    """A packaged model, or one described by a Hugging Face config.json."""
    with profile_errors():
        return _look_up("model", "models", name, profiles.model, _model_file, "or a path to config.json")


def hardware(name: str) -> Hardware:
    """A packaged hardware profile, or one in a TOML file (as `pushkv calibrate` writes it)."""
    with profile_errors():
        return _look_up("hardware", "hardware", name, profiles.hardware, _hardware_file, "or a path to a TOML profile")


def kv_blocks(scenario: Scenario, parts: Parts, side: str) -> int:
    """KV blocks of an engine of ``side`` ("prefill" or "decode"): the scenario's override, or what the GPU leaves
    beside weights and, with pushkv's packed path, staging or landing memory.
    """
    if scenario.num_blocks is not None:
        return scenario.num_blocks
    tp = scenario.prefill_tp if side == "prefill" else scenario.decode_tp
    free_bytes = _for_weights_and_cache(scenario, parts.hardware) - parts.shape.weight_bytes_rank(tp)
    free_bytes -= _pool_gib(scenario, side)[1] * (1 << 30)
    return int(free_bytes // (parts.shape.kv_bytes_per_token_rank(tp) * scenario.block_size))


def _pool_gib(scenario: Scenario, side: str) -> tuple[str, float]:
    """The flag and the size (GiB per GPU) of what the packed path keeps for itself on ``side``."""
    if scenario.mode != "pushkv" or scenario.path == "direct":
        return "", 0.0
    return ("--staging-gib", scenario.staging_gib) if side == "prefill" else ("--landing-gib", scenario.landing_gib)


def check_lengths(scenario: Scenario, longest_input: int, longest_request: int) -> None:
    """Raise `BadInput` unless the longest prompt fits a prefill engine's cache, the longest request a decode engine's.

    ``longest_input`` and ``longest_request`` (input and output) in tokens.
    """
    parts = resolve(scenario)
    for side, tokens, what in (
        ("prefill", longest_input, "prompt"),
        ("decode", longest_request, "request (input and output)"),
    ):
        capacity = kv_blocks(scenario, parts, side) * scenario.block_size
        if tokens > capacity:
            raise BadInput(
                f"a {what} of {tokens} tokens does not fit the KV cache of a {side} engine, {capacity} tokens:"
                f" raise --{side}-tp, --num-blocks or --gpu-memory-utilization, or shorten the requests"
            )


def _check_tp(shape: ModelShape, side: str, tp: int) -> None:
    """Heads must divide, as vLLM demands; said here with the flag's name and every TP that would do."""
    try:
        shape.check_tp(tp)
    except ProfileError:
        good = ", ".join(str(n) for n in _possible_tps(shape))
        raise BadInput(
            f"--{side}-tp {tp} does not divide the heads of {shape.name}"
            f" ({shape.heads} attention, {shape.kv_heads} KV): use {good}"
        ) from None


def _possible_tps(shape: ModelShape) -> list[int]:
    possible = []
    for tp in range(1, shape.heads + 1):
        try:
            shape.check_tp(tp)
        except ProfileError:
            continue
        possible.append(tp)
    return possible


def _for_weights_and_cache(scenario: Scenario, hardware: Hardware) -> float:
    return hardware.memory_bytes * scenario.gpu_memory_utilization - ENGINE_OVERHEAD_BYTES


def _check_memory(scenario: Scenario, parts: Parts, side: str, tp: int) -> None:
    shape, room_bytes = parts.shape, _for_weights_and_cache(scenario, parts.hardware)
    block_bytes = shape.kv_bytes_per_token_rank(tp) * scenario.block_size
    left_bytes = room_bytes - shape.weight_bytes_rank(tp) - block_bytes
    flag, pool_gib = _pool_gib(scenario, side)
    if 0 <= left_bytes < pool_gib * (1 << 30) and scenario.num_blocks is None:
        raise BadInput(
            f"{flag} {pool_gib:g} does not fit a {side} GPU: {parts.hardware.name} has room for"
            f" {left_bytes / (1 << 30):.1f} GiB beside the weights of {shape.name} at TP {tp}, KV cache included;"
            f" lower it or raise --{side}-tp"
        )
    if left_bytes >= 0:
        return
    fitting = [n for n in _possible_tps(shape) if n > tp and shape.weight_bytes_rank(n) + block_bytes <= room_bytes]
    advice = f"use --{side}-tp {fitting[0]}" if fitting else "use larger GPUs"
    raise BadInput(
        f"{shape.name} at --{side}-tp {tp} has {shape.weight_bytes_rank(tp) / 1e9:.1f} GB of weights per GPU, but"
        f" {parts.hardware.name} has room for {max(room_bytes, 0) / 1e9:.1f} GB (utilization"
        f" {scenario.gpu_memory_utilization:g}): {advice}"
    )


# ---- names and files -----------------------------------------------------------------------------------------------


def _look_up(
    what: str, kind: str, name: str, packaged: Callable[[str], T], from_file: Callable[[str], T], also: str
) -> T:
    names = profiles.names(kind)
    if name in names:
        return packaged(name)
    if "/" in name or name.endswith((".json", ".toml")) or Path(name).exists():
        return from_file(name)
    raise unknown(f"--{what}", name, names, also=also)


def _calibrated(scenario: Scenario) -> Hardware:
    found, name = hardware(scenario.hardware), scenario.calibration
    if name is None:
        return found
    if name in found.calibrations:
        return found.with_calibration(name)
    raise unknown("--calibration", name, found.calibrations)


def _model_file(path: str) -> ModelShape:
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--model {path} cannot be read: {error.strerror}; give a name or a config.json") from None
    except ValueError as error:
        raise BadInput(f"--model {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"--model {path} does not hold a JSON object; give a Hugging Face config.json")
    return ModelShape.from_config(path, config)


def _hardware_file(path: str) -> Hardware:
    return Hardware.from_mapping(path, read_toml("--hardware", path))


def _fabric_file(path: str) -> Fabric:
    return Fabric.from_mapping(path, read_toml("--fabric", path))
