"""A scheduler that treats a connector as vLLM's does, without vLLM: what it asks, in which order, and what it asserts.

Written from what vLLM 0.32 was seen to do; `test_real_scheduler.py` holds the same stories against the real one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pushkv.reference.ports import Address
from pushkv.reference.rules import Rules
from pushkv.reference.scheduler import SchedulerSide

from .engines import BLOCK, Cluster, Engine


class Status(enum.Enum):
    WAITING = 1
    REMOTE = 2
    RUNNING = 3
    STOPPED = 4
    ABORTED = 5
    ERROR = 6


@dataclass(eq=False)
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    max_tokens: int = 1
    hit: int = 0
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    returned: dict[str, Any] | None = None
    preemptions: int = 0

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids or ())
        self.num_prompt_tokens = len(self._all_token_ids)
        self.made = 0
        self.load: list[tuple[int, bool]] = []

    @property
    def over(self) -> bool:
        return self.status in (Status.STOPPED, Status.ABORTED, Status.ERROR)

    @property
    def tokens(self) -> list[int]:
        return self._all_token_ids


class Blocks:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self._ids),)


class VllmLike:
    """One engine."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        blocks: int = 64,
        chunk: int = 64,
        holding_first: bool = True,
        engine: dict[str, Any] | None = None,
        **rules: Any,
    ) -> None:
        self.engine = Engine(cluster, name, **(engine or {}))
        self.rules = Rules(here=Address(name, "127.0.0.1", 5600, 1), block_tokens=BLOCK, **rules)
        self.side = SchedulerSide(self.engine, self.rules)
        self.free = list(range(1, blocks + 1))
        self.chunk = chunk
        self.holding_first = holding_first  # 0.32: who holds blocks comes first; 0.26: who was skipped before
        self.skipped: set[Request] = set()
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished_recving: set[str] = set()
        self.failed_recving: set[str] = set()
        self.preempted: set[str] = set()
        self.known: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}  # the model runner's: the lists that it was given, extended in place
        self.lost: list[int] = []

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.side.on_new_request(request)
        return request

    def abort(self, request: Request, status: Status = Status.ABORTED) -> None:
        if request.over:
            return
        delay = request.status is Status.REMOTE and request.request_id not in self.finished_recving
        if request.status is Status.REMOTE:
            self.finished_recving.discard(request.request_id)
            self.failed_recving.discard(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = status
        self._free(request, delay)

    def preempt(self, request: Request) -> None:
        assert request.status is Status.RUNNING
        self.running.remove(request)
        if self.rules.send:
            self.lost += request.blocks  # as they were until the next step overwrites them
            self.free += request.blocks
            request.blocks = []
        else:
            self._give_back(request)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.known.pop(request.request_id, None)
        request.hit = 0
        self.waiting.insert(0, request)
        self.preempted.add(request.request_id)

    @property
    def alive(self) -> bool:
        """Whether vLLM would go on stepping."""
        queued = len(self.waiting) + len(self.running)
        return bool(queued or len(self.requests) > queued or self.side.pending)

    def step(self) -> None:
        """One pass of the engine's loop."""
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it
            new = min(self.chunk, len(request.tokens) - request.num_computed_tokens)
            while not self._allocate(request, request.num_computed_tokens + new):
                victim = self.running[-1]
                self.preempt(victim)
                scheduled.pop(victim.request_id, None)
                if victim is request:
                    break
            if request.status is Status.RUNNING:
                scheduled[request.request_id] = new
        if not self.preempted:
            self._admit(scheduled)
        output = self._output(scheduled)
        orders = self.side.step(scheduled, self.preempted, output)
        self._remember(output)
        self.preempted = set()
        self.engine.fence(orders.preempted, orders.step)
        for block in self.lost:
            for slot in range(BLOCK):
                self.engine.cache.pop((block, slot), None)
        self.lost = []
        self.engine.scatter(orders.load).wait()
        for request_id, new in scheduled.items():
            self._compute(self.requests[request_id], new)
        if orders.chunks:
            self.engine.enqueued(orders.step)
        self._update(orders, scheduled)

    def _output(self, scheduled: dict[str, int]) -> Any:
        """What the workers are told of the step. A request that goes on after a preemption is a cached one in 0.26."""
        new = []
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
        for request_id in scheduled:
            request = self.requests[request_id]
            told = self.known.get(request_id)
            self.known[request_id] = len(request.blocks)
            blocks = request.blocks[told or 0 :]
            if told is None and (self.holding_first or not request.preemptions):
                computed = request.num_computed_tokens
                new.append(SimpleNamespace(req_id=request_id, num_computed_tokens=computed, block_ids=(list(blocks),)))
                continue
            cached.req_ids.append(request_id)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.new_block_ids.append((list(blocks),) if blocks else None)
            if told is None:
                cached.resumed_req_ids.add(request_id)
        return SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=new, scheduled_cached_reqs=cached)

    def _remember(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = new.block_ids[0]
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and request_id in cached.resumed_req_ids:
                self.tables[request_id] = blocks[0]
            elif blocks:
                self.tables[request_id].extend(blocks[0])

    def _admit(self, scheduled: dict[str, int]) -> None:
        order = list(self.waiting)
        if self.holding_first:
            order.sort(key=lambda request: not request.blocks)
        else:
            order.sort(key=lambda request: request not in self.skipped)
        for request in order:
            was_skipped = request in self.skipped
            self.skipped.add(request)
            if request.status is Status.REMOTE:
                if request.request_id not in self.finished_recving:
                    continue
                self.finished_recving.remove(request.request_id)
                if request.request_id in self.failed_recving:
                    self.failed_recving.remove(request.request_id)
                    self._give_back(request)
                elif request.num_computed_tokens == len(request.tokens):
                    request.num_computed_tokens -= 1
                request.status = Status.WAITING
            external, later = 0, False
            local = request.num_computed_tokens
            if not local:
                local = request.hit
                found, later = self.side.matched_tokens(request, local)
                if found is None:
                    continue
                external = found
                assert external or not later
            computed = local + external
            assert computed <= len(request.tokens)
            new = 0 if later else min(self.chunk, len(request.tokens) - computed)
            assert later or new > 0, "a synchronous load must leave a token to compute"
            fresh = not request.blocks
            if not self._allocate(request, computed + new):
                if not was_skipped:
                    self.skipped.discard(request)
                break
            self.skipped.discard(request)
            if fresh:
                for token in range(local):  # the local prefix is in the cache
                    self._put(request, token)
            self.side.allocated(request, Blocks(request.blocks), external)
            request.num_computed_tokens = computed
            request.load.append((external, later))
            if later:
                request.status = Status.REMOTE
                self.skipped.add(request)
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.status = Status.RUNNING
            scheduled[request.request_id] = new

    def _compute(self, request: Request, new: int) -> None:
        """The forward pass: everything before must be right, what is new is written."""
        for token in range(request.num_computed_tokens):
            cell = request.blocks[token // BLOCK], token % BLOCK
            assert self.engine.cache.get(cell) == request.tokens[token], f"{request.request_id}: token {token}"
        for token in range(request.num_computed_tokens, request.num_computed_tokens + new):
            self._put(request, token)
        request.num_computed_tokens += new

    def _update(self, orders: Any, scheduled: dict[str, int]) -> None:
        for request_id in orders.failed:
            request = self.requests.get(request_id)
            if request is not None and request.status is Status.REMOTE:
                if self.rules.recompute:
                    request.num_computed_tokens = 0
                    self.failed_recving.add(request_id)
                else:
                    self.abort(request, Status.ERROR)
        for request_id in scheduled:
            request = self.requests[request_id]
            if request.status is Status.RUNNING and request.num_computed_tokens == len(request.tokens):
                request.tokens.append(7000 + len(request.tokens))
                request.made += 1
                if request.made == request.max_tokens:
                    request.status = Status.STOPPED
                    self.running.remove(request)
                    self._free(request, False)
        for request_id in orders.received:
            request = self.requests[request_id]  # a report too many ends the engine
            if request.status is Status.REMOTE:
                assert request_id not in self.finished_recving
                self.finished_recving.add(request_id)
            else:
                assert request.over
                self._forget(request)
        for request_id in orders.sent:
            self._forget(self.requests[request_id])

    def _put(self, request: Request, token: int) -> None:
        self.engine.cache[request.blocks[token // BLOCK], token % BLOCK] = request.tokens[token]

    def _allocate(self, request: Request, tokens: int) -> bool:
        need = -(-tokens // BLOCK) - len(request.blocks)
        if need > len(self.free):
            return False
        for _ in range(need):
            request.blocks.append(self.free.pop())
        return True

    def _give_back(self, request: Request) -> None:
        for block in request.blocks:
            for slot in range(BLOCK):
                self.engine.cache.pop((block, slot), None)
        self.free += request.blocks
        request.blocks = []

    def _free(self, request: Request, delay: bool) -> None:
        blocks = request.blocks[: -(-request.num_computed_tokens // BLOCK)]
        keep, request.returned = self.side.finished(request, (blocks,), request.status is Status.STOPPED)
        if not (keep or delay):
            self._forget(request)

    def _forget(self, request: Request) -> None:
        assert request.over
        self._give_back(request)
        del self.requests[request.request_id]
        self.known.pop(request.request_id, None)
        self.tables.pop(request.request_id, None)


class Pair:
    """One prefill and one decode engine, and a router that sends both legs at once."""

    def __init__(self, *, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None, **protocol: Any) -> None:
        self.cluster = Cluster()
        packed = protocol.pop("packed", True)
        engine = {"packed": packed, **protocol}
        self.p = VllmLike(self.cluster, "P", engine=engine, receive=False, **(p or {}))
        self.d = VllmLike(self.cluster, "D", engine=engine, send=False, **(d or {}))
        self.count = 0

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        return [10_000 * (seed + 1) + token for token in range(tokens)]

    def prefill(self, prompt: list[int], transfer_id: str | None = "t", **more: Any) -> Request:
        self.count += 1
        params: dict[str, Any] = {"do_remote_decode": True}
        if transfer_id is not None:
            params["transfer_id"] = transfer_id
        name = more.pop("request_id", f"cmpl-p{self.count}-0-{self.count:08x}")
        return self.p.add(Request(name, list(prompt), params, **more))

    def decode(self, prompt: list[int], transfer_id: str | None = "t", **more: Any) -> Request:
        self.count += 1
        params: dict[str, Any] = {
            "do_remote_prefill": True, "remote_engine_id": "P", "remote_host": "127.0.0.1", "remote_port": 5600,
            "tp_size": 1,
        }  # fmt: skip
        if transfer_id is not None:
            params["transfer_id"] = transfer_id
        name = more.pop("request_id", f"cmpl-d{self.count}-0-{self.count:08x}")
        params.update(more.pop("params", {}))
        return self.d.add(Request(name, list(prompt), params, max_tokens=more.pop("max_tokens", 3), **more))

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.p.step()
            self.cluster.settle()
            self.d.step()
            self.cluster.settle()

    def p_falls_silent(self) -> None:
        """Nothing of P comes through any more, and D waits far longer than it must."""
        self.cluster.cut.add("P")
        for _ in range(40):
            self.d.step()
            self.cluster.wait(0.5)

    def until_quiet(self, most: int = 200, *, seconds: float = 0.0) -> None:
        """Steps until neither engine would go on; the time passes between steps."""
        self.cluster.settle()
        for _ in range(most):
            if not (self.p.alive or self.d.alive):
                break
            self.steps()
            if seconds:
                self.cluster.wait(seconds)
        else:
            raise AssertionError(f"still alive: {[*self.p.requests, *self.d.requests]}")

    def check_nothing_left(self, blocks: int = 64) -> None:
        """All blocks are free, no request and no entry in any table is left."""
        for one in (self.p, self.d):
            assert not one.requests and sorted(one.free) == list(range(1, len(one.free) + 1))
            one.side._hear()
            assert len(one.side.prefill) == len(one.side.decode) == 0
            assert not one.side.prefill._legs and not one.side.decode.legs
            assert len(one.engine.handles) == 0, one.engine.handles.sizes()
            assert one.engine.ledger.open() == (0, 0)
            assert one.engine.ledger.landing_free == one.engine.endpoint.settings.landing_segments
