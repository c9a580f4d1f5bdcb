"""What a rank says in place of its machines when they refuse an event.

Decides who is told what, so that no host waits for a verdict or for memory that nobody will ever speak of. Does not
decide what is refused: the machines do.
"""

from __future__ import annotations

from pushkv.model.protocol import LocalProtocolError
from pushkv.model.protocol import events as ev

OF_A_PROMPT = (ev.Computed, ev.Preempted, ev.Abort)
"""What the machines are told of a prompt after its ``Begin``."""


def answers(event: ev.Record | None, error: Exception) -> tuple[ev.Record, ...]:
    """What is said in place of the machines when they refuse ``event``: reports to the ledger, which would wait for
    theirs, or a command that ends the transfer. An earlier one of the same id, which they may have, goes on.
    """
    if isinstance(event, ev.Begin):  # no host reads for it: with ``Sent`` its blocks are forgotten
        return ev.Sent(event.transfer_id, False, "ambiguous"), ev.Released(event.transfer_id)
    if isinstance(event, ev.Expect):
        broken = ev.Broken(event.transfer_id, str(error))
        settled = isinstance(error, LocalProtocolError)  # nothing was registered; else the machines must say so
        return (broken, ev.Settled(event.transfer_id)) if settled else (broken,)
    if isinstance(event, (ev.Computed, ev.Preempted)):  # what its blocks hold is not what the machines believe
        return (ev.Abort(event.transfer_id, "refused"),)
    return ()
