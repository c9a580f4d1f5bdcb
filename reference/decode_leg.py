"""One request of a decode engine: what is known of it, and where it stands. `decode_legs.py` moves it on."""

from __future__ import annotations

import enum
from typing import Any, Final

from pushkv.reference.identity import RequestLike


class State(enum.Enum):
    NEW = "new"
    WAITING = "waiting"
    READY = "ready"
    ADMITTED = "admitted"
    HOLDING = "holding"
    FAILED = "failed"
    FAILING = "failing"
    DONE = "done"


WAITING: Final = State.WAITING
"""Asked for most: a look-up less."""


class Books(enum.Enum):
    """What the ledger has of a transfer, as far as its news tell."""

    UNTOLD = "untold"
    OPEN = "open"  # its verdict is still to come
    READY = "ready"  # landed; waits for Loaded
    FAILED = "failed"  # direct: the verdict is failed, the memory not settled
    CLOSED = "closed"


class Leg:
    __slots__ = (
        "asked_from", "base", "blocks", "books", "kept", "length", "request", "request_id", "starved", "state",
        "steps_back", "tokens", "unwanted", "useful",
    )  # fmt: skip

    def __init__(self, request_id: str, prompt: int, length: int, tokens: int) -> None:
        self.request_id = request_id
        self.length = length  # tokens of the prompt that move
        self.useful = length if length < prompt else prompt - 1  # that spare work: its last token is computed here
        self.tokens = tokens  # the same, rounded up to what the layout can move
        self.base = 0  # the first token that was asked for
        self.asked_from = 0  # tokens that were computed here when vLLM was last answered
        self.state = State.NEW
        self.books = Books.UNTOLD
        self.request: RequestLike | None = None  # until the office is told of it
        self.starved = self.steps_back = False
        self.unwanted = False  # the books are to be closed whatever comes
        self.blocks: Any = None  # vLLM's `KVCacheBlocks`
        self.kept: list[Any] = []  # those of them that we keep from others
