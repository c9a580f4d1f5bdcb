"""Host records as plain data and back: for the trace, and between the processes of one engine.

Decides nothing. Not for what comes from another engine: those are frames of ``pushkv.model.protocol``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pushkv.model.protocol import decode, encode
from pushkv.model.protocol import events as ev
from pushkv.reference import office, ports

KINDS: dict[str, type[msgspec.Struct]] = {
    name: kind for name, kind in vars(ev).items() if isinstance(kind, type) and issubclass(kind, ev.Record)
}
KINDS.update({f"host {kind.__name__}": kind for kind in (office.Open, office.Table, office.Total)})
KINDS.update({f"host {kind.__name__}": kind for kind in (office.Forget, office.Loaded, ports.Told)})
_NAMES = {kind: name for name, kind in KINDS.items()}


def plain(record: msgspec.Struct) -> tuple[str, dict[str, Any]]:
    """(kind, fields) of ``record``, of types that every encoding knows; a message as its frame."""
    if isinstance(record, ev.Received):
        return "Received", {"link": record.link, "frame": encode(record.message)}
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    if isinstance(record, ev.FromRank):
        fields["report"] = plain(record.report)
    return _NAMES[type(record)], msgspec.to_builtins(fields, builtin_types=(bytes,))


def record(kind: str, fields: dict[str, Any]) -> Any:
    """The record again. Raises ``KeyError`` for an unknown kind, ``msgspec.ValidationError`` for wrong fields."""
    if kind == "Received":
        frame = msgspec.convert(fields["frame"], bytes, strict=False)
        return ev.Received((fields["link"][0], fields["link"][1]), decode(frame))
    if kind == "FromRank":
        return ev.FromRank(fields["rank"], record(*fields["report"]))
    return msgspec.convert(frozen(fields), KINDS[kind])


def frozen(value: Any) -> Any:
    """Lists as the tuples that they were."""
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return value
