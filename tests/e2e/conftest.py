"""How the end-to-end tests run: only when this folder is named, and only where vLLM is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .kinds import KINDS, Kind
from .model import make_model

if TYPE_CHECKING:
    from .cluster import Cluster, Oracle


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


CONNECTOR = "pushkv" if _installed("pushkv.reference.connector") else "vllm"
HAS_VLLM = _installed("vllm")
collect_ignore_glob: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """pytest calls this only where ``tests/e2e`` stands on its command line."""
    parser.addoption("--connector", choices=sorted(KINDS), default=CONNECTOR, help="who hands the cache over")
    parser.addoption("--outcomes", help="write one JSON line per test with the faults that it covers")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*ids): the entries of the fault log that a test goes through")
    if not HAS_VLLM or not hasattr(config.option, "connector"):
        collect_ignore_glob.append("test_*.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        kind = KINDS[metafunc.config.getoption("connector")]
        metafunc.parametrize("path", kind.paths, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def`` tests."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        for server in cluster.servers():
            report.sections.append((f"log of {server.name}", server.tail(25)))
            server.say_where()
    target = item.config.getoption("outcomes", None)
    if target and (report.when == "call" or report.failed or report.skipped):
        faults = [fault for mark in item.iter_markers("fault") for fault in mark.args]
        said = "" if call.excinfo is None else call.excinfo.exconly(tryshort=True).splitlines()[0]
        row = {"test": item.name, "faults": faults, "outcome": report.outcome, "said": said, "seconds": report.duration}
        with open(target, "a", encoding="utf-8") as file:
            print(json.dumps(row), file=file)
    return report


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.config.getoption("connector")]


@pytest.fixture(scope="session")
def folder() -> Path:
    """Logs, with the stacks of all threads at a failure, and traces; kept."""
    made = Path(tempfile.mkdtemp(prefix="pushkv-e2e-"))
    print(f"\nservers' logs: {made}")
    return made


@pytest.fixture(scope="session")
def cluster(kind: Kind, folder: Path) -> Iterator[Cluster]:
    from .cluster import Cluster  # brings in what only vLLM's environment has

    made = Cluster(kind, make_model(), folder)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def oracle(cluster: Cluster) -> Oracle:
    return cluster.oracle


@pytest.fixture
def only_pushkv(kind: Kind) -> None:
    if kind.name != "pushkv":
        pytest.skip("a promise of pushkv's connector alone")
