"""`PushConnector`: the class that vLLM loads. It translates and decides nothing that the sides do not.

Loaded by `kv_connector_module_path="pushkv.reference.connector"`, or by its name once `register` has run (the
`vllm.general_plugins` entry point). vLLM makes two of it: one beside the scheduler, one in each worker.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pushkv.reference import local, versions
from pushkv.reference.connector_setup import (
    cpu_format,
    opener_of_offices,
    opener_of_ranks,
    ranks_of,
    rules_of,
    setup_of,
    sized,
)
from pushkv.reference.metric_names import Meter
from pushkv.reference.metrics import PushPromMetrics, PushStats
from pushkv.reference.outlet import OFFICE, Outlet, address, rank_name
from pushkv.reference.ports import IDLE, RankCard, StepOrders
from pushkv.reference.scheduler import SchedulerSide
from pushkv.reference.worker import WorkerSide, begin_loads

NAME = "PushConnector"
COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
LINGER_S = 2.0
"""An engine that has nothing to do goes on stepping for so long at the most, until what has ended is in the metrics:
they leave with a step's output. What ends later leaves by an outlet.
"""

log = logging.getLogger("vllm.pushkv")


class PushMetadata(KVConnectorMetadata):
    """The orders of one step, on their way to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


QUIET = PushMetadata(IDLE)
"""Of every step in which there is nothing to do: most of them."""


class PushHandshake(KVConnectorHandshakeMetadata):
    """A rank's card, on its way to the scheduler."""

    def __init__(self, card: RankCard) -> None:
        self.card = card


class PushConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV caches over by push. Settings: `settings.py`; per hook: `versions.HOOKS`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._setup = setup_of(vllm_config, os.environ)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._meter = Meter("office")
        self._busy_at = -LINGER_S
        self._pool: Any = None
        self._alone: Any = None  # the only rank, when it is in this process
        self._said: Collection[Any] = ()  # what the office has not looked at yet
        self._outlet: Outlet | None = None
        if role == KVConnectorRole.SCHEDULER:
            for doubt in versions.doubts(self._setup.vllm_version, KVConnectorBase_V1, SupportsHMA):
                log.warning("%s", doubt)
            rules_of(vllm_config, kv_cache_config, self._setup, KVConnectorBase_V1)  # what is impossible is said now
        else:
            ranks = ranks_of(vllm_config)
            self._meter = Meter(f"rank {ranks.tp_rank}")
            self._worker = WorkerSide(self._setup, ranks, opener_of_ranks())

    # ------------------------------------------------------------ scheduler side

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        cards = [metadata[rank].card for rank in sorted(metadata)]
        if [card.rank for card in cards] != list(range(self._setup.tp_size)):
            raise RuntimeError(f"{len(cards)} ranks have opened, {self._setup.tp_size} were expected")
        rules = rules_of(self._vllm_config, self._kv_cache_config, self._setup, KVConnectorBase_V1)
        alone = local.get(self._setup.engine_id) if len(cards) == 1 and not cards[0].door else None
        self._alone = alone
        open_office = opener_of_offices()
        office = open_office(sized(self._setup, cards), cards, alone)
        self._said = office.inbox
        self._scheduler = SchedulerSide(office, rules)
        self._scheduler.decode.pool = self._pool
        self._open_outlet(OFFICE)
        self.__dict__.update(  # asked most: nothing stands between vLLM and the answer
            on_new_request=self._scheduler.on_new_request, get_num_new_matched_tokens=self._scheduler.matched_tokens
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("vLLM has asked the connector before it was told of the ranks")
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self._side().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._side().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (self._scheduler or self._side()).allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        preempted = getattr(scheduler_output, "preempted_req_ids", None)
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            self._busy_at = time.monotonic()
        orders = (self._scheduler or self._side()).step(scheduled, preempted, scheduler_output)
        if orders is IDLE:
            return QUIET
        if orders.early and not orders.preempted and self._alone is not None:  # this thread runs the step too
            begin_loads(self._alone, orders)
        return PushMetadata(orders)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not request.kv_transfer_params:
            return False, None
        complete = request.status._name_ in COMPLETE  # `name` is a property, in Python
        return self._side().finished(request, block_ids, complete)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups = versions.transferred_groups(self._kv_cache_config)
        return tuple(range(len(self._kv_cache_config.kv_cache_groups))) if groups is None else groups

    def take_events(self) -> Iterable[Any]:
        """Not for events: when vLLM has looked at all of a step's output."""
        if self._said and self._scheduler is not None:
            self._scheduler.over()
        return ()

    def has_pending_push_work(self) -> bool:
        """vLLM asks when nothing else keeps the engine from sleeping. What is held beyond blocks does not, past
        `LINGER_S`: as long as this says yes, vLLM neither pauses nor stops the engine.
        """
        side = self._scheduler
        if side is None:
            return False
        now = time.monotonic()
        if side.pending:
            self._busy_at = now
            return True
        if now - self._busy_at > LINGER_S:
            return False
        unreported = self._meter.stale(*side.readings())
        self._meter.urgent |= unreported
        return local.stale(self._setup.engine_id) or unreported or side.open

    def reset_cache(self) -> bool | None:
        return self._side().reset()

    # ------------------------------------------------------------ worker side

    def _orders(self) -> StepOrders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, PushMetadata) else StepOrders()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        cpu = cpu_format(self._vllm_config, self._kv_cache_config, kv_caches)
        rank = self._worker.register(kv_caches, self._kv_cache_config, cpu)
        local.put(self._setup.engine_id, rank, self._meter)
        self._open_outlet(rank_name(rank.card.rank))

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        raise RuntimeError("pushkv has not asked for cross-layer caches and does not know this one")

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Peers write into this memory while it is registered: it cannot go away under them."""
        return False

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        card = None if self._worker is None else self._worker.card
        return None if card is None else PushHandshake(card)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if kv_connector_metadata is QUIET:
            return
        if self._worker is not None and isinstance(kv_connector_metadata, PushMetadata):
            self._worker.preempted(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata is not QUIET and self._worker is not None:
            self._worker.begin(self._orders())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._connector_metadata is not QUIET and self._worker is not None:
            self._worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._connector_metadata is not QUIET and self._worker is not None:
            self._worker.saved(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        sent, received, _ = self._worker.results()
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self._worker is not None
        return versions.results(KVConnectorBase_V1, *self._worker.results())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.invalid()

    # ------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> PushStats | None:
        if not self._meter.due(time.monotonic()):
            return None
        with self._meter.lock:
            tally = self._meter.read(*self._readings())
        return None if tally is None else PushStats(tally.data)

    def _readings(self) -> tuple[Mapping[str, float], Mapping[str, float], Sequence[Mapping[str, Any]]]:
        """Counters, gauges and fresh records of the side that this is."""
        worker, scheduler = self._worker, self._scheduler
        if worker is not None and (rank := worker.rank) is not None:
            return rank.counters, rank.gauges, rank.drain_records()
        return (*scheduler.readings(), ()) if scheduler is not None else ({}, {}, ())

    def _open_outlet(self, part: str) -> None:
        """For what happens while the engine takes no step."""
        try:
            self._outlet = Outlet(address(self._setup.engine_id, part), self._meter, self._readings)
        except (OSError, zmq.ZMQError) as error:  # no reason not to serve
            log.warning("metrics leave with the engine's steps alone: %s", error)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PushStats:
        return PushStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PushPromMetrics:
        return PushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
        drain_s = self._setup.settings.drain_s
        if self._scheduler is not None:
            self._scheduler.stop(drain_s)
        if self._worker is not None and self._worker.rank is not None:
            rank = self._worker.rank
            self._worker.stop(drain_s)
            local.forget(self._setup.engine_id, rank)


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes the connector known by its name. vLLM runs it in every process, and
    sometimes twice.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
    except ValueError:
        log.debug("%s is registered already", NAME)


register()  # also where it is loaded by module path: under a MultiConnector, vLLM looks for its statistics by name
