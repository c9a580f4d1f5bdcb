"""One vLLM V1 engine: its loop, its scheduler, its block pool and its clockwork of steps.

Decides when a step starts, what it holds and when its tokens come out, after vLLM 0.26's ``step_with_batch_queue`` with a queue of two (async
scheduling): schedule, launch on the engine's thread, look at the connector, then wait for the older of two batches. Does not decide how KV
cache gets here or leaves: a ``Connector`` does, at the points where vLLM calls its connector.

Decode steps between two events are not simulated one by one: ``_jump`` sums them up in whole ticks, and a ``kick`` lands at the step
in which the event falls. Idle polls are jumped over the same way. With ``fast=False`` neither is done, and the result is the same.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import isqrt
from typing import TYPE_CHECKING

import simpy

from pushkv.sim.blocks import BlockPool
from pushkv.sim.costs import StepCosts
from pushkv.sim.request import Request

if TYPE_CHECKING:
    from pushkv.sim.connector import Connector


Part = tuple[Request, int, int]
"""A chunk of a prompt in a step: request, new tokens, tokens before them."""


class Batch:
    """One step that was launched: when its tokens are there, and whose they are."""

    __slots__ = ("context", "count", "end", "firsts", "lasts", "parts", "prefilled", "report", "version")

    def __init__(self, end: int, version: int) -> None:
        self.end = end
        self.version = version
        self.count = self.context = 0
        self.parts: list[Part] = []
        self.firsts: list[Request] = []
        self.lasts: list[Request] = []
        self.prefilled: list[Request] = []
        self.report: list[Request] = []

    @property
    def quiet(self) -> bool:
        """Whether nobody waits for this very step."""
        return not (self.firsts or self.lasts or self.prefilled or self.report)


class Engine:
    """``connector`` is set by whoever builds the pair; ``costs`` and ``pool`` are this engine's own."""

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        costs: StepCosts,
        pool: BlockPool,
        *,
        block_size: int,
        token_budget: int,
        max_num_seqs: int,
        fast: bool,
    ) -> None:
        self.env, self.name, self.costs, self.pool = env, name, costs, pool
        self.connector: Connector
        self.block_size, self.token_budget, self.max_num_seqs, self.fast = block_size, token_budget, max_num_seqs, fast
        self.inbox: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.active: dict[Request, None] = {}
        self.gpu_free = 0
        self.preemptions = 0
        self.dead = False
        self.steps = 0
        self._base = 0
        self._ends: list[tuple[int, int, Request]] = []
        self._phases: list[list[Request]] = [[] for _ in range(block_size)]
        self._starting: list[Request] = []
        self._finishing = 0
        self._queue: deque[Batch] = deque()
        self._finished_flag = False
        self._version = 0
        self._turn = 0
        self._paused_until = 0
        self._then: Callable[[], None] = self._top
        self._parked = "empty"
        self._since = 0
        self._ran = False
        self._batch = Batch(0, 0)
        self._jump_to = (0, 0, 0, 0)
        self._jump_end = 0

    # ------------------------------------------------------------ waking

    def _at(self, when: int, then: Callable[[], None]) -> None:
        self._turn += 1
        self._then = then
        self._parked = ""
        event = self.env.timeout(when - self.env.now, self._turn)
        event.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event._value == self._turn and not self.dead:
            if self.env.now < self._paused_until:
                self._at(self._paused_until, self._then)
            else:
                self._then()

    def pause(self, until: int) -> None:
        """The process is stopped until ``until``: what is due before happens then."""
        self._paused_until = until

    def deliver(self, request: Request) -> None:
        """A request comes in; the loop sees it at its next pass."""
        self.inbox.append(request)
        self.kick()

    def kick(self) -> None:
        """Something outside has changed that the loop may see. Costs nothing unless it is being jumped over."""
        parked = self._parked
        if not parked or self.dead:
            return
        if self.env.now < self._paused_until:
            return
        now = int(self.env.now)
        if parked == "empty":
            self._at(now, self._top)
        elif parked == "idle":
            costs = self.costs
            period = costs.schedule + costs.idle_poll
            top = self._since + (now - self._since) // period * period
            if now <= top + costs.schedule:
                self._batch, self._ran = Batch(top + costs.schedule, self._version), False
                self._at(top + costs.schedule, self._look)
            else:
                self._at(top + period, self._top)
        else:
            self._land(now)

    # ------------------------------------------------------------ the loop

    def _top(self) -> None:
        """One pass: drain the inbox, schedule, post, launch."""
        now = int(self.env.now)
        connector = self.connector
        if self.inbox:
            arrived, self.inbox = self.inbox, []
            for request in arrived:
                connector.received(request)
        if not self._has_requests():
            if self._queue:
                self._ran = False
                self._pop(now)
            else:
                self._parked = "empty"
            return
        finished, self._finished_flag = self._finished_flag, False
        connector.admit(now)
        if self.fast and self._may_jump() and self._jump(now):
            return
        batch = self._schedule(now)
        ran = batch is not None
        idle = not ran and not connector.posting and not finished and len(self._queue) == 1
        if idle and self.fast and self._queue[0].quiet and self._queue[0].end <= now and not connector.pending():
            self._parked, self._since = "idle", now
            return
        costs = self.costs
        t = now + costs.schedule
        if connector.posting:
            t = connector.pre_forward(t)
        if batch is not None:
            t = self._launch(batch, t)
        else:
            batch = Batch(t, self._version)
        self._batch, self._ran = batch, ran
        if connector.polls():
            self._at(t, self._look)
        else:
            self._queued(t)

    def _look(self) -> None:
        """The connector is asked what has come or gone; the answer travels with this step's output."""
        now = int(self.env.now)
        self._batch.report = self.connector.poll(now)
        self._queued(now)

    def _queued(self, t: int) -> None:
        self._queue.append(self._batch)
        if len(self._queue) < 2 and (self._ran or self._has_requests()):
            self._at(t if self._ran else t + self.costs.idle_poll, self._top)
        else:
            self._pop(t)

    def _pop(self, t: int) -> None:
        end = self._queue[0].end
        self._at(end if end > t else t, self._update)

    def _update(self) -> None:
        """The oldest batch is done: tokens go out, reports take effect."""
        now = int(self.env.now)
        batch = self._queue.popleft()
        if not batch.quiet:
            connector = self.connector
            if batch.report:
                self._finished_flag |= connector.apply(batch.report, now)
            for request in batch.prefilled:
                self._finished_flag = True
                connector.prefilled(request, now)
            for request in batch.firsts:
                connector.first_token(request, now)
            for request in batch.lasts:
                self._finished_flag = True
                self._finishing -= 1
                self.pool.give_back(request.blocks)
                connector.finished(request, now)
        if not self._ran and self._has_requests():
            self._at(now + self.costs.idle_poll, self._top)
        else:
            self._top()

    def _has_requests(self) -> bool:
        return bool(
            self.active
            or self.waiting
            or self.prefilling
            or self._starting
            or self._finishing
            or self._finished_flag
            or self.connector.has_requests()
        )

    # ------------------------------------------------------------ scheduling

    @property
    def running(self) -> int:
        """Requests that count against ``max_num_seqs``: those waiting for remote KV do not (vLLM 0.26)."""
        return len(self.active) + len(self.prefilling) + len(self._starting) + self._finishing

    def start(self, request: Request) -> None:
        """A request whose KV cache is here decodes from the next step on; its last prompt token is computed there."""
        self._starting.append(request)

    def _schedule(self, now: int) -> Batch | None:
        step = self.steps + 1
        if self.active:
            self._grow(step)
        batch = Batch(0, self._version)
        ending: list[Request] = []
        if self.prefilling or self.waiting:
            self._schedule_prompts(batch.parts, ending, now)
        if not batch.parts and not self.active and not self._starting:
            return None
        self.steps = step
        for request in self._starting:
            self._activate(request, step, request.tokens)
            batch.firsts.append(request)
        self._starting.clear()
        batch.count = len(self.active)
        batch.context = self._base + batch.count * step
        ends = self._ends
        while ends and ends[0][0] <= step:
            last, _, request = heappop(ends)
            if request.last_step == last and request in self.active:
                self._retire(request)
                self._finishing += 1
                batch.lasts.append(request)
        for request in ending:
            self.prefilling.remove(request)
            if request.prefill_only:
                batch.prefilled.append(request)
                continue
            batch.firsts.append(request)
            request.got += 1
            if request.got < request.output_len:
                self._activate(request, step + 1, request.tokens)
            else:
                self._finishing += 1
                batch.lasts.append(request)
        batch.version = self._version
        return batch

    def _schedule_prompts(self, parts: list[Part], ending: list[Request], now: int) -> None:
        """Chunks of prompts: those under way first, then new ones while there is room."""
        budget = self.token_budget - len(self.active) - len(self._starting)
        for request in list(self.prefilling):
            if request in self.prefilling:
                budget = self._chunk(request, budget, parts, ending)
        while self.waiting and budget > 0 and self.running < self.max_num_seqs:
            request = self.waiting[0]
            count = min(budget, request.target - request.computed)
            if self._missing(request, request.computed + count) > len(self.pool):
                self.connector.starved(request, now)
                break
            self.waiting.popleft()
            self.prefilling.append(request)
            self.connector.started(request, now)
            budget = self._chunk(request, budget, parts, ending)

    def _missing(self, request: Request, tokens: int) -> int:
        return -(-tokens // self.block_size) - len(request.blocks)

    def _chunk(self, request: Request, budget: int, parts: list[Part], ending: list[Request]) -> int:
        count = min(budget, request.target - request.computed)
        if count <= 0:
            return budget
        missing = self._missing(request, request.computed + count)
        while missing > len(self.pool):
            victim = self._youngest()
            self._preempt(victim)
            if victim is request:
                return budget
        request.blocks.extend(self.pool.take(missing))
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
        self.pool.give_back(request.blocks)
        request.blocks = array("i")
        if request in self.active:
            self._retire(request)
            request.got += self.steps - request.first_step + 1
            request.last_step = -1
        else:
            self.prefilling.remove(request)
        request.computed = 0
        request.target = request.input_len + request.got
        self.connector.preempted(request)
        self.waiting.appendleft(request)

    def _activate(self, request: Request, step: int, context: int) -> None:
        """``request`` decodes from ``step`` on with ``context`` tokens there; it asks for a block whenever it crosses a boundary."""
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

    def _grow(self, step: int) -> None:
        """Give each running request that crosses a block boundary in ``step`` one more block, preempting the youngest if there is none."""
        wanting = self._phases[step % self.block_size]
        if not wanting:
            return
        if len(self.pool) >= len(wanting):
            for request in wanting:
                request.blocks.append(self.pool.take_one())
            return
        for request in list(wanting):
            while request in self.active and not len(self.pool):
                self._preempt(self._youngest())
            if request in self.active:
                request.blocks.append(self.pool.take_one())

    def _launch(self, batch: Batch, t: int) -> int:
        """Launch on this thread; returns when it has the thread again. ``batch.end`` is when the device is done."""
        costs = self.costs
        start = max(self.gpu_free, t) + self.connector.before_step(batch.firsts)
        if batch.parts:
            host, batch.end = costs.mixed(batch.parts, batch.count, batch.context, t, start)
            t += host
        else:
            t += costs.decode_launch
            batch.end = max(start, t) + costs.decode(batch.count, batch.context)
        self.gpu_free = batch.end
        if batch.parts:
            self.connector.launched(batch.parts, t)
        return t

    # ------------------------------------------------------------ jumping over equal steps

    def _may_jump(self) -> bool:
        if not self.active or self._starting or self.prefilling or self.waiting or self._finishing:
            return False
        if len(self._queue) != 1:
            return False
        batch, connector = self._queue[0], self.connector
        return batch.version == self._version and batch.quiet and not connector.posting and not connector.pending()

    def _jump(self, now: int) -> bool:
        """Run all steps in which nothing happens but one token for everybody, up to the step before somebody's last."""
        step, n = self.steps, len(self.active)
        ends = self._ends
        while ends[0][2].last_step != ends[0][0] or ends[0][2] not in self.active:
            heappop(ends)
        count = ends[0][0] - 1 - step
        room = len(self.pool) // n - 1
        count = min(count, room * self.block_size)
        if count < 2:
            return False
        costs = self.costs
        base, slope = costs.decode_line(n)
        first = base + slope * (self._base + n * (step + 1))
        busy = costs.schedule + costs.decode_launch
        end = self._queue[0].end
        if first < busy or end < now + busy:
            return False
        self._jump_to = (count, first, slope * n, end)
        self._since = now
        self._jump_end = end + self._sum(count - 1)
        self._at(self._jump_end, self._jumped)
        self._parked = "jump"
        return True

    def _sum(self, steps: int) -> int:
        """Ticks of the first ``steps`` steps of the jump."""
        _, first, growth, _ = self._jump_to
        return steps * first + growth * (steps * (steps - 1) // 2)

    def _advance(self, steps: int) -> None:
        """Book ``steps`` steps: blocks in the order in which the scheduler would have given them out."""
        phases, size, pool = self._phases, self.block_size, self.pool
        for step in range(self.steps + 1, self.steps + steps + 1):
            for request in phases[step % size]:
                request.blocks.append(pool.take_one())
        self.steps += steps

    def _jumped(self) -> None:
        count, _, _, end = self._jump_to
        self._parked = ""
        self._advance(count)
        batch = self._queue[0]
        batch.end = self.gpu_free = end + self._sum(count)
        self._ran = True
        self._top()

    def _land(self, now: int) -> None:
        """An event falls into the jump: be in the pass in which it falls, as if every step had been taken."""
        _, _, _, end = self._jump_to
        if now >= self._jump_end:
            return
        done = 0
        if now >= end:
            done = 1 + self._steps_in(now - end)
        top = self._since if done == 0 else end + self._sum(done - 1)
        self._advance(done + 1)
        older = self._queue[0]
        older.end = end + self._sum(done)
        batch = Batch(end + self._sum(done + 1), self._version)
        self.gpu_free = batch.end
        self._ran = True
        looked = top + self.costs.schedule + self.costs.decode_launch
        if self.connector.polls() and now <= looked:
            self._batch = batch
            self._at(looked, self._look)
        else:
            self._queue.append(batch)
            self._pop(now)

    def _steps_in(self, ticks_: int) -> int:
        """How many whole steps of the jump fit into ``ticks_``."""
        _, first, growth, _ = self._jump_to
        if growth == 0:
            return ticks_ // first
        # growth/2 k² + (first − growth/2) k ≤ ticks
        b = 2 * first - growth
        k = (isqrt(b * b + 8 * growth * ticks_) - b) // (2 * growth)
        while self._sum(k + 1) <= ticks_:
            k += 1
        while k and self._sum(k) > ticks_:
            k -= 1
        return k
