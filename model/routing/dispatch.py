"""How a dispatcher picks P and D for a request. Shared by the router and the simulator.

Decides from what the dispatcher itself has sent and seen come back; it asks no server. Ties go to the lowest index,
so that the same requests are spread the same way every time.
"""

from __future__ import annotations


class RoundRobin:
    """Engines in turn, whatever they have to do."""

    def __init__(self, engines: int) -> None:
        if engines < 1:
            raise ValueError(f"a dispatcher needs at least one engine, got {engines}")
        self._engines = engines
        self._next = 0

    def pick(self, tokens: int) -> int:
        """Index of the engine for a request of ``tokens`` tokens."""
        chosen = self._next
        self._next = (chosen + 1) % self._engines
        return chosen

    def finished(self, engine: int, tokens: int) -> None:
        """A request has left ``engine``."""


class LeastTokens:
    """The engine with the fewest outstanding tokens (prompt plus output) of those that are alive."""

    def __init__(self, engines: int) -> None:
        if engines < 1:
            raise ValueError(f"a dispatcher needs at least one engine, got {engines}")
        self._outstanding = [0] * engines
        self._dead = [False] * engines

    def pick(self, tokens: int) -> int:
        """Index of the engine for a request of ``tokens`` tokens."""
        load = self._outstanding
        if len(load) == 1:
            chosen = 0
        else:
            chosen = min(range(len(load)), key=lambda i: (self._dead[i], load[i], i))
        load[chosen] += tokens
        return chosen

    def finished(self, engine: int, tokens: int) -> None:
        """A request of ``tokens`` tokens has left ``engine``."""
        self._outstanding[engine] -= tokens

    def mark(self, engine: int, dead: bool) -> None:
        """A health check has found ``engine`` dead, or alive again."""
        self._dead[engine] = dead
