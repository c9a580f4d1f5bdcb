"""The worker side of the connector: opens this worker's rank, and does and reports what the scheduler ordered.

Decides nothing about transfers: it is a dumb reporter. What a step's metadata says is done in that step and reported in
that step, once. Does not import vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pushkv.model.layout import Layout
from pushkv.reference.caches import Ranks, layouts_of
from pushkv.reference.cpu_formats import CpuFormat
from pushkv.reference.memory import free_and_margin, sizes
from pushkv.reference.ports import EngineSetup, Load, OpenRank, Rank, RankCard, StepOrders


def begin_loads(rank: Rank, orders: StepOrders) -> None:
    """Scatters behind all that the calling thread has enqueued by now. A second call in a step finds nothing to do."""
    loads, orders.load = orders.load, []
    if loads:
        orders.begun.append(rank.scatter(loads))


class WorkerSide:
    """One per worker process (at TP1 in the scheduler's). Every call comes from the worker's thread."""

    def __init__(self, setup: EngineSetup, ranks: Ranks, open_rank: OpenRank) -> None:
        self._setup = setup
        self._ranks = ranks
        self._open_rank = open_rank
        self.rank: Rank | None = None
        self.layout: Layout | None = None
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def register(self, kv_caches: Mapping[str, Any], kv_cache_config: Any, cpu: CpuFormat | None) -> Rank:
        """Reads the layout, sizes landing and staging memory, and opens the rank.

        Raises `CacheError` or `SettingsError`: the engine does not start.
        """
        setup = self._setup
        name = f"{setup.model} on {setup.engine_id}"
        layout, regions = layouts_of(kv_caches, kv_cache_config, name=name, ranks=self._ranks, cpu=cpu)
        device = regions[0].device
        free, margin = free_and_margin(device.type, device.index)
        if device.type == "cpu":
            free //= setup.tp_size  # every rank of this machine looks at the same memory
        found = sizes(setup.settings, free, margin, send=setup.send, receive=setup.receive)
        settings = setup.settings.with_memory(found.landing_bytes, found.staging_bytes)
        setup = dataclasses.replace(setup, settings=settings)
        self.layout = layout
        self.rank = self._open_rank(setup, self._ranks.tp_rank, layout, regions)
        return self.rank

    @property
    def card(self) -> RankCard | None:
        return None if self.rank is None else self.rank.card

    def preempted(self, orders: StepOrders) -> None:
        """`handle_preemptions`: before this step overwrites what was preempted; with model runner V1 also before vLLM
        prepares its forward, which takes about as long as a scatter.
        """
        if self.rank is None:
            return
        if orders.preempted:
            preempted, orders.preempted = orders.preempted, []
            self.rank.fence(preempted, orders.step)
        if orders.early:
            begin_loads(self.rank, orders)

    def begin(self, orders: StepOrders) -> None:
        """`bind_connector_metadata`: what this step reports, whichever hook asks for it first. Older versions do not
        always call `handle_preemptions`.
        """
        if not orders:
            return
        self.preempted(orders)
        self._sent.update(orders.sent)
        self._received.update(orders.received)
        self._failed.update(orders.failed)
        self._invalid.update(orders.invalid)

    def load(self, orders: StepOrders) -> None:
        """`start_load_kv`: all scatters are begun, then all waited for: this thread sleeps once."""
        if not (orders.load or orders.begun) or self.rank is None:
            return
        begin_loads(self.rank, orders)
        begun, orders.begun = orders.begun, []
        for loading in begun:
            for lost in loading.wait():
                self._lost(lost, orders.apart)
            if orders.apart:
                self._received.update(load.request_id for load in loading.loads)

    def _lost(self, load: Load, apart: bool) -> None:
        """Told of by request where vLLM waits for it, else by the blocks that were to be loaded: those before them are
        right, and may be shared with requests that run.
        """
        if apart:
            self._failed.add(load.request_id)
        elif len(load.blocks) == 1:
            self._invalid.update(load.blocks[0][load.first // self._setup.block_tokens :])
        else:
            raise RuntimeError(
                f"what has landed for {load.request_id} cannot be loaded, and this vLLM knows no failed load of a model"
                " with several cache groups"
            )

    def saved(self, orders: StepOrders) -> None:
        """`wait_for_save`: this step's forward is enqueued."""
        if orders.chunks and self.rank is not None:
            self.rank.enqueued(orders.step)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Sent, received, failed: what has not been reported yet."""
        found = self._sent, self._received, self._failed
        self._sent, self._received, self._failed = set(), set(), set()
        return found

    def invalid(self) -> set[int]:
        """Blocks whose load failed."""
        found, self._invalid = self._invalid, set()
        return found

    def stop(self, drain_s: float) -> None:
        if self.rank is not None:
            self.rank.stop(drain_s)
            self.rank = None
