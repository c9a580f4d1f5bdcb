"""Header lines that are passed on: those of one hop are not, nor what its `Connection` names (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""
HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade content-length".split()
)
_USUAL = (b"close", b"keep-alive", b"Close", b"Keep-Alive")


def nominated(value: bytes) -> list[bytes]:
    """The names in a `Connection` header."""
    return [name.strip().lower() for name in value.split(b",")]


def passed_on(headers: Iterable[tuple[bytes, bytes]], but: Collection[bytes]) -> bytes:
    """As lines. but: names that are left out, among them those of `HOP`."""
    kept: Headers = []
    named: list[bytes] = []
    for one in headers:
        if one[0] not in but:
            kept.append(one)
        elif one[0] == b"connection" and one[1] not in _USUAL:
            named += nominated(one[1])
    if named:
        kept = [one for one in kept if one[0] not in named]
    return b"".join([b"%b: %b\r\n" % one for one in kept])
