"""What a step costs one engine, in ticks: ``pushkv.model.timing`` with the host's part and the device's part kept
apart.

Decides only rounding. A decode step is a whole number of ticks plus a whole number per token of context, so that a
thousand of them can be summed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pushkv.model.timing import EngineCost
from pushkv.sim.ticks import S_PER_TICK, ticks

if TYPE_CHECKING:
    from pushkv.sim.request import Request


class StepCosts:
    """Costs of one engine. All attributes and results are ticks."""

    def __init__(self, cost: EngineCost) -> None:
        serving = cost.hardware.serving
        self.cost = cost
        self.schedule = ticks(serving.schedule_s)
        self.idle_poll = ticks(serving.idle_poll_s)
        self.decode_launch = ticks(serving.decode_launch_s)
        self._lines: dict[int, tuple[int, int]] = {}

    def decode_line(self, batch: int) -> tuple[int, int]:
        """Ticks of a decode step of ``batch`` sequences, and ticks per token of their context."""
        line = self._lines.get(batch)
        if line is None:
            base_s, context_s = self.cost.decode_line(batch)
            line = self._lines[batch] = (ticks(base_s), ticks(context_s))
        return line

    def decode(self, batch: int, context: int) -> int:
        """Ticks of one decode step on the device."""
        base, slope = self.decode_line(batch)
        return base + slope * context

    def mixed(
        self, parts: Sequence[tuple[Request, int, int]], batch: int, context: int, t: int, start: int
    ) -> tuple[int, int]:
        """A step with chunks of prompts, launched at ``t`` on a device that is free at ``start``.

        Returns how long the launch takes the host (more kernels than the launch queue holds: it waits for the
        device), and when the device is done.
        """
        cost = self.cost
        chunks = [(new, before) for _, new, before in parts]
        device_s = cost.device_s(chunks, batch, context)
        launch_s = host_s = cost.launch_s(batch + sum(new for new, _ in chunks))
        ahead_s = (start - t) * S_PER_TICK
        blocked_s = cost.launch_blocked_s(device_s)
        if blocked_s > 0:
            host_s = max(launch_s, ahead_s + blocked_s)
        return ticks(host_s), t + ticks(cost.floor_s(ahead_s + device_s, launch_s))
