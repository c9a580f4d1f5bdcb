"""What breaks a property is made small, can be written down, and breaks the same property when it is played again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pushkv.sim.errors import BadInput
from pushkv.sim.explore import plan
from pushkv.sim.explore.case import Case, case_of, from_json, play_case, to_json
from pushkv.sim.explore.profiles import CONFIGS, PROFILES
from pushkv.sim.explore.shrink import ddmin, shrink
from tests.protocol.mutants import MUTANTS

TRANSFERS = 8


def broken(name: str) -> Case:
    """The first seed that notices the mutant ``name``, which is in place."""
    profile, settings = MUTANTS[name].profile, MUTANTS[name].settings
    assert profile is not None
    shapes = list(CONFIGS.values())
    for seed in range(60):
        case = case_of(seed, profile, shapes[seed % len(shapes)], TRANSFERS, settings)
        played = play_case(case)
        if played.violation:
            return msgspec.structs.replace(case, violation=played.violation)
    pytest.fail(f"{name} survives")


@pytest.mark.parametrize("name", ["freed_at_the_first_failure", "failed_with_a_handle_active", "seen_forgotten"])
def test_a_mutants_case_is_small_and_breaks_the_same_property(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[name].apply(patch)
        case = broken(name)
        least = shrink(case)
        assert least.broken == case.broken
        assert least.actions is not None and len(least.actions) <= 4 < len(case.plan())
        assert least.faults is not None and len(least.faults) <= 3
        again = from_json("case.json", to_json(least).encode())
        assert again == least
        assert len(to_json(least)) < 3000
        played = play_case(again, transcript=True)
        assert played.violation == least.violation
        assert 5 < len(played.lines) < 200
    assert play_case(again).violation == ""


def test_what_breaks_nothing_stays_as_it_is() -> None:
    case = case_of(0, PROFILES["lossy"], CONFIGS["plain"], 4)
    assert shrink(case) == case


def test_leaving_something_out_does_not_shuffle_the_rest() -> None:
    """A request keeps its name and its chances, whatever else is played."""
    case = case_of(3, PROFILES["lossy"], CONFIGS["plain"], TRANSFERS)
    last = [action for action in case.plan() if isinstance(action, plan.Dispatch)][-1]
    alone = play_case(msgspec.structs.replace(case, actions=(last,), faults=())).worlds[0]
    request = alone.requests[f"t{last.number}"]
    assert (request.prompt, request.tokens, request.outcome) == (last.prompt, last.tokens, "loaded")
    assert alone.causes.labels == []


def test_faults_can_be_chosen_by_their_labels() -> None:
    case = case_of(5, PROFILES["lossy"], CONFIGS["plain"], TRANSFERS)
    labels = play_case(case).worlds[0].causes.labels
    chosen = tuple(labels[: len(labels) // 3])
    met = play_case(msgspec.structs.replace(case, faults=chosen)).worlds[0].causes.labels
    assert met
    assert set(met) <= set(chosen)
    assert play_case(msgspec.structs.replace(case, faults=tuple(labels))).worlds[0].causes.labels == labels


@pytest.mark.parametrize("least", [[], [3], [0, 7], [1, 2, 3, 11]])
def test_ddmin_finds_the_least(least: list[int]) -> None:
    def breaks(items: Sequence[int]) -> bool:
        return set(least) <= set(items)

    assert ddmin(range(12), breaks) == least


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not a case"),
        (b"[]", "is not a case"),
        (b'{"schema": 9, "seed": 1, "profile": "calm", "shape": "plain", "transfers": 1}', "reads schema 1"),
        (b'{"schema": 1, "seed": 1, "profile": "calmy", "shape": "plain", "transfers": 1}', "did you mean 'calm'"),
        (b'{"schema": 1, "seed": 1, "profile": "calm", "shape": "square", "transfers": 1}', "choose from plain"),
        (
            b'{"schema": 1, "seed": 1, "profile": "calm", "shape": "plain", "transfers": 1, "changes": {"x": 1}}',
            "unexpected keyword",
        ),
        (
            b'{"schema": 1, "seed": 1, "profile": "calm", "shape": "plain", "transfers": 1, "actions":'
            b' [{"type": "kill", "at": 1, "engine": "X", "down_s": 1, "told_s": null}]}',
            "engine 'X' is not known",
        ),
    ],
)
def test_a_file_that_is_no_case_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_json("case.json", text)
