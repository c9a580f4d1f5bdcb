"""Ways to break the protocol and the planner, by kind of mistake; ``registry`` says what a mutant is, ``table`` which
faults of real systems they stand for. ``python -m tests.protocol.mutants`` prints the table.
"""

from tests.protocol.mutants import arrivals, memory, peers, planner, staging, ways
from tests.protocol.mutants.registry import MUTANTS, hunt

__all__ = ["MUTANTS", "arrivals", "hunt", "memory", "peers", "planner", "staging", "ways"]
