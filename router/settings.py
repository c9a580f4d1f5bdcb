"""The router's settings: one frozen object from one TOML file, flags on top. All timeouts stand here.

Decides names, defaults, units and what is impossible. A mistake is a `BadInput` of one sentence that names the setting.
"""

from __future__ import annotations

import difflib
import re
import ssl
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from pushkv.model.routing import POLICIES
from pushkv.router.identity import Identity
from pushkv.sim.errors import BadInput, unknown

Mode = Literal["push", "pull"]
Dispatch = Literal["parallel", "sequential"]


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[prefill]]` or `[[decode]]`. engine_id, kv_host, kv_port, tp_size: of a prefill server, how its connector
    is reached; learnt from its first prefill where they are not given. drain: finish what it has, send nothing new.
    """

    url: str
    engine_id: str | None = None
    kv_host: str | None = None
    kv_port: int | None = None
    tp_size: int = 1
    drain: bool = False

    @property
    def identity(self) -> Identity | None:
        if self.engine_id is None or self.kv_host is None or self.kv_port is None:
            return None
        return Identity(self.engine_id, self.kv_host, self.kv_port, self.tp_size)


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of them; `SAYS` tells what each is for. Times in seconds."""

    prefill: tuple[ServerSettings, ...] = ()
    decode: tuple[ServerSettings, ...] = ()
    listen: str = "127.0.0.1:8100"
    mode: Mode = "push"
    dispatch: Dispatch = "parallel"
    policy: str = "least-tokens"
    session_header: str = "x-session-id"
    attempts: int = 3

    max_active: int = 2048
    max_queued: int = 2048
    max_body_bytes: int = 32 << 20
    max_answer_bytes: int = 256 << 20
    max_held_bytes: int = 1 << 30

    tls_cert: str | None = None
    tls_key: str | None = None
    upstream_ca: str | None = None
    upstream_verify: bool = True

    connect_s: float = 2.0
    prefill_s: float = 600.0
    first_token_s: float = 600.0
    token_gap_s: float = 120.0
    answer_s: float = 1800.0
    queue_s: float = 30.0
    client_body_s: float = 30.0
    client_stall_s: float = 60.0
    client_idle_s: float = 30.0
    upstream_idle_s: float = 3.0
    health_every_s: float = 1.0
    health_s: float = 2.0
    reload_every_s: float = 1.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.policy not in POLICIES:
            raise unknown("policy", self.policy, POLICIES)
        if self.attempts > 10:
            raise BadInput(f"attempts is {self.attempts}: it must be from 1 to 10")
        if not self.prefill or not self.decode:
            kind = "prefill" if not self.prefill else "decode"
            raise BadInput(f"there is no {kind} server: name at least one with --{kind} URL or [[{kind}]]")
        for kind, servers in (("prefill", self.prefill), ("decode", self.decode)):
            self._check_servers(kind, servers)
        address(self.listen)
        if not re.fullmatch(r"[a-z0-9-]{1,64}", self.session_header):
            raise BadInput(f"session_header is {self.session_header!r}: it must be a header's name in lower case")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput("tls_cert and tls_key belong together: set both or neither")
        for name in ("tls_cert", "tls_key", "upstream_ca"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise BadInput(f"{name} is {path!r}: there is no such file")

    def _check_numbers(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if name.endswith("_s"):
                if not 0.001 <= value <= 86_400:
                    raise BadInput(f"{name} is {value}: it must be from 0.001 to 86400 seconds")
            elif value < (0 if name == "max_queued" else 1):
                raise BadInput(f"{name} is {value}: it must be at least {0 if name == 'max_queued' else 1}")

    def _check_servers(self, kind: str, servers: Sequence[ServerSettings]) -> None:
        seen = set()
        for server in servers:
            host, port, _ = target(f"{kind} server", server.url)
            if (host, port) in seen:
                raise BadInput(f"the {kind} server {server.url} is listed twice")
            seen.add((host, port))
            given = [name for name in ("engine_id", "kv_host", "kv_port") if getattr(server, name) is not None]
            if kind == "decode" and given:
                raise BadInput(
                    f"{given[0]} of the decode server {server.url} has no use: only prefill servers are named"
                )
            if 0 < len(given) < 3:
                raise BadInput(
                    f"{server.url} has {' and '.join(given)} only: give engine_id, kv_host and kv_port, or none"
                )
            if server.kv_port is not None and not 1 <= server.kv_port <= 65535:
                raise BadInput(f"kv_port of {server.url} is {server.kv_port}: it must be a port from 1 to 65535")
            if not 1 <= server.tp_size <= 1024:
                raise BadInput(f"tp_size of {server.url} is {server.tp_size}: it must be from 1 to 1024")
        if servers and all(server.drain for server in servers):
            raise BadInput(f"all {kind} servers have drain = true: leave at least one to serve")

    def client_tls(self) -> ssl.SSLContext | None:
        """What clients are shown, None without TLS. Raises `BadInput`."""
        if self.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:  # ssl.SSLError is one
            raise BadInput(f"tls_cert and tls_key cannot be used: {error}") from None
        return context

    def server_tls(self) -> ssl.SSLContext:
        """For https:// servers. Raises `BadInput`."""
        try:
            context = ssl.create_default_context(cafile=self.upstream_ca)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"upstream_ca {self.upstream_ca!r} cannot be used: {error}") from None
        if not self.upstream_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


SAYS: Mapping[str, str] = {
    "prefill": "`[[prefill]]` tables: `url`; `engine_id`, `kv_host`, `kv_port`, `tp_size` of its connector; `drain`",
    "decode": "`[[decode]]` tables: `url`, `drain`",
    "listen": "address of the router",
    "mode": "what the engines' connector does: push (pushkv, NixlPushConnector) or pull (NixlConnector)",
    "dispatch": "whether push sends both legs at once; pull never does",
    "policy": "who gets a request: round-robin, least-tokens, session or prefix",
    "session_header": "requests with the same value are a session",
    "attempts": "pairs that a request is tried on at most",
    "max_active": "requests that the engines have at once",
    "max_queued": "requests that wait for one of them to end; more get 429",
    "max_body_bytes": "larger requests get 413",
    "max_answer_bytes": "an answer that is not streamed is held until it is whole, up to this size",
    "max_held_bytes": "of requests without an answer, and of answers that are not whole or not taken; more get 429",
    "tls_cert": "certificate that clients are shown; with `tls_key`",
    "tls_key": "its key",
    "upstream_ca": "certificates that https:// servers are checked with, instead of the system's",
    "upstream_verify": "whether they are checked at all",
    "connect_s": "to connect to a server",
    "prefill_s": "a whole prefill leg",
    "first_token_s": "from the dispatch to the first bytes of a stream",
    "token_gap_s": "longest silence of a stream after that",
    "answer_s": "from the dispatch to the end of an answer that is not streamed; not tried again",
    "queue_s": "longest wait in the queue; then 429",
    "client_body_s": "until a client has sent its body; then 408",
    "client_stall_s": "a client that takes nothing for so long has left",
    "client_idle_s": "an idle connection of a client is closed, as is one with half the head of a request",
    "upstream_idle_s": "an idle connection to a server is closed (vLLM closes its own after 5)",
    "health_every_s": "between two looks at a server's /health",
    "health_s": "longest wait for its answer",
    "reload_every_s": "between two looks at the settings file",
    "drain_s": "how long a router that was told to stop waits for what it has",
}
"""What each setting is for."""


def address(text: str) -> tuple[str, int]:
    """`HOST:PORT` of `listen`. Raises `BadInput`."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\s]+)):(\d{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise BadInput(f"listen is {text!r}: it must be HOST:PORT, as 0.0.0.0:8100")
    return found[1] or found[2], int(found[3])


def target(what: str, url: str) -> tuple[str, int, bool]:
    """Host, port and whether TLS is spoken. Raises `BadInput`."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    whole = parts.scheme in ("http", "https") and parts.hostname and port != -1
    if not whole or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise BadInput(f"{what} {url!r} must be http://HOST:PORT or https://HOST:PORT, and nothing behind it")
    assert parts.hostname is not None
    return parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https"


def parse_server(kind: str, text: str) -> ServerSettings:
    """`URL`, or `URL=ENGINE_ID@HOST:PORT` for a prefill server whose connector is known. Raises `BadInput`."""
    url, _, identity = text.partition("=")
    if not identity:
        return ServerSettings(url)
    found = re.fullmatch(r"([^@\s]+)@([^@\s]+):(\d{1,5})(?:/(\d{1,4}))?", identity)
    if found is None:
        raise BadInput(f"--{kind} {text!r}: what follows = must be ENGINE_ID@HOST:PORT, or .../TP_SIZE behind it")
    return ServerSettings(url, found[1], found[2], int(found[3]), int(found[4] or 1))


def read(path: str | None, flags: Mapping[str, Any]) -> RouterSettings:
    """The settings of a TOML file (None: of flags alone), with `flags` that are not None on top. Raises `BadInput`."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise BadInput(f"--config {path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"--config {path} is not TOML: {error}") from None
    values.update({name: value for name, value in flags.items() if value is not None})
    known = RouterSettings.__struct_fields__
    for name in values:
        if name not in known:
            raise unknown("the setting", name, known)
    for kind in ("prefill", "decode"):
        entries = values.get(kind, ())
        if not isinstance(entries, (list, tuple)):
            raise BadInput(f"{kind} is no list of servers: write [[{kind}]] tables, each with its url")
        for entry in entries:
            for name in entry if isinstance(entry, dict) else ():
                if name not in ServerSettings.__struct_fields__:
                    raise unknown(f"the setting of a {kind} server", name, ServerSettings.__struct_fields__)
    try:
        return msgspec.convert(values, RouterSettings)
    except msgspec.ValidationError as error:
        raise BadInput(_sentence(error)) from None


def _sentence(error: msgspec.ValidationError) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.attempts`", the setting first."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, BadInput):
        return str(cause)
    text, _, where = str(error).partition(" - at `$")
    name = where.strip("`.").replace("[...]", "")
    text = text[:1].lower() + text[1:]
    near = difflib.get_close_matches(name, RouterSettings.__struct_fields__, 1)
    return f"{name or (near[0] if near else 'the settings')}: {text.replace('`', '')}"


def table() -> str:
    """All settings as a Markdown table, for the docs."""
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    hints = get_type_hints(RouterSettings)
    defaults = RouterSettings.__struct_defaults__
    fields = RouterSettings.__struct_fields__
    for name, default in zip(fields, defaults, strict=True):
        hint = hints[name]
        if name in ("prefill", "decode"):
            shown, default = "servers", "none"
        elif isinstance(hint, types.UnionType):
            shown, default = "text", "not set"
        else:
            shown = " or ".join(get_args(hint)) or {"str": "text", "int": "whole", "float": "seconds"}.get(
                hint.__name__, hint.__name__
            )
        rows.append(f"| `{name}` | {shown} | {default} | {SAYS[name]} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
