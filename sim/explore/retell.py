"""A path through an exhaustive world as a transcript, in the form of those of the stories."""

from __future__ import annotations

from typing import Any

from pushkv.model.protocol import LocalProtocolError
from pushkv.sim.explore.local import ABANDON, SOUP, TOLD
from pushkv.sim.explore.moves import Moves
from pushkv.sim.explore.rows import State
from pushkv.sim.explore.text import text
from pushkv.sim.explore.violation import Violation

BREACHES = (Violation, LocalProtocolError, KeyError, AssertionError)
QUIET = {"passes", "tells", "gathers", "gathered", "reads", "quiet", "filled", "passed", "fence", "timer"}


class Retelling:
    """Lines of a transcript, while ``moves`` makes moves again."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        self.lines: list[str] = []

    def tell(self, keys: list[State]) -> str:
        """Go through states with ``keys``, from the first state on; then try what is next, if a breach is there."""
        moves = self.moves
        moves.now = 0.0
        state = moves.start()
        for key in keys[1:]:
            state = self._go(state, key)
        now = moves.now
        try:
            for _, after, _ in moves.all(state):
                moves.check(after)
        except BREACHES as breach:
            moves.now = now
            self._again(state)
            self.lines.append(f"!! {type(breach).__name__}: {breach}")
        return "\n".join(self.lines)

    def _go(self, state: State, key: State) -> State:
        moves, now = self.moves, self.moves.now
        for move, after, _ in moves.all(state):
            if moves.key(after) == key:
                draft = moves.draft(state)
                moves.now = now
                moves.log = self._log
                moves.make(draft, move)
                moves.log = None
                return after
        raise AssertionError("the path does not lead on")

    def _again(self, state: State) -> None:
        """The move that breaks something, once more, aloud."""
        moves, now = self.moves, self.moves.now
        for move in moves.candidates(state):
            draft = moves.draft(state)
            kept = len(self.lines)
            moves.now = now
            moves.log = self._log
            try:
                moves.make(draft, move)
                moves.check(moves.pack(draft))
            except BREACHES:
                return
            finally:
                moves.log = None
            del self.lines[kept:]

    def _log(self, who: Any, note: str, happened: Any) -> None:
        line = note or self._line(happened)
        if line:
            engine, rank = who
            several = rank == "ledger" or self.moves.scope.ranks[engine] > 1
            name = f"{engine}/{rank}" if several else engine
            self.lines.append(f"{self.moves.now:8.3f}  {name:<9} {line}".rstrip())

    def _line(self, happened: Any) -> str:
        kind = happened[0]
        if kind == SOUP:
            return self._under_way(self.moves.items.values[happened[1]])
        if kind == TOLD:
            return f"  {text(happened[1])}"
        if kind == ABANDON:
            return f"  Abandon handle={happened[2]}"
        if not isinstance(kind, str) or kind in QUIET:
            return ""
        if kind == "hears" and len(happened) == 3:
            return f"<- {self._link(happened[1])} {text(happened[2])}"
        if kind in ("hears", "takes"):
            return f"* {text(happened[1])}"
        if kind == "claims":
            return f"* claim of handle {happened[1].handle}"
        return "* " + " ".join(str(part) for part in happened)

    def _under_way(self, item: Any) -> str:
        kind = item[0]
        if kind == "msg":
            return f"-> {self._link(item[2])} {text(item[3])}"
        if kind == "post":
            return f"  {text(item[3])}"
        if kind == "write":
            return f"  writes handle {item[3].handle}"
        return f"  {kind} {' '.join(str(part) for part in item[3:])}"

    def _link(self, link: Any) -> str:
        engine, rank = link
        return f"{engine}/{rank}" if self.moves.scope.ranks[engine] > 1 else str(engine)
