"""The result of an exploration as tables."""

from __future__ import annotations

from collections.abc import Sequence

from pushkv.sim.explore.causes import CRASH_STATES
from pushkv.sim.explore.network import KINDS
from pushkv.sim.explore.tally import FATES, Exploration, Tally
from pushkv.sim.report import table

UNKIND = ("lossy", "hostile")
"""Profiles that do everything to every kind of message."""
NEVER = "never"
SHORT = {"dropped": "dropped", "duplicated": "doubled", "reordered": "late"}


def summary(found: Exploration) -> str:
    """All of it."""
    total = found.total
    parts = [_heading(found, total), table(_profiles(found, total), gap=1)]
    parts.append("Percent of runs in which a message of that kind was\n" + table(_messages(found, total), gap=1))
    if total.crashes:
        parts.append("Runs in which an engine with an open shard in that state was\n" + table(_crashes(total)))
    return "\n\n".join(parts)


def _heading(found: Exploration, total: Tally) -> str:
    ranges = ", ".join(f"{start}:{stop}" for start, stop in found.seeds)
    speed = f"{total.events / total.cpu_s:,.0f} events per CPU second" if total.cpu_s else "nothing played"
    verdict = f"{len(found.violations):,} violations" if found.violations else "no violation"
    return "\n".join(
        (
            f"seeds {ranges}: {verdict}" + (" (interrupted)" if found.interrupted else ""),
            f"{total.runs:,} runs, {total.pairs:,} pairs of runs; {found.wall_s:.1f} s, {total.cpu_s:.1f} s of CPU",
            f"{total.events:,} events, {speed}",
        )
    )


def _profiles(found: Exploration, total: Tally) -> list[Sequence[str]]:
    columns = {**found.profiles, **({"all": total} if len(found.profiles) > 1 else {})}
    tallies = list(columns.values())

    def row(name: str, values: Sequence[float]) -> tuple[str, ...]:
        return (name, *(_short(value) if value else "-" for value in values))

    reasons = sorted(outcome for outcome in total.outcomes if outcome.startswith("failed"))
    rows: list[Sequence[str]] = [("", *columns), row("runs", [t.runs for t in tallies])]
    rows.append(row("transfers", [t.transfers for t in tallies]))
    for name, outcome in (("  loaded", "loaded"), ("  cancelled", "cancelled"), ("  a leg missing", "neither")):
        rows.append(row(name, [t.outcomes.get(outcome, 0) for t in tallies]))
    rows.append(row("  failed", [sum(t.outcomes.get(reason, 0) for reason in reasons) for t in tallies]))
    for reason in reasons:
        rows.append(row("  " + reason.removeprefix("failed: "), [t.outcomes.get(reason, 0) for t in tallies]))
    rows.append(row("events", [t.events for t in tallies]))
    rows.append(row("CPU s", [t.cpu_s for t in tallies]))
    rows.append(row("events per CPU s", [t.events / t.cpu_s if t.cpu_s else 0.0 for t in tallies]))
    return rows


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:,.0f}" if value >= 10 or isinstance(value, int) else f"{value:.1f}"


def _messages(found: Exploration, total: Tally) -> list[Sequence[str]]:
    groups = {name: tally for name, tally in found.profiles.items() if name in UNKIND or len(found.profiles) == 1}
    if len(found.profiles) > 1:
        groups["all"] = total
    rows: list[Sequence[str]] = [("", *(f"{name}:" if not i else "" for name in groups for i in range(len(FATES))))]
    rows.append(("message", *(SHORT[fate] for _ in groups for fate in FATES)))
    for kind in KINDS:
        cells = []
        for tally in groups.values():
            for fate in FATES:
                hits = tally.fates.get(f"{kind} {fate}", 0)
                cells.append(f"{100 * hits / tally.runs:.1f}" if hits else NEVER)
        rows.append((kind, *cells))
    return rows


def _crashes(total: Tally) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("shard", "killed", "paused")]
    for state in CRASH_STATES:
        hits = [total.crashes.get(f"{how} {state}", 0) for how in ("killed", "paused")]
        rows.append((state, *(f"{count:,}" if count else NEVER for count in hits)))
    return rows
