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
        self.stream = ticks(cost.hardware.calibration.stream_s)
        self.result = ticks(cost.hardware.calibration.result_s)
        self._lines: dict[int, tuple[int, int]] = {}
        self._chunks: dict[tuple[int, int], tuple[float, float, float]] = {}

    def decode_line(self, batch: int) -> tuple[int, int]:
        """Ticks of a decode step of ``batch`` sequences, and ticks per token of their context."""
        line = self._lines.get(batch)
        if line is None:
            base_s, context_s = self.cost.decode_line(batch)
            line = self._lines[batch] = (ticks(base_s), ticks(context_s))
        return line

    def mixed(
        self, parts: Sequence[tuple[Request, int, int]], batch: int, context: int, t: int, start: int
    ) -> tuple[int, int]:
        """A step with chunks of prompts, launched at ``t`` on a device that is free at ``start``.

        Returns how long the launch takes the host (more kernels than the launch queue holds: it waits for the
        device), and when the device is done.
        """
        if len(parts) == 1 and not batch:
            device_s, launch_s, blocked_s = self._lone(parts[0][1:])
        else:
            device_s, launch_s, blocked_s = self._step_s([part[1:] for part in parts], batch, context)
        host_s = launch_s
        ahead_s = (start - t) * S_PER_TICK
        if blocked_s > 0:
            host_s = max(launch_s, ahead_s + blocked_s)
        return ticks(host_s), t + ticks(self.cost.floor_s(ahead_s + device_s, launch_s))

    def _lone(self, chunk: tuple[int, int]) -> tuple[float, float, float]:
        """``_step_s`` of one chunk and nothing else: a prefill engine computes the same few again and again."""
        costs = self._chunks.get(chunk)
        if costs is None:
            costs = self._step_s([chunk], 0, 0)
            if len(self._chunks) < 1 << 16:
                self._chunks[chunk] = costs
        return costs

    def _step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context: int) -> tuple[float, float, float]:
        """Seconds on the device, to launch, and for which launching waits for the device."""
        cost = self.cost
        device_s = cost.device_s(chunks, batch, context)
        new_tokens = batch + sum([new for new, _ in chunks])
        return device_s, cost.launch_s(new_tokens), cost.launch_blocked_s(device_s)
