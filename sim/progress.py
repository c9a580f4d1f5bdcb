"""A progress bar on stderr for runs that take longer than a moment.

Decides when one is shown: only where stderr is a terminal and tqdm is installed (pip install 'pushkv[progress]').
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress", "progress_bar"]

Progress = Callable[[int, int], None]
"""Called with (requests, or whatever the unit is, done and in all), as often as the caller likes."""

_DELAY_S = 1.0


@contextmanager
def progress_bar(label: str, *, wanted: bool = True, unit: str = "requests") -> Iterator[Progress | None]:
    """A `Progress` that draws a bar after a second, or None where nobody would see one."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(total=None, desc=label, unit=f" {unit}", file=sys.stderr, delay=_DELAY_S, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
