"""How long the span planner takes, how many spans it finds and how much memory it needs.

Run with `.venv/bin/python benchmarks/layout_planner.py`. Two cases decide: Qwen3-32B's 16,000 tokens in random
16-token blocks between equal caches (64,000 pieces of 64 KiB, the transfer thread's common case), and heads split
under NHD (one piece per token, layer and K/V: two million), which must not be held in memory at once.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from pushkv.model.layout import (
    Part,
    Shard,
    block_table,
    count_spans,
    dense_layout,
    pair,
    plan,
    plan_gather,
    plan_scatter,
)

TOKENS = 16_000
REPEATS = 25
QWEN3_32B: dict[str, Any] = {"num_blocks": 4000, "block_tokens": 16, "kv_heads": 8, "head_dim": 128}
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(64)]


def measure(what: str, action: Callable[[], int], repeats: int = REPEATS) -> None:
    """Prints the median time in ms, what `action` counted, and the peak of Python's and numpy's memory in MiB."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        count = action()
        times.append((time.perf_counter() - begin) * 1e3)
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{what:<62} {statistics.median(times):>9.3f} {count:>10} {peak / 2**20:>9.2f}")


def shard(src_axes: str, dst_axes: str, dst_tp: int = 1, dst_block_tokens: int = 16) -> Shard:
    p = dense_layout("P", src_axes, LAYERS, **QWEN3_32B)
    changes = QWEN3_32B | {"block_tokens": dst_block_tokens}
    d = [dense_layout("D", dst_axes, LAYERS, tp_size=dst_tp, tp_rank=rank, **changes) for rank in range(dst_tp)]
    return pair([p], d)[0]


def main() -> None:
    rng = random.Random(0)
    part = Part.whole(0, TOKENS)
    ids = [rng.sample(range(4000), TOKENS // 16 + 1) for _ in "PD"]
    src, dst = ([block_table(one)] for one in ids)
    print(f"{'case':<62} {'median ms':>9} {'spans':>10} {'peak MiB':>9}")

    equal = shard("interleaved", "interleaved")
    measure("equal, interleaved: plan and spans", lambda: len(plan(equal, src, dst, part).spans()))
    measure(
        "  ids as lists, converted too",
        lambda: len(plan(equal, [block_table(ids[0])], [block_table(ids[1])], part).spans()),
    )
    measure("  plan alone (templates)", lambda: plan(equal, src, dst, part).count)
    measure("  count_spans", lambda: count_spans(equal, part))
    measure("  gather and its spans", lambda: len(plan_gather(equal, src, part).spans()))
    measure("  scatter and its spans", lambda: len(plan_scatter(equal, dst, part).spans()))

    blocks = shard("interleaved", "interleaved", dst_block_tokens=128)
    few = [block_table(ids[1][: TOKENS // 128 + 1])]
    measure("HND, blocks of 16 to blocks of 128: plan and spans", lambda: len(plan(blocks, src, few, part).spans()), 5)
    measure("  gather and its spans", lambda: len(plan_gather(blocks, src, part).spans()), 5)
    measure("  scatter and its spans", lambda: len(plan_scatter(blocks, few, part).spans()))

    split = shard("nhd_apart", "nhd_apart", dst_tp=2)
    measure("NHD, heads split TP1 to TP2: count_spans", lambda: count_spans(split, part))
    measure("  plan alone (templates)", lambda: plan(split, src, dst, part).count)
    measure("  all spans in chunks of 65,536", lambda: sum(map(len, plan(split, src, dst, part).chunks())), 5)
    measure("  gather, all spans in chunks", lambda: sum(map(len, plan_gather(split, src, part).chunks())), 5)
    measure("  scatter and its spans", lambda: len(plan_scatter(split, dst, part).spans()))
    measure("handshake: pair 64 layers, TP1 to TP2", lambda: shard("nhd_apart", "nhd_apart", 2).token_bytes, 5)


if __name__ == "__main__":
    main()
