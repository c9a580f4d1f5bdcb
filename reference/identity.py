"""Which transfer a request belongs to: the key by which a prefill here meets a registration from over there.

    key = transfer id "/" prompt "." sample ":" digest

* *transfer id*: the router's, from `kv_transfer_params`; without one, vLLM's request id without what vLLM adds to it.
  Both legs of a dispatch carry the same.
* *prompt.sample*: one HTTP request may be several requests of the engine: the i-th prompt of a completion, the j-th of
  `n` samples. vLLM numbers them in the request id, the same way on both legs: `j_cmpl-<id>-i-<random>`.
* *digest*: of everything that decides what is in the cache: token ids, LoRA adapter, cache salt, multi-modal inputs.
  It is part of the key, so a registration for one prompt never meets the cache of another, whatever a router or a
  retry mixes up: it stays without a partner and fails as an orphan. Nothing has to be compared after the bytes have
  moved, and the protocol needs no further field.

Does not decide what to do when two live requests of one engine have the same key: `handles.py` refuses the second.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from pushkv.reference.ports import Address

MAX_ID = 200
"""Characters of a transfer id at the most: with prompt, sample and digest it stays within the protocol's 256."""

_PIECE = 4096
"""Tokens that are hashed in one go: between two pieces other threads may run."""

_RANDOM = re.compile(r"-[0-9a-f]{8}$")  # InputProcessor.assign_request_id
_SAMPLE = re.compile(r"^(\d{1,9})_")  # ParentRequest.get_child_info
_PROMPT = re.compile(r"^(cmpl-.+)-(\d{1,9})$")  # OpenAIServingCompletion


class RequestLike(Protocol):
    """What is read of vLLM's `Request`."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None


class IdentityError(ValueError):
    """A request that cannot be part of a transfer; one clause that says why (at most 64 characters)."""


@dataclass(frozen=True, slots=True)
class RequestName:
    """A request id of vLLM, taken apart. base: what the client or the router sees of it."""

    base: str
    prompt: int
    sample: int


def name_of(request_id: str, *, randomized: bool = True) -> RequestName:
    """Takes `request_id` apart. randomized: whether vLLM appends its random suffix (it does unless
    `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION` is set).
    """
    cut = len(request_id) - 9
    base = request_id[:cut] if randomized and cut >= 0 and _RANDOM.match(request_id, cut) else request_id
    sample = prompt = 0
    if base[:1].isdigit() and (found := _SAMPLE.match(base)):
        sample, base = int(found[1]), base[found.end() :]
    if base.startswith("cmpl-") and (found := _PROMPT.match(base)):
        base, prompt = found[1], int(found[2])
    return RequestName(base, prompt, sample)


class Identity(msgspec.Struct, frozen=True):
    """One end of a transfer, as its request was taken down; what takes time is worked out later, on another thread.

    given: the router's transfer id, None without one. randomized: vLLM has added its suffix. request: vLLM's, of which
    is read what decides, beside the tokens, what is in the cache (LoRA request, cache salt, multi-modal features).
    tokens: vLLM's own list, of which the first `count` and `tail` after them make the prompt.
    """

    request_id: str
    given: str | None
    randomized: bool
    request: RequestLike
    tokens: list[int]
    count: int
    tail: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"Identity({self.request_id!r}, {self.given!r}, {self.count + len(self.tail)} tokens)"

    @property
    def transfer_id(self) -> str:
        """Without the child's numbers, as the other leg must be told."""
        return self._name.base if self.given is None else self.given

    @property
    def _name(self) -> RequestName:
        return name_of(self.request_id, randomized=self.randomized)

    def key(self) -> str:
        """As the protocol knows the transfer. Takes 20 to 60 µs per 1,000 tokens: not for the engine's thread. Raises
        `IdentityError`.
        """
        name = self._name
        transfer_id = name.base if self.given is None else self.given
        if len(transfer_id) > MAX_ID:
            raise IdentityError(f"request id of more than {MAX_ID} characters, no transfer_id")
        try:
            transfer_id.encode()
            return f"{transfer_id}/{name.prompt}.{name.sample}:{self.digest()}"
        except UnicodeEncodeError:
            raise IdentityError("text that is not Unicode") from None

    def digest(self) -> str:
        """16 hexadecimal digits."""
        lora, salt, features = (
            getattr(self.request, name, None) for name in ("lora_request", "cache_salt", "mm_features")
        )
        parts = [str(getattr(lora, "lora_name", "") or ""), str(salt or "")]
        for feature in features or ():
            position = getattr(feature, "mm_position", None)
            parts.append(f"{getattr(feature, 'identifier', '')}@{getattr(position, 'offset', '')}")
        state = blake2b(digest_size=8)
        for part in parts:
            raw = part.encode()
            state.update(len(raw).to_bytes(8, "little") + raw)
        state.update(len(parts).to_bytes(8, "little"))
        try:
            for start in range(0, self.count, _PIECE):
                state.update(array("q", self.tokens[start : min(start + _PIECE, self.count)]).tobytes())
            state.update(array("q", self.tail).tobytes())
        except (TypeError, OverflowError):
            raise IdentityError("token ids that are not integers") from None
        return state.hexdigest()


def identify(request: RequestLike, *, randomized: bool = True, cut: int = 0) -> Identity:
    """The transfer that `request` is one end of; in time that does not depend on the prompt, and as little as can be.
    cut: last tokens that the caller is about to take off `request`. Raises `IdentityError`.
    """
    params = request.kv_transfer_params
    given = params.get("transfer_id") if params else None
    if given is not None and (not isinstance(given, str) or not 0 < len(given) <= MAX_ID):
        raise IdentityError(f"transfer_id must be text of 1 to {MAX_ID} characters")
    tokens = request.prompt_token_ids
    if tokens is None:
        raise IdentityError("prompt embeddings have no identity")
    count = len(tokens)
    if not cut:
        return Identity(request.request_id, given, randomized, request, tokens, count)
    count = max(0, count - cut)
    return Identity(request.request_id, given, randomized, request, tokens, count, tuple(tokens[count:]))


def address_of(params: Mapping[str, Any]) -> Address:
    """Where the prefill engine is, from what the router gave. It comes from the network: everything is checked.
    Raises `IdentityError`.
    """
    engine_id, host, port = params.get("remote_engine_id"), params.get("remote_host"), params.get("remote_port")
    try:
        return _known_address(engine_id, host, port, params.get("tp_size"))
    except TypeError:  # not even hashable: certainly not what it should be
        return _address(engine_id, host, port, params.get("tp_size"))


def _address(engine_id: Any, host: Any, port: Any, tp_size: Any) -> Address:
    for name, value in (("remote_engine_id", engine_id), ("remote_host", host)):
        if not isinstance(value, str) or not 0 < len(value) <= 255 or any(c.isspace() for c in value):
            raise IdentityError(f"{name} is missing or not a name")
    return Address(engine_id, host, _number("remote_port", port, 65535), _number("tp_size", tp_size, 1024))


_known_address = functools.lru_cache(256, typed=True)(_address)  # by type, too: True is not 1


def _number(name: str, value: Any, most: int) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        value = int(value)  # some routers keep ports as text
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise IdentityError(f"{name} is missing or not from 1 to {most}")
    return value
