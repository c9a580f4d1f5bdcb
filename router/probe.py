"""What `pushkv doctor` looks at in a process of its own: libraries that take long to import, and may crash or hang.

`python -m pushkv.router.probe nixl UCX` (or `torch`, `vllm`) prints one JSON object. Decides nothing about it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any


def nixl(backend: str) -> dict[str, Any]:
    """Versions, the plugins that NIXL finds, and whether an agent with the backend starts (`error` says why not)."""
    from pushkv.reference.backends import BACKENDS, TransportError, make_agent

    try:
        import nixl._api as api
    except ImportError as error:
        return {"missing": str(error)}
    found: dict[str, Any] = {"version": _version("nixl"), "plugins": [], "error": ""}
    try:
        plain = api.nixl_agent("doctor-list", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        found["plugins"] = sorted(plain.get_plugin_list())
        make_agent("doctor", BACKENDS[backend])
    except TransportError as error:
        found["error"] = str(error)
    return found


def torch(_: str) -> dict[str, Any]:
    """The accelerators: name, free and total bytes, and which pairs reach each other's memory."""
    try:
        import torch as library
    except ImportError as error:
        return {"missing": str(error)}
    count = library.cuda.device_count() if library.cuda.is_available() else 0
    devices = []
    for number in range(count):
        free, total = library.cuda.mem_get_info(number)
        devices.append({"name": library.cuda.get_device_name(number), "free_bytes": free, "total_bytes": total})
    apart = [
        [a, b] for a in range(count) for b in range(count) if a != b and not library.cuda.can_device_access_peer(a, b)
    ]
    return {"version": str(library.__version__), "devices": devices, "no_peer_access": apart}


def vllm(_: str) -> dict[str, Any]:
    """Its version, and what of its connector's hooks is not as pushkv knows it."""
    from pushkv.reference import versions

    try:
        import vllm as library
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    except ImportError as error:
        return {"missing": str(error)}
    found = versions.check(KVConnectorBase_V1, SupportsHMA)
    return {
        "version": str(getattr(library, "__version__", "") or _version("vllm")),
        "trouble": [f"{one.hook} ({one.state})" for one in found if one.trouble],
        "new": [one.hook for one in found if one.state == "new"],
        "hooks": sum(one.state == "known" for one in found),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    answer = {"nixl": nixl, "torch": torch, "vllm": vllm}[sys.argv[1]](sys.argv[2])
    print("\n" + json.dumps(answer))
