"""`pushkv doctor`: what is wrong on the machine of an engine, and what to do about it.

Decides what is looked at, and what is an error (an engine would not start, or hand nothing over), a warning (it would,
but badly), a note, or ok. Changes nothing; starts no engine. Checks of this machine are in `machine_checks`, those of
others in `peer_checks`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from pushkv.reference.settings import ConnectorSettings, SettingsError
from pushkv.sim.errors import BadInput

Level = Literal["ok", "note", "warning", "error"]
ROLES = {"prefill": (True, False), "decode": (False, True), "both": (True, True)}


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at. says: what was found. todo: what to do, "" for nothing."""

    check: str
    level: Level
    says: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """What is asked of the doctor. extra: `kv_connector_extra_config`; environ: where PUSHKV_* is read.

    tp: ranks on this machine. peers: side channels of other engines. servers: URLs of vLLM servers that are to work
    together.
    """

    extra: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    role: str = "both"
    tp: int = 1
    peers: tuple[tuple[str, int], ...] = ()
    servers: tuple[str, ...] = ()


def examine(asked: Examination) -> list[Finding]:
    """All findings, in the order in which an engine would run into them."""
    from pushkv.router import machine_checks, peer_checks

    settings, findings = _settings(asked)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [("vLLM", lambda: machine_checks.vllm())]
    if settings is not None:
        backend, host, port, secret = settings.backend, settings.host, settings.port, settings.secret
        checks += [
            ("NIXL", lambda: machine_checks.nixl(backend)),
            ("devices", lambda: machine_checks.devices(settings, *ROLES[asked.role])),
            ("fabric", lambda: machine_checks.fabric(backend, asked.environ)),
            ("ports", lambda: machine_checks.ports(host, port, asked.tp)),
            *(("peer", partial(peer_checks.side_channel, peer, secret)) for peer in asked.peers),
        ]
    checks.append(("servers", lambda: peer_checks.servers(asked.servers)))
    for name, check in checks:
        findings += _guarded(name, check)
    return findings


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What the check finds, and that it failed itself where it did: the others go on."""
    try:
        yield from check()
    except Exception as error:  # only its kind is shown: its text may quote a setting
        todo = "look at the rest; please report this as a bug of pushkv, with the versions of vLLM and NIXL"
        yield Finding(name, "error", f"the check itself failed ({type(error).__name__})", todo)


def _settings(asked: Examination) -> tuple[ConnectorSettings | None, list[Finding]]:
    try:
        settings = ConnectorSettings.read(asked.extra, asked.environ)
    except SettingsError as error:
        return None, [Finding("settings", "error", str(error), "the engine would not start; change this setting first")]
    found = [Finding("settings", "ok", f"backend {settings.backend}, path {settings.path}, host {settings.host}")]
    if settings.secret is None:
        todo = "set PUSHKV_SECRET to the same text on every engine: openssl rand -hex 32"
        found.append(Finding("secret", "note", "no secret: only engines on this machine can be reached", todo))
    elif len(set(settings.secret)) < 8 or "replace" in settings.secret.lower():
        todo = "make one: openssl rand -hex 32"
        found.append(Finding("secret", "error", "the secret is a placeholder or can be guessed", todo))
    else:
        found.append(Finding("secret", "ok", f"set, {len(settings.secret)} characters"))
    return settings, found


def parse(options: Any) -> Examination:
    """From the command line's flags. Raises `BadInput`."""
    extra: Mapping[str, Any] = {}
    if options.kv_transfer_config is not None:
        try:
            whole = json.loads(options.kv_transfer_config)
            extra = whole.get("kv_connector_extra_config") or {}
        except (ValueError, AttributeError, RecursionError):
            raise BadInput("--kv-transfer-config must be the JSON object that vLLM is started with") from None
        if not isinstance(extra, dict):
            raise BadInput("kv_connector_extra_config in --kv-transfer-config must be a JSON object")
    if options.role not in ROLES:
        raise BadInput(f"--role is {options.role!r}: it must be one of {', '.join(ROLES)}")
    if not 1 <= _whole(options.tp) <= 1024:
        raise BadInput(f"--tp is {options.tp!r}: it must be from 1 to 1024")
    peers = []
    for text in options.peer or ():
        host, _, port = text.rpartition(":")
        if not host or not 1 <= _whole(port) <= 65535:
            raise BadInput(f"--peer {text!r} must be HOST:PORT of another engine's side channel")
        peers.append((host.strip("[]"), int(port)))
    for url in options.server or ():
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"--server {url!r} must be a URL, as http://10.0.0.7:8000")
    return Examination(
        extra, dict(os.environ), options.role, int(options.tp), tuple(peers), tuple(options.server or ())
    )


def _whole(text: str) -> int:
    """0 where it is no whole number of up to five digits."""
    return int(text) if len(text) <= 5 and text.isascii() and text.isdecimal() else 0


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """For `--json`."""
    return {
        "schema": 1,
        "errors": sum(one.level == "error" for one in findings),
        "warnings": sum(one.level == "warning" for one in findings),
        "findings": [asdict(one) for one in findings],
    }


def text(findings: Sequence[Finding]) -> str:
    """For people: one line each, and under it what to do."""
    lines = []
    for one in findings:
        lines.append(f"{one.level:8} {one.check:12} {one.says}")
        if one.todo:
            lines.append(f"{'':21} -> {one.todo}")
    errors = sum(one.level == "error" for one in findings)
    lines.append(f"{errors} errors, {sum(one.level == 'warning' for one in findings)} warnings")
    return "\n".join(lines)
