"""A peer in a process of its own: answers every frame with the same frame, until it is killed.

    echo.py ENGINE PORT SECRET

An empty secret is none. Prints the port on which it listens.
"""

from __future__ import annotations

import sys

from pushkv.reference.side_channel import SideChannel


def main() -> None:
    engine, port, secret = sys.argv[1:]
    channel = SideChannel((engine, 0), "127.0.0.1", int(port), secret or None)
    print(channel.port, flush=True)
    while True:
        channel.poller.poll(1000)
        for link, frame in channel.receive():
            channel.send(link, frame)


if __name__ == "__main__":
    main()
