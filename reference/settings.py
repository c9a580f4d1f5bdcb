"""The connector's settings: one frozen object, read once from `kv_connector_extra_config` and the environment.

Decides names, defaults, units and what is impossible. The environment wins over the configuration: the same
`--kv-transfer-config` serves every replica, and what differs by replica (host, port, secret) comes from its
environment. Does not decide how much memory is free (`memory.py`).

`python -m pushkv.reference.settings` prints the table of all settings as Markdown.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pushkv.model.protocol import Settings
from pushkv.model.timing import PathCosts, path_costs, profiles
from pushkv.reference.addresses import is_loopback

PREFIX = "PUSHKV_"
BACKENDS = ("UCX", "LIBFABRIC")
PATHS = ("auto", "packed", "direct")
OVERLAPS = ("none", "chunk")
PROFILES = {"cuda": ("h200", "nvlink-ucx"), "cpu": ("cpu", "tcp")}
"""What `auto` goes by where nothing is set."""
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_ALIGNMENT = 4096


class SettingsError(ValueError):
    """A setting that is unknown or impossible. One sentence that names it and what would be right."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def _name(value: Any) -> str:
    text = _text(value).strip()
    if not text or any(letter.isspace() for letter in text):
        raise ValueError("must be a host name or an address")
    if text in ("0.0.0.0", "::"):
        raise ValueError("must be the one address at which others reach this engine")
    return text


def _secret(value: Any) -> str:
    text = _text(value)
    if len(text) < 16:
        raise ValueError("must have at least 16 characters, the same on every engine")
    return text


def _whole(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def _port(value: Any) -> int:
    port = _whole(value)
    if not 1 <= port <= 65535:
        raise ValueError("must be a port from 1 to 65535")
    return port


def _bytes(value: Any) -> int:
    """Bytes as a whole number, or as text with a unit: "512MiB"."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError('must be bytes, as 1073741824 or "1GiB"')
        value = int(float(found[1]) * _UNITS[found[2].upper()]) if found[2] else _whole(found[1])
    size = _whole(value)
    if size < 1:
        raise ValueError("must be at least one byte; leave it out to size it from free memory")
    return size


def _number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("must be a number")
    return float(value)


def _seconds(value: Any) -> float:
    seconds = _number(value)
    if seconds <= 0:
        raise ValueError("must be a positive number of seconds")
    return seconds


def _share(value: Any) -> float:
    share = _number(value)
    if not 0 < share <= 1:
        raise ValueError("must be a part of a whole: above 0, at most 1")
    return share


def _one_of(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        wanted = _text(value)
        for name in names:
            if name.lower() == wanted.lower():
                return name
        raise ValueError("must be one of " + ", ".join(names))

    return parse


def _profile(kind: str) -> Callable[[Any], str]:
    return _one_of(*profiles.names(kind))


def _setting(
    parse: Callable[[Any], Any], default: Any, unit: str, says: str, protocol: str = "", shown: str = "", **kw: Any
) -> Any:
    meta = {"parse": parse, "unit": unit, "says": says, "protocol": protocol, "shown": shown}
    return field(default=default, metadata=meta, **kw)


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Made by `ConnectorSettings.read`. `protocol` is the same in the protocol core's terms."""

    host: str = _setting(_name, "127.0.0.1", "", "address at which other engines reach this one's side channel")
    port: int = _setting(
        _port, 5600, "", "side-channel port of rank 0; rank r of data-parallel rank d listens r + d x TP further"
    )
    secret: str | None = _setting(
        _secret,
        None,
        "",
        "shared by all engines; the side channel's keys follow from it. Without one, `host` must be a loopback address",
        repr=False,
    )
    backend: str = _setting(_one_of(*BACKENDS), "UCX", "", "NIXL backend: " + " or ".join(BACKENDS))
    path: str = _setting(_one_of(*PATHS), "auto", "", "how bytes travel: packed, direct, or chosen for each transfer")
    hardware: str | None = _setting(
        _profile("hardware"), None, "", "what `auto` takes this device for: a profile of hardware", shown="by device"
    )
    fabric: str | None = _setting(
        _profile("fabric"), None, "", "what `auto` takes the wire for: a profile of a fabric", shown="by device"
    )
    overlap: str = _setting(
        _one_of(*OVERLAPS),
        "none",
        "",
        "when a packed prompt leaves: once its prefill is finished (none), or chunk by chunk as it is computed (chunk)",
    )
    landing_bytes: int | None = _setting(
        _bytes, None, "bytes", "receiving memory of each rank, outside the KV cache", shown="from free memory"
    )
    staging_bytes: int | None = _setting(
        _bytes, None, "bytes", "sending memory of each rank, outside the KV cache", shown="from free memory"
    )
    segment_bytes: int = _setting(
        _bytes,
        2 << 20,
        "bytes",
        f"landing and staging memory is given out in pieces of this; a multiple of {_ALIGNMENT}",
    )
    part_bytes: int = _setting(
        _bytes,
        512 << 20,
        "bytes",
        "a prompt is gathered, written and told of in parts of at most this, which overlap",
        "part_bytes",
    )
    landing_share: float = _setting(
        _share, 1.0, "", "part of the landing memory that one peer may hold", "landing_share"
    )
    staging_share: float = _setting(
        _share, 0.5, "", "part of the staging memory that one peer may hold", "staging_share"
    )
    trace: str | None = _setting(
        _text, None, "", "write what the machines are told, and one line per hand-over, to this file (one per engine)"
    )
    switch_s: float = _setting(
        _seconds,
        1e-4,
        "s",
        "the interpreter's switch interval in an engine's process: how long one thread may keep another waiting",
    )
    records: str | None = _setting(
        _text, None, "", "write one line per hand-over, with the times of its parts, to this file (one per rank)"
    )
    drain_s: float = _setting(_seconds, 5.0, "s", "how long a stopping engine waits for what is still to be sent")
    dead_peer_s: float = _setting(
        _seconds, 10.0, "s", "silence after which a peer's open transfers get their verdict", "suspect_after_s"
    )
    beat_s: float = _setting(_seconds, 1.0, "s", "time between two signs of life while something is open", "beat_s")
    wait_s: float = _setting(_seconds, 480.0, "s", "longest wait of a decode request for its prompt", "wait_s")
    lease_s: float = _setting(
        _seconds, 480.0, "s", "how long a finished prompt is kept for a decode engine that has not come", "lease_s"
    )
    orphan_s: float = _setting(
        _seconds, 60.0, "s", "how long a decode request waits for a prefill that this engine has never seen", "orphan_s"
    )
    write_s: float = _setting(_seconds, 60.0, "s", "longest duration of one write before it is given up", "write_s")
    fabric_drain_s: float = _setting(
        _seconds, 1.0, "s", "from a peer's proven death until the fabric holds no write of it any more", "drain_s"
    )

    def __post_init__(self) -> None:
        if self.segment_bytes % _ALIGNMENT:
            raise SettingsError(f"segment_bytes is {self.segment_bytes}: it must be a multiple of {_ALIGNMENT}.")
        for name in ("landing_bytes", "staging_bytes"):
            size = getattr(self, name)
            if size is not None and size < self.segment_bytes:
                raise SettingsError(
                    f"{name} is {size}: it must hold at least one segment (segment_bytes is {self.segment_bytes})."
                )
        if self.secret is None and not is_loopback(self.host):
            raise SettingsError(
                f"host is {self.host!r} and secret is not set: other machines could write into this cache; "
                f"set {PREFIX}SECRET to the same text on every engine, or host to 127.0.0.1."
            )
        _ = self.protocol

    @classmethod
    def read(cls, extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> ConnectorSettings:
        """The settings of `kv_connector_extra_config`, overridden by `PUSHKV_*` of `environ`.

        An empty variable counts as not set. Raises `SettingsError`.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for source, name, value in (
            *(("kv_connector_extra_config", str(key), value) for key, value in extra_config.items()),
            *((key, key[len(PREFIX) :].lower(), environ[key]) for key in sorted(environ) if key.startswith(PREFIX)),
        ):
            said = source if source.startswith(PREFIX) else f"{source}[{name!r}]"
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(known) + "."
                raise SettingsError(f"{said} is not a setting of pushkv; {hint}")
            if value is None or (source.startswith(PREFIX) and not value):
                continue
            try:
                values[name] = known[name].metadata["parse"](value)
            except ValueError as error:
                shown = "(hidden)" if name == "secret" else repr(value)
                raise SettingsError(f"{said} is {shown}: it {error}.") from None
        return cls(**values)

    def with_memory(self, landing_bytes: int, staging_bytes: int) -> ConnectorSettings:
        """The same with sizes that a rank has found to fit."""
        return dataclasses.replace(self, landing_bytes=landing_bytes, staging_bytes=staging_bytes)

    @property
    def landing_segments(self) -> int:
        """Segments of landing memory of each rank; 1 as long as its size is not known."""
        return max(1, (self.landing_bytes or 0) // self.segment_bytes)

    def path_costs(self, device: str, size: int, pieces: int) -> PathCosts:
        """What a prompt of ``size`` bytes in ``pieces`` would cost on ``device`` ("cuda", "cpu") by either path."""
        hardware, fabric = PROFILES.get(device, PROFILES["cpu"])
        return path_costs(
            profiles.hardware(self.hardware or hardware), profiles.fabric(self.fabric or fabric), size, pieces
        )

    @property
    def protocol(self) -> Settings:
        """For the protocol core. Landing and staging memory as set or found; until then the smallest possible."""
        given = {
            f.metadata["protocol"]: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["protocol"]
        }
        try:
            return Settings(
                **given,
                landing_segments=self.landing_segments,
                staging_bytes=self.staging_bytes or self.segment_bytes,
            )
        except ValueError as error:
            sentence = str(error)
            for f in dataclasses.fields(self):
                if f.metadata["protocol"]:
                    sentence = re.sub(rf"\b{f.metadata['protocol']}\b", f.name, sentence)
            raise SettingsError(f"{sentence}.") from None


def table() -> str:
    """All settings as a Markdown table, for `docs/settings.md`."""
    rows = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    for f in dataclasses.fields(ConnectorSettings):
        default = f.metadata["shown"] or ("not set" if f.default is None else str(f.default))
        unit = f" {f.metadata['unit']}" if f.metadata["unit"] and f.default is not None else ""
        rows.append(f"| `{f.name}` | `{PREFIX}{f.name.upper()}` | {default}{unit} | {f.metadata['says']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
