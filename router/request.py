"""A client's request: read, checked, and turned into the bodies of the two legs.

Decides what the router must understand of a body, which is little: the engines check the rest, and their answer is the
client's. Values are kept as the bytes they came as, so a long prompt is neither decoded nor written again. Nothing in a
body can make this raise anything but `Refusal`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pushkv.router.headers import HOP, Headers, passed_on

PATHS = {b"/v1/completions": "prompt", b"/v1/chat/completions": "messages"}
"""What is handed over, and the field that holds the prompt."""
PIECE_BYTES = 1024
PIECES = 64
"""Prefix affinity looks at this many pieces of a prompt's text at the most."""
ANSWER_TOKENS = 256
"""What a request without `max_tokens` is taken to generate, for the balance between servers."""
_NOT_FOR_ENGINE = HOP | {b"host", b"accept-encoding", b"expect", b"x-request-id", b"content-type"}
_NOT_FOR_PREFILL = {
    "stream", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo",
    "min_tokens", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text",
    "return_mm_kwargs",
}  # fmt: skip
"""What asks for a longer answer: nobody reads P's."""
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode
_TRUE, _NULL, _ONE = msgspec.Raw(b"true"), msgspec.Raw(b"null"), msgspec.Raw(b"1")


class Refusal(Exception):
    """A request that is answered here. status: 4xx; message: says nothing of the body's contents."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after_s = status, kind, retry_after_s


def error_body(status: int, message: str, kind: str) -> bytes:
    """In the form of OpenAI's API and of vLLM."""
    return _encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


@dataclass(slots=True)
class Ask:
    """path: of the engines' API. forwarded: header lines that both legs get. plain: why nothing is handed over, or "".

    tokens: a guess at prompt and answer, for the balance. session, prefix: for affinity.
    """

    path: bytes
    fields: dict[str, Any]
    forwarded: bytes
    stream: bool
    prompt_tokens: int
    answer_tokens: int
    session: int | None
    prefix: tuple[int, ...]
    plain: str
    request_id: bytes
    arrived: float = 0.0  # by `time.perf_counter`
    own_s: float = 0.0  # the router's time on it before it was dispatched, without the queue

    def forget(self) -> None:
        """No attempt will be made any more."""
        self.fields = {}

    def prefill_body(self, params: Mapping[str, Any] | msgspec.Raw) -> bytes:
        """One token of it, not streamed."""
        fields = dict(self.fields)
        for name in _NOT_FOR_PREFILL & fields.keys():
            del fields[name]
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = _ONE
        fields["max_tokens"] = _ONE
        fields["kv_transfer_params"] = params
        return _encode(fields)

    def decode_body(self, params: Mapping[str, Any] | msgspec.Raw | None) -> bytes:
        """params: None for a request that is served by the decode server alone."""
        fields = self.fields
        if params is None:
            fields.pop("kv_transfer_params", None)
        else:
            fields["kv_transfer_params"] = params
        return _encode(fields)


def parse(path: bytes, headers: Headers, body: bytes, session_header: bytes, *, prefixes: bool) -> Ask:
    """Raises `Refusal`. prefixes: whether somebody asks for `Ask.prefix`."""
    try:
        fields: dict[str, Any] = _decoder.decode(body)
        if not body.isascii():
            body.decode()  # what is inside the values has not been looked at
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal(400, "the body must be a JSON object") from None
    session_text = request_id = b""
    for name, value in headers:
        if name == session_header:
            session_text = value
        elif name == b"x-request-id":
            request_id = value[:128]
    prompt = memoryview(fields.get(PATHS[path], b""))
    answer = min(_whole(fields, "max_completion_tokens") or _whole(fields, "max_tokens") or ANSWER_TOKENS, 1 << 20)
    if "n" in fields:
        answer *= max(1, min(_whole(fields, "n"), 1024))
    plain = ""
    if "use_beam_search" in fields and fields["use_beam_search"] == _TRUE:
        plain = "beam search"
    elif "prompt_embeds" in fields and fields["prompt_embeds"] != _NULL:
        plain = "prompt embeddings"
    if not session_text and "user" in fields:
        session_text = bytes(fields["user"])
        session_text = b"" if session_text in (b"null", b'""') else session_text
    return Ask(
        path,
        fields,
        passed_on(headers, _NOT_FOR_ENGINE) + b"content-type: application/json\r\n",
        "stream" in fields and fields["stream"] == _TRUE,
        1 + len(prompt) // 4,
        answer,
        zlib.crc32(session_text) if session_text else None,
        pieces(prompt) if prefixes else (),
        plain,
        request_id,
    )


def pieces(prompt: bytes | memoryview) -> tuple[int, ...]:
    """Running hashes over whole pieces of a prompt's text: equal as far as two prompts are equal. A collision costs no
    more than a cache hit.
    """
    found, running = [], 0
    for start in range(0, min(len(prompt) // PIECE_BYTES, PIECES) * PIECE_BYTES, PIECE_BYTES):
        running = zlib.crc32(prompt[start : start + PIECE_BYTES], running)
        found.append(running << 16 | start // PIECE_BYTES)
    return tuple(found)


def _whole(fields: Mapping[str, Any], name: str) -> int:
    """A whole number, or 0 where it is none: the engine says what is wrong with it."""
    if name not in fields:
        return 0
    raw = bytes(fields[name])
    return int(raw) if 0 < len(raw) < 10 and raw.isdigit() else 0
