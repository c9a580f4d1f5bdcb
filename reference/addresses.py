"""Hosts and ports as the side channel takes them.

Decides what counts as loopback and which address a host name is listened on. Does not look up names of peers: the
sockets do, each time they connect.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

from pushkv.reference.envelope import SideChannelError

_ADDRESS: Final = re.compile(r"[0-9A-Za-z:._%-]{1,253}")  # nothing that means more to ZMQ than an address


def is_address(host: str) -> bool:
    """Whether ``host`` is a numeric address or could be a name."""
    return _ADDRESS.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine whatever a name service says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def endpoint(host: str, port: int) -> str:
    """The address as ZMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listening(host: str, *, secured: bool) -> str:
    """The numeric address to listen on, IPv4 before IPv6 where a name has both. Raises ``SideChannelError`` for a host
    without one, and unless ``secured`` for one that others can reach.
    """
    if host in ("", "*"):
        host = "0.0.0.0"
    try:
        found = _look_up(host)
    except (OSError, ValueError) as error:
        raise SideChannelError(f"the side channel's host {host!r} has no address: {error}") from None
    public = [address for address in found if not address.is_loopback]
    if public and not secured:
        raise SideChannelError(
            f"the side channel has no shared secret, so it listens on loopback only, and its host {host!r} is "
            f"{public[0]}: set a secret, or the host to 127.0.0.1"
        )
    return str(min(found, key=lambda address: address.version))


def _look_up(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [ipaddress.ip_address(str(one[4][0])) for one in found]
