"""Many seeds, over all profiles and shapes, in worker processes.

Decides which profile and shape a seed plays and in what portions workers get seeds. A seed's run depends on nothing
else, and portions are added up in order, so the result is the same for any number of workers.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

from msgspec.structs import replace

from pushkv.sim.explore import pairs
from pushkv.sim.explore.case import EARLIER, RUN, SCHEMA, STALLED, Case, play_case
from pushkv.sim.explore.profiles import CONFIGS, PROFILES
from pushkv.sim.explore.tally import Exploration, Tally, versions

ALL = "all"
TRANSFERS = 8
"""Requests of one seed, unless told otherwise."""
PAIR_EVERY = 12
"""Of as many seeds of one profile and shape, one is also played with and without a stalled peer, and one with and
without an earlier attempt.
"""

Found = tuple[int, dict[str, Tally], list[Case]]


def combinations(profile: str, shape: str) -> list[tuple[str, str]]:
    """What seeds take turns with."""
    profiles = list(PROFILES) if profile == ALL else [profile]
    shapes = list(CONFIGS) if shape == ALL else [shape]
    return [(p, s) for s in shapes for p in profiles]


def cases(seed: int, turns: Sequence[tuple[str, str]], transfers: int) -> Iterator[Case]:
    """What is played of ``seed``."""
    turn, rest = seed % len(turns), seed // len(turns) % PAIR_EVERY
    profile, shape = turns[turn]
    usual = Case(schema=SCHEMA, seed=seed, profile=profile, shape=shape, transfers=transfers)
    yield usual
    for check, when in ((STALLED, 0), (EARLIER, PAIR_EVERY // 2)):
        if rest == when and pairs.possible(check, CONFIGS[shape]):
            yield replace(usual, check=check)


def portion(seeds: range, turns: Sequence[tuple[str, str]], transfers: int, until_failure: bool) -> Found:
    """Some seeds, one after the other, in this process."""
    tallies: dict[str, Tally] = {}
    broken: list[Case] = []
    played = 0
    start = time.process_time()
    for seed in seeds:
        played += 1
        for case in cases(seed, turns, transfers):
            tally = tallies.setdefault(case.profile, Tally())
            result = play_case(case)
            if case.check == RUN:
                tally.take(result.worlds[0])
            else:
                tally.pairs += 1
                tally.events += sum(world.events for world in result.worlds)
            if result.violation:
                broken.append(replace(case, violation=result.violation))
            del result
            gc.collect(0)  # the world is a ring of objects that are still in the cache: later is several times as dear
            end = time.process_time()
            tally.cpu_s += end - start
            start = end
        if broken and until_failure:
            break
    return played, tallies, broken


def explore(
    seeds: range,
    *,
    profile: str = ALL,
    shape: str = ALL,
    transfers: int = TRANSFERS,
    jobs: int = 1,
    until_failure: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exploration:
    """Play ``seeds``. When interrupted the result says so, and holds what was played by then."""
    turns = combinations(profile, shape)
    size = max(1, min(100, len(seeds) // (8 * jobs)))
    portions = (seeds[at : at + size] for at in range(0, len(seeds), size))
    found = Exploration(seeds=[], transfers=transfers, jobs=jobs, versions=versions())
    play = partial(portion, turns=turns, transfers=transfers, until_failure=until_failure)
    start, done = time.perf_counter(), 0
    try:
        with _results(play, portions, jobs) as results:
            for played, tallies, broken in results:
                for name, tally in tallies.items():
                    found.profiles.setdefault(name, Tally()).add(tally)
                found.violations += broken
                done += played
                if progress is not None:
                    progress(done, len(seeds))
                if broken and until_failure:
                    break
    except KeyboardInterrupt:
        found.interrupted = True
    found.seeds = [(seeds.start, seeds.start + done)]
    found.wall_s = time.perf_counter() - start
    found.profiles = {name: found.profiles[name] for name in PROFILES if name in found.profiles}
    return found


@contextmanager
def _results(play: Callable[[range], Found], portions: Iterator[range], jobs: int) -> Iterator[Iterator[Found]]:
    if jobs == 1:
        threshold = gc.get_threshold()
        _collect_seldom()
        try:
            yield map(play, portions)
        finally:
            gc.set_threshold(*threshold)
        return
    with multiprocessing.Pool(jobs, _worker) as pool:
        yield _in_order(pool, play, portions, 4 * jobs)


def _in_order(
    pool: multiprocessing.pool.Pool, play: Callable[[range], Found], portions: Iterator[range], ahead: int
) -> Iterator[Found]:
    """As ``pool.imap``, but hands out only so much work ahead of what was taken."""
    pending = [pool.apply_async(play, (some,)) for some in islice(portions, ahead)]
    while pending:
        result = pending.pop(0)
        yield result.get()
        pending += [pool.apply_async(play, (some,)) for some in islice(portions, 1)]


def _worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _collect_seldom()


def _collect_seldom() -> None:
    """A run makes no garbage in cycles but its own world, and that is collected when it has been counted."""
    gc.set_threshold(200_000, 10, 10)
