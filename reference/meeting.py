"""The peers of a rank: those it has met, how a new one is met, and what the operating system knows of a silent one.

Decides that a peer can be written to or written by: facts that fit, caches that can be mapped, an agent that is known.
When to meet, and what the end of a peer's process means, the machines say.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pushkv.model.protocol import events as ev
from pushkv.reference import facts as facts_
from pushkv.reference.fellow import Fellow

if TYPE_CHECKING:
    from pushkv.reference.evidence import Evidence
    from pushkv.reference.rank import Rank

log = logging.getLogger(__name__)

TRIM_S = 1.0
"""Between two looks at who has a socket and needs none."""


class Met:
    """From the thread that connects: ``fellow`` is behind ``link``."""

    __slots__ = ("fellow", "link")

    def __init__(self, link: ev.Link, fellow: Fellow) -> None:
        self.link, self.fellow = link, fellow


class Meeting:
    """All peers of ``rank``. Used from its thread; only the meeting itself happens beside it."""

    def __init__(self, rank: Rank, evidence: Evidence | None) -> None:
        self.rank, self.evidence = rank, evidence
        self.fellows: dict[ev.Link, Fellow] = {}
        self._asked = self._trimmed = 0.0
        self._beside = ThreadPoolExecutor(2, thread_name_prefix="pushkv-connect")

    def connect(self, action: ev.Connect, now: float) -> None:
        """Beside this thread (rule 6): pairing many layers takes milliseconds, a transport may take longer."""
        self._beside.submit(self._meet, action)

    def _meet(self, action: ev.Connect) -> None:
        """Compare both sides' facts and have the transport know the peer."""
        link, incarnation, rank = action.link, action.incarnation, self.rank
        try:
            theirs = facts_.decode(action.facts)
            refusal = facts_.refusal(rank.facts, theirs)
            if (theirs.engine_id, theirs.rank) != link:
                refusal = f"rank {link[1]} of {link[0]!r} calls itself rank {theirs.rank} of {theirs.engine_id!r}"
            if not refusal:
                fellow = Fellow(incarnation, rank.facts, theirs)
                if fellow.outgoing is not None:
                    fellow.agent = rank.transport.connect(theirs.agent)
                rank.receive(Met(link, fellow))
                return
        except Exception as error:  # whatever it is, the machines get their answer
            refusal = str(error) or repr(error)
        log.warning("no transfer with %s/%d: %s", *link, refusal)
        rank.receive(ev.Unfit(link, incarnation, refusal[:4000]))

    def met(self, met: Met) -> None:
        """A peer with whom transfers are possible."""
        link, fellow = met.link, met.fellow
        self.fellows[link] = fellow
        if self.evidence is not None:
            self.evidence.meet(link, fellow.incarnation, fellow.facts.process)
        self.rank.pending.append(ev.Connected(link, fellow.incarnation))

    def disconnect(self, action: ev.Disconnect, now: float) -> None:
        """Forget a peer, unless another process has taken its place."""
        if action.link not in self.rank.endpoint.peers:
            self.rank.channel.close_link(action.link)
        fellow = self.fellows.get(action.link)
        if fellow is None or fellow.incarnation != action.incarnation:
            return
        del self.fellows[action.link]
        if self.evidence is not None:
            self.evidence.forget(action.link)
        if fellow.agent:
            self.rank.transport.disconnect(fellow.agent)

    def look(self, now: float) -> None:
        """Ask the operating system about peers that are silent for two beats while something is open (E2), and let go
        of the sockets to those with whom nothing is.
        """
        if now - self._trimmed >= TRIM_S:
            self._trimmed = now
            self.rank.channel.trim(self.rank.endpoint.busy)
        if self.evidence is None:
            return
        rank = self.rank
        beat_s = rank.settings.beat_s
        if now - self._asked >= beat_s:
            self._asked = now
            for link, fellow in self.fellows.items():
                peer = rank.endpoint.peers.get(link)
                if peer is not None and now - peer.heard_at >= 2 * beat_s and rank.endpoint.busy(link):
                    self.evidence.ask(link, fellow.incarnation)
        for link, incarnation in self.evidence.answers():
            rank.pending.append(ev.ProcessGone(link, incarnation))
        for link in rank.channel.replaced():
            if link in self.fellows:
                rank.pending.append(ev.ProcessGone(link, self.fellows[link].incarnation))
