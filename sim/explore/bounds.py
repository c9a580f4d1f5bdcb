"""What each leg of one process must have been told by now: the part of I5 that looks at legs, not at the end of a run.

A leg is told by way of the rank, the ledger and the host's lane, in a few steps of ``inside_s``; ``late`` leaves room
for them, and for the time that the process was paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pushkv.sim.explore.violation import Violation

if TYPE_CHECKING:
    from pushkv.sim.explore.process import Process


def check_legs(process: Process, late: float) -> None:
    """Whatever was due by ``late`` (s) has been told."""
    for leg in process.host.receiving.values():
        if leg.aborted and leg.held and not leg.verdict and leg.aborted_at < late:
            raise Violation(f"I5a: {leg.tid} was aborted at {process.name}, which waits for its verdict")
    for leg in process.host.sending.values():
        if leg.verdict == "ok" and not leg.released and leg.verdict_at < late:
            raise Violation(f"I5b: {leg.tid} is handed over, and {process.name} still has to keep its source")
