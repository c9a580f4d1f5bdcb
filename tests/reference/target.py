"""A process with memory that others write into: the other side of the transport tests.

Run as `python target.py NAME BACKEND BYTES`. It prints one JSON line when it is ready and answers commands, one a line:
`sum START STOP`, `zero`, `notices`, `cpu`, `quit`. Meanwhile it polls its agent every millisecond.
"""

from __future__ import annotations

import base64
import json
import select
import sys
import time
import zlib

import numpy as np

from pushkv.reference.transport import Transport


class Memory:
    """As much of a torch tensor as a transport needs, for processes that need not import torch."""

    is_cuda = False

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)

    def data_ptr(self) -> int:
        return int(self.bytes.ctypes.data)

    def numel(self) -> int:
        return len(self.bytes)

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


def main() -> None:
    name, backend, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    transport = Transport(name, backend)
    memory = Memory(size)
    transport.register([memory])  # type: ignore[list-item]
    say(metadata=base64.b64encode(transport.metadata).decode(), address=memory.data_ptr())
    notices: list[str] = []
    while True:
        notices += [f"{agent} {notice.decode()}" for agent, notice in transport.progress()]
        if not select.select([sys.stdin], [], [], 0.001)[0]:
            continue
        words = sys.stdin.readline().split()
        if not words or words[0] == "quit":
            break
        if words[0] == "sum":
            say(sum=zlib.crc32(memory.bytes[int(words[1]) : int(words[2])].tobytes()))
        elif words[0] == "zero":
            memory.bytes.fill(0)
            say(zero=True)
        elif words[0] == "notices":
            say(notices=notices)
        elif words[0] == "cpu":
            say(cpu_s=time.process_time())
    transport.close()


def say(**answer: object) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
