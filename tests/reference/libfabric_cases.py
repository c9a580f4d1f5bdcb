"""What the transport must do over LIBFABRIC; run by `test_libfabric.py` in an environment of its own.

`python libfabric_cases.py NAME` ends with 0 if the case holds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib

import numpy as np

from tests.reference.pairs import Target, Writer, spaced

SIZE = 32 << 20
Pair = tuple[Writer, Target, str]


def pair(drain_s: float = 1.0) -> Pair:
    writer = Writer("writer.0.1", SIZE, "LIBFABRIC", drain_s=drain_s)
    target = Target("target.0.1", SIZE, "LIBFABRIC")
    return writer, target, writer.transport.connect(target.metadata)


def bytes_are_there_when_the_notice_comes() -> None:
    """Many batches, one notice; the target's bytes are compared after the notice, whatever the writer saw."""
    writer, target, agent = pair()
    assert writer.transport.arrival == "notification"
    offsets, length = spaced(5000, 2048)
    write = writer.post(agent, target, offsets, length, b"landed")
    assert writer.until(lambda: writer.transport.poll(write) != "active" and target.ask("notices"), 120)
    assert target.ask("notices") == ["writer.0.1 landed"] and write.state == "done"
    assert writer.transport.counters["batches"] == 10
    wanted = np.zeros(SIZE, np.uint8)
    for offset in offsets:
        wanted[offset : offset + 2048] = writer.memory.bytes[offset : offset + 2048]
    assert target.ask(f"sum 0 {SIZE}") == zlib.crc32(wanted.tobytes())
    assert writer.transport.release(write)
    empty = writer.post(agent, target, [], [], b"empty")
    assert writer.transport.poll(empty) == "done"
    assert writer.until(lambda: len(target.ask("notices")) == 2, 20)


def stopped_target_is_waited_for() -> None:
    writer, target, agent = pair()
    assert writer.finish(writer.post(agent, target, [0], [8])) == "done"
    target.signal(signal.SIGSTOP)
    write = writer.post(agent, target, [0], [SIZE], b"late")
    assert not writer.until(lambda: writer.transport.poll(write) != "active", 1)
    assert not writer.transport.release(write)
    target.signal(signal.SIGCONT)
    assert writer.finish(write, 120) == "done"
    assert writer.until(lambda: target.ask("notices") == ["writer.0.1 late"], 20)
    assert target.ask(f"sum 0 {SIZE}") == zlib.crc32(writer.memory.bytes.tobytes())


def killed_target_breaks_its_own_writes_only() -> None:
    writer, target, agent = pair(drain_s=2.0)
    other = Target("target.1.1", SIZE, "LIBFABRIC")
    healthy = writer.transport.connect(other.metadata)
    for name, peer in ((agent, target), (healthy, other)):
        assert writer.finish(writer.post(name, peer, [0], [8])) == "done"
    target.signal(signal.SIGSTOP)
    lost = [writer.post(agent, target, [0], [SIZE]) for _ in range(2)]
    other.signal(signal.SIGSTOP)
    slow = writer.post(healthy, other, [0], [SIZE], b"slow")
    target.end()
    assert not writer.until(lambda: writer.transport.poll(slow) == "broken", 1.0)
    other.signal(signal.SIGCONT)
    assert writer.finish(slow, 120) == "done"
    assert [writer.finish(write, 20) for write in lost] == ["broken", "broken"]
    assert writer.until(lambda: all(writer.transport.release(write) for write in lost), 20)
    writer.transport.disconnect(agent)
    assert writer.finish(writer.post(healthy, other, *spaced(100, 4096)), 60) == "done"
    assert writer.until(lambda: other.ask("notices") == ["writer.0.1 slow"], 20)


CASES = {
    case.__name__: case
    for case in (
        bytes_are_there_when_the_notice_comes,
        stopped_target_is_waited_for,
        killed_target_breaks_its_own_writes_only,
    )
}

if __name__ == "__main__":
    begun = time.monotonic()
    CASES[sys.argv[1]]()
    print(f"{sys.argv[1]}: {time.monotonic() - begun:.1f} s", flush=True)
    os._exit(0)  # the targets end with us
