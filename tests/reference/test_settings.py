"""Settings: what is taken, what is refused and with which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pushkv.reference.settings import ConnectorSettings, SettingsError, table

from .printed import check_table


def read(environ: dict[str, str] | None = None, **extra: Any) -> ConnectorSettings:
    return ConnectorSettings.read(extra, environ or {})


def test_defaults_are_the_protocols() -> None:
    settings = read()
    assert (settings.host, settings.port, settings.path) == ("127.0.0.1", 5600, "auto")
    assert settings.protocol.suspect_after_s == 10.0 and settings.protocol.wait_s == 480.0


def test_the_environment_wins() -> None:
    assert read({"PUSHKV_PORT": "7000"}, port=6000, lease_s=5).port == 7000
    assert read({"PUSHKV_PORT": ""}, port=6000).port == 6000
    assert read({"OTHER": "x"}, lease_s=5).lease_s == 5.0


@pytest.mark.parametrize(
    ("value", "size"), [(4096, 4096), ("4096", 4096), ("2MiB", 2 << 20), ("1.5 GiB", 3 << 29), ("8kib", 8192)]
)
def test_bytes(value: Any, size: int) -> None:
    assert read(segment_bytes=value).segment_bytes == size


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"prot": 1}, "'prot'"),
        ({"prot": 1}, "did you mean 'port'"),
        ({"xyz": 1}, "known are: host"),
        ({"port": 0}, "from 1 to 65535"),
        ({"port": "x"}, "whole number"),
        ({"port": True}, "whole number"),
        ({"host": ""}, "host name"),
        ({"host": "0.0.0.0"}, "the one address"),
        ({"host": "10.0.0.1"}, "PUSHKV_SECRET"),
        ({"secret": "short"}, "16 characters"),
        ({"backend": "TCP"}, "UCX, LIBFABRIC"),
        ({"path": 3}, "text"),
        ({"landing_bytes": "many"}, "1GiB"),
        ({"landing_bytes": 0}, "at least one byte"),
        ({"landing_bytes": 4096}, "at least one segment"),
        ({"segment_bytes": 5000}, "multiple of 4096"),
        ({"lease_s": 0}, "positive"),
        ({"lease_s": float("nan")}, "number"),
        ({"landing_share": 2}, "at most 1"),
        ({"dead_peer_s": 1.5}, "dead_peer_s"),
    ],
)
def test_refusals_name_the_setting(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(**extra)
    assert says in str(refused.value)
    assert any(name in str(refused.value) for name in extra)
    assert "\n" not in str(refused.value) and str(refused.value).endswith((".", "?"))


def test_a_variable_is_named_as_it_is_spelled() -> None:
    with pytest.raises(SettingsError, match="PUSHKV_PROT is not a setting"):
        read({"PUSHKV_PROT": "1"})
    with pytest.raises(SettingsError, match="PUSHKV_PORT is 'x'"):
        read({"PUSHKV_PORT": "x"})


def test_the_secret_is_not_shown() -> None:
    secret = "0123456789abcdef"
    assert secret not in repr(read(secret=secret, host="10.0.0.1"))
    with pytest.raises(SettingsError) as refused:
        read(secret="hush")
    assert "hush" not in str(refused.value)


def test_memory_is_filled_in() -> None:
    settings = read(segment_bytes="1MiB").with_memory(64 << 20, 32 << 20)
    assert settings.protocol.landing_segments == 64
    assert settings.protocol.staging_bytes == 32 << 20


def test_the_table_has_all_of_them() -> None:
    for field in dataclasses.fields(ConnectorSettings):
        assert f"| `{field.name}` | `PUSHKV_{field.name.upper()}` |" in table()
        assert field.metadata["says"]
        if isinstance(field.default, float):
            assert field.metadata["unit"] == "s" or field.name.endswith("_share")


def test_the_table_in_the_docs_is_what_the_command_prints() -> None:
    check_table("settings.md", "pushkv.reference.settings", table())
