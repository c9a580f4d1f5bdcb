"""Put vLLM's own push connector and pushkv's through the same faults, on real servers, and print both outcomes.

    .venv-e2e/bin/python experiments/faults/run.py                       # both, and the table
    .venv-e2e/bin/python experiments/faults/run.py --connector pushkv    # one anew; the other from its last run
    .venv-e2e/bin/python experiments/faults/run.py --file test_faults_kill.py    # only these tests anew
    .venv-e2e/bin/python experiments/faults/run.py --file test_faults_kill.py --match direct    # of those, these
    .venv-e2e/bin/python experiments/faults/run.py --table-only

The tests are those of ``make e2e``; every outcome goes to ``results/<connector>.jsonl``, the table to ``README.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = {"vllm": "vLLM 0.32 push", "pushkv": "pushkv"}
COLUMNS = {
    "vLLM 0.32 push": ("vllm", "direct"),
    "pushkv, packed": ("pushkv", "packed"),
    "pushkv, chunk by chunk": ("pushkv", "chunk"),
    "pushkv, direct": ("pushkv", "direct"),
}
"""Of the table: the connector and the path; a test without a path counts for every one."""
PATH = re.compile(r"\[(packed|chunk|direct)\b")
TITLES = {
    "F01": "part of the prompt is cached on P, on D or on both",
    "F02": "D's request is aborted, others use its memory, then P writes",
    "F03": "the same with the write under way",
    "F06": "P is killed, or freezes, while D waits",
    "F07": "D is killed and comes back under its name with other memory",
    "F09": "P's lease ends while a handshake is slow",
    "F11": "two attempts, or two children, have one id",
    "F12": "the legs go to servers that do not match; only one leg comes",
    "F13": "P's leg is rejected, aborted, or stops on its first token",
    "F14": "D rejects its leg, or is gone for good",
    "F15": "D's leg is aborted while it queues",
    "F16": "D's leg is aborted and P's never comes",
    "F17": "opposite orders on two full caches",
    "F18": "idle engines while a registration waits",
    "F19": "the notice of completion is lost, or comes twice",
    "F22": "P keeps nothing after success",
    "F26": "bad parameters from the network",
    "F27": "strangers at the side channel",
    "F28": "staging and landing memory are full",
    "F32": "the link stalls for two seconds, then goes on or fails",
    "F35": "posting a write raises",
    "F36": "P pauses, shorter and longer than the bound",
    "F37": "idle engines while a write is under way",
    "F39": "legs at once, P first, D first",
    "F40": "the router knows a P that is no longer there",
    "F41": "several children, chat",
}


def run(connector: str, files: list[str], match: str) -> None:
    """Run the tests with one connector; what they say replaces what was known of them."""
    outcomes = HERE / "results" / f"{connector}.jsonl"
    known = {} if not files and not match else {row["test"]: row for row in rows_of(outcomes)}
    fresh = outcomes.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--confcutdir=tests/e2e", "-q", "--tb=no", "-m", "fault"]
    command += [f"tests/e2e/{name}" for name in files] or ["tests/e2e"]
    command += ["-k", match] if match else []
    subprocess.run([*command, "--connector", connector, "--outcomes", str(fresh)], cwd=ROOT, check=False)
    known |= {row["test"]: row for row in rows_of(fresh)}
    fresh.unlink(missing_ok=True)
    outcomes.write_text("".join(json.dumps(row) + "\n" for row in known.values()), encoding="utf-8")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The outcomes in a file, one per test."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def cell(rows: list[dict[str, Any]], fault: str) -> str:
    """What one connector did with one fault."""
    mine = [row for row in rows if fault in row["faults"]]
    if not mine:
        return "not run"
    mine = [row for row in mine if row["outcome"] != "skipped"]
    if not mine:
        return "does not apply"
    failed = [row for row in mine if row["outcome"] == "failed"]
    if not failed:
        return "right"
    said = dict.fromkeys(_short(str(row["said"])) for row in failed)
    return f"**{len(failed)} of {len(mine)} wrong:** " + "; ".join(said)


def _short(said: str) -> str:
    """The sentence of an assertion, without the numbers that differ from run to run."""
    said = re.sub(r"^(AssertionError|Failed): ", "", said).split("\nassert")[0]
    said = re.sub(r"holds [\d.]+% of its cache after \d+ s", "holds cache for good", said)
    said = re.sub(r"differ by [\d.]+ from a plain server's", "differ", said)
    said = re.sub(r"after \d+ s", "in time", said) if "nothing" in said else said
    return said[:110].replace("|", "/")


def table() -> str:
    """The faults in lines, the connectors and their paths in columns."""
    found: dict[str, list[dict[str, Any]]] = {}
    for column, (name, path) in COLUMNS.items():
        rows = rows_of(HERE / "results" / f"{name}.jsonl")
        rows = [row for row in rows if (of := PATH.search(row["test"])) is None or of[1] == path]
        found[column] = [row for row in rows if "no pair to begin with" not in row["said"]]  # the machine was too busy
    shown = [column for column, rows in found.items() if rows]
    out = ["| fault | " + " | ".join(shown) + " |", "| --- |" + " --- |" * len(shown)]
    for fault, title in TITLES.items():
        out.append(f"| {fault} {title} | " + " | ".join(cell(found[column], fault) for column in shown) + " |")
    totals = []
    for column in shown:
        judged = [row for row in found[column] if row["outcome"] != "skipped"]
        totals.append(f"{sum(row['outcome'] == 'passed' for row in judged)} of {len(judged)} tests")
    return "\n".join([*out, "| **passed** | " + " | ".join(totals) + " |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", choices=sorted(NAMES), action="append", help="run this one (default: both)")
    parser.add_argument("--file", action="append", default=[], help="run the tests of this file only")
    parser.add_argument("--match", default="", help="run only the tests whose names match, as pytest's -k")
    parser.add_argument("--table-only", action="store_true", help="run nothing, print what the last runs found")
    chosen = parser.parse_args()
    for name in () if chosen.table_only else chosen.connector or NAMES:
        run(name, chosen.file, chosen.match)
    text = table()
    page = HERE / "README.md"
    before, _, _ = page.read_text(encoding="utf-8").partition("<!-- table -->")
    page.write_text(f"{before}<!-- table -->\n\n{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
