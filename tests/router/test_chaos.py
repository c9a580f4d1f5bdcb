"""No request is lost or answered twice while servers are killed. `experiments/router/run.py` does it 10,000 times."""

from __future__ import annotations

from .chaos import chaos
from .stack import Reply, play, stack


def test_no_request_is_lost_or_answered_twice() -> None:
    async def go() -> None:
        async with stack(2, 3, mock={"token_s": 0.01}, attempts=4) as s:

            async def ask(prompt: str, stream: bool) -> Reply:
                return await s.ask(prompt, stream=stream)

            found = await chaos(ask, s.mocks, 800, per_s=250, every_s=0.5, down_s=0.2, seed=1)
            assert found.kills >= 3
            assert not found.lost and not found.twice
            assert found.whole + found.cut + found.refused == 800
            assert found.refused == 0, found
            assert found.whole >= 760
            assert await s.metric("retries_total") > 0

    play(go())
