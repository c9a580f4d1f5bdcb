"""Many requests while one server after the other is killed and comes back as another engine: who got what.

Used with few requests by `test_chaos.py`, and with 10,000 by `experiments/router/run.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .mock import Mock
from .stack import Reply, expected

Ask = Callable[[str, bool], Awaitable[Reply]]


@dataclass
class Outcome:
    """whole: requests with their own, whole answer. cut: streams that ended with an error event after their first
    token, whole events before it. refused: no answer, and told so. lost: neither, or a wrong answer. twice: requests
    whose whole answer was written by two servers. kills: servers killed.
    """

    whole: int = 0
    cut: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    twice: int = 0
    kills: int = 0
    statuses: Counter[int] = field(default_factory=Counter)


async def chaos(
    ask: Ask, mocks: list[Mock], requests: int, *, per_s: float, every_s: float, down_s: float, seed: int
) -> Outcome:
    """`requests` at `per_s`, half of them streamed; every `every_s` one of `mocks`, in turn, is away for `down_s`."""
    found = Outcome()
    draw = random.Random(seed)
    answered: Counter[str] = Counter()

    async def one(number: int) -> None:
        prompt, stream = f"q{number}", number % 2 == 0
        try:
            reply = await ask(prompt, stream)
        except (OSError, TimeoutError, ValueError) as error:
            found.lost.append(f"{prompt}: {type(error).__name__}")
            return
        found.statuses[reply.status] += 1
        right = expected(prompt)
        if reply.status == 200 and reply.error is None and reply.text == right and reply.done == stream:
            found.whole += 1
        elif stream and reply.status == 200 and reply.error is not None and right.startswith(reply.text) and reply.text:
            found.cut += 1
        elif reply.status >= 500 and reply.error is not None and not reply.text:
            found.refused += 1
        else:
            found.lost.append(f"{prompt}: {reply}")

    async def kill() -> None:
        while True:
            await asyncio.sleep(every_s - down_s)
            mock = mocks[found.kills % len(mocks)]
            found.kills += 1
            await mock.kill()
            await asyncio.sleep(down_s)
            await mock.start()

    def collect() -> None:
        """The servers' own lists, before they grow."""
        for mock in mocks:
            done = [seen for seen in mock.seen if seen.end]
            if mock.role == "decode":
                answered.update(seen.body["prompt"] for seen in done if seen.end == "answered")
            mock.seen = [seen for seen in mock.seen if not seen.end]

    killing = asyncio.create_task(kill())
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    began = loop.time()
    for number in range(requests):
        await asyncio.sleep(began + number / per_s - loop.time() + draw.uniform(0, 0.5 / per_s))
        task = asyncio.create_task(one(number))
        running.add(task)
        task.add_done_callback(running.discard)
        if number % 500 == 0:
            collect()
            mocks[0].wire.done = {key: event for key, event in mocks[0].wire.done.items() if not event.is_set()}
    await asyncio.gather(*running)
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    for mock in mocks:
        mock.seen = [*mock.seen]
    collect()
    found.twice = sum(count > 1 for count in answered.values())
    return found
