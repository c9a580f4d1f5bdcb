"""From requests and the servers' records to tables: one row per load, and where the time of a hand-over went.

    python experiments/gpu_handover/report.py out/gpu_handover     # again, from what a run left there; draws it too
    python experiments/gpu_handover/report.py experiments/gpu_handover/results 8b   # a run that is kept

Milliseconds. The exposed hand-over is TTFT minus P's own leg. In the table of stages every time counts from the end of
P's leg as the client saw it: what is negative was over before the prefill's answer was.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    "mode", "row", "input_len", "number", "sent_s", "prefill_ms", "ttft_ms", "tpot_ms", "tokens", "error",
    "gathered_ms", "posted_ms", "written_ms", "landed_ms", "asked_ms", "launched_ms", "loaded_ms", "parts", "gather_ms",
    "post_ms", "wire_ms", "turn_p_ms", "turn_d_ms",
)  # fmt: skip
STAGES = (
    ("enqueued", "P's last step is enqueued"),
    ("computed", "P's engine has the first token"),
    ("launched_first", "first gather is launched"),
    ("gathered_first", "and seen to be done"),
    ("launched_last", "last gather is launched"),
    ("gathered", "and seen to be done"),
    ("posting", "last write begins to be posted"),
    ("posted", "and is posted"),
    ("written", "and seen to be complete"),
    ("verdict", "P's verdict"),
    ("heard", "D hears of the first part"),
    ("landed", "D has all"),
    ("asked", "D's step asks for the scatter"),
    ("launched", "scatter is launched"),
    ("loaded", "scatter is seen to be done"),
    ("token", "first token"),
)
PARTS = ("packing", "launched_last", "gathered", "posting", "posted", "written")
"""The columns of a record's parts, as stages: the last of them."""
SUMS = (("gather_ms", "gathers"), ("post_ms", "posting"), ("wire_ms", "wire"))
TABLE = (
    "mode", "row", "n", "lost", "prefill_p50", "handover_p50", "handover_p90", "handover_p99", "land_p50", "land_p99",
    "land_steps", "tpot", "tpot_alone", "slower_pct", "prefill_each", "prefill_each_alone", "prefill_slower_pct",
)  # fmt: skip


def read_records(paths: Iterable[Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """transfer id -> side (send, receive, load) -> record."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found.setdefault(record["transfer_id"].split("/")[0], {})[record["side"]] = record
    return found


def stages(served: Any, records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds from the end of P's leg to each of ``STAGES`` that is known; the sums over parts too."""
    zero = served.sent_s + served.prefill_s
    at: dict[str, float] = {"token": served.sent_s + served.ttft_s} if served.token_s else {}
    send, receive, load = records.get("send", {}), records.get("receive", {}), records.get("load", {})
    parts = send.get("parts") or []
    if parts:
        columns = list(zip(*parts, strict=True))
        for name, values in zip(PARTS, columns[1:], strict=True):
            at[name] = max(values)
        at["launched_first"], at["gathered_first"] = min(columns[2]), min(columns[3])
    for record, name in (
        *((send, name) for name in ("enqueued", "computed", "verdict")),
        *((receive, name) for name in ("heard", "landed")),
        *((load, name) for name in ("asked", "launched", "loaded")),
    ):
        if record.get(f"{name}_s"):
            at[name] = record[f"{name}_s"]
    found = {name: 1e3 * (when - zero) for name, when in at.items() if when}
    found |= {f"{name}_ms": 1e3 * send[f"{name}_s"] for name in ("gather", "post", "wire") if f"{name}_s" in send}
    if parts:
        found["parts"] = float(len(parts))
    for name, record in (("turn_p_ms", send), ("turn_d_ms", load)):
        if "longest_turn_s" in record:
            found[name] = 1e3 * record["longest_turn_s"]
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted or unsorted ``values``."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval."""
    if len(values) < 2:
        return (values[0] if values else float("nan")), float("nan")
    return statistics.fmean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5


def row_of(mode: str, row: str, found: Sequence[Any], of: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """One line of the table. ``of``: request number -> its stages."""
    good = [served for served in found if not served.error]
    line: dict[str, Any] = {"mode": mode, "row": row, "n": len(good), "lost": len(found) - len(good)}
    if not good:
        return {**line, "said": found[0].error if found else ""}
    handover = [1e3 * (served.ttft_s - served.prefill_s) for served in good if served.token_s]
    line["prefill_p50"] = statistics.median(1e3 * served.prefill_s for served in good)
    if handover:
        line["ttft_mean"] = statistics.fmean(1e3 * served.ttft_s for served in good)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            line[f"handover_{name}"] = statistics.median(handover) if share == 0.5 else quantile(handover, share)
    landing = [at["token"] - at["landed"] for at in (of.get(served.number, {}) for served in good) if "landed" in at]
    if landing:
        line["land_p50"], line["land_p99"] = statistics.median(landing), quantile(landing, 0.99)
    steps = [1e3 * served.tpot_s for served in good if len(served.token_s) > 2]
    if steps:
        line["own_tpot"] = statistics.median(steps)
    return line


def finish(line: dict[str, Any], step_ms: float | None) -> dict[str, Any]:
    """The same with landing to first token in steps of D, and rounded."""
    if step_ms and "land_p50" in line:
        line["land_steps"] = line["land_p50"] / step_ms
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}


def print_stages(mode: str, row: str, all_stages: Sequence[Mapping[str, float]]) -> None:
    """Median and 90th percentile of every stage."""
    if not any("landed" in at or "gathered" in at for at in all_stages):
        return
    print(f"  stages of {mode} {row}, ms from the end of P's leg: median, P90, largest")
    sums = [(name, f"sum over parts, {says}") for name, says in SUMS]
    turns = [("parts", "number"), ("turn_p_ms", "longest turn of P's thread"), ("turn_d_ms", "longest turn of D's")]
    for name, says in (*STAGES, *sums, *turns):
        values = [at[name] for at in all_stages if name in at]
        if values:
            middle, high, most = statistics.median(values), quantile(values, 0.9), max(values)
            print(f"    {middle:9.2f} {high:9.2f} {most:9.2f}  {name}: {says}")
    sys.stdout.flush()


def append_csv(path: Path, requests: Sequence[Any], of: Mapping[str, Mapping[str, float]]) -> None:
    """One line per request."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for served in requests:
            at = of.get(served.number, {})
            line: list[Any] = [served.mode, served.row, served.input_len, served.number, f"{served.sent_s:.4f}"]
            line.append(f"{1e3 * served.prefill_s:.3f}")
            done = bool(served.token_s) and not served.error
            line += [f"{1e3 * served.ttft_s:.3f}", f"{1e3 * served.tpot_s:.4f}"] if done else ["", ""]
            line += [len(served.token_s), served.error]
            for name in COLUMNS[10:17]:
                line.append(f"{at[name[:-3]]:.3f}" if name[:-3] in at else "")
            for name in COLUMNS[17:]:
                line.append(f"{at[name]:.3f}" if name in at else "")
            writer.writerow(line)


def print_table(lines: Sequence[Mapping[str, Any]]) -> None:
    """The table for people."""
    names = [name for name in TABLE if any(name in line for line in lines)]
    cells = [names, *([str(line.get(name, "")) for name in names] for line in lines)]
    widths = [max(len(row[number]) for row in cells) for number in range(len(names))]
    for row in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def plot(csv_path: Path, target: Path) -> None:
    """Exposed hand-overs, a panel per row of the load, a curve per mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, dict[str, list[float]]] = {}
    with csv_path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["ttft_ms"] and line["row"]:
                gap = float(line["ttft_ms"]) - float(line["prefill_ms"])
                curves.setdefault(line["row"], {}).setdefault(line["mode"], []).append(gap)
    figure, axes = pyplot.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.4), squeeze=False)
    for axis, (row, modes) in zip(axes[0], curves.items(), strict=True):
        for mode, values in modes.items():
            ordered = sorted(values)
            share = [100 * (number + 1) / len(ordered) for number in range(len(ordered))]
            axis.step(ordered, share, where="post", label=mode)
        axis.set_title(row)
        axis.set_xlabel("exposed hand-over (ms)")
        axis.set_xlim(left=0)
        axis.set_ylabel("requests (%)")
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(target)


def main(folder: Path, name: str = "") -> int:
    """Prints the table of a run again, and draws it where matplotlib is installed. ``name``: of one kept in results."""
    end = f"_{name}" if name else ""
    text = (folder / f"rows{end}.jsonl").read_text(encoding="utf-8")
    print_table([json.loads(line) for line in text.splitlines()])
    try:
        plot(folder / f"requests{end}.csv", folder / f"handover{end}.png")
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:3]))
