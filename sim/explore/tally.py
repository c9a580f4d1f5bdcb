"""What a number of runs did and met, in sums that can be added up: over seeds, workers and machines."""

from __future__ import annotations

import ast
import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from pushkv.model import protocol
from pushkv.sim import explore
from pushkv.sim.explore import world as played
from pushkv.sim.explore.case import Case
from pushkv.sim.explore.network import KINDS

SCHEMA = 1
FATES = ("dropped", "duplicated", "reordered")


class Tally(msgspec.Struct):
    """Sums over the runs of one profile. All but ``transfers``, ``events``, ``messages``, ``pairs`` and ``cpu_s``
    count runs or transfers that it happened to.
    """

    runs: int = 0
    transfers: int = 0
    events: int = 0
    pairs: int = 0
    """Pairs of runs that were compared (I6, I7)."""
    cpu_s: float = 0.0
    outcomes: dict[str, int] = {}
    """Transfers by outcome: loaded, cancelled, failed: REASON, or neither: a leg never came."""
    messages: dict[str, int] = {}
    fates: dict[str, int] = {}
    """Runs in which a message of a kind was dropped, duplicated, reordered: "KIND FATE"."""
    crashes: dict[str, int] = {}
    """Runs in which an engine was killed or paused while it had an open shard in a state: "killed sending met"."""
    faults: dict[str, int] = {}
    """Runs that a kind of fault hit."""

    def add(self, other: Tally) -> None:
        """Take in ``other``."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(theirs, dict):
                for key, value in theirs.items():
                    mine[key] = mine.get(key, 0) + value
            else:
                setattr(self, name, mine + theirs)

    def take(self, world: played.World) -> None:
        """Count one run."""
        self.runs += 1
        self.transfers += len(world.requests)
        self.events += world.events
        for request in world.requests.values():
            _count(self.outcomes, _outcome(request.outcome, request.spoiled))
        network = world.network
        for kind, number in network.sent.items():
            self.messages[kind] = self.messages.get(kind, 0) + number
        for fate in FATES:
            for kind in getattr(network, fate):
                _count(self.fates, f"{kind} {fate}")
        for how, state in world.causes.crashes:
            _count(self.crashes, f"{how} {state}")
        for kind in world.causes.kinds | world.spoils:
            _count(self.faults, kind)


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _outcome(outcome: str, spoiled: str) -> str:
    if outcome in ("failed: aborted", "failed: cancelled", "failed: rejected") or (not outcome and spoiled == "abort"):
        return "cancelled"
    return outcome or "neither"


class Exploration(msgspec.Struct, kw_only=True):
    """The result of ``pushkv explore``. ``seeds`` are ranges [from, to)."""

    schema: int = SCHEMA
    seeds: list[tuple[int, int]]
    transfers: int
    profiles: dict[str, Tally] = {}
    violations: list[Case] = []
    wall_s: float = 0.0
    jobs: int = 1
    interrupted: bool = False
    versions: dict[str, str] = {}

    @property
    def total(self) -> Tally:
        """Over all profiles."""
        total = Tally()
        for tally in self.profiles.values():
            total.add(tally)
        return total

    def add(self, other: Exploration) -> None:
        """Take in what other seeds gave, from another process or machine."""
        self.seeds = _joined(sorted([*self.seeds, *other.seeds]))
        for name, tally in other.profiles.items():
            self.profiles.setdefault(name, Tally()).add(tally)
        self.violations = sorted([*self.violations, *other.violations], key=lambda case: (case.seed, case.check))
        self.wall_s += other.wall_s
        self.interrupted = self.interrupted or other.interrupted


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    try:
        pushkv = version("pushkv")
    except PackageNotFoundError:
        pushkv = "0"
    return {
        "pushkv": pushkv,
        "python": platform.python_version(),
        "msgspec": msgspec.__version__,
        "sources": sources(),
        "build": "interpreted" if str(played.__file__).endswith(".py") else "compiled",
    }


def sources() -> str:
    """A hash of what a seed's run and its counts depend on: the protocol's sources and those of the explorer that
    playing seeds imports, not the exhaustive search. A compiled build has them beside its modules.
    """
    digest = sha256()
    for name, path in sorted(_played().items()):
        digest.update(f"{name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _played() -> dict[str, Path]:
    """Modules of both packages that are reached from the runner's imports, wherever in a module these stand."""
    folders = {package.__name__: Path(str(package.__file__)).parent for package in (protocol, explore)}
    found: dict[str, Path] = {}
    ahead = [f"{explore.__name__}.runner"]
    while ahead:
        name = ahead.pop()
        package, _, module = (name, "", "__init__") if name in folders else name.rpartition(".")
        if name in found or package not in folders:
            continue
        path = folders[package] / f"{module}.py"
        if path.exists():  # else what is imported is no module
            found[name] = path
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    ahead += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def document(found: Exploration) -> dict[str, Any]:
    """The JSON of ``pushkv explore``. What lies outside the fields of ``Exploration`` is derived from them."""
    total = found.total
    made: dict[str, Any] = msgspec.to_builtins(found)
    made["runs"], made["events"], made["cpu_s"] = total.runs, total.events, total.cpu_s
    made["events_per_cpu_s"] = total.events / total.cpu_s if total.cpu_s else None
    made["kinds"] = list(KINDS)
    return made


def from_json(text: bytes) -> Exploration:
    """What ``document`` wrote."""
    return msgspec.json.decode(text, type=Exploration)
