"""How long the packed path's passes over device memory take.

Decides the time of gathering cache blocks into contiguous staging and of scattering landed bytes into blocks. Does not
decide whether a transfer is packed, nor what the pass displaces on the device.
"""

from __future__ import annotations

from .hardware import Hardware


def gather_s(hardware: Hardware, bytes_total: float, busy: bool = False, fused: bool = False) -> float:
    """Seconds to gather `bytes_total` of cache into staging.

    `busy`: the engine launches kernels meanwhile. `fused`: one kernel for all layers, as this project's connector has
    it on a GPU, instead of one library call per layer.
    """
    factor = hardware.gather_busy_factor if busy else 1.0
    rate = hardware.fused_gather_bytes_per_s if fused else hardware.gather_bytes_per_s
    return _pass_s(hardware, bytes_total, rate, factor)


def scatter_s(hardware: Hardware, bytes_total: float, busy: bool = False, fused: bool = False) -> float:
    """Seconds to scatter `bytes_total` of landed bytes into cache blocks; `busy` and `fused` as in `gather_s`."""
    factor = hardware.scatter_busy_factor if busy else 1.0
    rate = hardware.fused_scatter_bytes_per_s if fused else hardware.scatter_bytes_per_s
    return _pass_s(hardware, bytes_total, rate, factor)


def _pass_s(hardware: Hardware, bytes_total: float, rate: float, factor: float) -> float:
    if bytes_total < 0:
        raise ValueError(f"a pass over {bytes_total} bytes: must be 0 or more")
    if bytes_total == 0:
        return 0.0
    return hardware.pass_launch_s + bytes_total / rate * factor
