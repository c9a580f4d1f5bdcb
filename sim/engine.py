"""One vLLM V1 engine: its loop, and its clockwork of steps.

Decides when a step starts and when its tokens come out, after vLLM 0.26's ``step_with_batch_queue`` with a queue of
two (async scheduling): schedule, launch on the engine's thread, look at the connector, then wait for the older of two
batches. What a step holds is the scheduler's business; how KV cache gets here or leaves is the connector's, which is
called where vLLM calls it.

Decode steps between two events are not simulated one by one: ``_jump`` sums them up in whole ticks, and a ``kick``
lands at the step in which the event falls. Idle polls are jumped over the same way. With ``fast=False`` neither is
done, and the result is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop
from math import isqrt

from pushkv.sim.blocks import BlockPool
from pushkv.sim.clock import Clock
from pushkv.sim.costs import StepCosts
from pushkv.sim.request import Request
from pushkv.sim.scheduler import Batch, Scheduler


class Engine(Scheduler):
    """``connector`` is set by whoever builds the pair; ``costs`` and ``pool`` are this engine's own."""

    def __init__(
        self,
        env: Clock,
        name: str,
        costs: StepCosts,
        pool: BlockPool,
        *,
        block_size: int,
        token_budget: int,
        max_num_seqs: int,
        fast: bool,
    ) -> None:
        super().__init__(pool, block_size=block_size, token_budget=token_budget, max_num_seqs=max_num_seqs)
        self.env, self.name, self.costs, self.fast = env, name, costs, fast
        self.inbox: list[Request] = []
        self.gpu_free = 0
        self.gpu_began = 0
        """When the device began the step that it ends at ``gpu_free``, or will."""
        self.on_step: Callable[[int, Batch], None] | None = None
        self.dead = False
        self._queue: deque[Batch] = deque()
        self._finished_flag = False
        self._turn = 0
        self._due = 0
        self._then: Callable[[], None] = self._top
        self._looping = self._again = False
        self._paused_until = 0
        self._parked = "empty"
        self._since = 0
        self._ran = False
        self._batch = Batch(0, 0)
        self._jump_to = (0, 0, 0, 0)
        self._jump_end = 0

    # ------------------------------------------------------------ waking

    def _at(self, when: int, then: Callable[[], None]) -> None:
        """Go on with ``then`` at ``when``: in this very call where nothing else happens before."""
        self._turn += 1
        self._then = then
        self._due = when
        self._parked = ""
        if self._looping and self.env.advance(when):
            self._again = True
        else:
            self.env.call(when, self._wake, self._turn)

    def _wake(self, turn: int) -> None:
        if turn != self._turn or self.dead:
            return
        if self._due < self._paused_until:
            self._at(self._paused_until, self._then)
            return
        self._looping = self._again = True
        while self._again:  # a loop and no recursion: the passes may be many
            self._again = False
            self._then()
        self._looping = False

    def pause(self, until: int) -> None:
        """The process is stopped until ``until``: what is due before happens then. What is being jumped over is taken
        step by step."""
        self.kick()
        self._paused_until = max(self._paused_until, until)

    def kill(self) -> None:
        """The process is gone for good, with all that it held."""
        self.kick()
        self.dead = True

    def deliver(self, request: Request) -> None:
        """A request comes in; the loop sees it at its next pass."""
        self.inbox.append(request)
        if self._parked == "jump" and self.connector.registers_only:
            if self.env.ticks < self._jump_end:
                self.env.call(self._place(self.env.ticks)[2], self._drain, self._turn)
        elif self._parked:
            self.kick()

    def _drain(self, turn: int) -> None:
        """The pass that takes the inbox, in the middle of a jump: nobody in it can be scheduled yet."""
        if turn == self._turn and self._parked == "jump" and not self.dead:
            self._take_inbox()

    def _take_inbox(self) -> None:
        arrived, self.inbox = self.inbox, []
        for request in arrived:
            self.connector.received(request)

    def kick(self) -> None:
        """Something outside has changed that the loop may see. Costs nothing unless it is being jumped over."""
        parked = self._parked
        if not parked or self.dead:
            return
        now = self.env.ticks
        if now < self._paused_until:
            self.env.call(self._paused_until, self._kicked, None)
        elif parked == "empty":
            self._at(now, self._top)
        elif parked == "idle":
            costs = self.costs
            period = costs.schedule + costs.idle_poll
            top = self._since + (now - self._since) // period * period
            looked = top + costs.schedule
            if now <= looked:
                self._batch, self._ran = Batch(looked, self._version), False
                if self.connector.watched:
                    self._at(looked, self._look)
                else:
                    self._queued(looked)
            else:
                self._at(top + period, self._top)
        elif parked == "winding down":
            self._rewind(now)
        else:
            self._land(now)

    def _rewind(self, now: int) -> None:
        """Something comes while the engine makes its last pass after everybody has gone: it is seen in that pass, or
        after it."""
        last = self._since + self.costs.idle_poll
        if now <= last:
            self._at(last, self._top)
            return
        self._ran = self._finished_flag = False
        if now > last + self.costs.schedule:
            self._queue.clear()
        self._at(max(now, last + self.costs.schedule), self._top)

    def _kicked(self, _: None) -> None:
        self.kick()

    # ------------------------------------------------------------ the loop

    def _top(self) -> None:
        """One pass: drain the inbox, schedule, post, launch."""
        now, connector, queue = self._due, self.connector, self._queue
        if self.inbox:
            self._take_inbox()
        if not self.open and not self._finished_flag:
            self._ran = False
            if queue:
                end = queue[0].end
                self._at(end if end > now else now, self._update)
            else:
                self._parked = "empty"
            return
        finished, self._finished_flag = self._finished_flag, False
        connector.admit(now)
        calm = self.fast and len(queue) == 1 and not connector.fresh and not connector.news
        alike = self.active and not (self._starting or self.prefilling or self.waiting)
        if calm and alike and queue[0].version == self._version and self._jump(now):
            return
        batch = self._schedule(now)
        if calm and batch is None and not (finished or self._preempted) and queue[0].quiet and queue[0].end <= now:
            self._parked, self._since = "idle", now
            return
        t = now + self.costs.schedule
        if connector.fresh:
            t = connector.pre_forward(t)
        if batch is not None:
            self._ran = True
            t = self._launch(batch, t)
        else:
            self._ran = False
            batch = Batch(t, self._version)
        self._batch = batch
        if connector.watched or connector.news:
            self._at(t, self._look)
        else:
            self._queued(t)

    def _look(self) -> None:
        """The connector is asked what has come or gone; the answer travels with this step's output."""
        report = self.connector.poll(self._due)
        if report:
            self._batch.report = report
            self._batch.quiet = False
        self._queued(self._due)

    def _queued(self, t: int) -> None:
        queue = self._queue
        queue.append(self._batch)
        if len(queue) < 2 and (self._ran or self.open or self._finished_flag):
            self._at(t if self._ran else t + self.costs.idle_poll, self._top)
            return
        older = queue[0]
        when = older.end if older.end > t else t
        if self._ran and older.quiet:
            queue.popleft()
            self._at(when, self._top)
        else:
            self._at(when, self._update)

    def _update(self) -> None:
        """The oldest batch is done: tokens go out, reports take effect."""
        now = self._due
        batch = self._queue.popleft()
        if not batch.quiet:
            self._results(batch, now)
        if self._ran or not (self.open or self._finished_flag):
            self._top()
        elif self.fast and not self.open and not self.inbox and all(left.quiet for left in self._queue):
            self._parked, self._since = "winding down", now
        else:
            self._at(now + self.costs.idle_poll, self._top)

    def _results(self, batch: Batch, now: int) -> None:
        connector = self.connector
        passed = now + self.costs.stream * max(0, batch.count - 1)  # the tokens of a step leave one by one
        if batch.report and connector.apply(batch.report, now):
            self._finished_flag = True
        for request in batch.prefilled:
            self._finished_flag = True
            connector.prefilled(request, now)
        for request in batch.firsts:
            connector.first_token(request, passed)
        for request in batch.lasts:
            self._finished_flag = True
            self._finishing -= 1
            self.open -= 1
            self.pool.give_back(request.blocks)
            connector.finished(request, passed)

    def _launch(self, batch: Batch, t: int) -> int:
        """Launch on this thread; returns when it has the thread again. ``gpu_free`` is when the device is done then,
        ``batch.end`` when the engine can take note of it."""
        costs = self.costs
        start = self.gpu_free if self.gpu_free > t else t
        if batch.firsts:
            t, start = self.connector.before_step(batch.firsts, t, start)
        if batch.parts:
            host, batch.end = costs.mixed(batch.parts, batch.count, batch.context, t, start)
            t += host
        else:
            t += costs.decode_launch
            base, slope = costs.decode_line(batch.count)
            batch.end = (start if start > t else t) + base + slope * batch.context
        self.gpu_began, self.gpu_free = start, batch.end
        if batch.prefilled:
            batch.end += costs.result
        if self.on_step is not None:
            self.on_step(start if batch.parts else max(start, t), batch)
        if batch.parts:
            self.connector.launched(batch.parts, t)
        return t

    # ------------------------------------------------------------ jumping over equal steps

    def _jump(self, now: int) -> bool:
        """Run all steps in which nothing happens but one token for everybody, up to the step before somebody's last."""
        step, n = self.steps, len(self.active)
        ends = self._ends
        while ends[0][2].last_step != ends[0][0] or ends[0][2] not in self.active:
            heappop(ends)
        count = ends[0][0] - 1 - step
        if count < 2:
            return False
        room = (self.pool.free // n - 1) * self.block_size
        if room < count:
            count = room
            if count < 2:
                return False
        costs = self.costs
        base, slope = costs.decode_line(n)
        first = base + slope * (self._base + n * (step + 1))
        busy = costs.schedule + costs.decode_launch
        end = self._queue[0].end
        if first < busy or end < now + busy:
            return False
        growth = slope * n
        self._jump_to = (count, first, growth, end)
        self._since = now
        self._jump_end = end + _sum(count - 1, first, growth)
        if not self._queue[0].quiet:
            self.env.call(end, self._deliver_results, self._turn + 1)
        self._at(self._jump_end, self._jumped)
        self._parked = "jump"
        return True

    def _deliver_results(self, turn: int) -> None:
        """The step that was under way when the jump began has tokens that somebody waits for: they are there now.

        The jump goes on from here, one step shorter, unless somebody waits for what the results set free.
        """
        if turn != self._turn or self.dead:
            return
        count, first, growth, end = self._jump_to
        self._advance(1)
        queue = self._queue
        batch = queue[0]
        self.gpu_free = then = end + first
        queue[0] = Batch(then, self._version)
        self._jump_to = (count - 1, first + growth, growth, then)
        self._since = end
        self._parked = ""
        self._results(batch, end)
        connector = self.connector
        if self.inbox or connector.news or connector.fresh or connector.blocked():
            self._ran = True
            self._at(end, self._top)
        else:
            self._parked = "jump"
            self._finished_flag = False

    def _advance(self, steps: int) -> None:
        """Book ``steps`` steps: blocks in the order in which the scheduler would have given them out."""
        size = self.block_size
        at = (self.steps + 1) % size
        self.steps += steps
        if steps == 1:
            wanting = [request.blocks for request in self._phases[at]]
        else:
            rounds, rest = divmod(steps, size)
            phases = self._phases[at:] + self._phases[:at]
            wanting = [request.blocks for phase in phases[:rest] if phase for request in phase]
            if rounds:
                ring = wanting + [request.blocks for phase in phases[rest:] if phase for request in phase]
                wanting = ring * rounds + wanting
        if wanting:
            self.pool.grow(wanting)

    def _jumped(self) -> None:
        count, first, growth, end = self._jump_to
        self._parked = ""
        self._advance(count)
        self._queue[0].end = self.gpu_free = end + _sum(count, first, growth)
        self._ran = True
        self._top()

    def _place(self, now: int) -> tuple[int, int, int]:
        """Where in the jump ``now`` falls: passes begun before this one, when this one began, and when it ends."""
        _, first, growth, end = self._jump_to
        if now < end:
            return 0, self._since, end
        before = _steps_in(now - end, first, growth)
        began = end + _sum(before, first, growth)
        return 1 + before, began, began + first + growth * before

    def _land(self, now: int) -> None:
        """An event falls into the jump: be in the pass in which it falls, as if every step had been taken."""
        older = self._queue[0]
        if now >= self._jump_end or (now >= self._jump_to[3] and not older.quiet):
            return  # the pass that begins at this very tick will see it
        done, began, ends = self._place(now)
        self._advance(done + 1)
        older.end = ends
        _, first, growth, end = self._jump_to
        self.gpu_free = end + _sum(done + 1, first, growth)
        batch = Batch(self.gpu_free, self._version)
        self._ran = True
        looked = began + self.costs.schedule + self.costs.decode_launch
        if self.connector.watched and now <= looked:
            self._batch = batch
            self._at(looked, self._look)
        elif older.quiet:
            self._queue[0] = batch
            self._at(ends, self._top)
        else:
            self._queue.append(batch)
            self._at(ends, self._update)


def _sum(steps: int, first: int, growth: int) -> int:
    """Ticks of ``steps`` steps of a jump, of which the first takes ``first`` and each ``growth`` more than the one
    before."""
    return steps * first + growth * (steps * (steps - 1) // 2)


def _steps_in(ticks_: int, first: int, growth: int) -> int:
    """How many whole steps of such a jump fit into ``ticks_``: the largest k with ``_sum(k, first, growth) <= ticks_``.

    Exact: the root of growth k² + (2 first - growth) k = 2 ticks, and rounding it down early changes nothing.
    """
    if growth == 0:
        return ticks_ // first
    b = 2 * first - growth
    return (isqrt(b * b + 8 * growth * ticks_) - b) // (2 * growth)
