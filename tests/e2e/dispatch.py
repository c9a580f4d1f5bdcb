"""A minimal client of the push contract: it sends the two legs of a request as a router would, well or badly.

Ids: vLLM's own push meets by ``X-Request-Id``, pushkv by ``transfer_id``; both are sent, and are the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .model import FIRST_WORD, VOCABULARY
from .servers import HOST, NAME, Server

Prompt = list[int]
LIMIT_S = 60.0
"""Nothing that a test waits for takes longer; what does, hangs."""


@dataclass(slots=True)
class Answer:
    """What one leg said."""

    status: int = 0
    """HTTP status; 0: the connection broke, or was closed by us."""
    tokens: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """Per token the five likeliest with their log-probabilities."""
    finish: str | None = None
    error: str = ""
    params: dict[str, Any] | None = None
    seconds: float = 0.0
    first_s: float | None = None
    """Until the first token, of a streamed answer."""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and self.finish in ("length", "stop")


@dataclass(slots=True)
class Handover:
    """Both legs of one request."""

    prefill: Answer
    decode: Answer


def words(length: int, seed: int) -> Prompt:
    """A prompt of ``length`` tokens; no two seeds share a prefix."""
    draw = random.Random(f"{seed}")
    return [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]


def fresh() -> str:
    """A transfer id that nobody had before."""
    return uuid.uuid4().hex


def for_prefill(transfer_id: str, **more: Any) -> dict[str, Any]:
    """``kv_transfer_params`` of the leg that goes to P."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id, **more}


def for_decode(prefill: Server, transfer_id: str, **more: Any) -> dict[str, Any]:
    """``kv_transfer_params`` of the leg that goes to D: it names P."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.spec.engine_id,
        "remote_request_id": f"cmpl-{transfer_id}-0",
        "remote_host": HOST,
        "remote_port": prefill.spec.side_ports[0],
        "tp_size": prefill.spec.tp,
        "transfer_id": transfer_id,
        **more,
    }


class Client:
    """An HTTP client; use it as an asynchronous context manager."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.limit_s), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def complete(
        self,
        server: Server,
        prompt: Prompt | str,
        tokens: int,
        params: dict[str, Any] | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        chat: bool = False,
        dp_rank: int | None = None,
        **more: Any,
    ) -> Answer:
        """One request, one answer. Cancelling the task closes the connection: vLLM aborts the request."""
        answers = await self.complete_all(
            server, prompt, tokens, params, request_id=request_id, stream=stream, chat=chat, dp_rank=dp_rank, **more
        )
        return answers[0]

    async def complete_all(
        self,
        server: Server,
        prompt: Any,
        tokens: int,
        params: dict[str, Any] | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        chat: bool = False,
        dp_rank: int | None = None,
        **more: Any,
    ) -> list[Answer]:
        """One request with all its choices (``n``, several prompts); a list of one where it failed."""
        body: dict[str, Any] = {"model": NAME, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body["return_tokens_as_token_ids"] = True
        if chat:
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 5}
        else:
            body |= {"prompt": prompt, "logprobs": 5}
        if params is not None:
            body["kv_transfer_params"] = params
        body |= {"stream": stream, **more}
        headers = {"X-Request-Id": request_id} if request_id else {}
        if dp_rank is not None:
            headers["X-data-parallel-rank"] = str(dp_rank)
        url = server.url + ("/v1/chat/completions" if chat else "/v1/completions")
        began = time.monotonic()
        answers: dict[int, Answer] = {}
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    return [Answer(response.status, error=(await response.text())[:500])]
                if stream:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            _take(json.loads(line[6:]), answers, began)
                else:
                    _take(await response.json(), answers, began)
        except TimeoutError:
            return [Answer(error=f"no answer within {self.limit_s:.0f} s", seconds=time.monotonic() - began)]
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            return [Answer(error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)]
        for answer in answers.values():
            answer.seconds = time.monotonic() - began
        return [answers[index] for index in sorted(answers)] or [Answer(200, error="an answer without choices")]

    async def push(
        self,
        prefill: Server,
        decode: Server,
        prompt: Prompt | str,
        tokens: int,
        *,
        order: str = "both",
        gap_s: float = 0.0,
        transfer_id: str | None = None,
        stream: bool = False,
        chat: bool = False,
        prefill_more: dict[str, Any] | None = None,
        decode_more: dict[str, Any] | None = None,
        **more: Any,
    ) -> Handover:
        """Both legs of one request.

        ``order``: ``both`` at once, ``prefill`` (D is asked when P has answered, with what P said) or ``decode`` (P is
        asked ``gap_s`` after D). ``prefill_more`` and ``decode_more`` go into the legs' ``kv_transfer_params``,
        ``more`` into both bodies.
        """
        tid = transfer_id or fresh()
        to_p = for_prefill(tid, **(prefill_more or {}))
        to_d = for_decode(prefill, tid, **(decode_more or {}))

        async def first() -> Answer:
            if order == "decode":
                await asyncio.sleep(gap_s)
            return await self.complete(prefill, prompt, 1, to_p, request_id=tid, chat=chat, **more)

        async def second(said: dict[str, Any] | None = None) -> Answer:
            params = to_d if said is None else {**said, **to_d}
            return await self.complete(decode, prompt, tokens, params, request_id=tid, stream=stream, chat=chat, **more)

        if order == "prefill":
            said = await first()
            await asyncio.sleep(gap_s)
            return Handover(said, await second(said.params))
        return Handover(*await asyncio.gather(first(), second()))

    async def push_children(
        self, prefill: Server, decode: Server, prompts: Sequence[Prompt], tokens: int, **more: Any
    ) -> list[Handover]:
        """What a router does with ``n`` > 1 or several prompts: every child its own request and its own transfer."""
        parent = fresh()
        return list(
            await asyncio.gather(
                *(
                    self.push(prefill, decode, prompt, tokens, transfer_id=f"{parent}-{index}", **more)
                    for index, prompt in zip(itertools.count(), prompts)
                )
            )
        )


def _take(body: dict[str, Any], answers: dict[int, Answer], began: float) -> None:
    """Add one body, or one piece of a stream, to the answers."""
    if "error" in body:
        answers.setdefault(0, Answer(200)).error = json.dumps(body["error"])[:500]
        return
    for choice in body.get("choices", ()):
        answer = answers.setdefault(choice["index"], Answer(200))
        answer.finish = choice.get("finish_reason") or answer.finish
        answer.params = body.get("kv_transfer_params") or answer.params
        found = choice.get("logprobs")
        if not found:
            continue
        if answer.first_s is None:
            answer.first_s = time.monotonic() - began
        if "content" in found:
            for entry in found["content"] or ():
                answer.tokens.append(_token(entry["token"]))
                answer.top.append({_token(each["token"]): each["logprob"] for each in entry["top_logprobs"]})
        else:
            answer.tokens += map(_token, found["tokens"])
            answer.top += [{_token(t): p for t, p in each.items()} for each in found["top_logprobs"]]


def _token(text: str) -> int:
    """``return_tokens_as_token_ids`` writes ``token_id:17``."""
    return int(text.removeprefix("token_id:"))
