"""From vLLM's configuration to what the sides of the connector are opened with.

Decides what cannot be served at all, and says so before the engine starts. Reads configuration objects by attribute;
what must be imported of vLLM is asked of `versions.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from pushkv.model.layout import GroupKind
from pushkv.reference import versions
from pushkv.reference.caches import Ranks
from pushkv.reference.cpu_formats import CpuFormat
from pushkv.reference.ports import Address, EngineSetup, OpenOffice, OpenRank, RankCard
from pushkv.reference.rules import Rules
from pushkv.reference.settings import ConnectorSettings, SettingsError
from pushkv.reference.specs import group_of, layer_spec

IN_PROCESS = (None, "uni", "external_launcher")
"""Of vLLM's executors, those whose only worker runs in the scheduler's process."""
ROLES = {"kv_producer": (True, False), "kv_consumer": (False, True), "kv_both": (True, True)}


def setup_of(vllm_config: Any, environ: Mapping[str, str]) -> EngineSetup:
    """Raises `SettingsError`."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role not in ROLES:
        raise SettingsError(f"kv_role is {transfer.kv_role!r}: it must be one of {', '.join(ROLES)}.")
    for field, name in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if int(getattr(parallel, field, 1) or 1) > 1:
            raise SettingsError(f"{field} is {getattr(parallel, field)}: pushkv does not support {name}; set it to 1.")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):  # 0.33 asks for it, older versions do not
        raise SettingsError(
            "enable_sleep_mode is set: peers write into memory that this engine has registered, and a sleeping engine"
            " gives it away under them; start it without --enable-sleep-mode."
        )
    settings = ConnectorSettings.read(transfer.kv_connector_extra_config or {}, environ)
    tp_size = int(parallel.tensor_parallel_size)
    dp_rank = int(getattr(parallel, "data_parallel_index", 0) or 0)
    last = settings.port + dp_rank * tp_size + tp_size - 1
    if last > 65535:
        raise SettingsError(f"port is {settings.port}: its last rank would listen on {last}; ports end at 65535.")
    send, receive = ROLES[transfer.kv_role]
    return EngineSetup(
        settings=settings,
        engine_id=str(transfer.engine_id),
        tp_size=tp_size,
        dp_rank=dp_rank,
        host=settings.host,
        port=settings.port + dp_rank * tp_size,
        model=str(vllm_config.model_config.model),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        block_tokens=int(vllm_config.cache_config.block_size),
        vllm_version=versions.installed(),
        send=send,
        receive=receive,
        apart=getattr(parallel, "distributed_executor_backend", None) not in IN_PROCESS,
    )


def ranks_of(vllm_config: Any) -> Ranks:
    """Of the worker in this process."""
    model = vllm_config.model_config
    heads = getattr(model, "get_total_num_kv_heads", None)
    return Ranks(
        tp_size=int(vllm_config.parallel_config.tensor_parallel_size),
        tp_rank=versions.tp_rank(),
        kv_heads=int(heads()) if heads is not None else 0,
    )


def rules_of(vllm_config: Any, kv_cache_config: Any, setup: EngineSetup, base: type) -> Rules:
    """Raises `CacheError` for a model whose cache cannot be moved, `SettingsError` for one that cannot be sent so."""
    if setup.settings.overlap == "chunk" and versions.writes_before_hooks(vllm_config, kv_cache_config):
        raise SettingsError(
            "overlap is chunk: with several cache groups, vLLM's model runner V2 may zero or copy blocks of a preempted"
            " prompt before it tells the connector, while a chunk is still read from them; set"
            " VLLM_USE_V2_MODEL_RUNNER=0, or overlap to none."
        )
    able = versions.abilities(base)
    may_fail = able.may_fail(len(kv_cache_config.kv_cache_groups))
    if setup.receive and setup.settings.path == "direct" and not may_fail:
        raise SettingsError(
            "path is direct: with several cache groups, this vLLM cannot be told that a prompt has not come into the"
            " blocks that wait for it; set path to packed or auto."
        )
    groups = versions.transferred_groups(kv_cache_config)
    moved = [
        kv_cache_config.kv_cache_groups[n]
        for n in (range(len(kv_cache_config.kv_cache_groups)) if groups is None else groups)
    ]
    kinds = [group_of(group.kv_cache_spec, group.layer_names)[0] for group in moved]
    hybrid = any(kind is not GroupKind.FULL for kind in kinds)
    cpu = cpu_format(vllm_config, kv_cache_config, None)
    return Rules(
        here=Address(setup.engine_id, setup.host, setup.port, setup.tp_size),
        send=setup.send,
        receive=setup.receive,
        recompute=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
        block_tokens=setup.block_tokens,
        backoff=max(1 if hybrid else 0, versions.lookahead_tokens(vllm_config)),
        unit_tokens=1 if cpu is None else cpu.unit_tokens,
        groups=groups,
        failed_requests=able.failed_requests,
        may_fail=may_fail,
        loads_apart=able.loads_apart(len(kv_cache_config.kv_cache_groups)),
        randomized_ids=versions.ids_are_randomized(),
        chunked=setup.settings.overlap == "chunk" and setup.settings.path != "direct",
        chunked_last=not hybrid,
    )


def cpu_format(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any] | None) -> CpuFormat | None:
    """The format of a CPU cache; None on accelerators. kv_caches: once they exist; before, the device is asked for."""
    if kv_caches:
        device = next(iter(kv_caches.values())).device.type
    else:
        device = str(getattr(vllm_config.device_config, "device_type", ""))
    if device != "cpu":
        return None
    group = kv_cache_config.kv_cache_groups[0]
    spec = layer_spec(group.kv_cache_spec, group.layer_names[0])
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    dtype = (inner[group.layer_names[0]] if inner else group.kv_cache_spec).dtype
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    isa = versions.cpu_isa(dtype, spec.block_tokens, spec.k_elements, cache_dtype)
    plain = cache_dtype in ("auto", spec.dtype) and not spec.opaque
    return CpuFormat(isa, spec.block_tokens, plain)


def sized(setup: EngineSetup, cards: Sequence[RankCard]) -> EngineSetup:
    """`setup` with the memory that every rank has: the books are the same for all of them."""
    landing, staging = min(card.landing_bytes for card in cards), min(card.staging_bytes for card in cards)
    return dataclasses.replace(setup, settings=setup.settings.with_memory(landing, staging))


def opener_of_ranks() -> OpenRank:
    """Late, because it brings NIXL in."""
    return cast(OpenRank, import_module("pushkv.reference.opening").open_rank)


def opener_of_offices() -> OpenOffice:
    return cast(OpenOffice, import_module("pushkv.reference.opening").open_office)
