"""How much memory landing and staging may take beside the KV cache.

Decides sizes where the settings leave them open, from what is free once the cache is made, and refuses what does not
fit with a sentence that names the setting that would. On a GPU a margin stays free for graph capture, which comes
later. Does not allocate.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pushkv.reference.settings import PREFIX, ConnectorSettings, SettingsError

GRAPH_MARGIN_BYTES = 2 << 30
"""Free GPU memory that is left alone: CUDA graphs are captured after the connector starts."""
HOST_MARGIN_BYTES = 1 << 30
USED_PART = 0.5
"""Part of what is free beyond the margin that an unset size may take."""
MOST_BYTES = 8 << 30
"""An unset size never takes more: with 2 MiB segments this keeps the wire full many times over."""


@dataclass(frozen=True, slots=True)
class Sizes:
    landing_bytes: int
    staging_bytes: int


def sizes(settings: ConnectorSettings, free_bytes: int, margin_bytes: int, *, send: bool, receive: bool) -> Sizes:
    """Landing and staging memory of one rank, whole segments. A direction that the engine does not have takes one.

    Raises `SettingsError`.
    """
    segment = settings.segment_bytes
    room = max(0, free_bytes - margin_bytes)
    wanted = {
        "landing_bytes": settings.landing_bytes if receive else segment,
        "staging_bytes": settings.staging_bytes if send else segment,
    }
    set_bytes = sum(_whole(size, segment) for size in wanted.values() if size is not None)
    if set_bytes > room:
        names = [name for name, size in wanted.items() if size is not None and getattr(settings, name) is not None]
        fits = max(0, room - (set_bytes - sum(_whole(wanted[name] or 0, segment) for name in names)))
        share = fits // max(1, len(names)) // segment * segment
        raise SettingsError(
            f"{' and '.join(names) or 'segment_bytes'} need {_text(set_bytes)}, but {_text(free_bytes)} are free "
            f"beside the KV cache and {_text(margin_bytes)} must stay so; "
            + (f"{' and '.join(f'{name}={share}' for name in names)} would fit." if share and names else _smaller())
        )
    open_names = [name for name, size in wanted.items() if size is None]
    left = int((room - set_bytes) * USED_PART)
    each = min(MOST_BYTES, left // len(open_names)) // segment * segment if open_names else 0
    if open_names and each < segment:
        raise SettingsError(
            f"no memory is left for {' and '.join(open_names)}: {_text(free_bytes)} are free beside the KV cache and "
            f"{_text(margin_bytes)} must stay so; {_smaller()}"
        )
    found = {name: each if size is None else _whole(size, segment) for name, size in wanted.items()}
    return Sizes(**found)


def _smaller() -> str:
    return (
        "make the KV cache smaller (--gpu-memory-utilization, on a CPU VLLM_CPU_KVCACHE_SPACE) or set "
        f"{PREFIX}SEGMENT_BYTES lower."
    )


def _whole(size: int, segment: int) -> int:
    return max(segment, size // segment * segment)


def _text(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 28 else f"{size / (1 << 20):.1f} MiB"


def host_free_bytes(meminfo: Callable[[], str] = lambda: Path("/proc/meminfo").read_text(encoding="ascii")) -> int:
    """Memory of this machine that can be had without swapping. Raises `SettingsError` where it cannot be told."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise SettingsError(
            "landing_bytes and staging_bytes must be set: /proc/meminfo does not tell how much memory is free."
        )
    return int(found[1]) << 10


def free_and_margin(device_type: str, device_index: int | None) -> tuple[int, int]:
    """Free bytes where the cache is, and how much of it must stay free."""
    if device_type == "cpu":
        return host_free_bytes(), HOST_MARGIN_BYTES
    import torch

    free, _ = torch.cuda.mem_get_info(device_index)
    return int(free), GRAPH_MARGIN_BYTES
