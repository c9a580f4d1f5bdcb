"""All that differs between vLLM 0.26 and 0.33, in one place: beside the classes that vLLM loads (`connector.py`,
`metrics.py`) nothing else imports vLLM.

Decides what a running vLLM can do, by looking at its base class and not at its version number, and what the connector
does about each hook. `check` compares the hooks with what is written here: a test runs it for 0.26, 0.32 and 0.33 (of
those between, nothing was looked at), the doctor for the vLLM that is installed, and `doubts` at start.

| what | 0.26 | 0.32 | what we do |
|---|---|---|---|
| results of a step | `get_finished` + `get_block_ids_with_load_errors` | `get_transfer_results` | answer both ways |
| a failed asynchronous load is told by | blocks | request | blocks only where requests are unknown |
| failed asynchronous load, several cache groups | ends the engine | fails the request | older: computed here |
| `start_load_kv` | before the forward, always | before it only if a synchronous load is due | see the next row |
| failed synchronous load, several cache groups | ends the engine | ends the engine | newer: loads are asynchronous |
| `wait_for_save` on empty steps | no | yes | only steps that compute something matter |
| `handle_preemptions` | when something was preempted | always | what it does is done at `bind_connector_metadata` too |
| model runner V2 | for some models | for most | with several cache groups: no `overlap: chunk` |
| prefill preempted in its last step | delivered without its blocks | computed again | older: the transfer is aborted |
| `register_cross_layers_kv_cache` | when preferred | gone | never preferred |
| cache manager | `bind_gpu_block_pool` | `bind_kv_cache_manager` calls it | the pool is used where it is told of |
| `supports_sleep_mode` and its hooks | | 0.33 | sleep is refused at start by every version (`setup_of`) |
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WRITTEN_FOR = ("0.26", "0.33")
"""First and last minor version that the connector was written for."""
RUN = ("0.26", "0.32")
"""Minor versions on which it has run."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a vLLM can do. failed_requests: it learns of failed loads by request (`failed_recving`)."""

    failed_requests: bool

    def may_fail(self, groups: int) -> bool:
        """Whether a failed load can be reported: by blocks it cannot where block ids are per group."""
        return self.failed_requests or groups == 1

    def loads_apart(self, groups: int) -> bool:
        """Whether what has landed is loaded asynchronously, one step before the request runs: a failed load of a
        request that runs is told of by blocks, and by blocks it cannot be where block ids are per group.
        """
        return self.failed_requests and groups > 1


def abilities(base: type) -> Abilities:
    """Of the vLLM that `base` (KVConnectorBase_V1) comes from."""
    return Abilities(failed_requests=hasattr(base, "get_transfer_results"))


def results(base: type, sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` returns, where it exists."""
    return _results_of(base)(finished_sending=sent, finished_recving=received, failed_recving=failed)


@functools.cache
def _results_of(base: type) -> Any:
    """Looked for once: it is asked for in every step."""
    kind = getattr(inspect.getmodule(base), "KVConnectorTransferResults", None)
    if kind is None:
        raise RuntimeError("this vLLM asks for transfer results, but has no KVConnectorTransferResults")
    return kind


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook of the base class: its parameters after self (None: a property), and what we do with it."""

    parameters: tuple[str, ...] | None
    does: str
    required: bool = False


_IGNORED = "not needed"
HOOKS: Mapping[str, Hook] = {
    # scheduler side
    "get_num_new_matched_tokens": Hook(("request", "num_computed_tokens"), "asks the decode legs", True),
    "update_state_after_alloc": Hook(("request", "blocks", "num_external_tokens"), "loads, or lets P write", True),
    "build_connector_meta": Hook(("scheduler_output",), "news in, chunks and orders for the workers out", True),
    "request_finished": Hook(("request", "block_ids"), "as below, for one group"),
    "request_finished_all_groups": Hook(("request", "block_ids"), "blocks of P to the ranks; aborts", True),
    "on_new_request": Hook(("request",), "registers and announces at arrival; else at the first look-up"),
    "has_pending_push_work": Hook((), "true while vLLM keeps blocks for us or must be told something"),
    "update_connector_output": Hook(("connector_output",), _IGNORED),
    "take_events": Hook((), "none; the office is told of what has ended in the step"),
    "reset_cache": Hook((), "drops what was computed with the old weights"),
    "get_finished_count": Hook((), "None: every rank reports"),
    "set_xfer_handshake_metadata": Hook(("metadata",), "opens the office with the ranks' cards", True),
    "set_xfer_handshake_metadata_pp_aware": Hook(("metadata",), "inherited: refuses pipeline stages"),
    "bind_kv_cache_manager": Hook(("kv_cache_manager",), "inherited: binds the block pool"),
    "bind_gpu_block_pool": Hook(("gpu_block_pool",), "keeps blocks from others that may still be written"),
    "get_loaded_kv_cache_group_ids": Hook(("request",), "all groups that are handed over"),
    "get_external_cache_hit_sources": Hook(("request", "num_external_tokens"), "inherited: from a peer"),
    "register_finished_partial_tail": Hook(("request", "block_ids", "partial_tail_offloads"), _IGNORED),
    "has_pending_block_frees": Hook((), "false: nothing of ours frees blocks soon for certain"),
    "requires_kv_delivery": Hook(None, "inherited: true on a prefill engine"),
    "supports_divergent_local_hybrid_hits": Hook(None, "inherited: false"),
    # worker side
    "register_kv_caches": Hook(("kv_caches",), "reads the layout, opens the rank", True),
    "register_cross_layers_kv_cache": Hook(("kv_cache", "attn_backend"), "refused: never preferred"),
    "prefer_cross_layer_blocks": Hook(None, "false"),
    "bind_connector_metadata": Hook(("connector_metadata",), "takes the step's orders"),
    "clear_connector_metadata": Hook((), "inherited"),
    "has_connector_metadata": Hook((), "inherited"),
    "handle_preemptions": Hook(("kv_connector_metadata",), "waits for gathers out of preempted blocks"),
    "start_load_kv": Hook(("forward_context", "kwargs"), "scatters what has landed", True),
    "wait_for_layer_load": Hook(("layer_name",), "nothing: a load is complete before the forward", True),
    "save_kv_layer": Hook(("layer_name", "kv_layer", "attn_metadata", "kwargs"), "nothing", True),
    "wait_for_save": Hook((), "the forward is enqueued: chunks can be gathered behind it", True),
    "finish_forward": Hook((), _IGNORED),
    "reset_capture_state": Hook((), _IGNORED),
    "get_finished": Hook(("finished_req_ids",), "the step's reports", True),
    "get_transfer_results": Hook(("finished_req_ids",), "the step's reports, failures with them"),
    "get_block_ids_with_load_errors": Hook(
        (), "blocks of failed loads: synchronous ones, or where requests are unknown", True
    ),
    "get_kv_connector_stats": Hook((), "counters and records since the last call"),
    "get_kv_connector_kv_cache_events": Hook((), _IGNORED),
    "get_handshake_metadata": Hook((), "this rank's card", True),
    "build_connector_worker_meta": Hook((), "nothing: ranks and office have their own way"),
    "set_host_xfer_buffer_ops": Hook(("copy_operation",), "nothing: caches are registered where they are"),
    "get_mem_pool_context": Hook((), _IGNORED),
    "shutdown": Hook((), "drains, then stops"),
    "supports_sleep_mode": Hook(("kv_transfer_config",), "false, asked of the class"),
    "unregister_kv_caches": Hook((), "never comes: sleep is refused"),
    "restore_kv_caches": Hook((), "never comes: sleep is refused"),
    # both, and of the class
    "role": Hook(None, "inherited"),
    "build_kv_connector_stats": Hook(("data",), "PushStats"),
    "build_prom_metrics": Hook(
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"), "PushPromMetrics"
    ),
    "get_required_kvcache_layout": Hook(("vllm_config",), "None: every layout is read as it is"),
    "requires_piecewise_for_cudagraph": Hook(("extra_config",), "false: no hook runs inside a graph"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """state: "known", "absent" (this version has no such hook), "changed" (other parameters) or "new"."""

    hook: str
    state: str
    parameters: tuple[str, ...] | None
    does: str

    @property
    def trouble(self) -> bool:
        """Whether the connector may not work with this vLLM."""
        required = self.hook in HOOKS and HOOKS[self.hook].required
        return self.state == "changed" or (self.state == "absent" and required)


def hooks_of(*kinds: type) -> dict[str, tuple[str, ...] | None]:
    """The public hooks of vLLM's base classes with their parameters after self; None: a property."""
    there: dict[str, tuple[str, ...] | None] = {}
    for kind in kinds:
        for name, member in vars(kind).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                there[name] = None
            elif callable(member) or isinstance(member, (classmethod, staticmethod)):
                function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
                names = tuple(inspect.signature(function).parameters)
                there[name] = names if isinstance(member, staticmethod) else names[1:]
    return there


def minor(version: str) -> str:
    """Of a version of vLLM; "" if it has none (a build from sources)."""
    found = re.match(r"\d+\.\d+", version)
    return "" if found is None else found[0]


def doubts(version: str, base: type, *others: type) -> list[str]:
    """What speaks against this vLLM, in sentences for a log. Nothing for a version on which the connector has run."""
    found = [
        f"vLLM's hook {one.hook} is {one.state}: pushkv may not work with vLLM {version}."
        for one in check(base, *others)
        if one.trouble
    ]
    if minor(version) not in RUN:
        found.append(f"pushkv has not run on vLLM {version}, but on {' and '.join(RUN)}: try it before you rely on it.")
    return found


def installed() -> str:
    """The version of vLLM, "" without it."""
    try:
        import vllm
    except ImportError:
        return ""
    return str(getattr(vllm, "__version__", ""))


def tp_rank() -> int:
    """Of the worker in this process."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def check(base: type, *others: type) -> list[Finding]:
    """Every hook of KVConnectorBase_V1 (and of SupportsHMA), and what we do about it."""
    return compare(hooks_of(base, *others))


def compare(there: Mapping[str, Sequence[str] | None]) -> list[Finding]:
    """Every hook of a vLLM that has those of `there`."""
    found = []
    for name in sorted({*HOOKS, *there}):
        hook = HOOKS.get(name)
        given = there.get(name)
        parameters = None if given is None else tuple(given)
        if hook is None:
            found.append(Finding(name, "new", parameters, "inherited: not known to pushkv"))
        elif name not in there:
            found.append(Finding(name, "absent", hook.parameters, hook.does))
        else:
            state = "known" if parameters == hook.parameters else "changed"
            found.append(Finding(name, state, parameters, hook.does))
    return found


def transferred_groups(kv_cache_config: Any) -> tuple[int, ...] | None:
    """Numbers of the cache groups that are handed over, None for all (older versions know no others)."""
    groups = kv_cache_config.kv_cache_groups
    moved = tuple(n for n, group in enumerate(groups) if getattr(group, "enable_kv_transfer", True))
    return None if len(moved) == len(groups) else moved


def lookahead_tokens(vllm_config: Any) -> int:
    """Last tokens of a prompt that a multi-module draft model must compute on the decode engine; 0 without one."""
    return max(0, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1) or 1) - 1)


def writes_before_hooks(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a step may write into blocks of what it preempts before the connector hears of it: model runner V2 zeroes
    new blocks and copies shared ones before its hooks. It runs on accelerators only, zeroes for recurrent layers, and
    copies where a prefix can end within a block: both take several cache groups.
    """
    if str(getattr(getattr(vllm_config, "device_config", None), "device_type", "")) == "cpu":
        return False
    return bool(getattr(vllm_config, "use_v2_model_runner", False)) and len(kv_cache_config.kv_cache_groups) > 1


def writes_blocks(scheduler_output: Any) -> bool:
    """Whether a step zeroes or copies blocks before its forward, of which a scatter begun before it might be undone.
    True when that cannot be told.
    """
    names = ("new_block_ids_to_zero", "kv_cache_block_copies")
    return any(getattr(scheduler_output, name, True) for name in names)


def ids_are_randomized() -> bool:
    """Whether vLLM appends a random suffix to request ids."""
    try:
        from vllm import envs
    except ImportError:
        return True
    return not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)


def cpu_isa(dtype: Any, block_tokens: int, head_size: int, cache_dtype: str) -> str:
    """The instruction set that the CPU attention kernels are built for, "" if this version does not tell."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return ""
    for arguments in ((dtype, block_tokens, head_size, cache_dtype), (dtype, block_tokens, head_size)):
        try:
            return str(_get_attn_isa(*arguments))
        except TypeError:
            continue
    return ""
