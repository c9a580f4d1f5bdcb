"""When two answers are the same: by the log-probabilities of the five likeliest tokens at every position.

Equal text of a random model proves little. Right KV gives the same log-probabilities but for rounding (the batch, the
chunks and the place of a token in its block change the order of a sum), wrong KV gives others; the tests check on the
recorded answers that the tolerance lies far below the distance of any two prompts.
"""

from __future__ import annotations

from .dispatch import Answer

TOLERANCE = 2e-3
"""In nats, float32."""


class WrongAnswer(AssertionError):
    """An answer that a plain server does not give. A test may be run again for anything else."""


def distance(one: Answer, other: Answer) -> float:
    """The largest difference of the log-probability of a token that stands among the first five of both, over all
    positions; infinite where they share none or the lengths differ.

    After a position at which the two took different tokens nothing can be compared: a tie of the first two tokens is
    told by their log-probabilities at that position, so the comparison ends there.
    """
    if len(one.top) != len(other.top) or not one.top:
        return float("inf")
    worst = 0.0
    for index, (mine, theirs) in enumerate(zip(one.top, other.top, strict=True)):
        both = mine.keys() & theirs.keys()
        if not both:
            return float("inf")
        worst = max(worst, *(abs(mine[token] - theirs[token]) for token in both))
        # a token that only one side ranks must lie at the edge of the other's five
        for ours, others in ((mine, theirs), (theirs, mine)):
            edge = min(others.values())
            worst = max(worst, *(ours[token] - edge for token in ours.keys() - both), 0.0)
        if one.tokens[index] != other.tokens[index]:
            break
    return worst


def same(answer: Answer, expected: Answer) -> None:
    """Fail with one sentence where ``answer`` is not what a plain server says."""
    assert answer.ok, f"no answer: status {answer.status}, finish {answer.finish}, {answer.error}"
    if len(answer.tokens) != len(expected.tokens):
        raise WrongAnswer(f"{len(answer.tokens)} tokens, expected {len(expected.tokens)}")
    found = distance(answer, expected)
    if found > TOLERANCE:
        raise WrongAnswer(f"log-probabilities differ by {found:.4f} from a plain server's: wrong KV")


def right_or_failed(answer: Answer, expected: Answer) -> bool:
    """Whether the request was answered; a wrong answer fails the test, an error told to the client does not."""
    if answer.ok:
        same(answer, expected)
    return answer.ok
