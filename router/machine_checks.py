"""The doctor's checks of this machine: vLLM, NIXL, accelerators, fabric, ports, memory.

Decides what each observation means. What takes long or may crash is looked at by `probe`, in a process of its own.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pushkv.reference import memory, versions
from pushkv.reference.addresses import endpoint
from pushkv.reference.settings import ConnectorSettings, SettingsError
from pushkv.router.doctor import Finding

PROBE_S = 240.0
"""Importing vLLM for the first time takes a minute on a small machine."""
LOCKED_BYTES = 1 << 30
INSTALL = "pip install 'pushkv[connector]' where vLLM is"


def probe(what: str, argument: str = "-") -> dict[str, Any]:
    """What `pushkv.router.probe` says; `crashed` where it does not."""
    command = [sys.executable, "-m", "pushkv.router.probe", what, argument]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"crashed": f"no answer within {PROBE_S:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1])
    except ValueError:
        last = (done.stderr.strip() or "no output").rsplit("\n", 1)[-1]
        return {"crashed": f"exit {done.returncode}: {last[:200]}"}
    return found


def vllm(found: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    found = probe("vllm") if found is None else found
    if "missing" in found:
        yield Finding("vLLM", "error", f"not installed ({found['missing']})", "run the doctor in vLLM's environment")
        return
    if "crashed" in found:
        yield Finding("vLLM", "error", f"cannot be imported: {found['crashed']}", "mend the installation of vLLM")
        return
    version = str(found["version"])
    first, last = versions.WRITTEN_FOR
    run = " and ".join(versions.RUN)
    if found["trouble"]:
        says = f"{version}: hooks that the connector needs are different: {', '.join(found['trouble'])}"
        yield Finding("vLLM", "error", says, f"use vLLM {first} to {last}; it has run on {run}")
    elif versions.minor(version) not in versions.RUN:
        says = f"{version}, pushkv was written for {first} to {last} and has run on {run}; all hooks are as known"
        yield Finding("vLLM", "warning", says, "try it before you rely on it")
    else:
        new = f", {len(found['new'])} new ones are inherited" if found["new"] else ""
        yield Finding("vLLM", "ok", f"{version}, {found['hooks']} hooks are as known{new}")
    where = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "pushkv" not in where:
        todo = 'add "kv_connector_module_path": "pushkv.reference.connector" to --kv-transfer-config'
        yield Finding("vLLM plug-in", "note", "PushConnector is not registered by name: pushkv is not installed", todo)


def nixl(backend: str, found: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    found = probe("nixl", backend) if found is None else found
    if "missing" in found:
        yield Finding("NIXL", "error", f"not installed ({found['missing']})", INSTALL)
    elif "crashed" in found:
        yield Finding(
            "NIXL", "error", f"starting an agent with {backend} ended it: {found['crashed']}", _drivers(backend)
        )
    elif found["error"]:
        yield Finding("NIXL", "error", f"{found['version']}: {found['error']}", _drivers(backend))
    else:
        plugins = ", ".join(found["plugins"])
        yield Finding("NIXL", "ok", f"{found['version']}, an agent with {backend} starts; backends: {plugins}")


def _drivers(backend: str) -> str:
    if backend == "LIBFABRIC":
        return "libfabric with the EFA provider must be installed, new enough for this NIXL, and on LD_LIBRARY_PATH"
    return "see the message; UCX needs no settings (UCX_TLS=sm,self fails)"


def devices(
    settings: ConnectorSettings, send: bool, receive: bool, found: Mapping[str, Any] | None = None
) -> Iterator[Finding]:
    """Accelerators and the memory for landing and staging."""
    found = probe("torch") if found is None else found
    if "missing" in found or "crashed" in found:
        says = f"torch cannot be used ({found.get('missing') or found['crashed']})"
        yield Finding("devices", "error", says, "run the doctor in vLLM's environment")
        return
    cards = found["devices"]
    if not cards:
        yield Finding("devices", "note", f"torch {found['version']} sees no CUDA device: the cache is in main memory")
        try:
            yield _memory("memory", settings, memory.host_free_bytes(), memory.HOST_MARGIN_BYTES, send, receive)
        except SettingsError as error:
            yield Finding("memory", "error", str(error), "set PUSHKV_LANDING_BYTES and PUSHKV_STAGING_BYTES")
        return
    yield Finding("devices", "ok", f"{len(cards)} of {cards[0]['name']}, torch {found['version']}")
    if len(cards) > 1:
        pairs = found["no_peer_access"]
        if pairs:
            says = f"no peer access between {', '.join(f'{a} and {b}' for a, b in pairs[:4])}"
            todo = "engines on these devices exchange caches through main memory: nvidia-smi topo -p2p w"
            yield Finding("peer access", "warning", says, todo)
        else:
            yield Finding("peer access", "ok", "every device reaches the memory of every other")
    for number, card in enumerate(cards):
        free, margin = int(card["free_bytes"]), memory.GRAPH_MARGIN_BYTES
        yield _memory(f"memory {number}", settings, free, margin, send, receive)


def _memory(check: str, settings: ConnectorSettings, free: int, margin: int, send: bool, receive: bool) -> Finding:
    """Before an engine runs the cache is still to come: what does not fit now will not fit then."""
    try:
        sizes = memory.sizes(settings, free, margin, send=send, receive=receive)
    except SettingsError as error:
        return Finding(check, "error", str(error), "free memory, or set the sizes lower")
    gib = (free / 2**30, sizes.landing_bytes / 2**30, sizes.staging_bytes / 2**30)
    says = "{:.1f} GiB free; without a KV cache beside it {:.2f} GiB landing and {:.2f} GiB staging fit".format(*gib)
    if settings.landing_bytes is None and settings.staging_bytes is None:
        return Finding(check, "ok", says)
    return Finding(check, "ok", says.replace(" fit", " are set and fit"))


def fabric(
    backend: str, environ: Mapping[str, str], sysfs: Path = Path("/sys/class/infiniband"), locked: int | None = None
) -> Iterator[Finding]:
    """EFA and InfiniBand cards, and what registered memory needs."""
    cards = sorted(path.name for path in sysfs.iterdir()) if sysfs.is_dir() else []
    efa = [name for name in cards if _driver(sysfs / name) == "efa"]
    if efa and backend != "LIBFABRIC":
        todo = "set PUSHKV_BACKEND=LIBFABRIC: UCX does not use them"
        yield Finding("EFA", "warning", f"{len(efa)} EFA cards, but the backend is {backend}", todo)
    elif efa:
        provider = environ.get("FI_PROVIDER", "efa")
        level, todo = ("ok", "") if provider == "efa" else ("warning", "unset FI_PROVIDER, or set it to efa")
        says = f"{len(efa)} EFA cards, libfabric's provider is {provider}"
        yield Finding("EFA", "ok" if level == "ok" else "warning", says, todo)
    elif backend == "LIBFABRIC":
        todo = (
            "on EC2: an instance type with EFA, the EFA device plug-in (vpc.amazonaws.com/efa), or PUSHKV_BACKEND=UCX"
        )
        yield Finding("EFA", "warning", "no EFA card: LIBFABRIC would use another provider, which is slow", todo)
    elif cards:
        yield Finding("fabric", "ok", f"RDMA cards: {', '.join(cards[:16])}")
    else:
        yield Finding("fabric", "note", "no RDMA card: between machines UCX uses TCP; on one machine NVLink or memory")
    if cards:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked is None else locked
        if limit != resource.RLIM_INFINITY and limit < LOCKED_BYTES:
            says = f"at most {limit >> 10} KiB may be locked; registered memory is"
            yield Finding("locked memory", "error", says, "ulimit -l unlimited; in Kubernetes the capability IPC_LOCK")
        else:
            yield Finding("locked memory", "ok", "enough may be locked for registration")


def _driver(card: Path) -> str:
    try:
        return os.path.basename(os.readlink(card / "device" / "driver"))
    except OSError:
        return ""


def ports(host: str, port: int, tp: int) -> Iterator[Finding]:
    """Where this engine's ranks will listen."""
    if port + tp - 1 > 65535:
        says = f"rank {tp - 1} would listen on port {port + tp - 1}; ports end at 65535"
        yield Finding("ports", "error", says, "set PUSHKV_PORT lower")
        return
    try:
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        yield Finding(
            "ports", "error", f"host {host!r} has no address: {error.strerror}", "set PUSHKV_HOST to an address"
        )
        return
    taken = []
    for number in range(port, port + tp):
        with socket.socket(family, socket.SOCK_STREAM) as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe_socket.bind((found[0], number, *found[2:]))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    says = f"host {host!r} is no address of this machine"
                    yield Finding("ports", "error", says, "set PUSHKV_HOST to the address at which others reach it")
                    return
                taken.append(str(number))
    if taken:
        says = f"in use on {host}: {', '.join(taken)}"
        yield Finding("ports", "warning", says, "fine if that is this engine, running; else set PUSHKV_PORT")
    else:
        last = f" to {port + tp - 1}" if tp > 1 else ""
        yield Finding("ports", "ok", f"free: {endpoint(host, port)}{last}")
