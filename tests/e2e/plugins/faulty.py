"""Connectors that do what a test tells them to do wrong; loaded by a server through ``kv_connector_module_path``.

The test writes one word per line into the file ``$E2E_FAULT_FILE``, the connector reads it whenever it moves bytes:

* ``hold``: a posted write stays under way, and stores nothing, for as long as the word stands there;
* ``error``: a write that is posted now fails half a second later, without having stored anything;
* ``raise``: posting raises;
* ``one``: ``hold`` and ``error`` meet one write, the next to be posted, and its siblings go on;
* ``lose``: the notice that a write is complete is not sent; ``double``: it is sent twice; ``late``: it is sent a second
  later, with the next sign of life;
* ``slow``: getting to know a new peer takes until the word is gone.

What goes wrong is NIXL in both connectors, and pushkv's own notice on its side channel.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

ERROR_S = 0.5
LATE_S = 1.0
_FILE = Path(os.environ.get("E2E_FAULT_FILE", "/nonexistent"))


def told() -> set[str]:
    """The words that stand in the file now."""
    try:
        return set(_FILE.read_text(encoding="ascii").split())
    except OSError:
        return set()


def wait_while(word: str) -> None:
    while word in told():
        time.sleep(0.05)


class _FaultyAgent:
    """A NIXL agent."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._held: set[int] = set()
        self._failing: dict[int, float] = {}
        self._spared = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def add_remote_agent(self, *arguments: Any) -> Any:
        wait_while("slow")
        return self._agent.add_remote_agent(*arguments)

    def make_prepped_xfer(self, *arguments: Any, notif_msg: bytes = b"", **more: Any) -> Any:
        if "lose" in told():
            notif_msg = b""
        return self._agent.make_prepped_xfer(*arguments, notif_msg=notif_msg, **more)

    def transfer(self, handle: Any) -> Any:
        words = told()
        if "raise" in words:
            raise RuntimeError("told to raise")
        if self._spared and "one" in words:  # it was another
            return self._agent.transfer(handle)
        self._spared = "one" in words
        if "error" in words:
            self._failing[handle] = time.monotonic() + ERROR_S
            return "PROC"
        if "hold" in words:
            self._held.add(handle)
            return "PROC"
        return self._agent.transfer(handle)

    def check_xfer_state(self, handle: Any) -> str:
        if handle in self._failing:
            return "PROC" if time.monotonic() < self._failing[handle] else "ERR"
        if handle in self._held:
            if "hold" in told():
                return "PROC"
            self._held.discard(handle)
            self._agent.transfer(handle)
        return self._agent.check_xfer_state(handle)

    def release_xfer_handle(self, handle: Any) -> Any:
        self._failing.pop(handle, None)
        return self._agent.release_xfer_handle(handle)


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPushConnector
except ImportError:
    pass
else:

    class FaultyNixlPushConnector(NixlPushConnector):
        """vLLM's own push."""

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            if self.connector_worker is not None:
                self.connector_worker.nixl_wrapper = _FaultyAgent(self.connector_worker.nixl_wrapper)


try:
    from pushkv.model.protocol import MessageError, decode
    from pushkv.model.protocol.messages import Written
    from pushkv.reference import transport
    from pushkv.reference.connector import PushConnector
    from pushkv.reference.side_channel import SideChannel
except ImportError as error:
    if "pushkv" not in str(error):
        raise
else:
    _make_agent = transport.make_agent
    _send = SideChannel.send

    def _faulty_agent(*arguments: Any) -> _FaultyAgent:
        return _FaultyAgent(_make_agent(*arguments))

    _late: list[tuple[float, SideChannel, Any, bytes]] = []

    def _faulty_send(channel: SideChannel, link: Any, frame: bytes) -> bool:
        for one in [late for late in _late if late[0] <= time.monotonic() and late[1] is channel]:
            _late.remove(one)
            _send(*one[1:])
        words = told() & {"lose", "double", "late"}
        if words and _is_written(frame):
            if "lose" in words:
                return True
            if "late" in words:
                _late.append((time.monotonic() + LATE_S, channel, link, frame))
                return True
            _send(channel, link, frame)
        return _send(channel, link, frame)

    def _is_written(frame: bytes) -> bool:
        try:
            return isinstance(decode(frame), Written)
        except MessageError:
            return False

    transport.make_agent = _faulty_agent
    SideChannel.send = _faulty_send  # type: ignore[method-assign]

    class FaultyPushConnector(PushConnector):
        """pushkv's."""
