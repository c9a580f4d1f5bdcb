"""The requests of a prefill engine: from their arrival to the moment when nobody reads their blocks any more.

Decides when the protocol is told that a prompt is held, has begun, is complete or will never come, and until when vLLM
keeps the blocks of a finished request. Does not decide whether, when or how the bytes leave; it has no clock.

    QUEUED -> RUNNING -> SENDING -> OVER        RUNNING -> QUEUED: preempted        QUEUED, RUNNING -> OVER: aborted

Chunk by chunk, a prompt is told of as its steps are scheduled, the last one too: by the time vLLM knows that the
request is finished, its blocks may not be needed any more. One that is aborted with chunks under way is held (SENDING)
until nothing reads its blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from pushkv.model.protocol import events as ev
from pushkv.reference.identity import Identity, IdentityError, RequestLike, identify
from pushkv.reference.ports import BlockIds, Chunk, Complete, Held, Office, StepOrders, Told
from pushkv.reference.progress import Progress
from pushkv.reference.rules import Rules

Added = tuple[tuple[list[int], int], ...]
"""What one step adds to a request's blocks: per cache group vLLM's own list, and its length then. The model runner
extends it in place.
"""


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    SENDING = "sending"
    OVER = "over"


class _Leg:
    __slots__ = ("added", "identity", "length", "released", "request_id", "state", "tokens", "told", "verdict")

    def __init__(self, request_id: str, identity: Identity, length: int, tokens: int) -> None:
        self.request_id = request_id
        self.identity = identity
        self.length = length  # tokens that must be computed
        self.tokens = tokens  # the same, rounded up to what the layout can move
        self.state = State.QUEUED
        self.added: list[Added] = []  # of the chunks so far
        self.told = 0  # tokens of the prompt that the protocol was told of, in whichever of its lives
        self.released = self.verdict = False


class PrefillLegs:
    """All of one engine. Every call is O(1) in the prompt. What the office is told of is a request id: its handle."""

    def __init__(self, office: Office, rules: Rules, counters: dict[str, float]) -> None:
        self._say = office.inbox.append
        self._rules = rules
        self._counters = counters
        self._legs: dict[str, _Leg] = {}  # by request id, while vLLM has the request
        self._booked: dict[str, _Leg] = {}  # the same, while the books have the transfer
        self._plain: set[str] = set()  # requests that vLLM has and that are no legs
        self._queued: dict[str, _Leg] = {}
        self.running: dict[str, _Leg] = {}  # whose chunks leave as they are computed
        self._sending = 0
        self._gave_way = False
        self._sent: list[str] = []
        self._lost_blocks: list[str] = []
        self.ears: dict[type, Callable[[Any], None]] = {ev.Finished: self._finished, ev.Release: self._release}
        """Who hears which news of the office."""

    def __len__(self) -> int:
        return len(self._booked)

    @property
    def open(self) -> bool:
        """Whether it matters to any of them what a step computes."""
        return bool(self._queued or self._gave_way)

    def knows(self, request_id: str) -> bool:
        """Whether the request was added, as a leg or not."""
        return request_id in self._legs or request_id in self._plain

    @property
    def waiting(self) -> bool:
        """Whether vLLM keeps blocks for us, or must be told that it need not any more."""
        return bool(self._sending or self._sent)

    @property
    def stirs(self) -> bool:
        """Whether there is something to report in this step."""
        return bool(self._sent or self._lost_blocks)

    def add(self, request: RequestLike) -> None:
        """First sight of a request with `do_remote_decode`. Later calls for it do nothing."""
        rules, name = self._rules, request.request_id
        if name in self._legs or name in self._plain:
            return
        length = rules.moved(request.num_prompt_tokens)
        if not rules.send:
            return self._refuse(name, "role")
        if length < 1:
            self._plain.add(name)
            return
        backoff = rules.backoff
        try:
            identity = identify(request, randomized=rules.randomized_ids, cut=backoff)
        except IdentityError:
            return self._refuse(name, "identity")
        if name in self._booked:  # an id that comes again: the books have not closed the transfer of the first
            return self._refuse(name, "ambiguous")
        tokens = rules.rounded(length)
        self._say(Held(identity, tokens, rules.chunked))
        if backoff and not _truncate(request, backoff):
            self._say(ev.Abort(name, "this vLLM cannot stop a prompt early"))
            return self._refuse(name, "backoff")
        self._legs[name] = self._booked[name] = self._queued[name] = _Leg(name, identity, length, tokens)

    def _refuse(self, name: str, why: str) -> None:
        """It is served as a plain request; the decode leg finds no partner and gets its verdict by its own bounds."""
        self._plain.add(name)
        counter = f"requests_refused:{why}"
        self._counters[counter] = self._counters.get(counter, 0) + 1

    def scheduled(self, tokens: Mapping[str, int], preempted: Collection[str]) -> None:
        """One step: who computes `tokens`, who was preempted before."""
        for request_id in preempted:
            leg = self._legs.get(request_id)
            if leg is not None and leg.state is State.RUNNING:
                leg.state = State.QUEUED
                leg.added = []
                self._queued[request_id] = leg
                self.running.pop(request_id, None)
                self._lost_blocks.append(request_id)
                self._say(ev.Preempted(request_id))
        if self._queued:
            few: Iterable[str] = self._queued if len(self._queued) < len(tokens) else tokens
            for request_id in [name for name in few if name in tokens and name in self._queued]:
                leg = self._queued.pop(request_id)
                leg.state = State.RUNNING
                if self._rules.chunked and not leg.released:
                    self.running[request_id] = leg
                self._say(ev.Computed(request_id, 0, False))
        self._give_way(bool(tokens))

    def computes(self, steps: Iterable[Progress], step: int) -> bool:
        """What the prefills of `running` compute in step `step` leaves behind it. Whether anything does."""
        found = False
        for request_id, done, blocks, fresh in steps:
            leg = self.running[request_id]
            if fresh:
                leg.added = []
            if blocks:
                leg.added.append(tuple([(ids, len(ids)) for ids in self._rules.select(blocks)]))
            tokens = self._rules.leaves(min(done, leg.length), leg.tokens)
            if tokens:
                leg.told = max(leg.told, tokens)
                self._say(Chunk(request_id, partial(_joined, leg.added), tokens, step))
                found = True
            if done >= leg.length:
                del self.running[request_id]
        return found

    def _give_way(self, computes: bool) -> None:
        """Rule 8, this side: nothing runs, something would, and finished prompts hold the blocks. Said once until
        something moves again.
        """
        stuck = not computes and self._sending > 0 and bool(self._queued)
        if stuck and not self._gave_way:
            self._say(ev.GiveWay())
        self._gave_way = stuck

    def finished(self, request: RequestLike, blocks: BlockIds, complete: bool) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is done with `request`. complete: it stopped by itself (not aborted, not an error).

        Returns whether vLLM must keep the blocks, and what the router passes on to the decode leg.
        """
        leg = self._legs.pop(request.request_id, None)
        if leg is None:
            self._plain.discard(request.request_id)
            return False, None
        if leg.state is State.QUEUED:
            self._queued.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        whole = complete and request.num_computed_tokens >= leg.length and any(blocks)
        if not whole:
            leg.state = State.OVER
            reason = "prefill ended without its whole cache" if complete else "prefill aborted"
            self._say(ev.Abort(leg.request_id, reason))
            if leg.told and not leg.released:
                if any(blocks):  # a gather may be reading them
                    leg.state = State.SENDING
                    self._sending += 1
                    return True, None
                self._lost_blocks.append(leg.request_id)  # preempted since the last step
            return False, None
        params = self._rules.params(request.request_id, leg.identity.transfer_id, leg.length)
        if leg.released:  # the decode engine has given it up meanwhile
            leg.state = State.OVER
            return False, params
        leg.state = State.SENDING
        self._sending += 1
        self._say(Complete(leg.request_id, blocks, leg.tokens))
        return True, params

    def _finished(self, news: ev.Finished) -> None:
        leg = self._booked.get(news.transfer_id)
        if leg is not None:
            leg.verdict = True
            if leg.released:
                del self._booked[news.transfer_id]

    def _release(self, news: ev.Release) -> None:
        leg = self._booked.get(news.transfer_id)
        if leg is None:
            return
        leg.released = True
        self.running.pop(leg.request_id, None)
        self._gave_way = False
        if leg.state is State.SENDING:
            leg.state = State.OVER
            self._sending -= 1
            self._sent.append(leg.request_id)
        if leg.verdict:
            del self._booked[news.transfer_id]

    def orders(self, out: StepOrders) -> None:
        """Adds what the workers report in this step."""
        if self._sent:
            out.sent, self._sent = self._sent, []
        if self._lost_blocks:
            out.preempted, self._lost_blocks = self._lost_blocks, []
            self._say(Told(out.step))

    def reset(self) -> None:
        """The weights have changed: what was computed before is not sent."""
        for leg in self._booked.values():
            if leg.state is State.SENDING or leg.told:
                self._say(ev.Abort(leg.request_id, "cache was reset"))


def _joined(steps: list[Added]) -> BlockIds:
    """All blocks that the steps so far have added."""
    return tuple([block for ids, count in group for block in ids[:count]] for group in zip(*steps, strict=True))


def _truncate(request: Any, backoff: int) -> bool:
    """Cuts the last `backoff` tokens off a prompt, before it is scheduled: the decode engine computes them, from the
    state or the window that this engine has after the token before. False if this version's request is not as known.
    """
    everything = getattr(request, "_all_token_ids", None)
    if not isinstance(everything, list) or request.prompt_token_ids is None or request.num_computed_tokens:
        return False
    del request.prompt_token_ids[-backoff:]
    del everything[-backoff:]
    request.num_prompt_tokens -= backoff
    request.max_tokens = 1
    return True
