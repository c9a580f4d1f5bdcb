"""The scheduler side of the connector: vLLM's hooks on one side, the office on the other.

Decides which leg a request is (`do_remote_decode`: prefill, `do_remote_prefill`: decode) and the order of things in a
step: news first, then vLLM's questions, then the orders for the workers. What vLLM is told goes one way only: into the
metadata of a step, which every worker reports word by word; so every rank reports each thing exactly once, never
before the scheduler knows. Requests without our parameters are none of our business.

Needs no vLLM: everything it touches of vLLM's objects is named in `identity.RequestLike` and here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pushkv.reference.decode_leg import WAITING
from pushkv.reference.decode_legs import LATER, NOTHING, Answer, DecodeLegs
from pushkv.reference.identity import RequestLike
from pushkv.reference.metric_names import merged
from pushkv.reference.ports import IDLE, BlockIds, Office, StepOrders
from pushkv.reference.prefill_legs import PrefillLegs
from pushkv.reference.progress import progress
from pushkv.reference.rules import Rules
from pushkv.reference.versions import writes_blocks

log = logging.getLogger(__name__)


class SchedulerSide:
    """One per engine. Every call comes from vLLM's engine thread and returns at once."""

    def __init__(self, office: Office, rules: Rules) -> None:
        self._office = office
        self._news, self._inbox = office.news, office.inbox
        self._rules = rules
        self.counters: dict[str, float] = {}
        self.prefill = PrefillLegs(office, rules, self.counters)
        self.decode = DecodeLegs(office, rules, self.counters)
        self._legs = self.decode.legs
        self._ears = self.decode.ears | self.prefill.ears
        self._step = 0

    def on_new_request(self, request: RequestLike) -> None:
        """A request was queued. Safe to call again: versions without the hook come here at the first look-up."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_prefill"):
            self.decode.add(request)
        elif params.get("do_remote_decode"):
            self.prefill.add(request)

    def matched_tokens(self, request: RequestLike, computed: int) -> Answer:
        """`get_num_new_matched_tokens`. Asked in every pass for every request that waits: the usual answer first."""
        if self._news:
            self._hear()
        name = request.request_id
        if name in self._legs:
            leg = self._legs[name]
            return LATER if leg.state is WAITING else self.decode.matched(leg, computed)
        if not request.kv_transfer_params or self.prefill.knows(name):
            return NOTHING
        self.on_new_request(request)
        return self.decode.matched(self._legs[name], computed) if name in self._legs else NOTHING

    def allocated(self, request: RequestLike, blocks: Any, external: int) -> None:
        """`update_state_after_alloc`."""
        leg = self._legs.get(request.request_id)
        if leg is not None:
            self.decode.allocated(leg, blocks, external)

    def step(self, scheduled: Mapping[str, int], preempted: set[str] | None, output: Any = None) -> StepOrders:
        """`build_connector_meta`: the end of a scheduling pass; what the workers do and report in this step.

        scheduled: tokens that each request computes in it. preempted: requests that lost their blocks in this pass or
        since the last one. output: vLLM's `SchedulerOutput`: the chunks of prefills are read from it, and block lists
        that vLLM has made already.
        """
        if self._news:
            self._hear()
        self._step += 1
        prefill, decode = self.prefill, self.decode
        if prefill.open or preempted:
            prefill.scheduled(scheduled, preempted or ())
        chunks = bool(prefill.running) and output is not None
        orders = IDLE
        if chunks or prefill.stirs or decode.stirs:
            orders = StepOrders(step=self._step)
            if chunks:
                orders.chunks = prefill.computes(progress(output, prefill.running), self._step)
            prefill.orders(orders)
            decode.step(bool(scheduled), output, orders)
            orders.early = bool(orders.load) and not writes_blocks(output)
        if self._inbox:  # all that this pass has to say, at once
            self._office.knock()
        return orders

    def finished(
        self, request: RequestLike, blocks: tuple[list[int], ...], complete: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished_all_groups`; complete: it ended by length or by a stop, not by an abort or an error."""
        if not request.kv_transfer_params:
            return False, None
        if request.request_id in self._legs:
            self.decode.finished(request)
            found: tuple[bool, dict[str, Any] | None] = (False, None)
        else:
            selected: BlockIds = self._rules.select(blocks) if blocks else ()
            found = self.prefill.finished(request, selected, complete)
        if not complete:
            self.over()
        return found

    def over(self) -> None:
        """`take_events`, the last thing that vLLM asks of a step's output: what has ended in it is told all at once.
        What ends otherwise (an abort) is told at once.
        """
        if self._inbox:
            self._office.knock()

    @property
    def pending(self) -> bool:
        """`has_pending_push_work`: the engine must go on stepping although it has nothing to compute."""
        return self.prefill.waiting or self.decode.waiting

    @property
    def open(self) -> bool:
        """Whether a verdict is still to come."""
        return bool(len(self.prefill) or len(self.decode))

    def reset(self) -> bool:
        """`reset_cache`: nothing computed with the old weights is sent or loaded from now on."""
        self._hear()
        self.prefill.reset()
        self.decode.reset()
        self.over()
        return True

    def stop(self, drain_s: float) -> None:
        self._office.stop(drain_s)

    def readings(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters of this side and of the office, for the metrics, and gauges: the office's, as this side hears of an
        end with its next step only.
        """
        return merged(self._office.counters, self.counters), dict(self._office.gauges)

    def _hear(self) -> None:
        queue = self._news
        while queue:
            news = queue.popleft()
            hear = self._ears.get(type(news))
            if hear is not None:
                hear(news)
            else:
                log.error("news that nobody hears: %s", news)
                name = "faults:unknown news"
                self.counters[name] = self.counters.get(name, 0) + 1
