"""How far each prefill comes in a step, and in which blocks: read from what vLLM's scheduler hands to its workers.

Decides nothing. Older versions describe a request that goes on after a preemption among the cached ones, newer ones
among the new: its blocks begin anew in both.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """Of one request in one step. done: tokens whose cache is there when the step has run. blocks: per cache group,
    what is added to its lists; fresh: they begin anew.
    """

    request_id: str
    done: int
    blocks: tuple[list[int], ...]
    fresh: bool


def progress(output: Any, wanted: Container[str]) -> Iterator[Progress]:
    """Of the requests in `wanted` that compute something in the step that `output` (a `SchedulerOutput`) describes."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        if new.req_id in wanted:
            done = new.num_computed_tokens + scheduled.get(new.req_id, 0)
            yield Progress(new.req_id, done, new.block_ids, True)
    cached = output.scheduled_cached_reqs
    for number, request_id in enumerate(cached.req_ids):
        if request_id in wanted:
            done = cached.num_computed_tokens[number] + scheduled.get(request_id, 0)
            blocks = cached.new_block_ids[number] or ()
            yield Progress(request_id, done, blocks, request_id in cached.resumed_req_ids)
