"""What the scheduler side calls a transfer, and what everybody else calls it.

The scheduler side knows a transfer by vLLM's request id, at once and at no cost: the *handle*. Ranks, ledgers and peers
know it by its *key*, which holds a digest of the prompt (`identity.py`) and so costs time that grows with the prompt.
The office computes it on its own thread, before it looks at the first word about the handle, and translates: words of
the scheduler on their way in, news on their way out.

Decides which of two live requests with the same key is refused: the later one. Not thread-safe but for `key`.

The host has done with a transfer when it was told all of it; the books may keep it longer, as long as a rank still
writes. Until they have closed it nobody else gets its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pushkv.model.protocol import events as ev
from pushkv.reference.identity import Identity
from pushkv.reference.ports import Complete

AMBIGUOUS = "another live request has the same transfer id"


class Handles:
    """All of one engine: a handle is here from `add` until the host was told all, its key until the books have closed
    the transfer.
    """

    __slots__ = ("_half", "_keys", "_refused", "_sides")

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._sides: tuple[dict[str, str], dict[str, str]] = ({}, {})  # key -> handle: received here, sent from here
        self._half: set[str] = set()  # keys sent from here of which one of `Finished` and `Release` was told
        self._refused: dict[str, tuple[str, str]] = {}

    def __len__(self) -> int:
        return sum(self.sizes().values())

    def add(self, handle: str, identity: Identity, sends: bool) -> str:
        """Computes the key of `handle`. Returns "" or why it is refused: "ambiguous" or "identity"."""
        try:
            key = identity.key()
        except Exception as error:  # a request is made of what clients send: whatever it is, the host hears how it ends
            self._refused[handle] = ("identity", str(error))
            return "identity"
        handles = self._sides[sends]
        if key in handles:
            self._refused[handle] = ("ambiguous", AMBIGUOUS)
            return "ambiguous"
        handles[key] = handle
        self._keys[handle] = key
        return ""

    def refuse(self, handle: str, sends: bool, why: str) -> None:
        """The books do not take `handle`, which was just added."""
        del self._sides[sends][self._keys.pop(handle)]
        self._refused[handle] = ("ambiguous", why)

    def key(self, handle: str) -> str:
        """As ranks and peers know it. From any thread, and only once there was news of it: until then the office may
        not have come to it. What was never added is a key.
        """
        return self._keys.get(handle, handle)

    def inward(self, word: Any) -> Any:
        """`word` of the scheduler about the key instead of the handle; None: the handle was refused."""
        handle = getattr(word, "transfer_id", None)
        if handle is None:
            return word
        key = self._keys.get(handle)
        if key is not None:
            return msgspec.structs.replace(word, transfer_id=key)
        return None if handle in self._refused else word

    def refusals(self, word: Any) -> tuple[ev.Record, ...]:
        """What is told instead when `word` is about a handle that was refused. A prefill engine is not bothered before
        its prompt has ended: until then the request is served as if nobody wanted its cache.
        """
        handle = word.transfer_id
        if isinstance(word, (ev.Abort, Complete)):
            _, why = self._refused.pop(handle)
            return ev.Finished(handle, False, why), ev.Release(handle)
        return ()

    def refused_arrival(self, handle: str) -> ev.Fail:
        """The verdict of an arrival that was refused."""
        _, why = self._refused.pop(handle)
        return ev.Fail(handle, why, True)

    def outward(self, news: Any) -> Any:
        """`news` of the ledger about the handle instead of the key."""
        key, sent = news.transfer_id, isinstance(news, (ev.Finished, ev.Release))
        handle = self._sides[sent].get(key)
        if handle is None:
            return news
        if sent:
            if key in self._half:  # the host was told both
                self._half.discard(key)
                self._leave(handle, key)
            else:
                self._half.add(key)
        return msgspec.structs.replace(news, transfer_id=handle)

    def received(self, key: str) -> None:
        """The books have closed the incoming transfer `key`."""
        handle = self._sides[False].pop(key, None)
        if handle is not None:
            self._leave(handle, key)

    def sent(self, key: str) -> None:
        """The books have closed the outgoing transfer `key`."""
        del self._sides[True][key]

    def _leave(self, handle: str, key: str) -> None:
        if self._keys.get(handle) == key:  # else it is another request's by now: vLLM may use an id again
            del self._keys[handle]

    def sizes(self) -> Mapping[str, int]:
        """How much is kept, for leak checks."""
        keys = len(self._sides[False]) + len(self._sides[True])
        return {"handles": len(self._keys), "keys": keys, "refused": len(self._refused), "half": len(self._half)}
