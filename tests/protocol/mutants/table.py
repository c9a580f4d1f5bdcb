"""Which mutant stands for which fault, as a table: ``docs/mutants.md``.

The runs that a mutant lived are measured when the table is written; everything else is checked by ``test_mutations``.
"""

from __future__ import annotations

from pathlib import Path

from tests.protocol.mutants.registry import MUTANTS, SEEDS

FILE = Path(__file__).parents[3] / "docs" / "mutants.md"

FAULTS = {
    "F01": "D has the first blocks cached, and the lists are cut from the front",
    "F02": "an abort on D gives blocks to another request, P writes them",
    "F03": "the same with a write in flight, with one of two notices in, before the handshake",
    "F04": "one of two P ranks that feed a D rank cannot write",
    "F05": "blocks are freed at the first failure, a sibling still writes",
    "F06": "P is killed while D waits",
    "F07": "D comes back with the same id and other memory",
    "F08": "beats name an id that P cannot resolve",
    "F09": "a write waits for a handshake, the lease ends, then it is posted",
    "F10": "a handshake with a dead peer holds up the rest",
    "F11": "the same request dispatched twice, the first attempt slow",
    "F12": "a registration at the wrong P, very often",
    "F13": "P's leg is rejected or aborted, D is not told",
    "F14": "D rejects the request, P holds its blocks",
    "F15": "abort on D before there are blocks",
    "F16": "the client leaves D while P has not come",
    "F17": "opposite admission order, both caches full",
    "F18": "a registration stays unmatched on an idle engine",
    "F19": "a notice is lost, doubled, early or late",
    "F20": "preempted in its last step, taken for finished",
    "F21": "preempted between chunks, the source is reused under a read",
    "F22": "every success keeps P's blocks to the lease",
    "F23": "short-lived peers come and go",
    "F24": "a peer is evicted while a transfer uses it",
    "F25": "peers that do not fit each other",
    "F26": "block ids out of range",
    "F27": "damaged, unknown or forged messages",
    "F28": "staging or landing is full",
    "F29": "region i on P is not region i on D",
    "F30": "only one of several D ranks is written",
    "F31": "notices come out of order",
    "F32": "the link dies in the middle of a write and comes back",
    "F33": "a failed receive: what an older prompt left is used",
    "F34": "D preempted after its load asks for a push that never comes",
    "F35": "the transfer call raises",
    "F36": "P is busy, its beats are late",
    "F37": "writes are in flight and nobody polls",
    "F38": "very many descriptors",
    "F39": "router answers are sequential, so a leg comes late",
    "F40": "the router's address of P is stale",
    "F41": "several prompts in one call, `n` > 1",
    "F42": "the clock jumps",
}

ELSEWHERE = {
    "F34": "the host's doing: `Loaded` ends a transfer in the core, and nothing there asks again; the connector lets "
    "the engine recompute. A second registration of the id would be answered at once (transcript `asked_again`)",
    "F41": "the router's and the connector's doing, one `transfer_id` per child. To the core children are strangers",
}
"""Rows that the core and the planner cannot have, with the reason."""

PROPERTIES = """\
I1 landings hit their own registration's memory; I2 no source is freed, rewritten or unready under a read; I3 D starts
with P's bytes; I5a verdict in time; I5b released or freed in time; I5c nothing left; I6 peers, I7 attempts leave each
other alone; V1 no failure without a cause; V2 loads after the faults; V3 tables bounded. `layout`: the planner's
oracle. F27: a frame is read as it was written, or refused."""

HEAD = f"""\
# Faults, and the mutants that stand for them

Written by `python -m tests.protocol.mutants --write`; do not edit. Each mutant puts the mistake of a real system into
the production code; a property must notice it within {SEEDS} runs (`tests/protocol/test_mutations.py`), where an
exception of the code does not count. The code is `tests/protocol/mutants/`.

{PROPERTIES}

| fault | what happens | mutant | what it does | property | runs |
|---|---|---|---|---|---|
"""


def rows(runs: dict[str, str] | None = None) -> list[str]:
    """One row a fault and mutant; ``runs``: what was measured, by mutant."""
    lines = []
    for fault, title in FAULTS.items():
        found = [each for each in MUTANTS.values() if fault in each.faults]
        for each in found:
            properties = " or ".join(each.expected)
            measured = (runs or {}).get(each.name, "")
            lines.append(f"| {fault} | {title} | `{each.name}` | {each.what} | {properties} | {measured} |")
        if fault in ELSEWHERE:
            lines.append(f"| {fault} | {title} | none | {ELSEWHERE[fault]} | | |")
    return lines


def bare(text: str) -> list[str]:
    """The rows of a written table without the last column."""
    return [line.rsplit("|", 2)[0] for line in text.splitlines() if line.startswith("| F")]
