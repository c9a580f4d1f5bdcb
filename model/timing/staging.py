"""How long the packed path's passes over device memory take.

Decides the time of gathering cache blocks into contiguous staging and of scattering landed bytes into blocks. Does not
decide whether a transfer is packed, nor what the pass displaces on the device.
"""

from __future__ import annotations

from .hardware import Hardware


def gather_s(hardware: Hardware, bytes_total: float, busy: bool = False, fused: bool = False) -> float:
    """Seconds to gather `bytes_total` of cache into staging.

    `busy`: the engine launches kernels meanwhile. `fused`: one kernel pass at the device's copy rate instead of one
    library call per layer (the rate is measured, such a kernel is not).
    """
    factor = hardware.gather_busy_factor if busy else 1.0
    return _pass_s(hardware, bytes_total, hardware.gather_bytes_per_s, factor, fused)


def scatter_s(hardware: Hardware, bytes_total: float, busy: bool = False, fused: bool = False) -> float:
    """Seconds to scatter `bytes_total` of landed bytes into cache blocks; `busy` and `fused` as in `gather_s`."""
    factor = hardware.scatter_busy_factor if busy else 1.0
    return _pass_s(hardware, bytes_total, hardware.scatter_bytes_per_s, factor, fused)


def _pass_s(hardware: Hardware, bytes_total: float, rate: float, factor: float, fused: bool) -> float:
    if bytes_total < 0:
        raise ValueError(f"a pass over {bytes_total} bytes: must be 0 or more")
    if bytes_total == 0:
        return 0.0
    if fused:
        rate = hardware.fused_pass_bytes_per_s
    return hardware.pass_launch_s + bytes_total / rate * factor
