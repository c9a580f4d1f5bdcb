"""The requests of a decode engine: from their arrival to the step in which their prompt's cache is theirs.

Decides what vLLM is answered when it asks how much of a prompt is there, when it is told that a load has failed or
ended, and what becomes of a request whose transfer fails, gives way, or is not needed any more. Does not decide
verdicts or when memory is free: those are the ledger's, and come as news. It has no clock.

Packed: NEW -> WAITING -> READY -> DONE; no block is held while it waits, the load is part of the step that starts it
(or of the one before: `Rules.loads_apart`).
Direct: NEW -> WAITING -> ADMITTED -> HOLDING -> DONE; vLLM holds the blocks and waits for our report.
Failed before it has blocks: FAILED -> DONE, computed here; or, when failing is the policy, FAILED -> FAILING -> DONE:
vLLM can only be told of a failed load for a request that it believes to be loading, so one block is asked for and
reported as failed. Failed later, and computed here: in other blocks, when those that may still be written are kept from
everybody by a reference of ours, or else when they are settled.

vLLM asks thousands of times a second for each waiting request: an answer is a dictionary look-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.reference.decode_leg import Books, Leg, State
from pushkv.reference.handles import AMBIGUOUS
from pushkv.reference.identity import RequestLike, identify
from pushkv.reference.metric_names import label
from pushkv.reference.ports import BlockIds, Load, Office, StepOrders, Wanted
from pushkv.reference.rules import Rules

log = logging.getLogger(__name__)
Answer = tuple[int | None, bool]
LATER: Answer = (None, False)
NOTHING: Answer = (0, False)


class DecodeLegs:
    """All of one engine. Every call is O(1) in the prompt. What the office is told of is a request id: its handle."""

    def __init__(self, office: Office, rules: Rules, counters: dict[str, float]) -> None:
        self._key = office.key
        self._say = office.inbox.append
        self._rules = rules
        self._counters = counters
        self.legs: dict[str, Leg] = {}  # by request id, while vLLM has the request
        self._booked: dict[str, Leg] = {}  # the same, while the books have the transfer
        self._unasked: dict[str, Leg] = {}  # NEW: told at the end of the step, asked or not
        self._hungry: dict[str, Leg] = {}  # told of tokens to load in this pass, and no blocks since
        self._loading: list[Leg] = []  # what has landed and was given blocks in this pass
        self._orders = StepOrders()
        self._held = 0  # direct: requests whose blocks vLLM keeps for us, or we from others
        self.pool: Any = None  # vLLM's `BlockPool`, where there is one
        self.ears: dict[type, Callable[[Any], None]] = {
            kind: partial(self._hear, handler)
            for kind, handler in {
                ev.Admit: self._admit,
                ev.Ready: self._ready,
                ev.Fail: self._fail,
                ev.Free: self._free,
                ev.TakeBack: self._take_back,
            }.items()
        }
        """Who hears which news of the office."""

    def __len__(self) -> int:
        return len(self._booked)

    @property
    def waiting(self) -> bool:
        """Whether vLLM keeps blocks for us, or must be told something in its next step."""
        return bool(self._held or self._orders or self._unasked)

    @property
    def stirs(self) -> bool:
        """Whether there is something to do at the end of this pass."""
        return bool(self._unasked or self._hungry or self._loading or self._orders)

    # ------------------------------------------------------------ what vLLM tells and asks

    def add(self, request: RequestLike) -> None:
        """First sight of a request with `do_remote_prefill`. Later calls for it do nothing."""
        if request.request_id in self.legs:
            return
        prompt = request.num_prompt_tokens
        length = self._rules.moved(prompt)
        if not length:
            return
        leg = self.legs[request.request_id] = Leg(request.request_id, prompt, length, self._rules.rounded(length))
        if not self._rules.receive:
            self._refuse(leg, "kv_role of this engine is kv_producer")
        elif request.request_id in self._booked:  # an id that comes again
            self._refuse(leg, AMBIGUOUS)
        else:
            leg.request = request
            self._booked[request.request_id] = self._unasked[request.request_id] = leg

    def matched(self, leg: Leg, computed: int) -> Answer:
        """How many tokens can be loaded beyond the `computed` ones; None: ask again later. Not for WAITING."""
        state = leg.state
        if state is State.NEW:
            if leg.useful <= computed:
                self._dismiss(leg)
                return NOTHING
            self._arrive(leg, computed)
            return LATER
        leg.asked_from = computed
        if leg.steps_back:  # there were no blocks for it: older versions look at nobody behind it then
            leg.steps_back = False
            return LATER
        if state is State.READY:
            useful = leg.useful - computed
            if useful <= 0 or computed < leg.base:
                return NOTHING
            self._hungry[leg.request_id] = leg
            return (leg.length - computed, True) if self._rules.loads_apart else (useful, False)
        if state is State.ADMITTED:
            if computed != leg.base:  # the blocks would not be those that were asked for
                self._count("transfers_cancelled:local prefix has changed")
                self._drop(leg, "local prefix has changed")
                return NOTHING
            self._hungry[leg.request_id] = leg
            return leg.length - computed, True
        if state is State.FAILED and not self._rules.recompute and self._rules.may_fail:
            some = min(self._rules.block_tokens, leg.useful - computed)
            if some <= 0:
                return NOTHING
            self._hungry[leg.request_id] = leg
            return some, True
        return NOTHING

    def allocated(self, leg: Leg, blocks: Any, external: int) -> None:
        """vLLM has allocated `blocks` (its `KVCacheBlocks`) and counts on `external` tokens of ours."""
        state = leg.state
        if state is State.DONE:
            return
        self._hungry.pop(leg.request_id, None)
        if not external:  # nothing to load: a local prefix that covers it, another connector, or a failure
            if state is State.HOLDING or state is State.FAILING:
                return
            self._drop(leg, "not needed")
            return
        leg.blocks = blocks
        if state is State.READY:
            self._loading.append(leg)
            self._close(leg)  # the ranks say Loaded
            leg.state = State.DONE
        elif state is State.ADMITTED:
            leg.state = State.HOLDING
            self._held += 1
            self._say(ev.Allocated(leg.request_id, partial(self._ids, leg)))
        elif state is State.FAILED:
            leg.state = State.FAILING
            self._report_failed(leg)
            self._orders.received.append(leg.request_id)

    def finished(self, request: RequestLike) -> None:
        """vLLM is done with `request`, in whatever state. Blocks of a load under way it keeps until our report."""
        leg = self.legs.pop(request.request_id, None)
        self._hungry.pop(request.request_id, None)
        if leg is None or leg.state is State.DONE:
            return
        if leg.state is State.HOLDING:
            if leg.books is Books.OPEN:
                leg.unwanted = True
                self._say(ev.Aborted(leg.request_id))
            return  # the report comes with the memory
        self._drop(leg, "aborted")

    def step(self, computes: bool, output: Any, out: StepOrders) -> None:
        """The end of a scheduling pass: moves to `out` what the workers do and report in this step.

        computes: whether anything was scheduled. output: vLLM's `SchedulerOutput`.
        """
        for leg in list(self._unasked.values()):  # vLLM had no slot to ask for it: P need not wait for that
            self._arrive(leg, 0)
        for leg in self._hungry.values():
            leg.steps_back = True
            if leg.state is State.ADMITTED and not computes and not leg.starved:
                leg.starved = True
                self._say(ev.Starved(leg.request_id))
        self._hungry.clear()
        if self._loading:
            self._load(() if output is None else output.scheduled_new_reqs, out)
        orders = self._orders
        if orders:
            out.received += orders.received
            out.failed += orders.failed
            out.invalid += orders.invalid
            self._orders = StepOrders()

    def reset(self) -> None:
        """The weights have changed: what has landed or will land was computed with the old ones."""
        for leg in list(self._booked.values()):
            if leg.state in (State.NEW, State.WAITING, State.READY, State.ADMITTED):
                self._drop(leg, "cache was reset")

    # ------------------------------------------------------------ what the office says

    def _hear(self, handler: Callable[[Leg, Any], None], news: Any) -> None:
        leg = self._booked.get(news.transfer_id)
        if leg is not None:
            handler(leg, news)

    def _admit(self, leg: Leg, news: Any) -> None:
        if leg.state is State.WAITING:
            leg.state = State.ADMITTED

    def _ready(self, leg: Leg, news: Any) -> None:
        if leg.unwanted:  # told meanwhile that it is not wanted: the books are closed by that
            self._close(leg)
            if leg.state is State.HOLDING:
                self._settle(leg)
        elif leg.state is State.HOLDING:
            self._say(ev.Loaded(leg.request_id))
            self._close(leg)
            self._settle(leg)
        elif leg.state is State.WAITING:
            leg.books, leg.state = Books.READY, State.READY
        else:  # a dismissal has gone through
            self._say(ev.Loaded(leg.request_id))
            self._close(leg)

    def _fail(self, leg: Leg, news: Any) -> None:
        if leg.state is State.HOLDING:
            leg.books = Books.FAILED  # Free follows, now or when it is settled
            if not leg.unwanted:
                self._log(leg, news.reason)
                self._report_failed(leg)
                if self._rules.recompute and not news.settled and self.pool is not None:
                    self._keep(leg)
            return
        self._close(leg)
        if leg.state is not State.DONE and not leg.unwanted:
            self._lost(leg, news.reason)

    def _keep(self, leg: Leg) -> None:
        """The request goes on at once, in other blocks: those that may still be written are kept from everybody, by a
        reference of ours, until it is settled.
        """
        leg.kept = [block for group in leg.blocks.blocks for block in group if not block.is_null]
        self.pool.touch(leg.kept)
        self._count("blocks_kept", len(leg.kept))
        self._settle(leg)
        self._held += 1  # the engine must hear when they are free

    def _free(self, leg: Leg, news: Any) -> None:
        self._close(leg)
        if leg.state is State.HOLDING:
            self._settle(leg)
        elif leg.kept:
            self.pool.free_blocks(reversed(leg.kept))
            leg.kept = []
            self._held -= 1

    def _take_back(self, leg: Leg, news: Any) -> None:
        """It gave way: vLLM must free the blocks and queue the request again. Where vLLM has no way for that, it is
        computed here or fails, by the policy.
        """
        if leg.state is not State.HOLDING:
            return
        if leg.unwanted:  # the blocks are vLLM's again; that the books are closed is still to be said
            self._settle(leg)
            return
        self._report_failed(leg)
        self._settle(leg)
        if self._rules.recompute and self._rules.failed_requests:
            leg.state, leg.starved = State.WAITING, False
        else:
            self._drop(leg, "gave way")

    # ------------------------------------------------------------ one leg

    def _arrive(self, leg: Leg, computed: int) -> None:
        self._unasked.pop(leg.request_id, None)
        leg.base = computed
        leg.state, leg.books = State.WAITING, Books.OPEN
        self._tell(leg, leg.tokens - computed)

    def _dismiss(self, leg: Leg) -> None:
        """Nothing is needed of a transfer that was never registered: P is told, so that it can let go."""
        self._unasked.pop(leg.request_id, None)
        leg.state, leg.books = State.DONE, Books.OPEN
        self._tell(leg, 0)

    def _tell(self, leg: Leg, tokens: int) -> None:
        """The first word about it; with none needed, no way for them has to be chosen. Where vLLM cannot be told of a
        failed load, no block may wait for one.
        """
        request, leg.request = leg.request, None
        assert request is not None and request.kv_transfer_params is not None
        leg.peer = request.kv_transfer_params.get("remote_engine_id")
        identity = partial(identify, request, randomized=self._rules.randomized_ids)
        packed = None if tokens and self._rules.may_fail else True
        self._say(Wanted(leg.request_id, identity, request.kv_transfer_params, tokens, leg.tokens, packed))

    def _drop(self, leg: Leg, reason: str) -> None:
        """The transfer is not wanted any more; the request is computed here, or gone. Not for HOLDING."""
        self._hungry.pop(leg.request_id, None)
        if leg.request is not None:
            self._dismiss(leg)
        elif leg.books is Books.OPEN:
            leg.unwanted = True
            self._say(ev.Aborted(leg.request_id, reason))
        elif leg.books is Books.READY:
            self._say(ev.Loaded(leg.request_id))
            self._close(leg)
        leg.state = State.DONE

    def _refuse(self, leg: Leg, reason: str) -> None:
        self._count("requests_refused:identity")
        self._lost(leg, reason)

    def _lost(self, leg: Leg, reason: str) -> None:
        leg.state = State.FAILED
        self._count(f"loads_lost:{label(reason)}")
        self._log(leg, reason)

    def _log(self, leg: Leg, reason: str) -> None:
        """vLLM has one sentence for all failed loads; why it was this one stands in the log."""
        peer = "an engine that is not named" if leg.peer is None else repr(leg.peer)[:200]
        log.warning("the prompt of %s does not come from %s: %s", leg.request_id, peer, reason[:200])

    def _close(self, leg: Leg) -> None:
        leg.books = Books.CLOSED
        if self._booked.get(leg.request_id) is leg:
            del self._booked[leg.request_id]

    def _settle(self, leg: Leg) -> None:
        """Direct: nobody writes into its blocks any more: they are the request's, or vLLM's to free."""
        self._orders.received.append(leg.request_id)
        self._held -= 1
        leg.state = State.DONE
        for other in self._hungry.values():
            other.starved = False

    def _report_failed(self, leg: Leg) -> None:
        self._count("loads_failed")
        self._orders.failed.append(leg.request_id)
        if not self._rules.failed_requests and leg.blocks is not None:
            first = leg.asked_from // self._rules.block_tokens
            self._orders.invalid += self._ids(leg)[0][first:]

    def _ids(self, leg: Leg) -> BlockIds:
        """Takes time that grows with the blocks: not for the engine's thread, but where nothing else helps. While a
        request loads, vLLM does not touch its blocks.
        """
        return self._rules.select(leg.blocks.get_block_ids())

    def _load(self, new: Iterable[Any], out: StepOrders) -> None:
        """Orders the loads of this pass, with the block lists that vLLM has made for its workers."""
        tables = {one.req_id: one.block_ids for one in new}
        for leg in self._loading:
            name, table = leg.request_id, tables.get(leg.request_id)
            blocks = self._ids(leg) if table is None else self._rules.select(table)
            out.load.append(Load(name, self._key(name), blocks, leg.asked_from, leg.tokens))
            leg.blocks = None
        out.apart = self._rules.loads_apart
        self._loading.clear()

    def _count(self, name: str, by: int = 1) -> None:
        self._counters[name] = self._counters.get(name, 0) + by
