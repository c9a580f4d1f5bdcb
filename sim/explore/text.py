"""Events, actions and messages as short text, for transcripts and for the traces of failed seeds."""

from __future__ import annotations

from typing import Any

HIDDEN = {"src", "dst", "facts", "bytes_per_token", "incarnation"}

STAGES = ("registered", "offered", "granted", "cancelled", "requeue")
DEFAULTS = (("fanout", 1), ("segments", 0), ("floor", 0), ("number", 0), ("echo", 0), ("missing", ()), ("open", ()))


def text(record: Any) -> str:
    """One record on one line: its name, its key, and what differs from the default."""
    if hasattr(record, "report"):
        return f"rank {record.rank}: {text(record.report)}"
    name = type(record).__name__
    parts = []
    for field in record.__struct_fields__:
        value = getattr(record, field)
        if (
            field in HIDDEN
            or value is None
            or value is False
            or value == ""
            or any(value == v and field == f for f, v in DEFAULTS)
        ):
            continue
        if field == "transfer_id":
            parts.append(str(value))
        elif field in ("link", "peer", "links"):
            parts.append(_links(field, value))
        elif value is True:
            parts.append(field)
        elif field == "open":
            parts.append("open=" + ",".join(f"{ask.attempt}:{STAGES[ask.stage]}/{ask.parts}" for ask in value))
        elif isinstance(value, (tuple, list)):
            parts.append(f"{field}=[{' '.join(str(v) for v in value)}]")
        else:
            parts.append(f"{field}={value}")
    return f"{name} {' '.join(parts)}".rstrip()


def _links(field: str, value: Any) -> str:
    if field == "link":
        return f"{value[0]}/{value[1]}"
    if field == "peer":
        return str(value)
    rows = value if value and isinstance(value[0][0], tuple) else (value,)
    return "links=" + ";".join(",".join(f"{e}/{r}" for e, r in row) for row in rows)
