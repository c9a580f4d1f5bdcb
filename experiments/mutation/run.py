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
import random
import resource
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings
from operators import edges, mutants

ROOT = Path(__file__).resolve().parents[2]
SURVIVORS = Path(__file__).with_name("survivors.toml")
PACKAGES = {"protocol": "pushkv.model.protocol", "layout": "pushkv.model.layout"}
LEFT_OUT = {
    "protocol": ("test_mutations", "test_a_seed_fixes_everything"),
    "layout": ("test_mutations",),
}
"""Tests of the tests: they cost much and find nothing that the others do not."""

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


def _swap(function: FunctionType, code: CodeType) -> None:
    function.__code__ = code


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
        self.running: dict[int, tuple[str, int]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        left_out = LEFT_OUT[self.package]
        self.items = [item for item in session.items if not any(name in item.nodeid for name in left_out)]
        self.cost, self.calls = self._baseline()
        gc.collect()
        gc.freeze()
        todo = list(jobs(self.package, self.options.only))
        if self.options.again:
            again = set(Path(self.options.again).read_text(encoding="utf-8").splitlines())
            todo = [job for job in todo if job[0] in again]
        random.Random(self.options.seed).shuffle(todo)
        if self.options.sample:
            todo = todo[: self.options.sample]
        print(f"{len(todo)} mutants, {len(self.items)} tests", file=sys.stderr)
        self._all(todo)
        return True

    def _baseline(self) -> tuple[dict[str, float], dict[str, set[str]]]:
        """What every test costs (s), and which functions of the package it calls."""
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
            _quiet()
            for item in self.items:
                seen: set[str] = set()

                def trace(frame: Any, event: str, arg: Any, seen: set[str] = seen) -> None:
                    code = frame.f_code
                    if folder in code.co_filename:
                        seen.add(f"{Path(code.co_filename).stem}:{code.co_qualname}")

                begun = time.perf_counter()
                sys.settrace(trace)
                failed = _fails(item)
                sys.settrace(None)
                cost[item.nodeid], calls[item.nodeid] = time.perf_counter() - begun, seen
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
        """Those that call the function; first those that have killed most for what they cost."""

        def worth(item: pytest.Item) -> float:
            return (1 + self.kills.get(item.nodeid, 0)) / (0.02 + self.cost.get(item.nodeid, 0.05))

        every = {function}
        chosen = [item for item in self.items if not function or function in self.calls.get(item.nodeid, every)]
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
            self.running[pid] = (key, read)
            if number % 50 == 49:
                left = sum(word == "survived" for word in self.results.values())
                print(f"{number + 1}/{len(todo)} {left} survive, {time.monotonic() - begun:.0f} s", file=sys.stderr)
                self._save()
        while self.running:
            self._reap()
        self._save()

    def _child(self, tests: list[pytest.Item], apply: Callable[[], None], write: int) -> None:
        _quiet()
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (int(3 * self.options.budget) + 5,) * 2)
        begun = time.process_time()
        try:
            apply()
            for item in tests:
                os.write(write, item.nodeid.encode() + b"\n")
                if _fails(item):
                    os._exit(1)
                if time.process_time() - begun > self.options.budget:
                    break
        except BaseException:
            os._exit(2)
        os._exit(0)

    def _reap(self) -> None:
        pid, status = os.wait()
        key, read = self.running.pop(pid)
        with os.fdopen(read) as pipe:
            played = pipe.read().split("\n")
        self.results[key] = "killed" if status else "survived"
        if status and len(played) > 1:
            self.kills[played[-2]] = self.kills.get(played[-2], 0) + 1

    def _save(self) -> None:
        if self.options.out:
            Path(self.options.out).write_text(json.dumps(self.results, indent=0), encoding="utf-8")


def _quiet() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))


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
    options = parser.parse_args()
    settings.register_profile(
        "mutation", deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
    )
    runner = Runner(options.package, options)
    sys.path.insert(0, str(ROOT))
    tests = options.tests or [str(ROOT / "tests" / options.package)]
    arguments = [*tests, "-q", "-s", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation"]
    status = pytest.main(arguments, plugins=[runner])
    if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(status)
    known = {entry["mutant"] for entry in tomllib.loads(SURVIVORS.read_text(encoding="utf-8")).get("survivor", [])}
    survived = {key for key, word in runner.results.items() if word != "killed"}
    print(f"{len(runner.results)} mutants, {len(runner.results) - len(survived)} killed, {len(survived)} survive")
    for key in sorted(survived - known):
        print(f"not explained: {key}  ({runner.results[key]})")
    for key in sorted(known & set(runner.results) - survived):
        print(f"explained, but killed: {key}")
    return 1 if survived - known else 0


if __name__ == "__main__":
    sys.exit(main())
