"""The transport over real NIXL and UCX, between two processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pushkv.reference.transport import TransportError, agent_name

pytest.importorskip("nixl", reason="the transport needs NIXL")

from .pairs import Target, Writer, spaced

SIZE = 64 << 20


@pytest.fixture
def target() -> Iterator[Target]:
    found = Target("target.0.1", SIZE)
    yield found
    found.end()


@pytest.fixture
def writer() -> Iterator[Writer]:
    found = Writer("writer.0.1", SIZE, drain_s=0.2)
    yield found
    found.transport.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX over TCP: the target takes part, so that a stopped one stops a write. (Shared memory goes without it.)"""
    monkeypatch.setenv("UCX_TLS", "tcp")


def crc(writer: Writer, offsets: Any, length: Any) -> int:
    """Of the target's memory, if nothing but these ranges was written."""
    wanted = np.zeros(SIZE, np.uint8)
    for offset, size in zip(offsets, length, strict=True):
        wanted[offset : offset + size] = writer.memory.bytes[offset : offset + size]
    return zlib.crc32(wanted.tobytes())


def test_bytes_arrive_and_nothing_else_changes(target: Target, writer: Writer) -> None:
    agent = writer.transport.connect(target.metadata)
    assert agent == "target.0.1"
    offsets, length = np.array([0, 4096, 5000, 1 << 20]), np.array([100, 1, 77, 3 << 20])
    write = writer.post(agent, target, offsets, length, b"landed")
    assert (write.descriptors, write.size_bytes) == (4, 178 + (3 << 20))
    assert writer.finish(write) == "done"
    # Done is arrived: the target has not been asked anything yet.
    assert target.ask(f"sum 0 {SIZE}") == crc(writer, offsets, length)
    assert writer.transport.release(write) and writer.transport.release(write)
    assert writer.until(lambda: target.ask("notices") == ["writer.0.1 landed"])


def test_ten_thousand_descriptors(target: Target, writer: Writer) -> None:
    agent = writer.transport.connect(target.metadata)
    offsets, length = spaced(10_000, 2048)
    write = writer.post(agent, target, offsets, length, b"many")
    assert writer.finish(write) == "done"
    assert writer.transport.counters["batches"] == -(-10_000 // 512)
    assert target.ask(f"sum 0 {SIZE}") == crc(writer, offsets, length)
    assert writer.until(lambda: target.ask("notices") == ["writer.0.1 many"])  # one notice, not one per batch


def test_no_call_posts_everything(target: Target) -> None:
    writer = Writer("writer.0.2", SIZE, batch_descriptors=100, slice_s=0.0)
    agent = writer.transport.connect(target.metadata)
    write = writer.post(agent, target, *spaced(1000, 1024))
    assert writer.transport.counters["batches"] == 1
    writer.transport.poll(write)
    assert writer.transport.counters["batches"] == 2
    writer.transport.stop(write)
    assert writer.finish(write) == "broken" and write.reason == "stopped"
    assert writer.transport.release(write)  # nothing went wrong, so nothing needs to drain
    assert writer.transport.counters["batches"] == 2
    writer.transport.close()


def test_nothing_to_write_is_done_and_noticed(target: Target, writer: Writer) -> None:
    agent = writer.transport.connect(target.metadata)
    write = writer.post(agent, target, [], [], b"empty")
    assert writer.transport.poll(write) == "done" and writer.transport.release(write)
    assert writer.until(lambda: target.ask("notices") == ["writer.0.1 empty"])


@pytest.mark.usefixtures("over_tcp")
def test_target_killed_in_mid_write() -> None:
    writer, target = Writer("writer.0.1", SIZE, drain_s=0.3), Target("target.0.1", SIZE)
    agent = writer.transport.connect(target.metadata)
    assert writer.finish(writer.post(agent, target, [0], [1])) == "done"
    target.signal(signal.SIGSTOP)
    writes = [writer.post(agent, target, [0], [SIZE]) for _ in range(3)]
    assert not writer.until(lambda: any(writer.transport.poll(write) != "active" for write in writes), 0.3)
    assert not any(writer.transport.release(write) for write in writes)
    target.end()
    assert [writer.finish(write) for write in writes] == ["broken"] * 3
    assert all("REMOTE_DISCONNECT" in write.reason or "NOT_FOUND" in write.reason for write in writes)
    ended = time.monotonic()
    assert not writer.transport.release(writes[0])
    assert writer.until(lambda: all(writer.transport.release(write) for write in writes))
    assert time.monotonic() - ended > 0.25
    try:  # the same process will not come back
        late = writer.post(agent, target, [0], [1])
    except TransportError:
        pass
    else:
        assert writer.finish(late) == "broken"
    writer.transport.disconnect(agent)
    writer.transport.disconnect(agent)
    with pytest.raises(TransportError, match="not connected"):
        writer.post(agent, target, [0], [1])
    writer.transport.close()


def test_target_killed_under_shared_memory(target: Target, writer: Writer) -> None:
    """Here a write ends in the call that posts it: done, or broken, and then quiet."""
    agent = writer.transport.connect(target.metadata)
    writes = [writer.post(agent, target, [0], [SIZE])]
    target.signal(signal.SIGKILL)
    target.process.wait()
    writes.append(writer.post(agent, target, *spaced(100, 4096)))
    assert all(writer.finish(write) in ("done", "broken") for write in writes)
    assert writes[1].state == "broken"
    assert writer.until(lambda: all(writer.transport.release(write) for write in writes))


@pytest.mark.usefixtures("over_tcp")
def test_stopped_target_delays_its_own_writes_only() -> None:
    writer = Writer("writer.0.1", SIZE)
    stopped, other = Target("target.0.1", SIZE), Target("target.1.1", SIZE)
    agents = [writer.transport.connect(target.metadata) for target in (stopped, other)]
    stopped.signal(signal.SIGSTOP)
    write = writer.post(agents[0], stopped, [0], [SIZE], b"late")
    for _ in range(5):
        assert writer.finish(writer.post(agents[1], other, *spaced(100, 4096))) == "done"
        assert writer.transport.poll(write) == "active" and not writer.transport.release(write)
    stopped.signal(signal.SIGCONT)
    assert writer.finish(write, 60) == "done"
    assert stopped.ask(f"sum 0 {SIZE}") == zlib.crc32(writer.memory.bytes.tobytes())
    assert writer.until(lambda: stopped.ask("notices") == ["writer.0.1 late"])
    for target in (stopped, other):
        target.end()
    writer.transport.close()


@pytest.mark.usefixtures("over_tcp")
def test_disconnect_ends_what_is_active_and_leaves_the_others() -> None:
    writer = Writer("writer.0.1", SIZE, drain_s=0.3)
    gone, other = Target("target.0.1", SIZE), Target("target.1.1", SIZE)
    agents = [writer.transport.connect(target.metadata) for target in (gone, other)]
    gone.signal(signal.SIGSTOP)
    write = writer.post(agents[0], gone, [0], [SIZE])
    writer.transport.disconnect(agents[0])
    assert writer.transport.poll(write) == "broken" and write.reason == "the peer was disconnected"
    assert not writer.transport.release(write)
    gone.end()
    assert writer.until(lambda: writer.transport.release(write), 5)
    assert writer.finish(writer.post(agents[1], other, *spaced(100, 4096))) == "done"
    other.end()
    writer.transport.close()


def test_errors_of_every_call(target: Target, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = writer.transport
    with pytest.raises(TransportError):
        transport.connect(b"garbage")
    with pytest.raises(TransportError):
        transport.connect(transport.metadata)  # ourselves
    with pytest.raises(TransportError, match="not connected"):
        writer.post("nobody", target, [0], [1])
    agent = transport.connect(target.metadata)
    outside = np.array([1 << 20], np.int64)
    with pytest.raises(TransportError):  # an address that nobody registered
        transport.post(agent, outside, np.array([target.address]), np.array([8]))
    with pytest.raises(TransportError):
        transport.post(agent, np.array([writer.memory.data_ptr()]), outside, np.array([8]))
    for length in ([0], [-1], [1, 2]):
        with pytest.raises(TransportError):
            writer.post(agent, target, [0], length)
    assert writer.finish(writer.post(agent, target, [0], [8])) == "done"

    class Broken:
        """NIXL, but some calls raise or return an error."""

        def __init__(self, real: Any, **instead: Any) -> None:
            self.__dict__.update(real=real, **instead)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("boom")

    real = transport._agent
    for instead in ({"transfer": fail}, {"transfer": lambda handle: "ERR"}, {"check_xfer_state": fail}):
        transport._agent = Broken(real, **instead)
        write = writer.post(agent, target, *spaced(100, 8192))
        transport.poll(write)
        assert write.state == ("broken" if "transfer" in instead else write.state)
        transport._agent = real
        if write.state == "broken":
            assert "boom" in write.reason or "returned an error" in write.reason
            assert not transport.release(write)  # part of it may be under way
        assert writer.until(lambda write=write: transport.poll(write) != "active" and transport.release(write))  # type: ignore[misc]
    transport._agent = Broken(real, initialize_xfer=fail)
    with pytest.raises(TransportError, match="boom"):
        writer.post(agent, target, [0], [8])
    transport._agent = Broken(real, get_new_notifs=fail)
    assert transport.progress() == []
    transport._agent = real
    assert writer.finish(writer.post(agent, target, [0], [8])) == "done"  # and it goes on


def test_a_lost_peer_comes_back(target: Target, writer: Writer) -> None:
    """After an error NIXL forgets the peer; a live one is loaded again by the next write."""
    agent = writer.transport.connect(target.metadata)
    assert writer.finish(writer.post(agent, target, [0], [8])) == "done"
    writer.transport._agent.remove_remote_agent(agent)
    writer.transport._lost.add(agent)
    assert writer.finish(writer.post(agent, target, *spaced(100, 4096))) == "done"


def test_a_restarted_peer_has_another_name(writer: Writer) -> None:
    names = []
    for incarnation in (1, 2):
        target = Target(agent_name("d", 0, incarnation), SIZE)
        names.append(writer.transport.connect(target.metadata))
        assert writer.transport.connect(target.metadata) == names[-1]
        assert writer.finish(writer.post(names[-1], target, [0], [1 << 20])) == "done"
        target.end()
    assert names == ["d.0.0000000000000001", "d.0.0000000000000002"]


@pytest.mark.usefixtures("over_tcp")
def test_connect_to_a_peer_that_nobody_answers_for_disturbs_no_warm_transfer() -> None:
    """F10: a stopped peer, a dead one, and an address without a host."""
    writer = Writer("writer.0.1", SIZE, drain_s=0.2)
    warm, cold = Target("target.0.1", SIZE), Target("target.1.1", SIZE)
    agent = writer.transport.connect(warm.metadata)
    cold.signal(signal.SIGSTOP)
    took: list[float] = []

    def connect(metadata: bytes) -> None:
        begun = time.monotonic()
        try:
            name = writer.transport.connect(metadata)
        except TransportError:
            name = ""
        took.append(time.monotonic() - begun)
        if name:
            names.append(name)

    names: list[str] = []
    metadata = [cold.metadata]
    ours = socket.gethostbyname(socket.gethostname())
    packed = socket.inet_aton(ours)
    if cold.metadata.count(packed) == 1 and not ours.startswith("127."):
        nobody = packed[:3] + bytes([packed[3] ^ 0x55])
        metadata.append(cold.metadata.replace(packed, nobody).replace(b"target.1.1", b"target.9.1"))
    for one in metadata:
        thread = threading.Thread(target=connect, args=(one,))
        thread.start()
        for _ in range(20):
            assert writer.finish(writer.post(agent, warm, *spaced(10, 4096)), 1.0) == "done"
        thread.join(10)
    assert len(took) == len(metadata) and max(took) < 1.0
    cold.end()
    connect(cold.metadata)
    assert max(took) < 1.0
    warm.end()
    writer.transport.close()


def test_a_thousand_connects_keep_the_memory(target: Target, writer: Writer) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    sizes = []
    for round_ in range(1000):
        agent = writer.transport.connect(target.metadata)
        if round_ % 10 == 0:
            assert writer.finish(writer.post(agent, target, [0], [4096])) == "done"
        writer.transport.disconnect(agent)
        writer.transport.progress()
        if round_ % 250 == 249:
            sizes.append(resident())
    assert sizes[-1] - sizes[0] < 8 << 20, sizes


def test_an_idle_agent_costs_little(target: Target) -> None:
    """Polled every millisecond, without a thread of its own."""
    before, begun = target.ask("cpu"), time.monotonic()
    time.sleep(3)
    share = (target.ask("cpu") - before) / (time.monotonic() - begun)
    assert share < 0.3, f"{share:.1%} of a core"
    threads = len(list(Path(f"/proc/{target.process.pid}/task").iterdir()))
    assert threads < 64
