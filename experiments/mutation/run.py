"""Mutation testing of ``model/protocol`` and ``model/layout``: ``python experiments/mutation/run.py protocol``.

Pytest collects once. Every mutant is a fork in which one function has another code object; the tests that call the
function run in it, the quickest first, until one fails or the budget is spent. What survives must stand in
``survivors.toml`` with the reason why it is no mistake; the exit status says whether it does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import platform
import random
import resource
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings
from operators import edges, mutants

ROOT = Path(__file__).resolve().parents[2]
SURVIVORS = Path(__file__).with_name("survivors.toml")
RESULTS = Path(__file__).with_name("results")
PACKAGES = {"protocol": "pushkv.model.protocol", "layout": "pushkv.model.layout"}
LEFT_OUT = {
    "protocol": (
        "test_mutations",
        "test_a_seed_fixes_everything",
        "test_exploration.py::test_properties_hold[",
        "test_exhaustive",
        "test_shrink",
        "test_explore_command",
        "test_pairs",
        "test_machine",
    ),
    "layout": ("test_mutations",),
}
"""Tests of the tests, and those that play many things in one: ``pool`` has those one by one."""

NEAR = {
    "sending": ("sender",), "outgoing": ("sender",), "receiving": ("receiver",), "incoming": ("receiver",),
    "endpoint": ("peer", "receiver", "sender"), "peer": ("peer", "receiver"),
}  # fmt: skip
"""Which tests are a module's own, where they are not called as it is."""

ALIVE = ("survived", "no test")
TOO_LONG = 3
"""Exit status of a mutant under which a test takes far longer than without: it goes round for ever, or nearly."""

Job = tuple[str, str, Callable[[], None]]


def _live(module: Any) -> Iterator[tuple[str, FunctionType]]:
    """Every function and method of ``module``, by its qualified name."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield value.__qualname__, value
        elif isinstance(value, type):
            for member in vars(value).values():
                for part in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
                    if isinstance(part, FunctionType):
                        yield part.__qualname__, part


def _swap(function: FunctionType, code: Callable[[], CodeType]) -> None:
    function.__code__ = code()


def _cut(table: dict[str, Any], event: str) -> None:
    del table[event]


def jobs(package: str, only: list[str]) -> Iterator[Job]:
    """(key, function, what to do in the fork)."""
    for path in sorted((ROOT / "model" / package).glob("*.py")):
        if path.stem == "__init__" or (only and path.stem not in only):
            continue
        module = import_module(f"{PACKAGES[package]}.{path.stem}")
        live = dict(_live(module))
        for mutant in mutants(path.read_text(encoding="utf-8"), path.stem):
            function = live.get(mutant.function)
            if function is not None:
                name = f"{path.stem}:{mutant.function}"
                yield mutant.key, name, lambda function=function, code=mutant.code: _swap(function, code)
    if package == "protocol" and (not only or "states" in only):
        tables = import_module("pushkv.model.protocol.states").TABLES
        for name, state, event in edges(tables):
            row = tables[name][1][state]
            yield f"states:{name}: no edge {event} from {state}", "", lambda row=row, event=event: _cut(row, event)


class Runner:
    """The pytest plugin."""

    def __init__(self, package: str, options: argparse.Namespace) -> None:
        self.package, self.options = package, options
        self.items: list[pytest.Item] = []
        self.results: dict[str, str] = {}
        self.kills: dict[str, int] = {}
        self.kills_of: dict[tuple[str, str], int] = {}
        self.running: dict[int, tuple[str, str, int]] = {}
        self.cpu_s = 0.0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        left_out = LEFT_OUT[self.package]
        self.items = [item for item in session.items if not any(name in item.nodeid for name in left_out)]
        self.cost, self.calls = self._baseline()
        out = Path(self.options.out or os.devnull)
        if out.is_file():
            before = json.loads(out.read_text(encoding="utf-8"))
            self.results, self.cpu_s = before["results"], before["cpu_s"]
        gc.collect()
        gc.freeze()
        todo = list(jobs(self.package, self.options.only))
        if self.options.again:
            again = set(Path(self.options.again).read_text(encoding="utf-8").splitlines())
            todo = [job for job in todo if job[0] in again]
        else:
            todo = [job for job in todo if job[0] not in self.results]
        random.Random(self.options.seed).shuffle(todo)
        if self.options.sample:
            todo = todo[: self.options.sample]
        print(f"{len(todo)} mutants, {len(self.items)} tests", file=sys.stderr)
        self._all(todo)
        return True

    def _baseline(self) -> tuple[dict[str, float], dict[str, set[str]]]:
        """What every test costs (CPU s, traced), and which functions of the package it calls."""
        cached = Path(self.options.baseline or os.devnull)
        if cached.is_file() and cached.stat().st_size:
            return pickle.loads(cached.read_bytes())  # type: ignore[no-any-return]
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            folder = f"/model/{self.package}/"
            cost: dict[str, float] = {}
            calls: dict[str, set[str]] = {}
            names: dict[CodeType, str] = {}
            _quiet()
            for item in self.items:
                seen: set[str] = set()

                def trace(frame: Any, event: str, arg: Any, seen: set[str] = seen) -> None:
                    code = frame.f_code
                    name = names.get(code)
                    if name is None:
                        inside = folder in code.co_filename
                        name = names[code] = f"{Path(code.co_filename).stem}:{code.co_qualname}" if inside else ""
                    if name:
                        seen.add(name)

                begun = time.process_time()
                sys.settrace(trace)
                failed = _fails(item)
                sys.settrace(None)
                cost[item.nodeid], calls[item.nodeid] = time.process_time() - begun, seen
                if failed:
                    cost[item.nodeid] = float("inf")
            with os.fdopen(write, "wb") as pipe:
                pickle.dump((cost, calls), pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            cost, calls = pickle.load(pipe)
        os.waitpid(pid, 0)
        broken = [name for name, seconds in cost.items() if seconds == float("inf")]
        if broken:
            raise pytest.UsageError(f"fails without a mutant: {broken}")
        if self.options.baseline:
            cached.write_bytes(pickle.dumps((cost, calls)))
        return cost, calls

    def _tests(self, function: str) -> list[pytest.Item]:
        """Those that call the function; first those that have killed most for what they cost, above all of its own."""

        near = tuple(f"test_{name}.py" for name in NEAR.get(function.split(":")[0], (function.split(":")[0],)))

        def worth(item: pytest.Item) -> float:
            kills = self.kills.get(item.nodeid, 0) + 10 * self.kills_of.get((function, item.nodeid), 0)
            if item.path.name in near:
                kills += 20
            return (1 + kills) / (0.02 + self.cost.get(item.nodeid, 0.02))

        every = {function}
        known = any(function in calls for calls in self.calls.values())  # else it is newer than the baseline
        chosen = [item for item in self.items if not known or function in self.calls.get(item.nodeid, every)]
        return sorted(chosen, key=worth, reverse=True)

    def _all(self, todo: list[Job]) -> None:
        begun = time.monotonic()
        for number, (key, function, apply) in enumerate(todo):
            if time.monotonic() - begun > self.options.minutes * 60:
                break
            while len(self.running) >= self.options.jobs:
                self._reap()
            tests = self._tests(function)
            if not tests:
                self.results[key] = "no test"
                continue
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                self._child(tests, apply, write)
            os.close(write)
            self.running[pid] = (key, function, read)
            if number % 50 == 49:
                left = sum(word in ALIVE for word in self.results.values())
                print(f"{number + 1}/{len(todo)} {left} survive, {time.monotonic() - begun:.0f} s", file=sys.stderr)
                self._save()
        while self.running:
            self._reap()
        self._save()

    def _child(self, tests: list[pytest.Item], apply: Callable[[], None], write: int) -> None:
        """Play ``tests`` until one fails, one takes far longer than without the mutant, or the budget is spent."""
        _quiet()
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        budget, item_begun, longest = self.options.budget, 0.0, 0.0

        def look(signal_number: int, frame: Any) -> None:
            now = time.process_time() - begun
            if now - item_begun > 3 * longest + 2.0:
                os._exit(TOO_LONG)

        begun = time.process_time()
        signal.signal(signal.SIGPROF, look)
        signal.setitimer(signal.ITIMER_PROF, 0.25, 0.25)
        try:
            apply()
            for item in tests:
                item_begun, longest = time.process_time() - begun, self.cost.get(item.nodeid, 0.05)
                if item_begun > budget:
                    break
                if longest > 2 * budget:
                    continue
                os.write(write, item.nodeid.encode() + b"\n")
                if _fails(item):
                    os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)

    def _reap(self) -> None:
        pid, status, usage = os.wait4(-1, 0)
        key, function, read = self.running.pop(pid)
        self.cpu_s += usage.ru_utime + usage.ru_stime
        with os.fdopen(read) as pipe:
            played = pipe.read().split("\n")
        code = os.waitstatus_to_exitcode(status)
        self.results[key] = "survived" if code == 0 else "too long" if code == TOO_LONG else "killed"
        if code and len(played) > 1:
            last = played[-2]
            self.kills[last] = self.kills.get(last, 0) + 1
            self.kills_of[(function, last)] = self.kills_of.get((function, last), 0) + 1

    def _save(self) -> None:
        if self.options.out:
            found = {"cpu_s": round(self.cpu_s), "results": self.results}
            Path(self.options.out).write_text(json.dumps(found, indent=0), encoding="utf-8")


def _quiet() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))


def known() -> dict[str, str]:
    """Mutants that live, and why they are no mistakes."""
    entries = tomllib.loads(SURVIVORS.read_text(encoding="utf-8")).get("survivor", [])
    return {entry["mutant"]: entry["why"] for entry in entries}


def summary(package: str, runner: Runner) -> dict[str, Any]:
    """What a run came to, for ``results/``. Mutants that are no more (the code has changed) are left out."""
    every = {key for key, _, _ in jobs(package, [])}
    results = {key: word for key, word in runner.results.items() if key in every}
    modules: dict[str, dict[str, int]] = {}
    for key in sorted(every):
        counts = modules.setdefault(key.split(":")[0], {"killed": 0, "too long": 0, "alive": 0, "not tried": 0})
        word = results.get(key, "not tried")
        counts["alive" if word in ALIVE else word] += 1
    versions = {name: version(name) for name in ("hypothesis", "msgspec", "numpy", "pytest")}
    return {
        "package": package,
        "mutants": len(every),
        "modules": modules,
        "alive": sorted(key for key, word in results.items() if word in ALIVE),
        "cpu_s": round(runner.cpu_s),
        "budget_s": runner.options.budget,
        "versions": {"python": platform.python_version(), **versions},
    }


def show(found: dict[str, Any]) -> None:
    """Print it."""
    explained = known()
    print(f"{'module':<12} {'killed':>7} {'too long':>9} {'alive':>6} {'not tried':>10}")
    rows = [*found["modules"].items(), ("all", Counter())]
    for _, counts in rows[:-1]:
        rows[-1][1].update(counts)
    for name, counts in rows:
        print(
            f"{name:<12} {counts['killed']:>7} {counts['too long']:>9} {counts['alive']:>6} {counts['not tried']:>10}"
        )
    left = [key for key in found["alive"] if key not in explained]
    print(
        f"{len(found['alive']) - len(left)} of those alive are no mistakes (survivors.toml), {len(left)} not looked at"
    )
    print(f"{found['cpu_s']} CPU s, {found['budget_s']:g} s of tests for a mutant at the most")
    print(", ".join(f"{name} {number}" for name, number in found["versions"].items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("only", nargs="*", help="modules of the package; all, if none is named")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=6.0, help="CPU seconds of tests for one mutant")
    parser.add_argument("--sample", type=int, default=0, help="so many at random")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop then; the order is random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", help="files of tests; all of the package, if none is named")
    parser.add_argument("--again", help="file with the keys of the mutants to try")
    parser.add_argument("--baseline", help="file that keeps what the tests cost and call, from run to run")
    parser.add_argument("--out", help="where to write every result as JSON")
    parser.add_argument("--write", action="store_true", help="write the summary to results/, with --out's from before")
    parser.add_argument("--show", action="store_true", help="print the summary in results/, and run nothing")
    options = parser.parse_args()
    results = RESULTS / f"{options.package}.json"
    if options.show:
        show(json.loads(results.read_text(encoding="utf-8")))
        return 0
    settings.register_profile(
        "mutation", deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
    )
    runner = Runner(options.package, options)
    sys.path.insert(0, str(ROOT))
    tests = options.tests or [str(ROOT / "tests" / options.package)]
    if options.package == "protocol" and not options.tests:
        tests.append(str(Path(__file__).with_name("pool.py")))
    arguments = [*tests, "-q", "-s", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation", "--tb=line"]
    status = pytest.main(arguments, plugins=[runner])
    if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(status)
    found = summary(options.package, runner)
    if options.write:
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)
    explained = known()
    survived = {key for key, word in runner.results.items() if word in ALIVE}
    for key in sorted(survived - explained.keys()):
        print(f"not explained: {key}  ({runner.results[key]})")
    for key in sorted(explained.keys() & runner.results.keys() - survived):
        print(f"explained, but killed: {key}")
    return 1 if survived - explained.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
