"""This project's own runs on a pair of GPUs: how each was made, and what the simulator says about it.

Decides which files of ``experiments/gpu_handover/results`` are compared, how their servers and clients were set, and
how their rows are simulated. `FILES` is the list: a further run is one line more. What is compared, and within which
limits, is decided in ``validate``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pushkv.sim import scenario, world
from pushkv.sim.errors import BadInput
from pushkv.sim.h200_pair import BLOCK, CACHE_TOKENS, Prediction
from pushkv.sim.measured import Files
from pushkv.sim.metrics import Floats
from pushkv.sim.progress import Progress
from pushkv.sim.workload import Workload

__all__ = ["FILES", "FITTED", "STAGES", "TIMES", "Own", "Row", "Setup", "read", "replay", "total"]

MODES = {
    "chunk": {"mode": "pushkv", "path": "packed", "overlap": "chunk"},
    "packed": {"mode": "pushkv", "path": "packed", "overlap": "none"},
    "auto": {"mode": "pushkv", "path": "auto", "overlap": "chunk"},
    "direct": {"mode": "pushkv", "path": "direct"},
    "push": {"mode": "push"},
    "pull": {"mode": "pull"},
}
"""What the modes of the experiment are in a scenario."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How the servers and the client of one file were set: `run.py` there has these defaults.

    ``ids``: the client asked for token ids, so that answers carried the prompt's. ``checked``: prompts whose answers
    were compared before the first row, eight at a time beside two decodes: what puts the free blocks in no order.
    """

    model: str
    landing_bytes: int = 5 << 30
    staging_bytes: int = 2 << 30
    ids: bool = False
    checked: int = 0
    calibration: str = "eager-2-queue"


FILES = {
    "hooks/requests.csv": Setup("qwen3-8b", ids=True),
    "requests_8b_eighth.csv": Setup("qwen3-8b", checked=100),
    "requests_8b_ninth.csv": Setup("qwen3-8b", checked=48),
    "requests_8b_seventh.csv": Setup("qwen3-8b", checked=8),
    "requests_8b_sixth.csv": Setup("qwen3-8b", checked=8),
    "requests_8b_fifth.csv": Setup("qwen3-8b", checked=200),
    "requests_8b_paths.csv": Setup("qwen3-8b", checked=100),
    "requests_8b_fourth.csv": Setup("qwen3-8b", checked=200),
    "requests_8b_landing.csv": Setup("qwen3-8b", landing_bytes=2_600_000_000),
    "requests_8b_third.csv": Setup("qwen3-8b"),
    "requests_8b_loop.csv": Setup("qwen3-8b", ids=True),
    "requests_8b_again.csv": Setup("qwen3-8b", ids=True),
    "requests_8b.csv": Setup("qwen3-8b", ids=True, calibration="eager-2"),
    "requests_32b_fifth.csv": Setup("qwen3-32b", landing_bytes=9_000_000_000),
    "requests_32b_fourth.csv": Setup("qwen3-32b", landing_bytes=9_000_000_000),
    "requests_32b_third.csv": Setup("qwen3-32b", landing_bytes=9_000_000_000),
    "requests_32b_again.csv": Setup("qwen3-32b", landing_bytes=9_000_000_000, ids=True),
    "requests_32b.csv": Setup("qwen3-32b", landing_bytes=9_000_000_000, ids=True, calibration="eager-2"),
}
"""Every file that is compared."""

FITTED = {
    ("hooks/requests.csv", "chunk", "open:1024:4:16"),
    ("hooks/requests.csv", "chunk", "open:16000:0.5:10"),
    ("requests_8b_third.csv", "chunk", "open:1024:4:24"),
    ("requests_8b_third.csv", "chunk", "busy:16000:0.5:10:2000"),
    ("requests_8b_loop.csv", "chunk", "busy:16000:0.5:12:2000"),
    ("requests_8b_loop.csv", "packed", "busy:16000:0.5:12:2000"),
    ("requests_8b_loop.csv", "packed", "open:16000:0.5:20"),
    ("requests_8b_loop.csv", "packed", "open:1024:4:32"),
    ("requests_8b_loop.csv", "packed", "loop:16000:10"),
}
"""Rows that constants were fitted to: file, mode, row. `experiments/gpu_handover/fit.py` prints which to which."""

STAGES = ("gathered", "posted", "written", "landed", "asked", "launched")
"""Columns of a file, in the order of a hand-over, that the simulator knows, too: ms from the end of P's leg."""

_COLUMNS = ("mode", "row", "input_len", "sent_s", "prefill_ms", "ttft_ms", "tpot_ms", "tokens", "error")
_DECODES, _DECODE_TOKENS, _DECODE_PROMPT = 8, 200, 64
_BUSY_FOR_S = 11.0  # before the first request: one second to begin with, ten to measure the decodes alone
_LOOP_WIDTH = 2
_CHECKED = (1, 15, 16, 17, 100, 1000, 3000, 9000)
TIMES, _LATER_S = 8, 0.618
"""How often a busy row is simulated, and how much later its requests come each time: where in a step of D a prompt
lands is chance, and such a row has few."""
_WARM_UP = Workload(
    np.array([0.0, 1.0, 2.0]), np.array([600, 600, 16000], dtype=np.int32), np.array([8, 8, 8], dtype=np.int32)
)


@dataclass(frozen=True, slots=True)
class Row:
    """One load, in the order in which its requests were sent. NaN where one was lost, or has not been written down."""

    text: str
    sent_s: Floats
    input_len: Floats
    output_len: Floats
    leg_ms: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    stages_ms: Mapping[str, Floats]

    @property
    def name(self) -> str:
        """For people: `16000@0.5 busy` for `busy:16000:0.5:16`; a `+` means decodes of another length."""
        kind, *rest = self.text.split(":")
        if kind == "mixed":
            return f"mixed@{rest[0]}"
        if kind == "loop":
            return f"{rest[0]} loop"
        busy = {"open": "", "busy": " busy"}.get(kind, f" {kind}")
        return f"{rest[0]}@{rest[1]}{busy}{'+' if len(rest) > 3 else ''}"

    @property
    def answered(self) -> Floats:
        """Which requests were not lost."""
        return np.isfinite(self.ttft_ms)

    @property
    def times(self) -> int:
        """How often it is simulated."""
        return TIMES if self.text.startswith("busy:") else 1

    def load(self, ids: bool, turn: int = 0) -> Workload:
        """The same requests, to be simulated for the ``turn``-th time."""
        kind, *rest = self.text.split(":")
        lengths = self.input_len.astype(np.int32), self.output_len.astype(np.int32)
        if kind == "loop":
            return Workload(np.zeros(len(self.sent_s)), *lengths, width=_LOOP_WIDTH, ids=ids)
        if kind == "busy":
            beside = (_DECODES, _DECODE_PROMPT, int(rest[3]) if len(rest) > 3 else _DECODE_TOKENS)
            return Workload(self.sent_s + _BUSY_FOR_S + turn * _LATER_S, *lengths, ids=ids, beside=beside)
        return Workload(self.sent_s, *lengths, ids=ids)


@dataclass(frozen=True, slots=True)
class Own:
    """One pair of servers and the rows that it was measured at, in order."""

    file: str
    mode: str
    setup: Setup
    rows: tuple[Row, ...]
    lost: tuple[str, ...] = ()
    """Rows of which nothing was answered."""

    @property
    def name(self) -> str:
        """For people."""
        run = self.file.removesuffix(".csv").removesuffix("/requests").removeprefix("requests_").removeprefix("8b_")
        return f"{run} {self.mode}"

    def fitted(self, row: Row) -> bool:
        """Whether a constant was fitted to ``row``."""
        return (self.file, self.mode, row.text) in FITTED


def read(files: Files) -> list[Own]:
    """Every pair of servers in `FILES`; none where no file is there. Raises `BadInput`."""
    found = []
    for file, setup in FILES.items():
        if not files.there(file):
            continue
        grouped: dict[str, dict[str, list[dict[str, str]]]] = {}
        for line, row in enumerate(files.rows(file, (*_COLUMNS, *(f"{stage}_ms" for stage in STAGES))), 2):
            if row["mode"] not in MODES:
                raise BadInput(f"--data: {file} line {line}: mode {row['mode']!r} is none of {', '.join(MODES)}")
            grouped.setdefault(row["mode"], {}).setdefault(row["row"], []).append(row)
        for mode, rows in grouped.items():
            good = {text: lines for text, lines in rows.items() if any(map(_answered, lines))}
            made = tuple(_row(file, text, lines) for text, lines in good.items())
            found.append(Own(file, mode, setup, made, tuple(text for text in rows if text not in good)))
    return found


def _answered(line: dict[str, str]) -> bool:
    return not line["error"] and bool(line["ttft_ms"])


def _row(file: str, text: str, lines: list[dict[str, str]]) -> Row:
    def cell(line: dict[str, str], name: str) -> float:
        try:
            return float(line[name]) if line[name] else math.nan
        except ValueError:
            raise BadInput(f"--data: {file}: {name} {line[name]!r} is not possible; expected a number") from None

    lines = sorted(lines, key=lambda line: cell(line, "sent_s"))
    good = np.array([_answered(line) for line in lines])

    def column(name: str, *, only_good: bool = True) -> Floats:
        values = np.array([cell(line, name) for line in lines])
        return np.where(good, values, np.nan) if only_good else values

    sent_s, tokens = column("sent_s", only_good=False), column("tokens")
    return Row(
        text,
        sent_s - sent_s[0],
        column("input_len", only_good=False),
        np.full(len(lines), np.nanmax(tokens)),
        column("prefill_ms"),
        column("ttft_ms"),
        column("tpot_ms"),
        {stage: column(f"{stage}_ms") for stage in STAGES},
    )


def _check(count: int) -> Workload:
    """The prompts of a check. Which length each has is chance here, too."""
    lengths = np.random.default_rng(0).choice(_CHECKED, count).astype(np.int32)
    return Workload(np.zeros(count), lengths, np.full(count, 8, dtype=np.int32), width=8, beside=(2, 64, 200))


def total(own: Own) -> int:
    """How many requests `replay` simulates."""
    return len(_WARM_UP) + own.setup.checked + sum(row.times * len(row.sent_s) for row in own.rows)


def replay(own: Own, *, progress: Progress | None = None) -> Iterator[tuple[Row, Prediction]]:
    """Simulate all rows of ``own`` in one world; what it says about the answered requests of each, the median where
    a row is simulated more than once."""
    setup = own.setup
    plan = scenario.load(
        None,
        {
            "model": setup.model,
            **MODES[own.mode],
            "calibration": setup.calibration,
            "num_blocks": CACHE_TOKENS[setup.model] // BLOCK,
            "landing_gib": setup.landing_bytes / (1 << 30),
            "staging_gib": setup.staging_bytes / (1 << 30),
            "requests": total(own),
        },
    )
    before = [_WARM_UP, _check(setup.checked)] if setup.checked else [_WARM_UP]
    loads = [*before, *(row.load(setup.ids, turn) for row in own.rows for turn in range(row.times))]
    stages: list[tuple[float, ...]] = []
    log = world.run(plan, arrivals=loads, progress=progress, stages=stages).log
    order = np.argsort(log.column("arrival_s"), kind="stable")
    log = log.rows(order)
    at = np.array(stages)[order]
    leg_end = log.column("arrival_s") + log.column("prefill_s")
    first = sum(map(len, before))
    for row in own.rows:
        count = len(row.sent_s)
        rows = first + np.arange(row.times)[:, None] * count + np.flatnonzero(row.answered)
        first += row.times * count
        leg, ttft, tpot = (np.median(log.milliseconds(name)[rows], axis=0) for name in ("prefill", "ttft", "tpot"))
        after = {name: np.median(at[rows, k] - leg_end[rows], axis=0) * 1e3 for k, name in enumerate(STAGES)}
        yield row, Prediction(leg, ttft, tpot, after)
