"""Mistakes of the planner, against the oracle of ``tests.layout``: other bytes, other memory, pairs that misfit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from pushkv.model.layout import (
    BlockError,
    BlockTable,
    GroupKind,
    LayoutError,
    PairingError,
    Part,
    RangeError,
    Shard,
    View,
    block_table,
    dense_layout,
    pair,
    plan,
    plan_tail,
)
from pushkv.sim.explore.violation import Violation
from tests.layout.oracle import Engine, Model, Store, contents, move, tables
from tests.layout.scenarios import CASE, Planner, Scenario, check
from tests.protocol.mutants.registry import Patch, mutant, wrap

Tables = Any


def _bytes(scenario: Scenario, planner: Planner = plan) -> None:
    try:
        check(scenario, planner)
    except LayoutError:
        raise
    except AssertionError as error:
        raise Violation(f"layout: D's memory is not what the oracle says: {error}") from error


def prefix_hit(seed: int) -> None:
    """D has the first tokens, and asks for the last ones by two lists that begin elsewhere."""

    def by_tail(shard: Shard, src: Tables, dst: Tables, part: Part) -> Any:
        return plan_tail(shard, [t.ids for t in src], part.stop, [t.ids for t in dst], part.stop - part.start)

    start = 1 + seed % 7
    _bytes(replace(CASE, part=Part.whole(start, 21), dst_first=start, seed=seed), by_tail)


def refused(what: str, error: type[LayoutError], attempt: Callable[[], Any]) -> None:
    """``attempt`` must be refused."""
    try:
        attempt()
    except error:
        return
    raise Violation(f"layout: {what} is not refused")


CACHE: dict[str, Any] = {"num_blocks": 10, "block_tokens": 4, "kv_heads": 4, "head_dim": 8}


def _one(name: str, layers: tuple[str, ...] = ("a", "b"), **changes: Any) -> Any:
    return dense_layout(name, "nhd_apart", layers, **CACHE | changes)


def short_prompt(seed: int) -> None:
    """P holds fewer tokens than D wants."""
    (shard,) = pair([_one("P")], [_one("D")])
    held = seed % 4
    refused("a prompt that is too short", RangeError, lambda: plan_tail(shard, [[1]], held, [[1, 2]], held + 1))


def misfits(seed: int) -> None:
    """Engines whose bytes mean something else."""
    other: list[dict[str, Any]] = [
        {"dtype": "float8_e4m3"},
        {"element_bytes": 1},
        {"head_dim": 16},
        {"kind": GroupKind.WINDOW, "window_tokens": 8},
    ]
    for changes in other:
        refused(
            f"{changes} against another",
            PairingError,
            lambda changes=changes: pair([_one("P")], [_one("D", **changes)]),
        )
    refused("a missing layer", PairingError, lambda: pair([_one("P")], [_one("D", ("a", "c"))]))


def foreign_ids(seed: int) -> None:
    """Block lists that no honest pool hands out."""
    (shard,) = pair([_one("P")], [_one("D")])
    part, good = Part.whole(0, 8), [block_table([1, 2])]
    for ids in ([1, 10], [-1, 2], [3, 3], list(range(10)) * 2):
        bad = [BlockTable(np.array(ids), 0)]
        refused(f"a list of blocks {ids}", BlockError, lambda bad=bad: plan(shard, good, bad, part))
        refused(f"a list of blocks {ids}", BlockError, lambda bad=bad: plan(shard, bad, good, part))


def layers_in_another_order(seed: int) -> None:
    """The same layers, listed in another order on the other side."""
    store, rng, dice = Store("BNH", 4, 20), np.random.default_rng(seed), Random(seed)
    ours, theirs = Model(("a", "b", "c"), kv_heads=2), Model(("b", "c", "a"), kv_heads=2)
    p, d = Engine("P", [ours], [store]), Engine("D", [theirs], [store])
    src, dst = (tables([ours], [store], 0, 9, 9, dice) for _ in range(2))
    rows = contents([ours], 9, rng)
    p.write(rows, src, [(0, 9)])
    d.write(rows, dst, [(0, 9)])
    expected = d.snapshot()
    d.randomize(rng)
    before = d.snapshot()
    d.write(rows, dst, [(0, 9)])
    expected = d.snapshot()
    d.restore(before)
    (shard,) = pair(p.layouts, d.layouts)
    move(plan(shard, src, dst, Part.whole(0, 9)), p.ranks[0].buffers, d.ranks[0].buffers)
    for found, wanted in zip(d.snapshot()[0], expected[0], strict=True):
        if (found != wanted).any():
            raise Violation("layout: a layer got the bytes of another")


def latent(seed: int) -> None:
    """One latent for all heads: every rank of D holds it."""
    model = Model(("a", "b"), kv_heads=1, head_dim=6, parts=("latent",))
    _bytes(replace(CASE, models=(model,), src_tp=1, dst_tp=2, seed=seed))


def neighbours(seed: int) -> None:
    """Blocks that follow each other on both sides are one span."""
    (shard,) = pair([_one("P")], [_one("D")])
    first = seed % 4
    ids = [block_table(list(range(first, first + 6)))]
    found = plan(shard, ids, ids, Part.whole(0, 24)).count
    if found != 4:
        raise Violation(f"layout: {found} descriptors for K and V of two layers, each in one piece")


# ---------------------------------------------------------------- the mutants


@mutant(prefix_hit, "layout")
def lists_are_cut_from_the_front(patch: Patch) -> None:
    """F01: both lists are cut to the shorter: D's first slot gets P's first token."""
    patch.setattr(Part, "tail", classmethod(lambda cls, src_tokens, wanted: cls.whole(0, wanted)))


@mutant(short_prompt, "layout")
def as_many_as_there_are(patch: Patch) -> None:
    """F01: D wants more tokens than P has, and gets those."""
    patch.setattr(Part, "tail", classmethod(lambda cls, held, wanted: cls.whole(max(0, held - wanted), held)))


@mutant(misfits, "layout")
def nothing_is_compared(patch: Patch) -> None:
    """F25: engines are paired whatever their bytes mean."""
    patch.setattr("pushkv.model.layout._pair._compare", lambda one, other, src, dst: None)


@mutant(foreign_ids, "layout")
def ids_are_believed(patch: Patch) -> None:
    """F26: block ids of the network are used as they come."""
    patch.setattr("pushkv.model.layout._plan.check_tables", lambda who, groups, tables: None)


@mutant(layers_in_another_order, "layout")
def regions_are_paired_by_number(patch: Patch) -> None:
    """F29: region i of P is taken to be region i of D."""
    patch.setattr(View, "key", property(lambda self: (str(self.region), "")))


@mutant(latent, "layout")
def one_rank_of_the_latent(patch: Patch) -> None:
    """F30: a replicated latent is written to the first rank that wants it."""

    def make(assign: Any) -> Any:
        return lambda held, wanted, pieces: assign(held, wanted[:1], pieces)

    from pushkv.model.layout import _pair

    wrap(patch, _pair, "_assign", make)


@mutant(neighbours, "layout")
def nothing_is_joined(patch: Patch) -> None:
    """F38: one descriptor a block, also where blocks are neighbours."""
    patch.setattr("pushkv.model.layout._plan._join", lambda src, dst, length: (src, dst, length))
