"""The oracle must catch a wrong planner: the mistakes that systems have really made, each put in on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pushkv.model.layout import BlockTable, Part, Plan, Shard, block_table, plan

from .scenarios import CASE, Planner, check

Tables = Sequence[BlockTable]


def _front_trim(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    """Both lists cut to the shorter from the front: D's first slot gets P's first token (fault F01)."""
    return plan(shard, [block_table(table.ids, part.start) for table in src], dst, part)


def _off_by_one_block(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    return plan(shard, src, [block_table([*table.ids[1:], table.ids[0]], table.first_token) for table in dst], part)


def _head_shift(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    """The source heads of the other rank."""
    head = 4 * 6  # bytes of one head of one block on P
    step = -2 * head if shard.dst_rank else 2 * head
    found = plan(shard, src, dst, part).templates
    return Plan(tuple(replace(template, src_base=template.src_base + step) for template in found))


def _token_shift(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    return plan(shard, src, [BlockTable(table.ids, table.first_token - 1) for table in dst], part)


def _swap_k_and_v(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    found = plan(shard, src, dst, part).templates
    swapped = [replace(template, dst_region=template.dst_region ^ 1) for template in found]  # K, V are regions 2i, 2i+1
    return Plan(tuple(swapped))


def _lost_rank(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    """One D rank is not written (fault F30)."""
    return plan(shard, src, dst, part if shard.dst_rank == 0 else Part.whole(part.stop, part.stop))


def _short(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    return plan(shard, src, dst, replace(part, stop=part.stop - 1))


def _long(shard: Shard, src: Tables, dst: Tables, part: Part) -> Plan:
    """One token too many: into a slot that D has not asked for."""
    return plan(shard, src, dst, replace(part, stop=part.stop + 1))


def test_the_case_itself_is_right() -> None:
    check(CASE)


@pytest.mark.parametrize(
    "broken",
    [_front_trim, _off_by_one_block, _head_shift, _token_shift, _swap_k_and_v, _lost_rank, _short, _long],
)
def test_a_broken_planner_is_caught(broken: Planner) -> None:
    with pytest.raises(AssertionError):
        check(CASE, broken)
