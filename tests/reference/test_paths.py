"""Which path a prompt takes, and why: by setting, by memory, by what both would cost."""

from __future__ import annotations

import pytest

from pushkv.model.protocol import Settings
from pushkv.model.timing import path_costs, profiles
from pushkv.reference.office import Office
from pushkv.reference.ports import Address
from pushkv.reference.settings import ConnectorSettings, SettingsError

from .said import wanted

PEER = Address("P", "127.0.0.1", 5600, 1)


def office(path: str) -> Office:
    return Office(
        Settings(landing_segments=8), 1, path=path, packed_costs_less=lambda tokens: tokens > 5, segment_bytes=100,
        token_bytes=10, landing_bytes=lambda tokens, links: 10 * tokens, deliver=lambda rank, command: None,
        wake=lambda: None, stop=lambda drain_s: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "tokens", "packed", "why"),
    [
        ("auto", 50, True, "costs less"),
        ("auto", 3, False, "costs less"),
        ("auto", 1000, False, "larger than the landing memory"),
        ("packed", 3, True, "by setting"),
        ("direct", 50, False, "by setting"),
    ],
)
def test_the_choice_and_its_reason(path: str, tokens: int, packed: bool, why: str) -> None:
    one = office(path)
    one.inbox.append(wanted("t", PEER, tokens, tokens, None))
    one.turn(0.0)
    assert one.counters[f"path:{'packed' if packed else 'direct'}, {why}"] == 1


def test_costs_are_those_of_the_profiles() -> None:
    """Many pieces make direct dear; over one piece nothing is gained by packing it."""
    settings = ConnectorSettings(hardware="h100", fabric="efa-p5en")
    many, one = (settings.path_costs("cuda", 1 << 30, pieces) for pieces in (100_000, 1))
    assert many.packed and not one.packed
    assert many == path_costs(profiles.hardware("h100"), profiles.fabric("efa-p5en"), 1 << 30, 100_000)
    assert ConnectorSettings().path_costs("cuda", 1 << 30, 9) != ConnectorSettings().path_costs("cpu", 1 << 30, 9)
    with pytest.raises(SettingsError, match="one of"):
        ConnectorSettings.read({"fabric": "string"}, {})
