"""How long one engine step takes: a roofline with a launch floor.

Decides the time of a step from what the step holds (prompt chunks, sequences decoding and their context). Does not
decide what a step holds (the scheduler), nor what happens around it (HTTP, the transfer).

Device time is a sum: matrix work (a smooth maximum of its operations and of reading the weights once), attention
(operations of the prompt's causal triangle, bytes of the context read), collectives, a cost per layer and one that
grows with the logarithm of the sequences decoding (`device_s`). A step that holds prefill is launched kernel by kernel,
or in the few pieces of a captured graph where it is short, so the host's launch time (`launch_s`) is a floor under it,
again by a smooth maximum: some kernels are shorter than their launch, some longer, so near the crossing both show
(measured: the table's 1k and 2k prefills on an H200 lie above either bound).

A pure decode step is exactly linear in its context: `decode_line`. Nothing that depends on context stands inside a
maximum there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .fields import ProfileError
from .hardware import Hardware
from .shapes import ModelShape

# Orders of the smooth maxima; a higher one is a sharper corner. On h200_engine.csv, among 3 to 6, 4 leaves the least
# residual for the launch; the roof's makes next to no difference between 2 and 5.
_ROOF_ORDER = 3.0
_LAUNCH_ORDER = 4.0


def smooth_max(a: float, b: float, order: float) -> float:
    """The p-norm of two times: above the larger by up to 2**(1/order) where they are equal, next to it elsewhere."""
    return float((a**order + b**order) ** (1.0 / order))


class EngineCost:
    """Times of one engine: a model on `tp` devices of one kind.

    Constructing it checks the pairing; errors: `ProfileError` where `tp` does not fit the model or the weights do not
    fit the devices' memory.
    """

    __slots__ = (
        "_attention_s",
        "_batch_s",
        "_collective_fixed_s",
        "_collective_token_s",
        "_context_s",
        "_eager_s",
        "_graph_s",
        "_graph_tokens",
        "_head_s",
        "_layers_s",
        "_lines",
        "_queue",
        "_token_s",
        "_weights_s",
        "hardware",
        "kernels",
        "shape",
        "tp",
    )

    def __init__(self, shape: ModelShape, hardware: Hardware, tp: int = 1) -> None:
        shape.check_tp(tp)
        weights = shape.weight_bytes_rank(tp)
        if weights >= hardware.memory_bytes:
            raise ProfileError(
                f"{shape.name} at TP {tp} needs {weights / 1e9:.1f} GB of weights per rank, "
                f"{hardware.name} has {hardware.memory_bytes / 1e9:.1f} GB: raise TP"
            )
        self.shape, self.hardware, self.tp = shape, hardware, tp
        cal = hardware.calibration
        matrix_per_s = hardware.matrix_flops_per_s * cal.matrix_efficiency
        pair_flops = 4 * shape.heads / tp * shape.head_dim * shape.layers
        self._token_s = 2 * shape.layers * shape.layer_parameters_rank(tp) / matrix_per_s
        self._head_s = 2 * shape.head_parameters_rank(tp) / matrix_per_s
        self._attention_s = pair_flops / (hardware.matrix_flops_per_s * cal.attention_efficiency)
        self._weights_s = shape.read_bytes_rank(tp) / (hardware.memory_bytes_per_s * cal.weights_efficiency)
        context_per_s = hardware.memory_bytes_per_s * cal.context_efficiency
        self._context_s = shape.kv_bytes_per_token_rank(tp) / context_per_s
        self._layers_s = shape.layers * cal.layer_s
        self._batch_s = shape.layers * cal.batch_layer_s
        self._eager_s = shape.layers * cal.launch_layer_s * cal.launch_factor
        self._graph_s = shape.layers * cal.graph_launch_layer_s * cal.launch_factor
        self._graph_tokens = cal.graph_tokens
        self.kernels = shape.layers * hardware.kernels_per_layer
        self._queue = cal.launch_queue or hardware.launch_queue
        self._collective_fixed_s = 2 * shape.layers * hardware.collective_latency_s if tp > 1 else 0.0
        ring = 2 * (tp - 1) / tp * shape.hidden * shape.dtype_bytes
        self._collective_token_s = 2 * shape.layers * ring / hardware.collective_bytes_per_s
        self._lines: dict[int, tuple[float, float]] = {}

    def decode_line(self, batch: int) -> tuple[float, float]:
        """(seconds of a decode step with no context, seconds per token of context summed over the batch)."""
        line = self._lines.get(batch)
        if line is None:
            if batch < 0:
                raise ValueError(f"decode batch is {batch}, expected 0 or more")
            line = (0.0 if batch == 0 else self._base_s(batch, batch, batch), self._context_s)
            self._lines[batch] = line
        return line

    def step_s(
        self, prefill: Sequence[tuple[int, int]], decode_batch: int = 0, decode_context_tokens: int = 0
    ) -> float:
        """Seconds of one step: `device_s`, not below `launch_s` where the step holds prefill; parameters as there."""
        device_s = self.device_s(prefill, decode_batch, decode_context_tokens)
        new_tokens = sum(new for new, _ in prefill if new > 0)
        return self.floor_s(device_s, self.launch_s(new_tokens + decode_batch)) if new_tokens else device_s

    @staticmethod
    def floor_s(device_s: float, launch_s: float) -> float:
        """Seconds until a step that holds prefill is done, from its device time and the host time to launch it."""
        return smooth_max(device_s, launch_s, _LAUNCH_ORDER)

    def device_s(
        self, prefill: Sequence[tuple[int, int]], decode_batch: int = 0, decode_context_tokens: int = 0
    ) -> float:
        """Seconds of one step on the device alone, however long the host takes to launch it.

        `prefill`: (new tokens, tokens of the same prompt that are already cached) per prompt chunk; `decode_batch`:
        sequences that get one token; `decode_context_tokens`: the sum of their context lengths. An empty step takes 0.
        """
        tokens, pairs, cached, sequences = decode_batch, 0.0, decode_context_tokens, decode_batch
        for new, before in prefill:
            if new > 0:
                tokens += new
                sequences += 1
                cached += before
                pairs += new * (before + 0.5 * new)
        if tokens == decode_batch:
            base_s, context_s = self.decode_line(decode_batch)
            return base_s + context_s * decode_context_tokens
        return self._base_s(tokens, sequences, decode_batch) + self._attention_s * pairs + self._context_s * cached

    def launch_s(self, new_tokens: int) -> float:
        """Host seconds to launch a step that holds prefill and computes `new_tokens` in all, decoding ones included."""
        return self._graph_s if new_tokens <= self._graph_tokens else self._eager_s

    def launch_blocked_s(self, device_s: float) -> float:
        """Seconds of a step's `device_s` for which launching it blocks the host, counted from the device's start on it.

        The launch returns when all but a queue's length of the step's kernels have begun; kernels count as equal. 0:
        the queue holds them all, so the launch does not wait for the device, not even for a busy one.
        """
        if self.kernels <= self._queue:
            return 0.0
        return device_s * (1.0 - self._queue / self.kernels)

    def request_s(self, n_tokens: int) -> float:
        """What a lone request with one output token takes beyond its steps: `Serving.request_s`."""
        return self.hardware.serving.request_s(n_tokens)

    def prefill_s(self, n_tokens: int, budget: int = 8192) -> float:
        """Seconds of a lone prompt, computed in chunks of at most `budget` tokens; without `request_s`."""
        if budget <= 0:
            raise ValueError(f"chunk budget is {budget}, expected a number above 0")
        total_s, done = 0.0, 0
        while done < n_tokens:
            new = min(budget, n_tokens - done)
            total_s += self.step_s(((new, done),))
            done += new
        return total_s

    def _base_s(self, tokens: int, sequences: int, decoding: int) -> float:
        matrix_s = tokens * self._token_s + sequences * self._head_s
        return (
            smooth_max(matrix_s, self._weights_s, _ROOF_ORDER)
            + self._layers_s
            + self._batch_s * math.log1p(decoding)
            + self._collective_fixed_s
            + self._collective_token_s * tokens
        )
