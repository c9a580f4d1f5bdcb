"""Connectors that do what a test tells them to do wrong; loaded by a server through ``kv_connector_module_path``.

The test writes one word per line into the file ``$E2E_FAULT_FILE``, the connector reads it whenever it moves bytes:

* ``hold``: a posted write stays under way, and stores nothing, for as long as the word stands there;
* ``error``: a write that is posted now fails half a second later, without having stored anything;
* ``raise``: posting raises;
* ``lose``: the notice that a write is complete is not sent; ``double``: it is sent twice;
* ``slow``: getting to know a new peer takes until the word is gone.

Both classes only wrap the calls by which their parent moves bytes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

ERROR_S = 0.5
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
    """A NIXL agent under vLLM's own connector, which polls it from two threads."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._held: set[int] = set()
        self._failing: dict[int, float] = {}

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
    from pushkv.reference.connector import PushConnector
    from pushkv.reference.side_channel import SideChannel
    from pushkv.reference.transport import Transport, TransportError
except ImportError:
    pass
else:

    class _Held:
        """A write that has been posted in everybody's eyes but the network's."""

        def __init__(self, fail: bool, post: Any) -> None:
            self.until = time.monotonic() + ERROR_S if fail else None
            self.post = post
            self.real: Any = None

    class _FaultyTransport(Transport):
        def connect(self, metadata: bytes) -> str:
            wait_while("slow")
            return super().connect(metadata)

        def post(self, *arguments: Any, **more: Any) -> Any:
            words = told()
            if "raise" in words:
                raise TransportError("told to raise")
            if words & {"hold", "error"}:
                return _Held("error" in words, lambda: super(_FaultyTransport, self).post(*arguments, **more))
            return super().post(*arguments, **more)

        def poll(self, write: Any) -> str:
            if not isinstance(write, _Held):
                return super().poll(write)
            if write.until is not None:
                return "active" if time.monotonic() < write.until else "broken"
            if write.real is None:
                if "hold" in told():
                    return "active"
                write.real = write.post()
            return super().poll(write.real)

        def release(self, write: Any) -> bool:
            if not isinstance(write, _Held):
                return super().release(write)
            if write.until is not None:
                return True
            return self.poll(write) != "active" and super().release(write.real)

    class _FaultySideChannel(SideChannel):
        def send(self, link: Any, frame: bytes) -> bool:
            words = told()
            if b"written" in frame.lower():
                if "lose" in words:
                    return True
                if "double" in words:
                    super().send(link, frame)
            return super().send(link, frame)

    class FaultyPushConnector(PushConnector):
        """pushkv's."""

    import pushkv.reference.rank as _rank

    _rank.Transport, _rank.SideChannel = _FaultyTransport, _FaultySideChannel
