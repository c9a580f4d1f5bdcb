"""The worker side: a dumb reporter."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.reference import connector_setup, local
from pushkv.reference.caches import Ranks
from pushkv.reference.connector_setup import rules_of, setup_of, sized
from pushkv.reference.metric_names import Meter
from pushkv.reference.ports import Load, RankCard, StepOrders
from pushkv.reference.settings import SettingsError
from pushkv.reference.worker import WorkerSide


def vllm_config(**more: Any) -> Any:
    parallel = {"tensor_parallel_size": 2, "data_parallel_index": 1, "pipeline_parallel_size": 1}
    transfer = {"kv_role": "kv_both", "engine_id": "e", "kv_connector_extra_config": {"segment_bytes": 4096}}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel | {k: v for k, v in more.items() if "parallel" in k}),
        kv_transfer_config=SimpleNamespace(**{**transfer, **{k: v for k, v in more.items() if k in transfer}}),
        model_config=SimpleNamespace(
            model="m", dtype="torch.bfloat16", **{k: v for k, v in more.items() if k == "enable_sleep_mode"}
        ),
        cache_config=SimpleNamespace(block_size=16),
    )


class Rank:
    """Writes down what it is asked."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.did: list[Any] = []
        self.card = RankCard(0, 8192, 8192, 1)

    def scatter(self, loads: Sequence[Load]) -> Any:
        self.did += [("scatter", one.transfer_id, one.first, one.stop) for one in loads]
        return SimpleNamespace(loads=loads, wait=lambda: self.did.append(("wait", len(loads))) or loads[:1])

    def fence(self, transfer_ids: Sequence[str], step: int) -> None:
        self.did.append(("fence", step, *transfer_ids))

    def enqueued(self, step: int) -> None:
        self.did.append(("enqueued", step))

    def stop(self, drain_s: float) -> None:
        self.did.append(("stop", drain_s))


def side(rank: Rank) -> WorkerSide:
    worker = WorkerSide(setup_of(vllm_config(), {}), Ranks(), lambda *arguments: rank)  # type: ignore[arg-type, return-value]
    worker.rank = rank  # type: ignore[assignment]
    return worker


@pytest.mark.parametrize(
    ("backend", "apart"), [(None, False), ("uni", False), ("external_launcher", False), ("mp", True), ("ray", True)]
)
def test_where_the_workers_are(backend: str | None, apart: bool) -> None:
    config = vllm_config()
    config.parallel_config.distributed_executor_backend = backend
    assert setup_of(config, {}).apart is apart


def test_what_is_ordered_is_reported_once() -> None:
    worker = side(Rank())
    worker.begin(StepOrders(sent=["a"], received=["b", "c"], failed=["c"], invalid=[4, 5]))
    assert worker.results() == ({"a"}, {"b", "c"}, {"c"})
    assert worker.invalid() == {4, 5}
    assert worker.results() == (set(), set(), set()) and worker.invalid() == set()


def test_all_loads_are_begun_and_then_waited_for_at_once() -> None:
    rank = Rank()
    worker = side(rank)
    orders = StepOrders(load=[Load("r1", "t1", ([1],), 0, 4), Load("r2", "t2", ([2],), 4, 8)])
    worker.load(orders)
    worker.load(orders)  # a second call in the same step
    assert rank.did == [("scatter", "t1", 0, 4), ("scatter", "t2", 4, 8), ("wait", 2)]
    assert worker.invalid() == {1}, "of the one that has failed"


def test_blocks_before_those_that_are_loaded_are_right() -> None:
    """They may be shared with requests that run: nothing is said of them."""
    worker = side(Rank())
    worker.load(StepOrders(load=[Load("r", "t", ([5, 6, 7, 8, 9],), 40, 80)]))
    assert worker.invalid() == {7, 8, 9}
    assert worker.results() == (set(), set(), set())


def test_loads_apart_are_reported_by_request() -> None:
    worker = side(Rank())
    loads = [Load("r1", "t1", ([1], [2]), 0, 16), Load("r2", "t2", ([1, 3], [4]), 16, 32)]
    worker.load(StepOrders(load=loads, apart=True))
    assert worker.results() == (set(), {"r1", "r2"}, {"r1"})
    assert worker.invalid() == set()


def test_a_failure_that_no_vllm_would_understand_is_not_passed_over() -> None:
    worker = side(Rank())
    with pytest.raises(RuntimeError, match="landed for r cannot be loaded"):
        worker.load(StepOrders(load=[Load("r", "t", ([1], [2]), 0, 16)]))


def test_a_load_is_begun_behind_the_fence_and_before_the_forward_is_prepared() -> None:
    rank = Rank()
    worker = side(rank)
    orders = StepOrders(load=[Load("r", "t", ([1],), 0, 4)], preempted=["lost"], step=7, early=True)
    worker.preempted(orders)
    assert rank.did == [("fence", 7, "lost"), ("scatter", "t", 0, 4)]
    worker.begin(orders)  # older versions come twice
    worker.load(orders)
    worker.load(orders)
    assert rank.did[2:] == [("wait", 1)]


def test_a_load_waits_where_vllm_writes_blocks_before_the_forward() -> None:
    rank = Rank()
    worker = side(rank)
    orders = StepOrders(load=[Load("r", "t", ([1],), 0, 4)])
    worker.preempted(orders)
    worker.begin(orders)
    assert not rank.did
    worker.load(orders)
    assert rank.did == [("scatter", "t", 0, 4), ("wait", 1)]


def test_preempted_prefills_are_fenced() -> None:
    rank = Rank()
    worker = side(rank)
    worker.preempted(StepOrders(preempted=["t"], step=7))
    worker.preempted(StepOrders())
    worker.stop(3.0)
    worker.stop(3.0)
    assert rank.did == [("fence", 7, "t"), ("stop", 3.0)]


def test_a_step_with_chunks_is_told_of_when_it_is_enqueued() -> None:
    rank = Rank()
    worker = side(rank)
    worker.saved(StepOrders(step=3))
    worker.saved(StepOrders(step=4, chunks=True))
    assert rank.did == [("enqueued", 4)]


def test_caches_are_read_and_memory_is_sized() -> None:
    torch = pytest.importorskip("torch")
    from .test_caches import config, full

    opened: list[Any] = []

    def open_rank(*arguments: Any) -> Any:
        opened.extend(arguments)
        return Rank()

    worker = WorkerSide(setup_of(vllm_config(), {}), Ranks(2, 1, 4), open_rank)
    spec = full(num_kv_heads=2)
    worker.register({"a": torch.zeros(5, 2, 8, 8, dtype=torch.int16)}, config((["a"], spec)), None)
    setup, rank, layout, regions = opened
    assert rank == 1 and layout.rank == 1 and layout.regions == (5 * 2 * 8 * 8 * 2,)
    assert regions[0].numel() == layout.regions[0]
    assert setup.settings.landing_bytes % 4096 == 0 and setup.settings.landing_bytes > 0


def test_setup() -> None:
    setup = setup_of(vllm_config(kv_role="kv_consumer"), {"PUSHKV_PORT": "6000"})
    assert (setup.port, setup.tp_size, setup.send, setup.receive, setup.dtype) == (6002, 2, False, True, "bfloat16")
    cards = [RankCard(0, 8192, 4096, 1), RankCard(1, 4096, 8192, 1)]
    assert sized(setup, cards).settings.landing_bytes == sized(setup, cards).settings.staging_bytes == 4096


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"kv_role": "kv_nobody"}, "kv_role"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2: .* set it to 1"),
        ({"prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4: .* set it to 1"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode is set: peers write .* without --enable-sleep-mode"),
        ({"kv_connector_extra_config": {"port": 65535}}, "port is 65535"),
    ],
)
def test_what_cannot_be_served(more: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        setup_of(vllm_config(**more), {})


def test_chunks_are_refused_where_a_preempted_prompt_may_be_written_over_before_the_connector_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model runner V2 zeroes and copies blocks before its hooks: where there are several kinds of cache."""
    pytest.importorskip("vllm", reason="cache specifications are vLLM's")
    from .test_caches import config, full

    def opened(overlap: str, groups: int, *, v2: bool, device: str) -> None:
        chosen = vllm_config(kv_connector_extra_config={"overlap": overlap})
        chosen.kv_transfer_config.kv_load_failure_policy = "fail"
        chosen.use_v2_model_runner, chosen.device_config = v2, SimpleNamespace(device_type=device)
        caches = config(*(([f"layer {n}"], full()) for n in range(groups)))
        monkeypatch.setattr(connector_setup, "cpu_format", lambda *arguments: None)
        rules_of(chosen, caches, setup_of(chosen, {}), object)

    opened("chunk", 1, v2=True, device="cuda")
    opened("chunk", 2, v2=False, device="cuda")
    opened("chunk", 2, v2=True, device="cpu")  # it does not run there
    opened("none", 2, v2=True, device="cuda")
    with pytest.raises(SettingsError, match="VLLM_USE_V2_MODEL_RUNNER=0, or overlap to none"):
        opened("chunk", 2, v2=True, device="cuda")


def test_direct_is_refused_where_a_failed_load_could_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 knows failed loads by block only, and blocks of several groups have the same numbers."""
    pytest.importorskip("vllm", reason="cache specifications are vLLM's")
    from .test_caches import config, full

    class Newer:
        def get_transfer_results(self) -> None: ...

    def opened(path: str, groups: int, role: str, base: type = object) -> bool:
        chosen = vllm_config(kv_role=role, kv_connector_extra_config={"path": path})
        chosen.kv_transfer_config.kv_load_failure_policy = "fail"
        chosen.device_config = SimpleNamespace(device_type="cuda")
        caches = config(*(([f"layer {n}"], full()) for n in range(groups)))
        monkeypatch.setattr(connector_setup, "cpu_format", lambda *arguments: None)
        return rules_of(chosen, caches, setup_of(chosen, {}), base).may_fail

    assert opened("direct", 1, "kv_consumer") and opened("direct", 2, "kv_consumer", Newer)
    assert not opened("auto", 2, "kv_consumer") and not opened("direct", 2, "kv_producer")
    with pytest.raises(SettingsError, match="set path to packed or auto"):
        opened("direct", 2, "kv_consumer")


def test_the_local_table_forgets_only_the_one_that_is_meant() -> None:
    old, new = Rank(), Rank()
    local.put("x", old, Meter("rank 0"))  # type: ignore[arg-type]
    local.put("x", new, Meter("rank 0"))  # type: ignore[arg-type]
    local.forget("x", old)  # type: ignore[arg-type]
    assert local.get("x") is new
    local.forget("x", new)  # type: ignore[arg-type]
    assert local.get("x") is None
