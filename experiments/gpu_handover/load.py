"""Load for the two servers: requests through both, decodes beside them, and what each of them took.

Times are seconds of ``time.perf_counter``, which is the monotonic clock that the servers' records are written with.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from servers import SIDE, URL

MIX = ((200, 4), (1000, 4), (3000, 2), (8000, 1))
"""Lengths of prompts in the mixed load, and how often they come."""


@dataclass
class Served:
    """One request. ``sent_s``: when, in absolute time; ``prefill_s`` and ``token_s`` count from then."""

    mode: str = ""
    row: str = ""
    number: str = ""
    input_len: int = 0
    sent_s: float = 0.0
    prefill_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)


async def complete(
    session: aiohttp.ClientSession,
    name: str,
    number: str,
    prompt: list[int],
    tokens: int,
    params: Any,
    *,
    logprobs: bool = False,
) -> tuple[Any, list[float], list[Any]]:
    """(kv_transfer_params of the answer, time of each token, log-probabilities) of one leg of request ``number``."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": name == "D" or (params is None and tokens > 1),
    }
    if body["stream"]:  # not the token ids: the first word would carry the prompt's, which takes milliseconds
        body["stream_options"] = {"include_usage": True}
    if params is not None:
        body["kv_transfer_params"] = params
    if logprobs:
        body["logprobs"] = 5
    times, found, counted = [], [], 0
    headers = {"X-Request-Id": number}
    async with session.post(URL[name] + "/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{name}: {answer.status} {(await answer.text())[:200]}")
        if not body["stream"]:
            return (await answer.json()).get("kv_transfer_params"), [], []
        async for line in answer.content:
            if line.startswith(b"data: {"):
                now, word = time.perf_counter(), json.loads(line[6:])
                counted = (word.get("usage") or {}).get("completion_tokens", counted)
                for choice in word.get("choices") or ():
                    times.append(now)
                    found += (choice.get("logprobs") or {}).get("top_logprobs") or []
    return None, times + times[-1:] * (counted - len(times)), found  # words of several tokens, under load


async def one(
    session: aiohttp.ClientSession, mode: str, prompt: list[int], tokens: int, row: str = "", *, logprobs: bool = False
) -> Served:
    """One request through both servers (``alone``: D by itself; ``prefill``: P by itself)."""
    begun = time.perf_counter()
    served, number = Served(mode, row, uuid.uuid4().hex, len(prompt), begun), ""
    number = served.number
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": number}
    decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "tp_size": 1,
        "remote_host": "127.0.0.1",
        "remote_port": SIDE["P"],
        "remote_request_id": f"cmpl-{number}-0",
        "transfer_id": number,
    }

    async def first(params: Any) -> Any:
        found, _, _ = await complete(session, "P", number, prompt, 1, params)
        served.prefill_s = time.perf_counter() - begun
        return found

    try:
        times: list[float] = []
        found: list[Any] = []
        if mode == "prefill":
            await first(None)
            return served
        if mode == "alone":
            _, times, found = await complete(session, "D", number, prompt, tokens, None, logprobs=logprobs)
        elif mode == "pull":
            params = await first(prefill)
            _, times, found = await complete(session, "D", number, prompt, tokens, params, logprobs=logprobs)
        else:
            second = complete(session, "D", number, prompt, tokens, decode, logprobs=logprobs)
            _, (_, times, found) = await asyncio.gather(first(prefill), second)
        served.token_s, served.logprobs = [at - begun for at in times], found
        if len(times) != tokens:
            served.error = f"{len(times)} of {tokens} tokens"
    except (TimeoutError, RuntimeError, aiohttp.ClientError) as error:
        served.error = repr(error)[:200]
    return served


def prompt_of(length: int, chance: random.Random) -> list[int]:
    """Tokens at random."""
    return [chance.randrange(4, 150000) for _ in range(length)]


@asynccontextmanager
async def decodes(session: aiohttp.ClientSession, count: int, tokens: int = 200) -> AsyncIterator[list[Served]]:
    """Keep ``count`` decodes running on D, of short prompts that it computes itself; yields those that have ended."""
    chance, ended = random.Random(7), []  # type: ignore[var-annotated]

    async def endless() -> None:
        while True:
            ended.append(await one(session, "alone", prompt_of(64, chance), tokens))

    tasks = [asyncio.create_task(endless()) for _ in range(count)]
    try:
        if count:
            await asyncio.sleep(1.0)
            ended.clear()
        yield ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def prompts_of(row: str, lengths: list[int], seed: object) -> list[list[int]]:
    """The prompts of a row, the same for every mode. Made before anything is timed: a long one takes milliseconds."""
    chance = random.Random(f"{row}:{seed}")
    return [prompt_of(length, chance) for length in lengths]


async def arrivals(
    session: aiohttp.ClientSession, mode: str, row: str, prompts: list[list[int]], qps: float, tokens: int, seed: object
) -> list[Served]:
    """An open-loop Poisson load: the same arrivals for every mode."""
    chance = random.Random(f"arrivals of {row}:{seed}")
    tasks, due = [], time.perf_counter()
    for prompt in prompts:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(session, mode, prompt, tokens, row)))
        due += chance.expovariate(qps)
    return list(await asyncio.gather(*tasks))


async def loop(
    session: aiohttp.ClientSession, mode: str, row: str, length: int, count: int, width: int, tokens: int
) -> tuple[list[Served], float]:
    """``count`` requests, ``width`` at a time: P is never idle. With them the time per request (s)."""
    chance, found = random.Random(f"{length}:{width}"), []  # type: ignore[var-annotated]
    prompts = [prompt_of(length, chance) for _ in range(count)]

    async def worker() -> None:
        while prompts:
            found.append(await one(session, mode, prompts.pop(), tokens, row))

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(width)))
    ends = [served.sent_s + served.prefill_s for served in found]
    return found, (max(ends) - begun) / count


def distance(one: Served, other: Served) -> float:
    """Largest difference of a log-probability that both answers name; infinite when they name nothing in common."""
    worst = 0.0
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=False):
        common = mine.keys() & theirs.keys()
        worst = max([worst, *(abs(mine[t] - theirs[t]) for t in common)]) if common else float("inf")
    return worst if one.logprobs and len(one.logprobs) == len(other.logprobs) else float("inf")


async def check(session: aiohttp.ClientSession, mode: str, count: int, longest: int, seed: int) -> str:
    """Answers of ``count`` handed-over prompts against those of D alone. Prompts of many lengths, eight at a time, and
    decodes beside them, so that the blocks of both caches are in no order.
    """
    chance, found = random.Random(seed), []
    lengths = [length for length in (1, 15, 16, 17, 100, 1000, 3000, 9000) if length <= longest]
    async with decodes(session, 2):
        for start in range(0, count, 8):
            prompts = [prompt_of(chance.choice(lengths), chance) for _ in range(min(8, count - start))]
            alone = await asyncio.gather(*(one(session, "alone", p, 8, logprobs=True) for p in prompts))
            through = await asyncio.gather(*(one(session, mode, p, 8, logprobs=True) for p in prompts))
            found += [distance(a, b) for a, b in zip(alone, through, strict=True)]
            failed = [served.error for served in (*alone, *through) if served.error]
            if failed:
                return f"check {mode}: FAILED at {start}: {failed[0]}"
    far = sum(each > 0.25 for each in found)
    return (
        f"check {mode}: {len(found)} prompts, median distance {statistics.median(found):.4f}, largest {max(found):.4f},"
        f" {far} above 0.25"
    )
