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
    _pair,
    _plan,
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


def whole_case(seed: int) -> None:
    """Other axes, other TP, and blocks of P that are twice as long as D's."""
    p, d = replace(CASE.src_stores[0], block_tokens=8), replace(CASE.dst_stores[0], block_tokens=4)
    _bytes(replace(CASE, src_stores=(p,), dst_stores=(d,), seed=seed))


def kernel_blocks(seed: int) -> None:
    """D's kernel has blocks of another size than its pool."""
    _bytes(replace(CASE, dst_stores=(Store("BNH", 8, 40, kernel_tokens=2),), dst_tp=1, seed=seed))


def square(seed: int) -> None:
    """As many heads as tokens of a block: the two orders of axes look alike."""
    p, d = Store("BNH", 4, 40), Store("BHN", 4, 40)
    _bytes(replace(CASE, src_stores=(p,), dst_stores=(d,), dst_tp=1, seed=seed))


def window(seed: int) -> None:
    """A sliding window begins within a block."""
    model = Model(("swa.0",), 2, 3, kind=GroupKind.WINDOW, window_tokens=9)
    stores = (Store("BNH", 4, 80, null_block=0),)
    _bytes(
        replace(
            CASE,
            models=(model,),
            src_stores=stores,
            dst_stores=stores,
            dst_tp=1,
            part=Part.whole(0, 21),
            dst_first=0,
            seed=seed,
        )
    )


def one_side_in_order(seed: int) -> None:
    """D's blocks are neighbours and P's are not."""
    (shard,) = pair([_one("P")], [_one("D")])
    first, dice = seed % 4, Random(seed)
    src = dice.sample(range(10), 6)
    found = plan(shard, [block_table(src)], [block_table(list(range(first, first + 6)))], Part.whole(0, 24)).spans()
    block = 4 * 4 * 8 * 2  # tokens, heads, elements and their bytes
    begins = {number * block for number in src}
    leaves = [
        (at, length)
        for at, length in zip(found.src_offset.tolist(), found.length.tolist(), strict=True)
        if not {at + step for step in range(0, length, block)} <= begins
    ]
    if leaves:
        raise Violation(f"layout: spans (offset, bytes) {leaves} read what P's blocks {src} do not hold")


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

    wrap(patch, _pair, "_assign", make)


@mutant(one_side_in_order, "layout")
def joined_where_one_side_is_in_order(patch: Patch) -> None:
    """F38: to have fewer descriptors, runs are joined that follow each other on D alone."""

    def join(src: Any, dst: Any, length: Any) -> Any:
        first = np.concatenate(([0], np.flatnonzero(dst[1:] != dst[:-1] + length[:-1]) + 1))
        return src[first], dst[first], np.add.reduceat(length, first)

    patch.setattr("pushkv.model.layout._plan._join", join)


@mutant(whole_case, "layout")
def block_sizes_are_taken_for_equal(patch: Patch) -> None:
    """F25: D's block ids are counted in P's block size."""

    def make(build: Any) -> Any:
        return lambda src, dst, *rest: build(src, replace(dst, block_tokens=src.block_tokens), *rest)

    wrap(patch, _plan, "build", make)


@mutant(kernel_blocks, "layout")
def kernel_blocks_are_taken_for_the_pools(patch: Patch) -> None:
    """F25: the pool's block ids are used as the kernel's, which are shorter."""

    def offsets(self: Any, tokens: Any) -> Any:
        index, slot = np.divmod(tokens - self.first_token, self.block_tokens)
        return self.blocks[index // self.ratio] * self.block_stride + slot * self.token_stride

    patch.setattr(_plan.Placed, "offsets", offsets)


@mutant(square, "layout")
def axes_are_taken_for_equal(patch: Patch) -> None:
    """F25: heads and tokens lie in another order on D, and P's order is used."""

    def make(bundles: Any) -> Any:
        def mutated(src: Any, dst: Any, pieces: Any) -> Any:
            turned = [
                replace(piece.dst, head_stride=piece.dst.token_stride, token_stride=piece.dst.head_stride)
                for piece in pieces
            ]
            return bundles(src, dst, [p._replace(dst=view) for p, view in zip(pieces, turned, strict=True)])

        return mutated

    wrap(patch, _pair, "_bundles", make)


@mutant(whole_case, "layout")
def every_rank_gets_the_first_heads(patch: Patch) -> None:
    """F30: where a rank of D begins among P's heads is forgotten."""

    def make(bundles: Any) -> Any:
        def mutated(src: Any, dst: Any, pieces: Any) -> Any:
            views = [replace(p.src, head_start=p.head_start, head_stop=p.head_stop) for p in pieces]
            return bundles(src, dst, [p._replace(src=view) for p, view in zip(pieces, views, strict=True)])

        return mutated

    wrap(patch, _pair, "_bundles", make)


@mutant(whole_case, "layout")
def only_whole_blocks_are_moved(patch: Patch) -> None:
    """F33: a last block that is not full is left as an older prompt has left it."""

    def make(tokens: Any) -> Any:
        def mutated(self: Any, part: Part) -> tuple[int, int]:
            start, stop = tokens(self, part)
            return start, max(start, stop - stop % self.dst.page_tokens)

        return mutated

    wrap(patch, _pair.Bundle, "tokens", make)


@mutant(window, "layout")
def a_window_begins_with_its_first_token(patch: Patch) -> None:
    """F33: the rest of the block in which a window begins is left as an older prompt has left it, and D's engine
    caches the block.
    """

    def make(tokens: Any) -> Any:
        def mutated(self: Any, part: Part) -> tuple[int, int]:
            start, stop = tokens(self, part)
            return max(start, stop - self.window_tokens + 1), stop

        return mutated

    wrap(patch, _pair.Bundle, "tokens", make)


@mutant(neighbours, "layout")
def nothing_is_joined(patch: Patch) -> None:
    """F38: one descriptor a block, also where blocks are neighbours."""
    patch.setattr("pushkv.model.layout._plan._join", lambda src, dst, length: (src, dst, length))
