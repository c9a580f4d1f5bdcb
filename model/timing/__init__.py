"""Timing: profiles of hardware, models and fabrics, and the cost functions that read them.

Pure functions of their arguments; times in seconds, sizes in bytes. `compute` costs an engine step, `posting` the
host's part of a transfer, `wire` the rest of it, `staging` the packed path's passes over memory, `paths` compares both
paths of the bytes; `calibrate` fits profiles to measurements.
"""

from .calibrate import EngineFit, PostingFit, Residual, calibrate, calibrate_posting
from .compute import EngineCost
from .fabric import Fabric, Op, Order, PostingRates
from .fields import ProfileError
from .hardware import Calibration, Hardware
from .paths import PathCosts, path_costs
from .posting import post_s
from .serving import Serving
from .shapes import ModelShape
from .staging import gather_s, scatter_s
from .wire import device_bytes_per_s, flow_bytes_per_s, max_min_rates, tail_s, transfer_s

__all__ = [
    "Calibration",
    "EngineCost",
    "EngineFit",
    "Fabric",
    "Hardware",
    "ModelShape",
    "Op",
    "Order",
    "PathCosts",
    "PostingFit",
    "PostingRates",
    "ProfileError",
    "Residual",
    "Serving",
    "calibrate",
    "calibrate_posting",
    "device_bytes_per_s",
    "flow_bytes_per_s",
    "gather_s",
    "max_min_rates",
    "path_costs",
    "post_s",
    "scatter_s",
    "tail_s",
    "transfer_s",
]
