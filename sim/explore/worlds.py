"""The exhaustive worlds: small ones for the tests, the standard set, and larger ones.

What may happen in a world is its budget. No world has all kinds of fate at once; together they have each kind alone on
two transfers and most pairs of kinds on one.
"""

from __future__ import annotations

from typing import Final

from pushkv.sim.explore.scope import TRANSFERS, Budget, Plan, Scope, settings

PACKED, EARLY, LATE, PULL = Plan("packed"), Plan("early"), Plan("late"), Plan("pull")
MODES: Final = {"packed": PACKED, "early": EARLY, "late": LATE, "pull": PULL}

BEATLESS: Final = settings(beat_s=20.0, suspect_after_s=50.0, greet_s=20.0)
"""Deadlines of transfers come before any beat: time that comes early leads to them, and not to traffic."""
SILENT: Final = settings(beat_s=1.0, suspect_after_s=3.0, wait_s=8.0, lease_s=8.0, write_s=8.0)
"""Suspicion comes before any deadline."""
PATIENT: Final = settings(wait_s=10.0, lease_s=8.0, orphan_s=8.0)
"""Two words that are lost or overtaken cost a beat each, and there is time for that before any deadline."""
STEADY: Final = settings()

ONE: Final = tuple(
    Scope(f"{mode}: {name}", (plan,), budget, settings=spans)
    for mode, plan in MODES.items()
    for name, budget, spans in (
        ("lost and doubled", Budget(drop=1, duplicate=1), PATIENT),
        ("given up", Budget(abort=1, drop=1), PATIENT),
        ("too late", Budget(early=2, abort=1), BEATLESS),
        ("restarted", Budget(kill=1, tell=1, abort=1), STEADY),
        ("restarted late", Budget(kill=1, early=1), BEATLESS),
        ("broken", Budget(broken=1, abort=1, preempt=1), STEADY),
        ("stopped", Budget(pause=1, early=2), BEATLESS),
        ("revoked", Budget(early=1, revoke=1), BEATLESS),
    )
)
PAIR_FATES: Final = (
    ("given up", Budget(abort=1), STEADY),
    ("lost", Budget(drop=1), PATIENT),
    ("restarted", Budget(kill=1), STEADY),
    ("too late", Budget(early=1), BEATLESS),
)
REGISTERED: Final = tuple(f"{engine} arrives {tid}" for engine in "DP" for tid in TRANSFERS)
"""Both legs of both transfers have arrived, and what that sets off has been heard."""
TWO: Final = tuple(Scope(f"two {mode}", (plan, plan)) for mode, plan in MODES.items()) + tuple(
    Scope(f"two {mode}: {name}", (plan, plan), budget, prelude=REGISTERED, settings=spans)
    for mode, plan in MODES.items()
    for name, budget, spans in PAIR_FATES
)
FROM_THE_START: Final = tuple(
    Scope(f"two {mode} from the start: {name}", (plan, plan), budget, settings=spans)
    for mode, plan in MODES.items()
    for name, budget, spans in PAIR_FATES
)
LAPSE: Final = settings(beat_s=1.0, suspect_after_s=3.0, wait_s=20.0, lease_s=4.0, write_s=8.0)
HELD: Final = (
    "D arrives t-1", "P arrives t-1", "P starts t-1", "D admits t-1", "D arrives t-2", "P arrives t-2", "P starts t-2",
    "P computes t-2",
)  # fmt: skip
"""One block: it is t-1's, whose prefill runs; t-2's has ended."""
APART: Final = Plan("packed", 2, apart=True)
SCARCE: Final = settings(landing_segments=1)
SHORT: Final = settings(staging_bytes=100)
"""Staging for one part."""
SHAPES: Final = (
    Scope("cold", (PACKED,), Budget(unfit=1, drop=1), warm=False, settings=PATIENT),
    Scope("cold: restarted", (EARLY,), Budget(kill=1, tell=1), warm=False),
    Scope("cold: refused", (EARLY, EARLY), Budget(unfit=1), warm=False),
    Scope("cold: refused, restarted", (EARLY,), Budget(unfit=1, kill=1, tell=1), warm=False),
    Scope("silence", (EARLY,), Budget(early=3), settings=SILENT),
    Scope("silence: restarted", (EARLY,), Budget(dark=5, kill=1), settings=SILENT),
    Scope("opposite", (LATE, LATE), d_blocks=1),
    Scope("opposite, packed", (PACKED, PACKED), p_blocks=1, settings=SCARCE),
    Scope("opposite, packed: preempted", (PACKED, PACKED), Budget(preempt=1), p_blocks=1, settings=SCARCE),
    Scope("giving way: given up", (LATE, LATE), Budget(abort=1), d_blocks=1, prelude=HELD),
    Scope("giving way: too late", (LATE, LATE), Budget(early=1), d_blocks=1, prelude=HELD, settings=BEATLESS),
    Scope("giving way: two D ranks", (LATE, LATE), d_blocks=1, decode=2, prelude=HELD),
    Scope("giving way: two P ranks", (LATE, LATE), d_blocks=1, prefill=2, prelude=HELD),
    Scope("late: killed", (LATE,), Budget(kill=1)),
    Scope("silence: lapses", (LATE,), Budget(dark=6, pause=1), settings=LAPSE),
    Scope("two P ranks", (LATE,), Budget(abort=1), prefill=2),
    Scope("two P ranks, packed", (PACKED,), Budget(abort=1), prefill=2),
    Scope("two D ranks", (LATE,), Budget(abort=1), decode=2),
    Scope("two D ranks, packed", (PACKED,), Budget(abort=1), decode=2),
    Scope("two D ranks: restarted", (EARLY,), Budget(kill=1), decode=2),
    Scope("two P ranks: restarted", (EARLY,), Budget(kill=1), prefill=2),
    Scope("inside", (LATE,), Budget(abort=1, drop=1), inside=True, settings=PATIENT),
    Scope("parts", (Plan("packed", 2),), Budget(preempt=1, abort=1)),
    Scope("parts: lost", (Plan("packed", 2),), Budget(drop=1, duplicate=1, broken=1), settings=PATIENT),
    Scope("parts: short of staging", (Plan("packed", 2),) * 2, settings=settings(staging_bytes=200)),
    Scope("parts: taken back", (Plan("packed", 2),) * 2, Budget(preempt=1), p_blocks=1, settings=SHORT),
    Scope("parts: taken back, two D ranks", (Plan("packed", 2),), Budget(preempt=2), decode=2, settings=SHORT),
    Scope("parts: taken back, two P ranks", (Plan("packed", 2),), Budget(preempt=2), prefill=2, settings=SHORT),
    Scope("parts: taken back, given up", (Plan("packed", 2),), Budget(preempt=2, abort=1, kill=1), settings=SHORT),
    Scope("parts: preempted at the end, two P ranks", (APART,), Budget(preempt=1), prefill=2, settings=SHORT),
    Scope("parts: preempted at the end, two D ranks", (APART,), Budget(preempt=1), decode=2, settings=SHORT),
    Scope("parts: preempted at the end, given up", (APART,), Budget(preempt=1, abort=1, broken=1)),
    Scope("prefix hit", (Plan("packed", tokens=0), Plan("late", tokens=0)), Budget(abort=1)),
    Scope("no prefill", (Plan("late", missing="P"),), Budget(abort=1, early=1), settings=BEATLESS),
    Scope("no decode", (Plan("late", missing="D"),), Budget(abort=1)),
)

STANDARD: Final = ONE + TWO + tuple(scope for scope in FROM_THE_START if scope.plans[0] is EARLY) + SHAPES
"""Each has been searched until its frontier was empty."""
_SHORT: Final = ("lost and doubled", "given up", "broken", "revoked")
_QUICK: Final = frozenset(f"{mode}: {name}" for mode in MODES for name in _SHORT) | {
    "early: too late", "early: restarted", "late: killed", "cold", "cold: restarted", "cold: refused",
    "cold: refused, restarted", "silence: restarted", "silence: lapses", "opposite, packed: preempted",
    "giving way: given up", "giving way: too late", "giving way: two D ranks", "giving way: two P ranks",
    "two early: given up", "two early: restarted", "two P ranks", "parts", "parts: taken back, two P ranks",
    "prefix hit", "no prefill", "no decode",
}  # fmt: skip
SMALL: Final = tuple(scope for scope in STANDARD if scope.name in _QUICK)
"""Those of the standard set that take seconds: the tests search them."""
DEEP: Final = (
    *STANDARD,
    *(scope for scope in FROM_THE_START if scope.plans[0] is not EARLY),
    Scope("opposite: given up", (LATE, LATE), Budget(abort=1), d_blocks=1),
    Scope("two D ranks, inside", (LATE,), Budget(abort=1), decode=2, inside=True),
    Scope("opposite, two P ranks", (LATE, LATE), d_blocks=1, prefill=2),
)
"""Larger ones. None of those that are not in the standard set ends within 40,000 states; how far they go has not been
tried, so a limit belongs to them.
"""
