"""The one exception for input that a person got wrong, and how such a message names what would be right.

Decides how a bad value is reported; not what counts as bad (``scenario``, ``workload`` and ``cli`` do).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BadInput", "unknown"]


class BadInput(Exception):
    """Input that cannot be simulated. The message is one line that names the thing and what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def unknown(what: str, value: object, choices: Iterable[str], *, also: str = "") -> BadInput:
    """A `BadInput` for a value outside ``choices``: the closest match if there is one, and the whole list.

    ``also`` names what is accepted besides the list, as "or a path to config.json".
    """
    names = list(choices)
    close = difflib.get_close_matches(str(value).lower(), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return BadInput(f"{what} {str(value)!r} is not known: {hint}choose from {', '.join(names)}{also and ' ' + also}")
