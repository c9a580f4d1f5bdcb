"""What an engine puts into its next step: vLLM V1's scheduler with real block numbers.

Decides which requests a step computes, who gets blocks in which order, and who is preempted when there are none: the
youngest, by recompute. Does not decide when a step starts or ends (``engine``), nor where KV cache comes from
(``connector``).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pushkv.sim.blocks import BlockPool
from pushkv.sim.request import Request

if TYPE_CHECKING:
    from pushkv.sim.connector import Connector

Part = tuple[Request, int, int]
"""A chunk of a prompt in a step: request, new tokens, tokens before them."""


class Batch:
    """One step that was launched: when its tokens are there, and whose they are.

    ``count`` sequences decode in it with ``context`` tokens in all; ``version`` is the scheduler's when it was made;
    ``quiet``: nobody waits for this very step.
    """

    count: int = 0
    context: int = 0
    quiet: bool = True
    parts: Sequence[Part] = ()
    firsts: Sequence[Request] = ()
    lasts: Sequence[Request] = ()
    prefilled: Sequence[Request] = ()
    report: Sequence[Request] = ()

    def __init__(self, end: int, version: int) -> None:
        self.end, self.version = end, version


class Scheduler:
    """Requests of one engine. Those that decode are kept as sums over steps, so that a step costs the same for one or
    a hundred."""

    connector: Connector

    def __init__(self, pool: BlockPool, *, block_size: int, token_budget: int, max_num_seqs: int) -> None:
        self.pool = pool
        self.block_size, self.token_budget, self.max_num_seqs = block_size, token_budget, max_num_seqs
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.active: dict[Request, None] = {}
        self.open = 0
        """Requests that this engine has to do with, from its inbox to its last block."""
        self.preemptions = 0
        self.steps = 0
        self._base = 0
        self._ends: list[tuple[int, int, Request]] = []
        self._phases: list[list[Request]] = [[] for _ in range(block_size)]
        self._starting: list[Request] = []
        self._finishing = 0
        self._version = 0
        self._preempted = False

    @property
    def running(self) -> int:
        """Requests that count against ``max_num_seqs``: those waiting for remote KV do not (vLLM 0.26)."""
        return len(self.active) + len(self.prefilling) + len(self._starting) + self._finishing

    def start(self, request: Request) -> None:
        """A request whose KV cache is here decodes from the next step on; its last prompt token is computed there."""
        self._starting.append(request)

    def _schedule(self, now: int) -> Batch | None:
        """The next step, or ``None`` when there is nothing to compute."""
        step = self.steps + 1
        self._preempted = False
        wanting = self._phases[step % self.block_size]
        if wanting:
            self._grow(wanting)
        parts: list[Part] = []
        ending: list[Request] = []
        if self.prefilling or self.waiting:
            self._schedule_prompts(parts, ending, now)
        starting = self._starting
        if not self.active and not starting and not parts:
            return None
        self.steps = step
        batch = Batch(0, 0)
        if starting:
            for request in starting:
                self._activate(request, step, request.input_len + request.got)
            batch.firsts, self._starting = starting, []
            batch.quiet = False
        batch.count = len(self.active)
        batch.context = self._base + batch.count * step
        ends = self._ends
        if ends and ends[0][0] <= step:
            batch.lasts = self._end_at(step)
            if batch.lasts:
                batch.quiet = False
        if parts:
            batch.parts = parts
        if ending:
            batch.quiet = False
            self._end_prompts(batch, ending, step)
        batch.version = self._version
        return batch

    def _end_at(self, step: int) -> list[Request]:
        """Requests whose last token ``step`` computes: they leave the batch, and stay till it is there."""
        ends, lasts = self._ends, []
        while ends and ends[0][0] <= step:
            last, _, request = heappop(ends)
            if request.last_step == last and request in self.active:
                self._retire(request)
                self._finishing += 1
                lasts.append(request)
        return lasts

    def _end_prompts(self, batch: Batch, ending: list[Request], step: int) -> None:
        """Prompts that are complete with ``step``: handed over from here, or decoded on."""
        prefilled, firsts, lasts = [], list(batch.firsts), list(batch.lasts)
        for request in ending:
            self.prefilling.remove(request)
            if request.prefill_only:
                prefilled.append(request)
                continue
            firsts.append(request)
            request.got += 1
            if request.got < request.output_len:
                self._activate(request, step + 1, request.input_len + request.got)
            else:
                self._finishing += 1
                lasts.append(request)
        batch.prefilled, batch.firsts, batch.lasts = prefilled, firsts, lasts

    def _schedule_prompts(self, parts: list[Part], ending: list[Request], now: int) -> None:
        """Chunks of prompts: those under way first, then new ones while there is room, but none in a step that has
        preempted somebody. Who was preempted comes back when there is room for all of it, not for a chunk: alone in a
        cache that has lost blocks for good it would be thrown out again for ever."""
        budget = self.token_budget - len(self.active) - len(self._starting)
        if self.prefilling:
            for request in list(self.prefilling):
                if request in self.prefilling:
                    budget = self._chunk(request, budget, parts, ending)
        while self.waiting and budget > 0 and not self._preempted and self.running < self.max_num_seqs:
            request = self.waiting[0]
            count = min(budget, request.target - request.computed)
            reach = request.target if request.resumed else request.computed + count
            if -(-reach // self.block_size) - len(request.blocks) > self.pool.free:
                self.connector.starved(request, now)
                break
            self.waiting.popleft()
            self.prefilling.append(request)
            self.connector.started(request, now)
            budget = self._chunk(request, budget, parts, ending)

    def _chunk(self, request: Request, budget: int, parts: list[Part], ending: list[Request]) -> int:
        count = min(budget, request.target - request.computed)
        if count <= 0:
            return budget
        missing = -(-(request.computed + count) // self.block_size) - len(request.blocks)
        while missing > self.pool.free:
            victim = self._youngest()
            self._preempt(victim)
            if victim is request:
                return budget
        if missing > 0:
            taken = self.pool.take(missing)
            if request.blocks:
                request.blocks.extend(taken)
            else:
                request.blocks = taken
        parts.append((request, count, request.computed))
        request.computed += count
        if request.computed == request.target:
            ending.append(request)
        return budget - count

    def _youngest(self) -> Request:
        if self.prefilling:
            return self.prefilling[-1]
        return next(reversed(self.active))

    def _preempt(self, request: Request) -> None:
        """vLLM preempts by recompute: blocks go back, the request goes to the head of the queue."""
        self.preemptions += 1
        self._preempted = True
        self.pool.give_back(request.blocks)
        request.blocks = array("i")
        if request in self.active:
            self._retire(request)
            request.got += self.steps - request.first_step + 1
            request.last_step = -1
        else:
            self.prefilling.remove(request)
        request.computed = 0
        request.resumed = True
        request.target = request.input_len + request.got
        self.connector.preempted(request)
        self.waiting.appendleft(request)

    def _activate(self, request: Request, step: int, context: int) -> None:
        """``request`` decodes from ``step`` on with ``context`` tokens there; it asks for a block whenever it crosses
        a boundary."""
        request.first_step = step
        request.last_step = step + request.output_len - request.got - 1
        self.active[request] = None
        self._base += context - step
        self._version += 1
        heappush(self._ends, (request.last_step, request.index, request))
        self._phases[(step + 1 - context) % self.block_size].append(request)

    def _retire(self, request: Request) -> None:
        del self.active[request]
        step, context = request.first_step, request.input_len + request.got
        self._base -= context - step
        self._version += 1
        self._phases[(step + 1 - context) % self.block_size].remove(request)

    def _grow(self, wanting: list[Request]) -> None:
        """Give each running request that crosses a block boundary one more block, preempting the youngest if there is
        none."""
        pool = self.pool
        if pool.free >= len(wanting):
            pool.grow([request.blocks for request in wanting])
            return
        for request in list(wanting):
            while request in self.active and not pool.free:
                self._preempt(self._youngest())
            if request in self.active:
                pool.grow([request.blocks])
