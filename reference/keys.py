"""CURVE key pairs out of the secret that all engines of a deployment share.

Decides how keys follow from the secret, and which secrets are too short to be one. Does not decide where the secret
comes from, or who may use it. Both pairs follow from the secret alone: whoever holds it can address every engine and is
admitted by every engine, so no public key has to be handed round; whoever does not can do neither. The secret is
stretched by scrypt, as a recorded handshake lets one try guesses elsewhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import zmq
import zmq.utils.z85

MIN_SECRET_BYTES: Final = 16
_DOMAIN: Final = b"pushkv side channel, keys of version 1"


class SecretError(ValueError):
    """The secret cannot be used; the message says why and never shows it."""


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """One CURVE pair, both halves in Z85 as ZMQ takes them."""

    public: bytes
    secret: bytes

    @property
    def raw_public(self) -> bytes:
        """The public half as a handshake shows it: 32 bytes."""
        return zmq.utils.z85.decode(self.public)


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """``server``: of every listening socket. ``client``: of every socket that addresses one."""

    server: KeyPair
    client: KeyPair


@lru_cache(maxsize=4)
def derive(secret: str) -> Keys:
    """The keys of all who hold ``secret``; takes some 50 ms and 16 MiB. Raises ``SecretError``."""
    raw = secret.encode()
    if len(raw) < MIN_SECRET_BYTES:
        raise SecretError(f"the shared secret has {len(raw)} bytes, at least {MIN_SECRET_BYTES} are needed")
    if not zmq.has("curve"):
        raise SecretError("a shared secret needs a ZMQ library that was built with CURVE, and this one was not")
    master = hashlib.scrypt(raw, salt=_DOMAIN, n=1 << 14, r=8, p=1, maxmem=64 << 20, dklen=32)
    return Keys(_pair(master, b"server"), _pair(master, b"client"))


def _pair(master: bytes, role: bytes) -> KeyPair:
    secret = zmq.utils.z85.encode(hashlib.blake2b(role, key=master, digest_size=32, person=b"pushkv curve").digest())
    return KeyPair(zmq.curve_public(secret), secret)
