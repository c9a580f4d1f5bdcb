"""What a person reads, and what a program reads, of a run.

Decides the tables (80 columns at most) and the JSON documents; both are made from the same dictionary, so they cannot
differ. It computes no statistic: `pushkv.sim.metrics` does.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pushkv.model.timing import Residual
from pushkv.sim.metrics import summary

if TYPE_CHECKING:
    from pushkv.sim.world import Result

__all__ = [
    "SCHEMA",
    "WIDTH",
    "Check",
    "Stages",
    "Validation",
    "calibrate",
    "compare",
    "document",
    "documents",
    "simulate",
    "table",
    "to_json",
    "validate",
]

SCHEMA = 1
WIDTH = 80

Document = Mapping[str, Any]


def document(run: Result) -> dict[str, Any]:
    """The JSON document of ``pushkv simulate``. Only ``wall_s`` differs between two runs of one seed."""
    return {
        "schema": SCHEMA,
        "scenario": run.scenario.as_json(),
        "summary": summary(run.log, run.totals),
        "events": run.totals.events,
        "machine_steps": run.totals.machine_steps,
        "wall_s": round(run.wall_s, 3),
    }


@dataclass(frozen=True, slots=True)
class Check:
    """A prediction beside a measurement, both in ``unit``.

    ``limit`` is the largest relative error that passes (None: shown only), ``noise`` how far the measurement's own
    repeats lie apart, relative. ``group`` is the heading that the row stands under, as "in-sample" or "out-of-sample".
    A miss of a check that is not ``binding`` is shown and counted, and does not fail the run. ``what``: the checks of a
    group that say it are printed as one line per load, with a column for each; it is the end of their ``name``.
    """

    group: str
    name: str
    unit: str
    measured: float
    predicted: float
    limit: float | None = None
    noise: float | None = None
    binding: bool = True
    what: str = ""

    @property
    def error(self) -> float:
        """Relative: (predicted - measured) / measured."""
        return self.predicted / self.measured - 1.0

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit."""
        return self.limit is None or abs(self.error) <= self.limit


@dataclass(frozen=True, slots=True)
class Stages:
    """When the stages of a load's hand-overs were over, measured and predicted: medians, milliseconds from the end of
    P's leg."""

    group: str
    name: str
    measured_ms: Mapping[str, float]
    predicted_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Validation:
    """All checks of ``pushkv validate``; ``inputs`` maps each file read to its SHA-256, ``notes`` are printed after."""

    checks: tuple[Check, ...]
    inputs: Mapping[str, str]
    notes: tuple[str, ...] = ()
    stages: tuple[Stages, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every binding check passed."""
        return all(check.passed for check in self.checks if check.binding)

    def document(self) -> dict[str, Any]:
        """The JSON document of ``pushkv validate``."""
        rows = [asdict(check) | {"error": check.error, "passed": check.passed} for check in self.checks]
        stages = [asdict(one) for one in self.stages]
        return {
            "schema": SCHEMA, "inputs": dict(self.inputs), "checks": rows, "stages": stages, "passed": self.passed
        }  # fmt: skip


def documents(runs: Iterable[Document]) -> dict[str, Any]:
    """The JSON document of ``pushkv compare``."""
    return {"schema": SCHEMA, "runs": list(runs)}


def to_json(value: Document) -> str:
    """Valid JSON, or an exception: NaN has no place in it."""
    return json.dumps(value, indent=2, allow_nan=False)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= 10 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return ""
    ratio = value / base
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


# ---- tables --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Sequence[str]], *, left: int = 1, gap: int = 2) -> str:
    """Rows of text as aligned columns: the first ``left`` to the left, the others to the right.

    A table that would be wider than `WIDTH` has its first column cut, with an ellipsis.
    """
    columns = max(map(len, rows), default=0)
    padded = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in padded) for i in range(columns)]
    excess = sum(widths) + gap * (columns - 1) - WIDTH
    if excess > 0:
        widths[0] = max(widths[0] - excess, 8)
    lines = []
    for row in padded:
        first = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
        cells = [first, *row[1:]]
        aligned = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        lines.append((" " * gap).join(aligned).rstrip())
    return "\n".join(lines)


def simulate(doc: Document) -> str:
    """One run as a block of text."""
    got = doc["summary"]
    rows = [["", "mean", "p50", "p90", "p99"]]
    for label, spread in _spreads(got):
        rows.append([label, *(_ms(spread[key]) for key in ("mean", "p50", "p90", "p99"))])
    facts = [_cut(f"{label:<22}{value}") for label, value in _facts(doc)]
    return "\n".join([*_heading(doc["scenario"]), "", table(rows, gap=4), "", *facts])


_LEGEND = (
    "× is the ratio to the first mode. Exposed hand-over: TTFT less the prefill leg.",
    "Posting: host time to post a transfer. Blocks held: KV blocks that wait for the",
    "network, times seconds. How far predictions were from measurements: pushkv",
    "validate (TTFT within 15 % in nearly every row, so less is no difference).",
)


def compare(docs: Sequence[Document]) -> str:
    """Runs side by side, each value with its ratio to the first run's."""
    modes = [doc["scenario"]["mode"] for doc in docs]
    rows = [["", *(cell for mode in modes for cell in (mode, ""))]]

    def add(label: str, values: Sequence[float | None], form: Callable[[float | None], str] = _ms) -> None:
        cells: list[str] = []
        for value in values:
            cells += [form(value), _ratio(value, values[0]) if len(cells) else ""]
        rows.append([label, *cells])

    got = [doc["summary"] for doc in docs]
    for label, name, keys in (
        ("TTFT", "ttft_ms", ("mean", "p50", "p90", "p99")),
        ("TPOT", "tpot_ms", ("mean", "p99")),
        ("end to end", "e2e_ms", ("mean", "p99")),
        ("prefill", "prefill_ms", ("mean",)),
        ("exposed hand-over", "handover_ms", ("mean", "p50", "p99")),
    ):
        for key in keys:
            add(f"{label} {key}, ms", [one[name][key] for one in got])
    for label, name in (("posting", "post_ms"), ("wire", "wire_ms")):
        add(f"{label} mean, ms", [one["transfer"][name]["mean"] for one in got])
    add("descriptors", [one["transfer"]["descriptors"] for one in got], _count)
    add("completed per s", [one["throughput_rps"] for one in got], _ms)
    add("failed", [one["failed"] for one in got], _count)
    add("preempted on D", [one["preemptions"]["decode"] for one in got], _count)
    for side, name in (("P", "prefill"), ("D", "decode")):
        add(f"KV cache peak on {side}", [one["kv_peak_fraction"][name] for one in got], _percent)
    for side, name in (("P", "prefill"), ("D", "decode")):
        add(f"blocks held on {side}, block·s", [one["held_block_s"][name] for one in got], _count)
    heading = _heading({**docs[-1]["scenario"], "mode": None})
    return "\n".join([*heading, "", table(rows, gap=2), "", *_LEGEND])


def calibrate(residuals: Sequence[Residual]) -> str:
    """What the fit says about each measured row."""
    rows = [["", "measured", "fitted", "error"]]
    rows += [[r.label, f"{_ms(r.measured_ms)} ms", f"{_ms(r.model_ms)} ms", f"{r.error:+.1%}"] for r in residuals]
    errors = [abs(r.error) for r in residuals]
    rms = math.sqrt(sum(e * e for e in errors) / len(errors))
    return f"{table(rows)}\n\n{len(errors)} rows: root mean square error {rms:.1%}, largest {max(errors):.1%}"


def validate(found: Validation) -> str:
    """Predicted beside measured, a block per group, and the files that were read."""
    blocks = []
    for group in dict.fromkeys(check.group for check in found.checks):
        if any(check.what for check in found.checks if check.group == group):
            blocks.append(f"{group}\n{_loads([check for check in found.checks if check.group == group])}")
            continue
        rows = [["", "measured", "predicted", "error", "limit", "noise", ""]]
        for check in found.checks:
            if check.group == group:
                limit = "" if check.limit is None else f"{check.limit:.0%}"
                noise = "" if check.noise is None else f"{check.noise:.0%}"
                measured, predicted = (f"{_ms(v)} {check.unit}" for v in (check.measured, check.predicted))
                verdict = "" if check.limit is None else "ok" if check.passed else "MISS"
                rows.append([check.name, measured, predicted, f"{check.error:+.1%}", limit, noise, verdict])
        blocks.append(f"{group}\n{table(rows)}")
    if found.stages:
        blocks.append(f"{_STAGES}\n{_stages(found.stages)}")
    failed = sum(not check.passed for check in found.checks)
    free = sum(not check.passed for check in found.checks if not check.binding)
    blocks.append(
        f"{len(found.checks)} checks, {failed} outside the limit" + f" ({free} of them only reported)" * bool(free)
    )
    blocks += [textwrap.fill(note, WIDTH) for note in found.notes]
    blocks.append("\n".join(["read", *(_cut(f"  {digest[:16]}  {name}") for name, digest in found.inputs.items())]))
    return "\n\n".join(blocks)


_STAGES = "stages of hand-overs, medians, ms from the end of P's leg: measured, predicted"


def _loads(checks: Sequence[Check]) -> str:
    """One line per load: errors, and of the last column what was measured and predicted. ``!`` marks a miss."""
    end = checks[-1].what
    kinds = [*dict.fromkeys(check.what for check in checks if check.what != end), end]
    rows = [["", *kinds, "error"]]
    for name in dict.fromkeys(check.name.removesuffix(f" {check.what}") for check in checks):
        mine = {check.what: check for check in checks if check.name == f"{name} {check.what}"}
        errors = [f"{one.error:+.0%}{'' if one.passed else '!'}" if one else "" for one in map(mine.get, kinds)]
        last = mine[end]
        rows.append([name, *errors[:-1], f"{last.measured:.1f} {last.predicted:6.1f}", errors[-1]])
    return table(rows)


def _stages(found: Sequence[Stages]) -> str:
    kinds = max((list(one.measured_ms) for one in found), key=len)[-4:]
    rows = [["", *kinds]]
    for group in dict.fromkeys(one.group for one in found):
        rows.append([group])
        for one in (one for one in found if one.group == group):
            pairs = [
                (one.measured_ms[kind], one.predicted_ms[kind]) if kind in one.measured_ms else () for kind in kinds
            ]
            rows.append([f"  {one.name}", *(f"{pair[0]:.1f} {pair[1]:6.1f}" if pair else "-" for pair in pairs)])
    return table(rows)


def _heading(scenario: Mapping[str, Any]) -> list[str]:
    engines = (
        f"{scenario['prefill']} P (TP{scenario['prefill_tp']}) to {scenario['decode']} D (TP{scenario['decode_tp']})"
    )
    hardware = f"{scenario['hardware']} ({scenario['calibration']})"
    first = f"{scenario['model']} on {hardware} over {scenario['fabric']}, {engines}"
    if scenario["arrival"] == "trace":
        second = f"arrivals from {scenario['trace']}"
    else:
        second = (
            f"{scenario['requests']} requests, {scenario['input_len']} tokens in, {scenario['output_len']} out,"
            f" {scenario['arrival']} at {scenario['qps']:g} per s"
        )
    lines = [first, f"{second}, seed {scenario['seed']}"]
    if scenario["mode"]:
        own = f", path {scenario['path']}, overlap {scenario['overlap']}" if scenario["mode"] == "pushkv" else ""
        lines.append(f"mode {scenario['mode']}{own}, router {scenario['router']}")
    return [_cut(line) for line in lines]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _spreads(got: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        ("time to first token, ms", got["ttft_ms"]),
        ("time per output token, ms", got["tpot_ms"]),
        ("end to end, ms", got["e2e_ms"]),
        ("prefill leg, ms", got["prefill_ms"]),
        ("exposed hand-over, ms", got["handover_ms"]),
        ("  posting, ms", got["transfer"]["post_ms"]),
        ("  wire, ms", got["transfer"]["wire_ms"]),
    ]


def _facts(doc: Document) -> list[tuple[str, str]]:
    got, wall_s = doc["summary"], doc["wall_s"]
    rate = f" ({_number(got['throughput_rps'])} per s)" if got["throughput_rps"] is not None else ""
    speed = f" ({_count(got['requests'] / wall_s)} requests per s)" if wall_s > 0 else ""

    def sides(name: str, form: Callable[[float | None], str]) -> str:
        return f"P {form(got[name]['prefill'])}, D {form(got[name]['decode'])}"

    return [
        ("completed", f"{_count(got['completed'])} in {_number(got['duration_s'])} s{rate}"),
        ("failed", _count(got["failed"])),
        ("moved", f"{_bytes(got['transfer']['bytes'])} in {_count(got['transfer']['descriptors'])} descriptors"),
        ("preemptions", sides("preemptions", _count)),
        ("KV cache peak", sides("kv_peak_fraction", _percent)),
        ("held for the network", f"{sides('held_block_s', _count)} block·s"),
        ("simulated", f"in {wall_s:.2f} s{speed}"),
        ("", f"{_count(doc['events'])} events, {_count(doc['machine_steps'])} steps of the protocol's machines"),
    ]
