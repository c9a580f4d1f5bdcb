"""Policies that send related requests to the same engine, where its prefix cache already has their beginning.

Both give in to load: an engine with more than `SLACK` times the mean of outstanding tokens and the request's own is not
picked for the sake of its cache (consistent hashing with bounded loads; Mirrokni, Thorup and Zadimoghaddam 2018). They
do not know what an engine's cache really holds; prefix affinity remembers what the engine was given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pushkv.model.routing.dispatch import Dispatcher

SLACK = 1.5
"""How much more than the mean an engine may have to do and still be preferred."""
REMEMBERED = 65_536
"""Pieces of prompts that prefix affinity remembers; the least recently seen are forgotten first."""
_MASK = (1 << 64) - 1


def mixed(session: int, engine: int) -> int:
    """A 64-bit weight of ``engine`` for ``session``: splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    z = (session + (engine + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class _Bounded(Dispatcher):
    def _loaded(self, engine: int, tokens: int, candidates: Sequence[int]) -> bool:
        """Whether ``engine`` has too much to do for its cache to be worth the wait of a request of ``tokens``."""
        total = sum(self._outstanding[i] for i in candidates)
        return self._outstanding[engine] > SLACK * (total / len(candidates) + tokens)


class SessionAffinity(_Bounded):
    """Requests of one session to one engine, by rendezvous hashing: when an engine goes, only its sessions move. A
    request without a session goes where the fewest tokens are.
    """

    def _choose(self, tokens: int, candidates: Sequence[int], session: int | None, prefix: Sequence[int]) -> int:
        if session is None:
            return self._least(candidates)
        for engine in sorted(candidates, key=lambda i: (-mixed(session, i), i)):
            if not self._loaded(engine, tokens, candidates):
                return engine
        return self._least(candidates)


class PrefixAffinity(_Bounded):
    """The engine that was given the longest beginning of this prompt; among equals the one with the fewest tokens."""

    def __init__(self, engines: int, remembered: int = REMEMBERED) -> None:
        super().__init__(engines)
        self._given: OrderedDict[int, set[int]] = OrderedDict()  # engines by running hash
        self._most = remembered

    def _choose(self, tokens: int, candidates: Sequence[int], session: int | None, prefix: Sequence[int]) -> int:
        wanted = set(candidates)
        for piece in reversed(prefix):
            holders = self._given.get(piece)
            if holders and (here := sorted(holders & wanted)):
                best = self._least(here)
                if not self._loaded(best, tokens, candidates):
                    return best
        return self._least(candidates)

    def _picked(self, engine: int, prefix: Sequence[int]) -> None:
        for piece in prefix:
            self._given.setdefault(piece, set()).add(engine)
            self._given.move_to_end(piece)
        while len(self._given) > self._most:
            self._given.popitem(last=False)

    def mark(self, engine: int, dead: bool) -> None:
        super().mark(engine, dead)
        if dead:
            self._forget(engine)

    def remove(self, engine: int) -> None:
        super().remove(engine)
        self._forget(engine)

    def _forget(self, engine: int) -> None:
        """It is gone, and its cache with it."""
        for piece in [piece for piece, holders in self._given.items() if engine in holders]:
            self._given[piece].discard(engine)
            if not self._given[piece]:
                del self._given[piece]
