"""What the scheduler side goes by, in numbers: frozen, derived once from the settings, the model and vLLM's version.

Decides how many tokens of a prompt move. Does not read vLLM's configuration itself (`connector.py` does).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pushkv.reference.ports import Address


@dataclass(frozen=True, slots=True)
class Rules:
    """here: this engine, as routers and peers are told. send, receive: by `kv_role`.

    recompute: `kv_load_failure_policy`; a failed load is computed here, else the request fails. block_tokens: of the
    scheduler. backoff: last tokens of a prompt that the prefill engine leaves to the decode engine (hybrid models: 1).
    unit_tokens: the layout moves whole groups of so many tokens (1, but for opaque CPU formats). groups: cache groups
    that move, None for all. failed_requests: this vLLM knows failed loads by request, not only by block. may_fail:
    reporting a failed load is safe (older versions with several groups end the engine: every prompt is packed there).
    loads_apart: what has landed is loaded in a step of its own, before vLLM runs the request. randomized_ids: vLLM
    appends a random suffix to request ids. chunked: a packed prompt leaves chunk by chunk. chunked_last: its last chunk
    too may leave before the prefill is known to be finished (not where a group keeps less than all tokens: its blocks
    are known at the end).
    """

    here: Address
    send: bool = True
    receive: bool = True
    recompute: bool = False
    block_tokens: int = 16
    backoff: int = 0
    unit_tokens: int = 1
    groups: tuple[int, ...] | None = None
    failed_requests: bool = True
    may_fail: bool = True
    loads_apart: bool = False
    randomized_ids: bool = True
    chunked: bool = False
    chunked_last: bool = True

    def moved(self, prompt_tokens: int) -> int:
        """Tokens of a prompt whose cache moves; 0: too short, the decode engine computes it all. The same number on
        both engines.
        """
        length = prompt_tokens - self.backoff
        return length if prompt_tokens >= 2 and length >= 1 else 0

    def leaves(self, done: int, tokens: int) -> int:
        """How much of a prompt of which `tokens` (rounded) move can leave when `done` tokens are computed: whole
        blocks, or all of it.
        """
        if self.rounded(done) >= tokens and self.chunked_last:
            return tokens
        grain = math.lcm(self.block_tokens, self.unit_tokens)
        return min(done, tokens - 1) // grain * grain

    def rounded(self, tokens: int) -> int:
        """`tokens`, up to what the layout can move. The blocks of the request cover it: they are multiples of it."""
        return -(-tokens // self.unit_tokens) * self.unit_tokens

    def select(self, blocks: Any) -> tuple[list[int], ...]:
        """The block lists that move, of all groups' lists; by reference."""
        return tuple(blocks) if self.groups is None else tuple(blocks[group] for group in self.groups)

    def params(self, request_id: str, transfer_id: str, tokens: int) -> dict[str, Any]:
        """`kv_transfer_params` of a finished prefill: what a router hands to the decode leg."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.here.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.here.host,
            "remote_port": self.here.port,
            "tp_size": self.here.tp_size,
            "remote_block_ids": [],
            "remote_num_tokens": tokens,
            "transfer_id": transfer_id,
            "transfer_mode": "push",
        }
