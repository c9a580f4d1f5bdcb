"""Print the table of faults and mutants with the runs that each mutant lives; ``--write`` renews the document."""

import sys

from tests.protocol.mutants import MUTANTS, hunt
from tests.protocol.mutants.table import FILE, HEAD, rows


def main() -> int:
    """1 if a mutant survives."""
    runs = {}
    for name, mutant in MUTANTS.items():
        played, broken = hunt(mutant)
        runs[name] = str(played) if broken else "survives"
    text = HEAD + "\n".join(rows(runs)) + "\n"
    if "--write" in sys.argv:
        FILE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return int("survives" in runs.values())


if __name__ == "__main__":
    sys.exit(main())
