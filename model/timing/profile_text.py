"""Profiles as TOML text, such that reading the text gives the profile back.

Decides the text only; writing it to a file is the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields

from .fabric import PostingRates
from .hardware import Calibration, Hardware
from .serving import Serving

_DEVICE = ("matrix_flops_per_s", "memory_bytes", "memory_bytes_per_s")
_LAUNCH = ("launch_queue", "kernels_per_layer")
_COLLECTIVE = ("latency_s", "bytes_per_s")
_STAGING = (
    "gather_bytes_per_s",
    "scatter_bytes_per_s",
    "gather_busy_factor",
    "scatter_busy_factor",
    "fused_pass_bytes_per_s",
    "fused_gather_bytes_per_s",
    "fused_scatter_bytes_per_s",
    "pass_launch_s",
    "beside_layers",
)


def calibration_toml(hardware: Hardware) -> str:
    """The whole hardware profile, its present calibration as the default; sources and assumptions are kept."""
    lines = [f"default_calibration = {json.dumps(hardware.calibration.name)}", ""]
    for table, keys in (
        ("device", _DEVICE),
        ("launch", _LAUNCH),
        ("collective", _COLLECTIVE),
        ("staging", _STAGING),
    ):
        lines.append(f"[{table}]")
        for key in keys:
            attribute = f"collective_{key}" if table == "collective" else key
            lines.append(f"{key} = {_number(hardware, f'{table}.{key}', getattr(hardware, attribute))}")
        lines.append("")
    lines.append("[serving]")
    for item in fields(Serving):
        lines.append(f"{item.name} = {_number(hardware, f'serving.{item.name}', getattr(hardware.serving, item.name))}")
    lines.append("")
    for name, calibration in hardware.calibrations.items():
        lines.append(f"[calibration.{json.dumps(name)}]")
        lines.append(f"source = {json.dumps(calibration.source)}")
        for item in fields(Calibration):
            if item.name not in ("name", "source"):
                value = getattr(calibration, item.name)
                dotted = f"calibration.{name}.{item.name}"
                lines.append(f"{item.name} = {_number(hardware, dotted, value)}")
        lines.append("")
    return "\n".join(lines)


def posting_toml(rates: Mapping[str, PostingRates | None]) -> str:
    """The posting tables of a fabric profile, for the operations that were fitted."""
    lines = []
    for op, found in rates.items():
        if found is not None:
            lines.append(f"[posting.{op}]")
            lines += [f"{item.name} = {getattr(found, item.name)!r}" for item in fields(PostingRates)]
            lines.append("")
    return "\n".join(lines)


def _number(hardware: Hardware, dotted: str, value: float) -> str:
    source = hardware.sources.get(dotted)
    if source is None and dotted not in hardware.assumed:
        return repr(value)
    parts = [f"value = {value!r}"]
    if dotted in hardware.assumed:
        parts.append("assumed = true")
    if source is not None:
        parts.append(f"source = {json.dumps(source, ensure_ascii=False)}")
    return "{ " + ", ".join(parts) + " }"
