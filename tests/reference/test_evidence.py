"""What proves that a process is gone, and what does not, with real processes and sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pushkv.reference import evidence as ev
from pushkv.reference.evidence import Evidence, Process

LINK = ("P", 0)


@contextmanager
def running(code: str = "import time; time.sleep(600)") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", f"print(flush=True); {code}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def evidence() -> Iterator[Evidence]:
    made = Evidence(apart_s=0.02, timeout_s=0.5)
    yield made
    made.close()


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets loopback stand for an address of another machine."""
    monkeypatch.setattr(ev, "_askable", lambda address: True)


def started(pid: int) -> int:
    found = ev._stat(pid)
    assert found is not None
    return found[1]


def proven(evidence: Evidence, incarnation: int = 1, patience_s: float = 10.0) -> bool:
    """Ask until there is an answer."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        evidence.ask(LINK, incarnation)
        if found := evidence.answers():
            assert found == [(LINK, incarnation)]
            return True
        time.sleep(0.02)
    return False


def settled(evidence: Evidence, done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10.0
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.005)


# ---------------------------------------------------------------- same machine


def test_this_process_is_here() -> None:
    pid, since = ev.process_id()
    assert pid == os.getpid() and since > 0
    assert not ev.vanished(pid, since)
    assert ev.vanished(pid, since + 1)  # the number now belongs to another
    assert len(ev.host_id()) > 36 and ev.host_id() == ev.host_id()
    assert ev.here("10.0.0.1", 5) == Process(ev.host_id(), pid, since, "10.0.0.1", 5)


def test_killed_not_reaped_and_reaped() -> None:
    with running() as process:
        since = started(process.pid)
        assert not ev.vanished(process.pid, since)
        process.kill()
        give_up = time.monotonic() + 10
        while not ev.vanished(process.pid, since) and time.monotonic() < give_up:
            time.sleep(0.001)
        state = ev._stat(process.pid)
        assert state is not None and state[0] == "Z"
        assert ev.vanished(process.pid, since)
        process.wait()
        assert ev.vanished(process.pid, since)


def test_stopped_is_not_gone() -> None:
    with running() as process:
        since = started(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.05)
        assert not ev.vanished(process.pid, since)


def test_a_first_thread_that_ends_before_the_others_is_not_gone() -> None:
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with running(code) as process:
        since = started(process.pid)
        give_up = time.monotonic() + 10
        while (found := ev._stat(process.pid)) and found[0] != "Z" and time.monotonic() < give_up:
            time.sleep(0.01)
        if not found or found[0] != "Z":
            pytest.skip("the first thread did not end")
        assert not ev.vanished(process.pid, since)


@pytest.mark.parametrize(("pid", "since"), [(0, 5), (-1, 5), (1, 0), (0, 0)])
def test_what_is_not_known_is_not_gone(pid: int, since: int) -> None:
    assert not ev.vanished(pid, since)


def test_a_hidden_process_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ev, "_stat", lambda pid: None)
    assert not ev.vanished(os.getpid(), 1)


def test_the_peer_on_this_machine_is_killed(evidence: Evidence) -> None:
    with running() as process:
        evidence.meet(LINK, 1, Process(ev.host_id(), process.pid, started(process.pid)))
        assert not proven(evidence, patience_s=0.3)
        os.kill(process.pid, signal.SIGSTOP)
        assert not proven(evidence, patience_s=0.3)
        process.kill()
        assert proven(evidence)
        assert not proven(evidence, patience_s=0.2)  # told once


def test_another_incarnation_or_nobody_is_not_asked_about(evidence: Evidence) -> None:
    with running() as process:
        evidence.ask(LINK, 1)
        evidence.meet(LINK, 2, Process(ev.host_id(), process.pid, started(process.pid)))
        process.kill()
        evidence.ask(LINK, 1)
        assert proven(evidence, 2)


def test_forgotten(evidence: Evidence) -> None:
    with running() as process:
        evidence.meet(LINK, 1, Process(ev.host_id(), process.pid, started(process.pid)))
        evidence.forget(LINK)
        process.kill()
        assert not proven(evidence, patience_s=0.3)


# ---------------------------------------------------------------- elsewhere


@contextmanager
def listening() -> Iterator[tuple[Process, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Process("another machine", 1, 1, "127.0.0.1", server.getsockname()[1]), server


@pytest.mark.usefixtures("reachable")
def test_an_endpoint_that_accepted_and_refuses(evidence: Evidence) -> None:
    with listening() as (process, server):
        evidence.meet(LINK, 1, process)
        settled(evidence, lambda: (LINK, 1) in evidence._open)
        assert not proven(evidence, patience_s=0.3)
        server.close()
        assert proven(evidence)


@pytest.mark.usefixtures("reachable")
def test_an_endpoint_that_never_accepted_proves_nothing(evidence: Evidence) -> None:
    with listening() as (process, server):
        server.close()
        evidence.meet(LINK, 1, process)
        assert not proven(evidence, patience_s=0.5)


@pytest.mark.usefixtures("reachable")
def test_what_an_earlier_process_accepted_does_not_count(evidence: Evidence) -> None:
    with listening() as (process, server):
        evidence.meet(LINK, 1, process)
        settled(evidence, lambda: (LINK, 1) in evidence._open)
        server.close()
        evidence.meet(LINK, 2, process)
        assert not proven(evidence, 2, patience_s=0.5)


@pytest.mark.usefixtures("reachable")
def test_a_refusal_can_be_told_not_to_count() -> None:
    evidence = Evidence(refusal_counts=False, apart_s=0.02)
    with listening() as (process, server):
        evidence.meet(LINK, 1, process)
        server.close()
        assert not proven(evidence, patience_s=0.3)
    evidence.close()


@pytest.mark.usefixtures("reachable")
def test_a_full_backlog_is_no_answer(evidence: Evidence) -> None:
    """A stopped process: the connection is neither accepted nor refused in time."""
    with listening() as (process, server):
        evidence.meet(LINK, 1, process)
        settled(evidence, lambda: (LINK, 1) in evidence._open)
        server.listen(0)
        others = [socket.socket() for _ in range(4)]
        for one in others:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", process.port))
        assert not proven(evidence, patience_s=1.5)
        for one in others:
            one.close()


@pytest.mark.usefixtures("reachable")
def test_one_refusal_is_not_enough(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([{"accepted"}, {"refused"}, {"accepted"}, {"refused"}] * 50)

    def knock(asked: dict[tuple[ev.Link, int], Process], timeout_s: float) -> tuple[set[object], set[object]]:
        word = next(rounds, {"accepted"})
        return (set(asked), set()) if word == {"accepted"} else (set(), set(asked))

    monkeypatch.setattr(ev, "knock", knock)
    evidence.meet(LINK, 1, Process("another machine", 1, 1, "127.0.0.1", 5))
    settled(evidence, lambda: (LINK, 1) in evidence._open)
    assert not proven(evidence, patience_s=0.5)


@pytest.mark.parametrize(
    ("address", "askable"),
    [
        ("10.0.0.1", True),
        ("2001:db8::1", True),
        ("host.example", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1", False),
        ("169.254.1.1", False),
        ("localhost", False),
        ("", False),
        ("*", False),
    ],
)
def test_addresses_that_mean_the_same_machine_everywhere(address: str, askable: bool) -> None:
    assert ev._askable(address) == askable


def test_many_at_once_and_names_that_are_none() -> None:
    with listening() as (process, server):
        asked = {((f"E{n}", 0), 1): process for n in range(60)}
        asked[("nobody", 0), 1] = Process("", 0, 0, "no such name.invalid", 5)
        asked[("zero", 0), 1] = Process("", 0, 0, "a\0b", 5)
        accepted, refused = ev.knock(asked, 1.0)
        assert len(accepted) == 60 and not refused
        server.close()
        accepted, refused = ev.knock(asked, 1.0)
        assert len(refused) == 60 and not accepted


def test_questions_are_bounded() -> None:
    evidence = Evidence(waiting=10)
    with evidence._changed:  # the thread waits
        for n in range(1000):
            evidence.meet((f"E{n}", 0), 1, Process("another machine", 1, 1, "", 0))
        assert len(evidence._asked) == 10
    evidence.close()
