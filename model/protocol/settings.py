"""Times and bounds of the protocol, and the bound on every verdict as a formula of them.

Decides no transition: only how long and how many. All times are seconds of the host's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's settings. Raises ``ValueError`` that names the field when one is impossible."""

    beat_s: float = 1.0
    """Time between two beats on a link on which something is open."""
    suspect_after_s: float = 10.0
    """Silence after which a peer is suspected: open transfers with it get their verdict; nothing is freed by it."""
    wait_s: float = 480.0
    """Receiver: from registration to verdict at the most (vLLM's abort time-out for a held request is 480 s)."""
    lease_s: float = 480.0
    """Sender: from the end of the prefill to the end of what was never posted."""
    orphan_s: float = 60.0
    """Sender: how long a registration waits for a prefill that has not begun here. A queue at P is not an orphan: the
    host tells of a request when it arrives, not when it is scheduled.
    """
    write_s: float = 60.0
    """Sender: from the posting of a write to giving it up. Its memory stays until the write is quiet."""
    drain_s: float = 1.0
    """From the proof that a process is gone to the time when its fabric holds no write of it any more."""
    greet_s: float = 1.0
    """First wait between two greetings of a peer that does not answer; doubles up to ``suspect_after_s``."""
    pause_s: float = 2.0
    """A step that comes later than this after the time it was asked for means that this host was paused."""
    open_per_link: int = 4096
    """Registrations open on one link at the most; one more is refused."""
    tombstones_per_link: int = 1024
    """Final notices kept for a peer that may have missed them. A cache: losing one turns success into a failure, no
    more.
    """
    links: int = 1024
    """Links kept; past it idle ones are forgotten, least recently heard first. A link with something open is never
    forgotten.
    """
    remembered_ids: int = 1024
    """Ended transfer ids for which a late registration is answered at once. A cache."""
    staging_bytes: int = 1 << 31
    """Sender: packed bytes that wait for the wire or are on it, per rank."""
    staging_share: float = 0.5
    """Sender: the part of staging that one peer may hold, so that a stalled peer leaves room for the others."""
    part_bytes: int = 1 << 62
    """Sender: bytes of a packed part at the most; small parts are packed, on the wire and told of at the
    same time. By default only staging bounds a part.
    """
    landing_segments: int = 1024
    """Ledger: segments of landing memory per rank."""
    yields: int = 4
    """Ledger: how often one transfer gives way at the most. Past it the host must let it be, and a sender that takes
    its grant back fails it.
    """
    landing_share: float = 1.0
    """Ledger: the part of the landing memory that one peer may hold, quarantine included."""
    quarantine_per_peer: int = 16
    """Ledger: unsettled transfers of one peer, past which it gets no direct destination any more."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:  # nor is a NaN
                raise ValueError(f"{field.name} must be positive, got {value}")
        if self.suspect_after_s <= 2 * self.beat_s:
            raise ValueError(
                f"suspect_after_s ({self.suspect_after_s}) must be more than two beats ({self.beat_s} s each)"
            )
        for name in ("staging_share", "landing_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a part of a whole: at most 1, got {getattr(self, name)}")

    @property
    def receiver_verdict_s(self) -> float:
        """From registration to landed, failed or cancelled at the receiver, whatever the peer does: it waits anew after
        giving way.
        """
        return (self.yields + 1) * self.wait_s

    @property
    def dead_peer_verdict_s(self) -> float:
        """From a peer's last sign of life to the verdict on what is open with it: silence is looked at once a beat."""
        return self.suspect_after_s + self.beat_s

    @property
    def sender_verdict_s(self) -> float:
        """From the end of the prefill to sent, failed or cancelled at the sender: the lease, then time for what was
        posted by then.
        """
        return self.lease_s + self.write_s
