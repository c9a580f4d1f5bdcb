"""The mutation run: what it makes of a function, and that what is said to live is still there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import CodeType, FunctionType

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "mutation"
sys.path.insert(0, str(FOLDER))

import run  # noqa: E402
from operators import mutants  # noqa: E402

SOURCE = '''
def clip(value, low, high):
    """Left as it is."""
    if value < low and not high:
        raise ValueError(f"{value} is {1}")
    return min(value + 2, high) - 1
'''


@pytest.fixture(scope="module")
def keys() -> dict[str, set[str]]:
    return {package: {key for key, _, _ in run.jobs(package, [])} for package in run.PACKAGES}


def test_every_mutant_is_another_function() -> None:
    scope: dict[str, FunctionType] = {}
    exec(SOURCE, scope)
    clip = scope["clip"]
    found = {mutant.key: mutant for mutant in mutants(SOURCE, "m")}

    def written(code: CodeType) -> tuple[object, ...]:
        return code.co_code, code.co_consts, code.co_names

    assert written(clip.__code__) not in {written(mutant.code()) for mutant in found.values()}
    assert not [key for key in found if "Left as" in key]
    assert [key for key in found if "value} is" in key] == [key for key in found if key.startswith("m:clip: delete")]
    clip.__code__ = found["m:clip: call: min(value + 2, high) -> max(value + 2, high)"].code()
    assert clip(1, 0, 5) == 4
    clip.__code__ = found["m:clip: compare: value < low -> value >= low"].code()
    with pytest.raises(ValueError, match="3 is 1"):
        clip(3, 0, 0)
    assert "m:clip: constant: 2 -> 3" in found, "in the argument of a call"
    assert {key.split(": ")[1] for key in found} == {
        "and/or", "arithmetic", "call", "compare", "constant", "delete", "drop", "not", "return"
    }  # fmt: skip


def test_no_two_mutants_have_one_name(keys: dict[str, set[str]]) -> None:
    for package, names in keys.items():
        assert len(list(run.jobs(package, []))) == len(names) > 500


def test_what_is_explained_is_a_mutant(keys: dict[str, set[str]]) -> None:
    """An explanation of code that is no more says nothing."""
    explained = run.known()
    assert sorted(explained.keys() - set().union(*keys.values())) == []
    assert all(len(why) > 10 for why in explained.values())
    text = run.SURVIVORS.read_text(encoding="utf-8")
    assert text.count("[[survivor]]") == len(explained), "explained twice"


@pytest.mark.parametrize("path", sorted(run.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_results_add_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    counts = [count for module in found["modules"].values() for count in module.values()]
    assert sum(counts) == found["mutants"]
    assert sum(module["alive"] for module in found["modules"].values()) == len(found["alive"])
    run.show(found)
    assert f"all {sum(m['killed'] for m in found['modules'].values()):>16}" in capsys.readouterr().out
