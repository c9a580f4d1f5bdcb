"""Settings: what is refused, in which words, and what a file and flags make of each other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pushkv.router.identity import Identity, identity_of
from pushkv.router.settings import SAYS, RouterSettings, parse_server, read, table
from pushkv.sim.errors import BadInput

P, D = "http://127.0.0.1:8001", "http://127.0.0.1:8002"
GOOD = f'[[prefill]]\nurl = "{P}"\n[[decode]]\nurl = "{D}"\n'


def test_a_file_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text('policy = "session"\nconnect_s = 1\n' + GOOD)
    made = read(str(path), {"policy": "prefix", "listen": None})
    assert (made.policy, made.connect_s, made.listen) == ("prefix", 1.0, "127.0.0.1:8100")
    made = read(str(path), {"decode": [parse_server("decode", "http://h:1"), parse_server("decode", "https://h")]})
    assert [server.url for server in made.decode] == ["http://h:1", "https://h"]
    server = parse_server("prefill", "http://h:1=P0@10.0.0.7:5600/8")
    assert server.identity == Identity("P0", "10.0.0.7", 5600, 8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("conect_s = 1\n" + GOOD, "the setting 'conect_s' is not known: did you mean 'connect_s'?"),
        ('connect_s = "soon"\n' + GOOD, "connect_s: expected float, got str"),
        ("connect_s = 0\n" + GOOD, "connect_s is 0.0: it must be from 0.001 to 86400 seconds"),
        ("attempts = 11\n" + GOOD, "attempts is 11: it must be from 1 to 10"),
        ("max_active = 0\n" + GOOD, "max_active is 0: it must be at least 1"),
        ('mode = "shove"\n' + GOOD, "mode: invalid enum value 'shove'"),
        ('policy = "random"\n' + GOOD, "policy 'random' is not known"),
        ('listen = "8100"\n' + GOOD, "listen is '8100': it must be HOST:PORT"),
        ('tls_cert = "x"\n' + GOOD, "tls_cert and tls_key belong together"),
        ('tls_cert = "/none"\ntls_key = "/none"\n' + GOOD, "tls_cert is '/none': there is no such file"),
        (GOOD + "drains = true\n", "the setting of a decode server 'drains' is not known: did you mean 'drain'?"),
        (GOOD + f'[[decode]]\nurl = "{D}/"\n', "is listed twice"),
        (GOOD + '[[decode]]\nurl = "127.0.0.1:1"\n', "must be http://HOST:PORT or https://HOST:PORT"),
        (GOOD + '[[decode]]\nurl = "http://user:pass@h:1"\n', "must be http://HOST:PORT or https://HOST:PORT"),
        (
            GOOD + '[[decode]]\nurl = "http://h:1"\nengine_id = "D"\n',
            "engine_id of the decode server http://h:1 has no use",
        ),
        (GOOD + '[[prefill]]\nurl = "http://h:1"\nengine_id = "D"\n', "http://h:1 has engine_id only"),
        (f'[[prefill]]\nurl = "{P}"\n', "there is no decode server"),
        (f'[[decode]]\nurl = "{D}"\ndrain = true\n[[prefill]]\nurl = "{P}"\n', "all decode servers have drain = true"),
        ("prefill = 5\n", "prefill is no list of servers: write [[prefill]] tables"),
        (f'decode = "{D}"\n', "decode is no list of servers: write [[decode]] tables"),
        ("prefill = [5]\n", "prefill[0]: expected object, got int"),
        ("[prefill]\nurl = 1\n", "prefill is no list of servers"),
        (GOOD + "[[decode]]\nurl = 5\n", "expected str, got int"),
        ("= 1", "is not TOML"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "router.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read(str(path), {})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_every_setting_is_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "router.md").read_text(encoding="utf-8")
    assert table() in docs, "python -m pushkv.router.settings prints the table"
    assert list(SAYS) == list(RouterSettings.__struct_fields__)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"remote_engine_id": "P", "remote_host": "h"},
        {"remote_engine_id": "P", "remote_host": "h", "remote_port": 0},
        {"remote_engine_id": 7, "remote_host": "h", "remote_port": 1},
        {"remote_engine_id": "", "remote_host": "h", "remote_port": 1},
        {"remote_engine_id": "P", "remote_host": "h", "remote_port": True},
    ],
)
def test_an_identity_that_cannot_be_used_is_none(said: Any) -> None:
    assert identity_of(said) is None


def test_an_identity_as_routers_write_it() -> None:
    said = {"remote_engine_id": "P", "remote_host": "h", "remote_port": "5600", "tp_size": 2, "more": 1}
    assert identity_of(said) == Identity("P", "h", 5600, 2)


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pushkv.sim.cli", "router", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, **more)


def test_a_start_that_cannot_be_is_exit_2_and_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        found = command("--prefill", P, "--decode", D, "--listen", where)
    assert found.returncode == 2 and "cannot be listened on" in found.stderr and found.stderr.count("\n") == 1
    found = command("--config", str(tmp_path / "none.toml"))
    assert found.returncode == 2 and "cannot be read" in found.stderr and found.stderr.count("\n") == 1


def test_check_prints_the_settings() -> None:
    found = command("--prefill", P, "--decode", D, "--check")
    assert found.returncode == 0 and json.loads(found.stdout)["decode"][0]["url"] == D


def test_without_the_extra_the_refusal_says_what_to_install() -> None:
    hide = "import sys; sys.modules['httptools'] = None; from pushkv.sim.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", hide, "router", "--prefill", P, "--decode", D]
    found = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2 and "pip install 'pushkv[router]'" in found.stderr


def test_the_process_reloads_its_list_and_drains(tmp_path: Path) -> None:
    """A real one, with signals. Nobody answers behind it: the list is what is looked at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = tmp_path / "router.toml"
    path.write_text(f'listen = "127.0.0.1:{port}"\nreload_every_s = 0.1\n' + GOOD)
    line = [sys.executable, "-m", "pushkv.sim.cli", "router", "--config", str(path)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:

        def metric(name: str) -> list[str]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
                lines = response.read().decode().splitlines()
            return [one for one in lines if one.startswith(f"pushkv_router_{name}")]

        def until(name: str, text: str) -> list[str]:
            for _ in range(300):
                try:
                    found = metric(name)
                except OSError:
                    found = []
                if any(text in one for one in found):
                    return found
                time.sleep(0.05)
            pytest.fail(f"no {text} in {found}")

        until("server_up", "127.0.0.1:8002")
        path.write_text(path.read_text() + '[[decode]]\nurl = "http://127.0.0.1:8003"\n')
        until("server_up", "127.0.0.1:8003")
        assert any("8002" in one for one in metric("server_up"))
        path.write_text("what = 1\n")
        until("reloads_total", 'result="refused"')
        assert len(metric("server_up")) == 3
        path.write_text(f'listen = "127.0.0.1:{port}"\nreload_every_s = 0.1\n' + GOOD.replace("8002", "8004"))
        os.kill(process.pid, signal.SIGHUP)
        found = until("server_up", "127.0.0.1:8004")
        assert len(found) == 2
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 0 and "draining" in said and "Traceback" not in said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("setting", ["upstream_ca", "tls_cert"])
def test_check_tries_the_certificates(tmp_path: Path, setting: str) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("none")
    path = tmp_path / "router.toml"
    lines = f'{setting} = "{bad}"\n' + (f'tls_key = "{bad}"\n' if setting == "tls_cert" else "")
    path.write_text(f'{lines}[[prefill]]\nurl = "https://127.0.0.1:9"\n[[decode]]\nurl = "{D}"\n')
    found = command("--config", str(path), "--check")
    assert found.returncode == 2 and setting in found.stderr and "cannot be used" in found.stderr
