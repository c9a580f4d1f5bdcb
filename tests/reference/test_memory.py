"""Sizes of landing and staging memory."""

from __future__ import annotations

import pytest

from pushkv.reference.memory import MOST_BYTES, Sizes, host_free_bytes, sizes
from pushkv.reference.settings import ConnectorSettings, SettingsError

MIB, GIB = 1 << 20, 1 << 30


def found(free: int, margin: int = 0, *, send: bool = True, receive: bool = True, **extra: object) -> Sizes:
    return sizes(ConnectorSettings.read(extra, {}), free, margin, send=send, receive=receive)


def test_half_of_what_is_left_is_shared_out() -> None:
    assert found(9 * GIB, GIB) == Sizes(2 * GIB, 2 * GIB)


def test_not_more_than_is_useful() -> None:
    assert found(500 * GIB) == Sizes(MOST_BYTES, MOST_BYTES)


def test_a_direction_that_is_not_there_takes_one_segment() -> None:
    assert found(4 * GIB, send=False).staging_bytes == 2 * MIB
    assert found(4 * GIB, receive=False, landing_bytes=GIB).landing_bytes == 2 * MIB


def test_what_is_set_is_taken_in_whole_segments() -> None:
    got = found(4 * GIB, landing_bytes=5 * MIB, staging_bytes=GIB)
    assert got == Sizes(4 * MIB, GIB)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(SettingsError) as refused:
        found(3 * GIB, GIB, landing_bytes=4 * GIB, staging_bytes=4 * GIB)
    assert f"landing_bytes and staging_bytes={GIB}" in str(refused.value).replace(f"={GIB} and", " and")
    size = int(str(refused.value).split("landing_bytes=")[1].split(" ")[0])
    found(3 * GIB, GIB, landing_bytes=size, staging_bytes=size)


def test_one_that_does_not_fit_beside_the_other() -> None:
    with pytest.raises(SettingsError, match=r"landing_bytes=\d+ would fit"):
        found(2 * GIB, send=False, landing_bytes=4 * GIB)


def test_nothing_is_left() -> None:
    for kw in ({}, {"landing_bytes": GIB}):
        with pytest.raises(SettingsError, match="make the KV cache smaller"):
            found(GIB, GIB, **kw)  # type: ignore[arg-type]


def test_free_memory_of_this_machine() -> None:
    assert host_free_bytes(lambda: "MemTotal: 10 kB\nMemAvailable:     7 kB\n") == 7 << 10
    with pytest.raises(SettingsError, match="landing_bytes"):
        host_free_bytes(lambda: "nothing")

    def missing() -> str:
        raise OSError

    with pytest.raises(SettingsError, match="must be set"):
        host_free_bytes(missing)
