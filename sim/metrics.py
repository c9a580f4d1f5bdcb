"""What happened to each request, and the summary that every report prints.

Decides the columns of the request log and how a summary is computed from them: latencies over completed requests only,
percentiles by linear interpolation, null where there is nothing to average. It does not decide when a thing happened:
the world does, and adds one row when a request ends.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["COMPLETED", "FAILED", "Floats", "RequestLog", "Totals", "summary"]

COMPLETED = 0
FAILED = 1

Floats = NDArray[np.float64]

_FIELDS = (
    "arrival_s",
    "input_len",
    "output_len",
    "first_token_s",
    "finish_s",
    "prefill_s",
    "status",
    "bytes",
    "descriptors",
    "post_s",
    "wire_s",
)
_ROW = Struct(f"{len(_FIELDS)}d")


class RequestLog:
    """One row per finished request in one flat array: 88 bytes each, 88 MB for a million.

    A float64 holds every count below 2**53 exactly, so lengths and bytes share the array with the times.
    """

    __slots__ = ("_append", "_cells")

    def __init__(self) -> None:
        self._cells = array("d")
        self._append = self._cells.frombytes

    def add(
        self,
        arrival_s: float,
        input_len: int,
        output_len: int,
        first_token_s: float,
        finish_s: float,
        prefill_s: float,
        status: int,
        bytes: int,
        descriptors: int,
        post_s: float,
        wire_s: float,
        _pack: Any = _ROW.pack,
    ) -> None:
        """Add a request that ended.

        ``arrival_s``, ``first_token_s`` and ``finish_s`` are points in simulated time; ``prefill_s`` is how long the
        prefill leg took (from arrival to P's end of prefill), ``post_s`` and ``wire_s`` how long posting and the wire
        took. ``status`` is `COMPLETED` or `FAILED`; what a failed request never reached may be NaN.
        """
        self._append(
            _pack(
                arrival_s,
                input_len,
                output_len,
                first_token_s,
                finish_s,
                prefill_s,
                status,
                bytes,
                descriptors,
                post_s,
                wire_s,
            )
        )

    def __len__(self) -> int:
        return len(self._cells) // len(_FIELDS)

    def column(self, name: str) -> Floats:
        """A copy of one column, in the order in which requests ended."""
        return self._table()[:, _FIELDS.index(name)].copy()

    def rows(self, index: NDArray[np.integer[Any]]) -> RequestLog:
        """A log of these rows, in this order."""
        picked = RequestLog()
        picked._append(self._table()[index].tobytes())
        return picked

    def _table(self) -> Floats:
        # A copy of the buffer's address only; it must not outlive the call, since a growing array may move.
        return np.frombuffer(self._cells, dtype=np.float64).reshape(-1, len(_FIELDS))

    def milliseconds(self, name: str) -> Floats:
        """A latency derived from the log, in milliseconds, one value per row (NaN where it does not exist).

        ``name`` is ttft, tpot, e2e, prefill, handover, post or wire.
        """
        if name in ("prefill", "post", "wire"):
            value = self.column(f"{name}_s")
        elif name == "e2e":
            value = self.column("finish_s") - self.column("arrival_s")
        elif name in ("ttft", "handover"):
            value = self.column("first_token_s") - self.column("arrival_s")
            if name == "handover":
                value -= self.column("prefill_s")
        elif name == "tpot":
            steps = self.column("output_len") - 1.0
            steps[steps < 1.0] = math.nan  # one token has no time between tokens
            value = (self.column("finish_s") - self.column("first_token_s")) / steps
        else:
            raise KeyError(name)
        value *= 1e3
        return value


@dataclass(slots=True)
class Totals:
    """What a run adds up besides its requests; the world fills it in.

    ``kv_peak_*`` is the largest fraction of the KV blocks in use on any engine of that side, ``held_block_s_*`` the
    blocks that waited for the network times seconds, ``duration_s`` the simulated time from the first arrival to the
    last finish.
    """

    duration_s: float = 0.0
    events: int = 0
    machine_steps: int = 0
    preemptions_prefill: int = 0
    preemptions_decode: int = 0
    kv_peak_prefill: float = 0.0
    kv_peak_decode: float = 0.0
    held_block_s_prefill: float = 0.0
    held_block_s_decode: float = 0.0


def summary(log: RequestLog, totals: Totals) -> dict[str, Any]:
    """The ``summary`` object of ``simulate --json``: plain numbers, null where nothing completed, never NaN."""
    completed = log.column("status") == COMPLETED
    count = int(np.count_nonzero(completed))

    def spread(name: str) -> dict[str, float | None]:
        return _spread(log.milliseconds(name)[completed])

    return {
        "requests": len(log),
        "completed": count,
        "failed": len(log) - count,
        "duration_s": _number(totals.duration_s),
        "throughput_rps": _number(count / totals.duration_s) if totals.duration_s > 0 else None,
        "ttft_ms": spread("ttft"),
        "tpot_ms": spread("tpot"),
        "e2e_ms": spread("e2e"),
        "prefill_ms": spread("prefill"),
        "handover_ms": spread("handover"),
        "transfer": {
            "bytes": int(np.nansum(log.column("bytes"))),
            "descriptors": int(np.nansum(log.column("descriptors"))),
            "post_ms": spread("post"),
            "wire_ms": spread("wire"),
        },
        "preemptions": {"prefill": totals.preemptions_prefill, "decode": totals.preemptions_decode},
        "kv_peak_fraction": {"prefill": _number(totals.kv_peak_prefill), "decode": _number(totals.kv_peak_decode)},
        "held_block_s": {
            "prefill": _number(totals.held_block_s_prefill),
            "decode": _number(totals.held_block_s_decode),
        },
    }


def _spread(values_ms: Floats) -> dict[str, float | None]:
    values_ms = values_ms[np.isfinite(values_ms)]
    if not len(values_ms):
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(values_ms, (50, 90, 99)).tolist()
    return {"mean": _number(values_ms.mean()), "p50": _number(p50), "p90": _number(p90), "p99": _number(p99)}


def _number(value: float) -> float | None:
    """To nine significant digits, so that a report does not carry the last bits of a sum; None for NaN and infinity."""
    return float(f"{value:.9g}") if math.isfinite(value) else None
