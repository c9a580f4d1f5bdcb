"""The doctor's checks of other engines: who listens at a side channel, and whether servers fit each other.

Decides what a silence, a refusal or a difference means. To learn who listens, it addresses somebody who does not exist:
an engine answers such a frame with its own name (`reference/side_channel.py`), and keeps nothing of it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any

from pushkv.reference import envelope
from pushkv.reference.addresses import endpoint, is_loopback
from pushkv.router.doctor import Finding

ANSWER_S = 5.0
COMPARED = {"block_size": "block size", "cache_dtype": "cache dtype"}
"""Labels of `vllm:cache_config_info`."""


def side_channel(at: tuple[str, int], secret: str | None, answer_s: float = ANSWER_S) -> Iterator[Finding]:
    """Whether an engine answers there, knows our secret, and who it is."""
    host, port = at
    where = f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=answer_s).close()
    except OSError as error:
        says = f"{where} cannot be reached: {error.strerror or type(error).__name__}"
        todo = "is the engine up, PUSHKV_HOST the address that others reach, the port open in the firewall?"
        yield Finding("peer", "error", says, todo)
        return
    if secret is None and not is_loopback(host):
        todo = "set PUSHKV_SECRET as on the other engines"
        yield Finding("peer", "error", f"{where} listens, but without a secret nothing but loopback is reached", todo)
        return
    try:
        who, refused = _ask(host, port, secret, answer_s)
    except ImportError as error:
        yield Finding("peer", "error", f"{where} listens; {error}", "pip install 'pushkv[connector]'")
        return
    if who is not None:
        yield Finding("peer", "ok", f"{where} is rank {who[1]} of engine {who[0]!r}, and knows the secret")
    elif refused:
        todo = "set PUSHKV_SECRET to the same text on both engines"
        yield Finding("peer", "error", f"{where} refuses the handshake: another secret, or none on one side", todo)
    else:
        says = f"{where} takes connections, but does not answer as an engine"
        todo = (
            "is that the side channel's port (PUSHKV_PORT plus the rank), and pushkv on the other side as new as here?"
        )
        yield Finding("peer", "error", says, todo)


def _ask(host: str, port: int, secret: str | None, answer_s: float) -> tuple[tuple[str, int] | None, bool]:
    """The link of who listens, and whether the handshake was refused."""
    import zmq
    import zmq.utils.monitor

    from pushkv.reference.keys import derive

    me, nobody = (f"pushkv-doctor-{os.getpid()}", 0), ("pushkv-doctor-asks-who-is-there", 0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.ROUTING_ID, envelope.routing_id(nobody, me))
        dealer.set(zmq.IPV6, int(":" in host))
        if secret is not None:
            keys = derive(secret)
            dealer.set(zmq.CURVE_SERVERKEY, keys.server.public)
            dealer.set(zmq.CURVE_PUBLICKEY, keys.client.public)
            dealer.set(zmq.CURVE_SECRETKEY, keys.client.secret)
        failed = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
        failed |= zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.DISCONNECTED
        monitor = dealer.get_monitor_socket(int(failed))
        dealer.connect(endpoint(host, port))
        dealer.send_multipart((envelope.head(nobody, me), b"?"))
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        refused = False
        for _ in range(20):
            ready = dict(poller.poll(max(1, round(answer_s * 1000 / 20))))
            if dealer in ready:
                parts = dealer.recv_multipart()
                links = envelope.links(parts[0]) if len(parts) == 2 else None
                return (links[1] if links is not None else None), False
            if monitor in ready:
                zmq.utils.monitor.recv_monitor_message(monitor)
                refused = True
        dealer.disable_monitor()
        return None, refused
    finally:
        context.destroy(linger=0)


def servers(urls: Sequence[str], answer_s: float = ANSWER_S) -> Iterator[Finding]:
    """vLLM servers that are to work together: up, with the connector, and alike in what must be."""
    facts: dict[str, dict[str, str]] = {}
    for url in urls:
        try:
            facts[url] = _facts(url.rstrip("/"), answer_s)
        except Exception as error:  # whatever it answers, it is no vLLM server
            says = f"{url} does not answer as a vLLM server ({type(error).__name__})"
            yield Finding("server", "error", says, "is it up, and is this its HTTP address?")
            continue
        said = ", ".join(f"{name} {value}" for name, value in facts[url].items() if value and name != "connector")
        if facts[url]["connector"]:
            yield Finding("server", "ok", f"{url}: {said}")
        else:
            todo = "start it with --kv-transfer-config for PushConnector"
            yield Finding("server", "error", f"{url} runs without pushkv's connector: {said}", todo)
    names = list(facts)
    for url in names[1:]:
        for name in ("model", "cache dtype", "block size", "vLLM"):
            one, other = facts[names[0]][name], facts[url][name]
            if one == other or not one or not other:
                continue
            says = f"{name} is {one} on {names[0]} and {other} on {url}"
            if name in ("model", "cache dtype"):
                yield Finding("together", "error", says, "they refuse each other: start both with the same")
            elif name == "vLLM" and one.split(".")[:2] != other.split(".")[:2]:
                yield Finding("together", "warning", says, "layouts may differ: the handshake says so in the log")
            elif name == "block size":
                yield Finding("together", "note", f"{says}: the planner maps one to the other")
    if len(names) > 1:
        yield Finding("together", "ok", f"{len(names)} servers were compared")


def _facts(url: str, answer_s: float) -> dict[str, str]:
    model = json.loads(_get(f"{url}/v1/models", answer_s))["data"][0]
    metrics = _get(f"{url}/metrics", answer_s)
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    labels: dict[str, Any] = dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}
    try:
        version = str(json.loads(_get(f"{url}/version", answer_s))["version"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError, RecursionError):
        version = ""
    found = {"model": str(model.get("root") or model["id"]), "vLLM": version}
    found |= {says: str(labels.get(label, "")) for label, says in COMPARED.items()}
    return found | {"connector": "yes" if "pushkv:transfers_sent_total" in metrics else ""}


def _get(url: str, answer_s: float) -> str:
    with urllib.request.urlopen(url, timeout=answer_s) as response:
        body: bytes = response.read(16 << 20)
    return body.decode()
