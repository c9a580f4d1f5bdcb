"""How a dispatcher picks P and D for a request. Shared by the router and the simulator.

Decides from what the dispatcher itself has sent and seen come back; it asks no server and reads no clock. Engines are
numbered; a number stays an engine's for as long as it is known. Ties go to the lowest number, so that the same requests
are spread the same way every time. An engine that is dead is picked only when all are; one that has been removed never.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

NOBODY: frozenset[int] = frozenset()


class Dispatcher:
    """What all policies have in common: the engines, whether they live, and their outstanding tokens (prompt plus
    output).
    """

    def __init__(self, engines: int) -> None:
        if engines < 1:
            raise ValueError(f"a dispatcher needs at least one engine, got {engines}")
        self._outstanding = [0] * engines
        self._dead = [False] * engines
        self._removed = [False] * engines

    def __len__(self) -> int:
        """Engines that have not been removed."""
        return self._removed.count(False)

    def pick(
        self, tokens: int, *, exclude: Collection[int] = NOBODY, session: int | None = None, prefix: Sequence[int] = ()
    ) -> int:
        """Number of the engine for a request of ``tokens`` tokens, which it has from now on until `finished`.

        exclude: engines that have failed it already; they are picked when no other is left. session: a hash of what
        the requests of one session share. prefix: running hashes of the prompt, each over one more piece of it.
        """
        if len(self._outstanding) == 1 and not self._removed[0]:
            chosen = 0
        else:
            chosen = self._choose(tokens, self._candidates(exclude), session, prefix)
        self._outstanding[chosen] += tokens
        self._picked(chosen, prefix)
        return chosen

    def finished(self, engine: int, tokens: int) -> None:
        """A request of ``tokens`` tokens has left ``engine``."""
        self._outstanding[engine] -= tokens

    def mark(self, engine: int, dead: bool) -> None:
        """A health check has found ``engine`` dead, or alive again."""
        self._dead[engine] = dead

    def add(self) -> int:
        """One more engine; its number."""
        self._outstanding.append(0)
        self._dead.append(False)
        self._removed.append(False)
        return len(self._outstanding) - 1

    def remove(self, engine: int) -> None:
        """``engine`` gets nothing any more; what it has may still finish. Raises `ValueError` for the last one."""
        if not self._removed[engine] and len(self) == 1:
            raise ValueError("a dispatcher needs at least one engine; this is the last")
        self._removed[engine] = True

    def outstanding(self, engine: int) -> int:
        """Tokens that ``engine`` has to do with."""
        return self._outstanding[engine]

    def _candidates(self, exclude: Collection[int]) -> list[int]:
        """The engines that may be picked: never empty."""
        here = [i for i, removed in enumerate(self._removed) if not removed]
        alive = [i for i in here if not self._dead[i]]
        fresh = [i for i in alive if i not in exclude] if exclude else alive
        return fresh or alive or here

    def _least(self, candidates: Sequence[int]) -> int:
        load = self._outstanding
        return min(candidates, key=lambda i: (load[i], i))

    def _choose(self, tokens: int, candidates: Sequence[int], session: int | None, prefix: Sequence[int]) -> int:
        raise NotImplementedError

    def _picked(self, engine: int, prefix: Sequence[int]) -> None:
        """What a policy remembers of its choice."""


class RoundRobin(Dispatcher):
    """Engines in turn, whatever they have to do."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._next = 0

    def _choose(self, tokens: int, candidates: Sequence[int], session: int | None, prefix: Sequence[int]) -> int:
        chosen = next((i for i in candidates if i >= self._next), candidates[0])
        self._next = chosen + 1
        return chosen


class LeastTokens(Dispatcher):
    """The engine with the fewest outstanding tokens of those that are alive."""

    def _choose(self, tokens: int, candidates: Sequence[int], session: int | None, prefix: Sequence[int]) -> int:
        return self._least(candidates)
