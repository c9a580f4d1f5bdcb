"""Simulated time is whole picoseconds.

Sums of whole numbers are exact and associative, so the engines may jump over a thousand equal steps and arrive at the
same tick as one that took each of them: fast paths cannot change a result. The protocol gets seconds.
"""

from __future__ import annotations

TICKS_PER_S = 10**12
S_PER_TICK = 1e-12


def ticks(seconds: float) -> int:
    """Seconds as the nearest whole picosecond."""
    return round(seconds * TICKS_PER_S)
