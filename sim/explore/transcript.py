"""What happens in a world, line by line, for people: the stories of the protocol and the runs that break a property."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pushkv.sim.explore.world import World

LEGEND = """\
Columns: seconds, who, what. "*" happens to it, "->" is sent, "!" is a fault, anything else is
asked of its host. A rank's line bears its engine's name (P/0, P/1 where it has several).
"""


class Transcript:
    """Lines of ``world`` from now on; times count from now."""

    def __init__(self, world: World) -> None:
        self.lines: list[str] = []
        self._world, self._start = world, world.now
        world.log = self._log

    def _log(self, who: Any, text: str, record: Any) -> None:
        world = self._world
        self.lines.append(f"{world.now - self._start:8.3f}  {world.link(who):<9} {text}".rstrip())


def shorten(lines: Sequence[str], at_most: int) -> list[str]:
    """Without beats and timers that changed nothing where there are too many lines, then without the middle."""
    if len(lines) <= at_most:
        return list(lines)
    kept = [line for line in lines if " Beat " not in line]
    head, tail = at_most // 3, at_most - at_most // 3
    if len(kept) <= at_most:
        return [f"(without {len(lines) - len(kept)} beats)", *kept]
    return [
        f"(without {len(lines) - len(kept)} beats)",
        *kept[:head],
        f"(… {len(kept) - head - tail} lines …)",
        *kept[-tail:],
    ]
