"""The names of what office and ranks count, and how it adds up. No vLLM here: the transfer thread imports this.

Decides which counters, gauges and times exist, and what each means. A counter may carry a label behind a colon
(`failed:peer unreachable`); labels come from a closed list, so that a peer cannot invent metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COUNTERS: Mapping[str, str] = {
    "transfers_sent": "prompts handed over, counted on the prefill engine",
    "transfers_received": "prompts that landed, counted on the decode engine",
    "transfers_failed": "transfers with the verdict failed, by reason",
    "transfers_cancelled": "transfers given up by the other engine or the client",
    "bytes_sent": "bytes written into other engines",
    "bytes_received": "bytes that landed",
    "descriptors": "contiguous pieces handed to the transport",
    "path": "prompts waited for, by the path they were to take and why, counted on the decode engine",
    "writes_broken": "writes that ended with an error",
    "gave_way": "transfers that gave their memory to another one and came back",
    "messages_refused": "frames of the side channel that were malformed, unknown or not authentic",
    "peers_refused": "engines whose cache or version does not fit",
    "requests_refused": "requests whose transfer parameters could not be used, by reason",
    "loads_failed": "requests that vLLM was told have failed to load",
    "loads_lost": "requests whose prompt did not come, computed here or failed by the policy",
    "blocks_kept": "KV blocks of failed loads that nobody could use until they were proven free",
    "records_dropped": "records of single transfers that nobody fetched in time",
}
FROM_THE_START = (("peers_refused", ""), ("messages_refused", ""), ("writes_broken", ""), ("transfers_failed", "lease"))
"""Counters and their labels that are there before they count: an alert on a first event needs the 0 before it."""
GAUGES: Mapping[str, str] = {
    "open_outgoing": "prompts held or on their way, on the prefill engine",
    "open_incoming": "prompts waited for, on the decode engine",
    "landing_segments_used": "segments of landing memory that belong to a transfer",
    "landing_segments": "segments of landing memory in all",
    "staging_bytes_used": "bytes of staging memory that wait for the wire or are on it",
    "staging_bytes": "bytes of staging memory in all",
    "quarantined": "transfers with a verdict whose memory is not yet proven free",
    "leases": "finished prompts kept for a decode engine that has not come",
    "writes_open": "writes posted and not complete",
    "peers": "engines that this one talks to",
}
TIMES: Mapping[str, str] = {
    "gather_s": "copying a prompt into staging memory",
    "post_s": "handing the writes of a prompt to the transport",
    "wire_s": "from posting to completion",
    "scatter_s": "copying a prompt out of landing memory",
    "handover_s": "from the end of the prefill to the verdict",
}
REASONS = (
    "aborted", "lease", "prefill aborted", "prefill ended without its whole cache", "gave way", "gave way too often",
    "larger than the landing memory", "too much in quarantine with this peer", "peer unreachable", "peer silent",
    "peer gone", "not needed", "local prefix has changed", "cache was reset", "cancelled", "cancelled by the sender",
    "superseded", "revoked", "deadline", "ended", "forgotten", "forgotten by the sender", "handed over before",
    "no prefill here", "write failed", "write took too long", "writes took too long", "too many open registrations",
    "fewer tokens than wanted", "more tokens than the prompt has", "the prompt is shorter than what is wanted",
    "transfer is registered by another engine", "this vLLM cannot stop a prompt early",
    "packed", "direct", "role", "identity", "ambiguous", "backoff",
)  # fmt: skip
OTHER = "other"
EVERY_S = 0.5
"""Between two tallies of one side."""


def label(reason: str, known: Iterable[str] = REASONS) -> str:
    """`reason` if it is one of ours, else "other"."""
    return reason if reason in known else OTHER


def added(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """What has been counted between two readings of the same counters."""
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}


class Tally:
    """Counters, gauges and times of one interval, as plain data that any process can add up."""

    __slots__ = ("data",)

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data if data else {"counters": {}, "gauges": {}, "times": {}}

    def count(self, counters: Mapping[str, float]) -> None:
        mine = self.data["counters"]
        for name, value in counters.items():
            mine[name] = mine.get(name, 0) + value

    def gauge(self, who: str, gauges: Mapping[str, float]) -> None:
        """Readings of `who` (a rank, the office): a later reading replaces an earlier one, ranks add up."""
        self.data["gauges"].update({f"{name}|{who}": value for name, value in gauges.items()})

    def record(self, records: Sequence[Mapping[str, Any]]) -> None:
        times = self.data["times"]
        for name in TIMES:  # 0: it has not happened, as a gather on the direct path
            if found := [float(one[name]) for one in records if one.get(name, 0.0) > 0.0]:
                times[name] = times[name] + found if name in times else found

    def add(self, other: Mapping[str, Any]) -> None:
        self.count(other.get("counters", {}))
        self.data["gauges"].update(other.get("gauges", {}))
        for name, values in other.get("times", {}).items():
            self.data["times"].setdefault(name, []).extend(values)

    @property
    def empty(self) -> bool:
        return not any(self.data.values())

    def gauges(self) -> dict[str, float]:
        """Over all ranks."""
        found: dict[str, float] = {}
        for name, value in self.data["gauges"].items():
            short = name.split("|")[0]
            found[short] = found.get(short, 0) + value
        return found

    def summary(self) -> dict[str, int | float]:
        """For a log line: what moved, and how long the middle transfer took."""
        found: dict[str, int | float] = {}
        for name, value in sorted(self.data["counters"].items()):
            found[name] = int(value) if value == int(value) else round(value, 3)
        for name, values in sorted(self.data["times"].items()):
            if values:
                found[f"{name[:-2]}_p50_ms"] = round(1e3 * sorted(values)[len(values) // 2], 3)
        found.update({name: value for name, value in sorted(self.gauges().items()) if value})
        return found


class Meter:
    """Turns running totals into tallies: each call gives what has happened since the last one, at most every
    `EVERY_S`, unless it is `urgent`.
    """

    __slots__ = ("_before", "_gauges", "_read_at", "_who", "urgent")

    def __init__(self, who: str) -> None:
        self._who = who
        self._before: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._read_at = 0.0
        self.urgent = False

    def due(self, now: float) -> bool:
        """Whether it is time for a tally; `now` in seconds of the monotonic clock. Yes is said once."""
        if not self.urgent and now - self._read_at < EVERY_S:
            return False
        self.urgent, self._read_at = False, now
        return True

    def stale(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> bool:
        """Whether something has happened since the last tally."""
        return counters != self._before or gauges != self._gauges

    def read(
        self, counters: Mapping[str, float], gauges: Mapping[str, float], records: Sequence[Mapping[str, Any]] = ()
    ) -> Tally | None:
        """None when nothing has changed."""
        tally = Tally()
        now = dict(counters)
        tally.count(added(self._before, now))
        tally.record(records)
        readings = dict(gauges)
        if readings != self._gauges:
            tally.gauge(self._who, readings)
        self._before, self._gauges = now, readings
        return None if tally.empty else tally
