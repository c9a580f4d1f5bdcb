"""The doctor's findings: what each observation is called, and what there is to do about it."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pushkv.reference import memory
from pushkv.reference.settings import ConnectorSettings
from pushkv.router import doctor, machine_checks, peer_checks
from pushkv.router.doctor import Examination, Finding

from .mock import RECORDINGS

GIB = 1 << 30
SECRET = "0123456789abcdef0123456789abcdef"


def levels(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.level for one in findings}


def one(findings: Iterator[Finding] | list[Finding]) -> Finding:
    (found,) = findings
    return found


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        ({"missing": "No module named 'vllm'"}, "error", "not installed"),
        ({"crashed": "exit -11: no output"}, "error", "cannot be imported"),
        ({"version": "0.32.0", "trouble": [], "new": [], "hooks": 40}, "ok", "40 hooks are as known"),
        (
            {"version": "0.32.0", "trouble": ["start_load_kv (changed)"], "new": [], "hooks": 1},
            "error",
            "start_load_kv",
        ),
        ({"version": "0.40.1", "trouble": [], "new": ["x"], "hooks": 40}, "warning", "written for 0.26 to 0.33"),
        ({"version": "0.9.2", "trouble": [], "new": [], "hooks": 40}, "warning", "written for 0.26 to 0.33"),
        ({"version": "dev", "trouble": [], "new": [], "hooks": 40}, "warning", "written for"),
    ],
)
def test_vllm(found: dict[str, Any], level: str, says: str) -> None:
    first = next(iter(machine_checks.vllm(found)))
    assert first.level == level and says in first.says and (first.level == "ok" or first.todo)


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        ({"missing": "x"}, "error", "not installed"),
        ({"crashed": "no answer within 240 s"}, "error", "ended it"),
        ({"version": "1.5.1", "plugins": ["POSIX", "UCX"], "error": ""}, "ok", "POSIX, UCX"),
        ({"version": "1.5.1", "plugins": [], "error": "starting failed: no EFA"}, "error", "no EFA"),
    ],
)
def test_nixl(found: dict[str, Any], level: str, says: str) -> None:
    found_ = one(machine_checks.nixl("LIBFABRIC", found))
    assert found_.level == level and says in found_.says and (level == "ok" or found_.todo)


def cards(*free_gib: float, apart: list[list[int]] | None = None) -> dict[str, Any]:
    devices = [{"name": "H200", "free_bytes": int(gib * GIB), "total_bytes": 140 * GIB} for gib in free_gib]
    return {"version": "2.13", "devices": devices, "no_peer_access": apart or []}


def test_devices_and_their_memory() -> None:
    settings = ConnectorSettings()
    found = list(machine_checks.devices(settings, True, True, cards(100, 100)))
    assert levels(found) == {"devices": "ok", "peer access": "ok", "memory 0": "ok", "memory 1": "ok"}
    found = list(machine_checks.devices(settings, True, True, cards(100, 1, apart=[[0, 1], [1, 0]])))
    assert levels(found)["peer access"] == "warning" and levels(found)["memory 1"] == "error"
    large = ConnectorSettings(landing_bytes=200 * GIB)
    assert levels(list(machine_checks.devices(large, False, True, cards(100))))["memory 0"] == "error"
    assert levels(list(machine_checks.devices(settings, True, True, {"crashed": "x"}))) == {"devices": "error"}


def test_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 64 * GIB)
    found = list(machine_checks.devices(ConnectorSettings(), True, True, cards()))
    assert levels(found) == {"devices": "note", "memory": "ok"} and "64.0 GiB free" in found[1].says


def card(sysfs: Path, name: str, driver: str) -> None:
    (sysfs / name / "device").mkdir(parents=True)
    (sysfs / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (sysfs / name / "device" / "driver").symlink_to(sysfs / "drivers" / driver)


@pytest.mark.parametrize(
    ("driver", "backend", "provider", "expected"),
    [
        ("efa", "LIBFABRIC", None, {"EFA": "ok", "locked memory": "ok"}),
        ("efa", "LIBFABRIC", "tcp", {"EFA": "warning", "locked memory": "ok"}),
        ("efa", "UCX", None, {"EFA": "warning", "locked memory": "ok"}),
        ("mlx5_core", "UCX", None, {"fabric": "ok", "locked memory": "ok"}),
        (None, "LIBFABRIC", None, {"EFA": "warning"}),
        (None, "UCX", None, {"fabric": "note"}),
    ],
)
def test_fabric(tmp_path: Path, driver: str | None, backend: str, provider: str | None, expected: Any) -> None:
    sysfs = tmp_path / "infiniband"
    if driver:
        card(tmp_path / "infiniband", "rdmap0s1", driver)
        for folder in (tmp_path / "infiniband" / "drivers").iterdir():
            assert folder.is_dir()
    environ = {"FI_PROVIDER": provider} if provider else {}
    found = list(machine_checks.fabric(backend, environ, sysfs, resource.RLIM_INFINITY))
    assert levels(found) == expected
    assert all(one.todo for one in found if one.level in ("warning", "error"))


def test_locked_memory(tmp_path: Path) -> None:
    card(tmp_path / "infiniband", "mlx5_0", "mlx5_core")
    found = list(machine_checks.fabric("UCX", {}, tmp_path / "infiniband", 64 << 10))
    assert levels(found)["locked memory"] == "error"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert one(machine_checks.ports("127.0.0.1", port, 1)).level == "warning"
    assert one(machine_checks.ports("127.0.0.1", port, 1)).level == "ok"
    assert one(machine_checks.ports("127.0.0.1", 65535, 8)).level == "error"
    assert "no address of this machine" in one(machine_checks.ports("192.0.2.7", port, 1)).says
    assert "has no address" in one(machine_checks.ports("no-such-host.invalid", port, 1)).says


@contextmanager
def engine(secret: str | None) -> Iterator[int]:
    """The real side channel of an engine."""
    channels = pytest.importorskip("pushkv.reference.side_channel")
    channel = channels.SideChannel(("P0", 3), "127.0.0.1", 0, secret)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            channel.receive()
            over.wait(0.01)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield channel.port
    finally:
        over.set()
        thread.join()
        channel.close()


def test_a_peer_says_who_it_is() -> None:
    pytest.importorskip("zmq")
    for secret in (None, SECRET):
        with engine(secret) as port:
            found = one(peer_checks.side_channel(("127.0.0.1", port), secret))
            assert found.level == "ok" and "rank 3 of engine 'P0'" in found.says


def test_a_peer_with_another_secret() -> None:
    pytest.importorskip("zmq")
    for theirs, ours in ((SECRET, SECRET[::-1]), (SECRET, None), (None, SECRET)):
        with engine(theirs) as port:
            found = one(peer_checks.side_channel(("127.0.0.1", port), ours, 1.0))
            assert found.level == "error" and found.todo and SECRET not in found.says


def test_a_peer_that_is_none() -> None:
    pytest.importorskip("zmq")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = one(peer_checks.side_channel(("127.0.0.1", silent.getsockname()[1]), None, 0.3))
        assert found.level == "error" and "does not answer as an engine" in found.says
        port = silent.getsockname()[1]
    assert "cannot be reached" in one(peer_checks.side_channel(("127.0.0.1", port), None, 0.3)).says


@contextmanager
def server(model: str, version: str, dtype: str, *, connector: bool = True, block: int = 16) -> Iterator[str]:
    metrics = f'vllm:cache_config_info{{block_size="{block}",cache_dtype="{dtype}",engine="0"}} 1.0\n'
    if connector:
        metrics += (RECORDINGS / "metrics_types.txt").read_text(encoding="utf-8")
    answers = {
        "/v1/models": json.dumps({"data": [{"id": "m", "root": model}]}),
        "/metrics": metrics,
        "/version": json.dumps({"version": version}),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers[self.path].encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_servers_are_compared() -> None:
    with server("qwen", "0.32.0", "auto") as one_url, server("qwen", "0.32.1", "auto", block=32) as other:
        found = list(peer_checks.servers((one_url, other)))
        assert [f.level for f in found] == ["ok", "ok", "note", "ok"]
        assert "model qwen, vLLM 0.32.0, block size 16, cache dtype auto" in found[0].says
    with server("qwen", "0.32.0", "auto") as one_url, server("llama", "0.26.0", "fp8", connector=False) as other:
        found = list(peer_checks.servers((one_url, other)))
        assert [f.level for f in found] == ["ok", "error", "error", "error", "warning", "ok"]
    assert one(peer_checks.servers(("http://127.0.0.1:9",))).level == "error"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"settings": "ok", "secret": "note"}),
        ({"PUSHKV_SECRET": SECRET}, {"settings": "ok", "secret": "ok"}),
        ({"PUSHKV_SECRET": "replace-me-with-openssl-rand-hex-32"}, {"settings": "ok", "secret": "error"}),
        ({"PUSHKV_SECRET": "a" * 40}, {"settings": "ok", "secret": "error"}),
        ({"PUSHKV_HOST": "10.0.0.7"}, {"settings": "error"}),
        ({"PUSHKV_BAKEND": "UCX"}, {"settings": "error"}),
    ],
)
def test_settings_and_secret(environ: dict[str, str], expected: dict[str, str]) -> None:
    found = doctor._settings(Examination(environ=environ))[1]
    assert levels(found) == expected
    assert not any(environ.get("PUSHKV_SECRET", "\0") in one.says + one.todo for one in found)


def test_the_command(tmp_path: Path) -> None:
    """In an environment without vLLM it ends with 1 and says so; stdout is JSON alone."""
    command = [sys.executable, "-m", "pushkv.sim.cli", "doctor"]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, timeout=120, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["errors"] else 0)
    checks = {one["check"]: one for one in found["findings"]}
    assert {"settings", "secret", "vLLM", "NIXL", "devices", "ports"} <= set(checks)
    assert all(one["todo"] for one in found["findings"] if one["level"] in ("error", "warning"))
    for flags, says in (
        (["--tp", "0"], "--tp is '0'"),
        (["--role", "x"], "--role is 'x'"),
        (["--peer", "x"], "must be HOST:PORT"),
        (["--server", "x"], "must be a URL"),
        (["--kv-transfer-config", "[]"], "must be the JSON object"),
        (["--kv-transfer-config", '{"kv_connector_extra_config": 5}'], "must be a JSON object"),
        (["--tp", "²"], "--tp is '²'"),
        (["--peer", "h:²"], "must be HOST:PORT"),
        (["--peer", "h:" + "1" * 5000], "must be HOST:PORT"),
    ):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
        *(
            b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            for body in (
                b"[]",
                b"5",
                b"null",
                b'{"data": 5}',
                b'{"data": [5]}',
                b'{"data": [{}]}',
                b"\xff",
                b"[" * 9999,
            )
        ),
        b"HTTP/1.0 200 OK\r\ncontent-length: 50\r\n\r\n{}",
    ],
)
def test_a_server_that_answers_nonsense(answer: bytes) -> None:
    """Another service's port, or one that answers what vLLM would not."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)

        def serve() -> None:
            while not over.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(5)
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            found = one(peer_checks.servers((f"http://127.0.0.1:{listening.getsockname()[1]}",), 2.0))
        finally:
            over.set()
            thread.join()
    assert found.level == "error" and "does not answer as a vLLM server" in found.says


def test_a_check_that_fails_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def ports(*_: object) -> Iterator[Finding]:
        yield Finding("ports", "ok", "the first")
        raise RuntimeError(SECRET)

    def nothing(*_: object) -> Iterator[Finding]:
        yield from ()

    for name in ("vllm", "nixl", "devices", "fabric"):
        monkeypatch.setattr(machine_checks, name, nothing)
    monkeypatch.setattr(machine_checks, "ports", ports)
    found = doctor.examine(Examination(environ={}, servers=("http://127.0.0.1:9",)))
    assert [(one.check, one.level) for one in found[-3:]] == [("ports", "ok"), ("ports", "error"), ("server", "error")]
    assert "RuntimeError" in found[-2].says and found[-2].todo and SECRET not in str(found)
