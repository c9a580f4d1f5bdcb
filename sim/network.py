"""Control messages between engines: a delay, and what faults do to them.

Decides when a message arrives, and drops it while its pair is partitioned. With ``encoded`` every message goes
through the real encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pushkv.model.protocol import decode, encode
from pushkv.model.protocol.messages import Message
from pushkv.sim.clock import Clock
from pushkv.sim.ticks import ticks

if TYPE_CHECKING:
    from pushkv.sim.host import Host


class Network:
    """``message_s``: one way, from engine to engine."""

    def __init__(self, env: Clock, message_s: float, *, encoded: bool = False) -> None:
        self._env = env
        self._delay = ticks(message_s)
        self._encoded = encoded
        self.hosts: dict[str, Host] = {}
        self.cut: set[frozenset[str]] = set()
        self.messages = 0

    def send(self, source: str, destination: str, message: Message) -> None:
        """Deliver ``message`` after the delay, unless the pair is cut when it is sent."""
        self.messages += 1
        if self.cut and frozenset((source, destination)) in self.cut:
            return
        if self._encoded:
            message = decode(encode(message))
        env = self._env
        env.call(env.ticks + self._delay, self._arrive, (source, destination, message))

    def _arrive(self, what: tuple[str, str, Message]) -> None:
        source, destination, message = what
        self.hosts[destination].receive(source, message)
