"""The names of what office and ranks count, and how it adds up. No vLLM here: the transfer thread imports this.

Decides which counters, gauges and times exist, and what each means. A counter may carry a label behind a colon
(`failed:peer unreachable`); labels come from closed lists, so that a peer cannot invent metrics. What the parts of a
rank count by words of their own (a side channel its drops, a machine what it survived) is shown by what `PARTS` says;
there is no count that is not shown.

`python -m pushkv.reference.metric_names` prints the table of all metrics as Markdown.
"""

from __future__ import annotations

import threading
import time
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
    "writes_posted": "writes handed to the transport",
    "write_batches": "calls to the transport that the writes took",
    "transport_errors": "errors of the transport, those of peers that have died included",
    "gave_way": "transfers that gave their memory to another one and came back, by side",
    "messages_refused": "frames of the side channel that were dropped, by reason",
    "messages_unsent": "frames to peers that were dropped, to be said again, by reason",
    "connections_refused": "connections to the side channel by somebody without the shared secret, by how it showed",
    "addresses_refused": "addresses of peers that cannot be reached or must not be",
    "faults": "faults of the connector itself, each of which fails one transfer at the most, by kind",
    "late": "events that came late, twice or across another one, and were survived, by kind",
    "peers_refused": "engines whose cache or version does not fit",
    "requests_refused": "requests whose transfer parameters could not be used, by reason",
    "loads_failed": "requests that vLLM was told have failed to load",
    "loads_lost": "requests whose prompt did not come, computed here or failed by the policy",
    "blocks_kept": "KV blocks of failed loads that nobody could use until they were proven free",
    "records_dropped": "records of single transfers that nobody fetched in time",
}
FAULTS = (
    "failed turn", "refused event", "failed action", "gather failed", "post failed", "scatter failed",
    "scatter too late",
)  # fmt: skip
"""Of a rank."""
REFUSED = (
    "malformed", "oversized", "version", "truncated", "unknown", "misnamed", "misaddressed", "stranger",
)  # fmt: skip
"""Frames: by the side channel, and by the protocol's decoder."""
PARTS: Mapping[str, Mapping[str, str]] = {
    "rank": {
        **{name: f"faults:{name}" for name in FAULTS},
        "impossible part": "messages_refused:impossible part",
        "oversized": "messages_unsent:oversized",
        "not claimed": "late:not claimed",
        "parts taken back": "late:parts taken back",
        "stray notice": "late:stray notice",
    },
    "side channel": {
        **{name: f"messages_refused:{name}" for name in REFUSED},
        "denied": "connections_refused:denied",
        "handshake": "connections_refused:handshake",
        "full": "messages_unsent:full",
        "nobody": "messages_unsent:nobody",
        "oversized_out": "messages_unsent:oversized",
        "unreachable": "addresses_refused",
    },
    "transport": {
        "posts": "writes_posted",
        "batches": "write_batches",
        "errors": "transport_errors",
        "notices": "late:notice of no write",
    },
    "endpoint": {
        "stranger": "late:word of a stranger",
        "misdirected": "late:word to a predecessor",
    },
    "sender": {
        "gave_way": "gave_way:sending",
        "register_again": "late:registered again",
        "grant_ignored": "late:grant ignored",
        "refused": "late:registration refused",
    },
    "receiver": {
        "offer_ignored": "late:offer ignored",
        "written_late": "late:written late",
        "written_again": "late:written again",
        "written_refused": "late:written refused",
        "sent_again": "late:sent again",
        "expose_late": "late:memory named late",
        "withdraw_late": "late:withdrawn late",
        "closing_late": "late:closing late",
    },
    "office": {
        "refused event": "late:event of a closed transfer",
    },
    "ledger": {
        "gave_way": "gave_way:receiving",
        "allocated_late": "late:allocated late",
    },
}  # fmt: skip
"""What each part counts, and the counter and label that show it."""
FROM_THE_START = (
    ("peers_refused", ""), ("writes_broken", ""), ("transfers_failed", "lease"),
    *(("faults", name) for name in (*FAULTS, "unknown news")),
    *(("messages_refused", name) for name in REFUSED),
    ("connections_refused", "denied"), ("connections_refused", "handshake"),
)  # fmt: skip
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
    "peers": "ranks of other engines that the ranks of this one talk to",
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


def shown(part: str, counters: Mapping[str, float]) -> dict[str, float]:
    """The counts of a part of a rank, or of the office, by the names of `COUNTERS`."""
    names = PARTS[part]
    found: dict[str, float] = {}
    for name, count in tuple(counters.items()):  # another thread may be counting
        name = names.get(name, name)
        found[name] = found.get(name, 0) + count
    return found


def merged(*counted: Mapping[str, float]) -> dict[str, float]:
    """All of them in one; the same name adds up."""
    found: dict[str, float] = {}
    for counters in counted:
        for name, count in tuple(counters.items()):  # another thread may be counting
            found[name] = found.get(name, 0) + count
    return found


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
    `EVERY_S`, unless it is `urgent`. Read by the engine's thread and, while the engine takes no step, by an `Outlet`'s:
    whoever takes the totals that it reads holds `lock` from then on.
    """

    __slots__ = ("_asked_at", "_before", "_gauges", "_read_at", "_who", "lock", "urgent")

    def __init__(self, who: str) -> None:
        self._who = who
        self._before: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._read_at = self._asked_at = 0.0
        self.lock = threading.Lock()
        self.urgent = False

    def due(self, now: float) -> bool:
        """Whether it is time for a tally; `now` in seconds of the monotonic clock. Yes is said once."""
        self._asked_at = now
        if not self.urgent and now - self._read_at < EVERY_S:
            return False
        self.urgent, self._read_at = False, now
        return True

    def forsaken(self, after_s: float) -> bool:
        """Whether no step has asked for `after_s`."""
        return time.monotonic() - self._asked_at >= after_s

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


def table() -> str:
    """All metrics as they stand in vLLM's `/metrics`, as a Markdown table, for `docs/metrics.md`."""
    labels: dict[str, set[str]] = {}
    for name in (*(name for names in PARTS.values() for name in names.values()), *map(":".join, FROM_THE_START)):
        short, _, what = name.partition(":")
        if what and short != "transfers_failed":  # its reasons are the protocol's, as those of a few others
            labels.setdefault(short, set()).add(what)
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    for name, says in COUNTERS.items():
        known = "; ".join(sorted(labels.get(name, ())))
        rows.append(f"| `pushkv:{name}_total` | counter | {says}{f' (`what`: {known})' if known else ''} |")
    rows += [f"| `pushkv:{name}` | gauge | {says} |" for name, says in GAUGES.items()]
    rows += [f"| `pushkv:{name.removesuffix('_s')}_seconds` | histogram | {says} |" for name, says in TIMES.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
