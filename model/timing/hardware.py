"""Hardware profiles: what one device can do, and how near a measured engine comes to it.

Decides which numbers describe a device and what a valid profile is. Does not decide how they combine into a step
(`compute`) or a copy (`staging`), and reads no file (`profiles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .fields import Fields, ProfileError
from .serving import Serving


@dataclass(frozen=True, slots=True)
class Calibration:
    """How one engine configuration uses a device; most of it fitted by `calibrate`.

    `matrix_efficiency` and `attention_efficiency` are fractions of the device's matrix peak; `weights_efficiency` and
    `context_efficiency` fractions of its memory bandwidth, which reading the weights and reading the KV of the context
    reach. `launch_layer_s`: host time to launch one layer of a step that holds prefill, kernel by kernel; times
    `launch_factor` it is a floor under such steps. `graph_tokens`: steps of at most so many tokens replay a captured
    graph even where they hold prefill (0: none does); their floor is `graph_launch_layer_s` per layer, times the same
    factor. `layer_s`: device time per layer and step that neither operations nor bytes explain (gaps, small kernels).
    `batch_layer_s`: device time per layer and natural logarithm of one plus the number of sequences decoding.
    `launch_queue`: as the device's, where the engine's process was given another (0: the device's). `result_s`: from
    the end of a prompt's last step on the device until the engine has taken note of it; `stream_s`: how much later a
    token is with its client for every other request that gets one from the same step, as they pass one by one;
    `answer_per_token_s`: as `Serving.client_out_per_token_s`, on an answer that is no stream, as P's (0: the same).
    """

    name: str
    matrix_efficiency: float
    attention_efficiency: float
    weights_efficiency: float
    context_efficiency: float
    launch_layer_s: float
    layer_s: float
    batch_layer_s: float
    graph_tokens: int = 0
    graph_launch_layer_s: float = 0.0
    launch_factor: float = 1.0
    launch_queue: int = 0
    result_s: float = 0.0
    stream_s: float = 0.0
    answer_per_token_s: float = 0.0
    source: str = ""

    @classmethod
    def from_fields(cls, name: str, fields: Fields) -> Calibration:
        """Errors: `ProfileError`."""
        made = cls(
            name=name,
            matrix_efficiency=fields.fraction("matrix_efficiency"),
            attention_efficiency=fields.fraction("attention_efficiency"),
            weights_efficiency=fields.fraction("weights_efficiency"),
            context_efficiency=fields.fraction("context_efficiency"),
            launch_layer_s=fields.number("launch_layer_s", zero=True),
            layer_s=fields.number("layer_s", zero=True),
            batch_layer_s=fields.number("batch_layer_s", zero=True),
            graph_tokens=fields.count("graph_tokens", 0, zero=True),
            graph_launch_layer_s=fields.number("graph_launch_layer_s", 0.0, zero=True),
            launch_factor=fields.number("launch_factor", 1.0),
            launch_queue=fields.count("launch_queue", 0, zero=True),
            result_s=fields.number("result_s", 0.0, zero=True),
            stream_s=fields.number("stream_s", 0.0, zero=True),
            answer_per_token_s=fields.number("answer_per_token_s", 0.0, zero=True),
            source=fields.text("source", "not stated"),
        )
        fields.finish()
        return made


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and its neighbours of the same node.

    `matrix_flops_per_s`: dense peak at the weights' precision. `memory_bytes_per_s`: peak. `launch_queue`: kernels that
    the host may have launched and the device not begun, before a launch blocks; `kernels_per_layer`: how many of them
    a step with prefill has. `collective_latency_s`: one small all-reduce inside a graph;
    `collective_bytes_per_s`: one rank's bandwidth to the others. `gather_bytes_per_s` and `scatter_bytes_per_s`: bytes
    of payload per second that a pass over device memory moves, one library call per layer (each byte read and written
    once); `gather_busy_factor` and `scatter_busy_factor`: how much longer it takes while the engine computes;
    `fused_gather_bytes_per_s` and `fused_scatter_bytes_per_s`: the rates of a single kernel for all layers, as this
    project's connector has them (`fused_pass_bytes_per_s` where a profile does not say); `pass_launch_s`: fixed cost of
    a pass; `beside_layers`: for how much of a layer's time a pass waits when the device computes a prompt meanwhile,
    for the kernel under way.
    `serving`: what the serving processes around the device add.
    """

    name: str
    matrix_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    launch_queue: int
    kernels_per_layer: int
    collective_latency_s: float
    collective_bytes_per_s: float
    gather_bytes_per_s: float
    scatter_bytes_per_s: float
    gather_busy_factor: float
    scatter_busy_factor: float
    fused_pass_bytes_per_s: float
    fused_gather_bytes_per_s: float
    fused_scatter_bytes_per_s: float
    pass_launch_s: float
    beside_layers: float
    serving: Serving
    calibration: Calibration
    calibrations: Mapping[str, Calibration]
    sources: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    @classmethod
    def from_mapping(cls, name: str, profile: Mapping[str, Any], calibration: str | None = None) -> Hardware:
        """Build from a parsed TOML profile; `calibration` picks one of its tables, else `default_calibration`.

        Errors: `ProfileError`, one line, naming the field.
        """
        fields = Fields(f"hardware {name}", profile)
        device, collective, staging = fields.table("device"), fields.table("collective"), fields.table("staging")
        launch, serving = fields.table("launch"), fields.table("serving")
        every = fields.table("calibration")
        found = {key: Calibration.from_fields(key, every.table(key)) for key in every.tables()}
        chosen = calibration or fields.text("default_calibration")
        fields.read.add("default_calibration")
        fields.read.add("description")
        if chosen not in found:
            raise ProfileError(f"hardware {name}: no calibration {chosen!r}; it has {', '.join(found) or 'none'}")
        fused = staging.number("fused_pass_bytes_per_s")
        made = cls(
            name=name,
            matrix_flops_per_s=device.number("matrix_flops_per_s"),
            memory_bytes=device.number("memory_bytes"),
            memory_bytes_per_s=device.number("memory_bytes_per_s"),
            launch_queue=launch.count("launch_queue"),
            kernels_per_layer=launch.count("kernels_per_layer"),
            collective_latency_s=collective.number("latency_s", zero=True),
            collective_bytes_per_s=collective.number("bytes_per_s"),
            gather_bytes_per_s=staging.number("gather_bytes_per_s"),
            scatter_bytes_per_s=staging.number("scatter_bytes_per_s"),
            gather_busy_factor=staging.number("gather_busy_factor"),
            scatter_busy_factor=staging.number("scatter_busy_factor"),
            fused_pass_bytes_per_s=fused,
            fused_gather_bytes_per_s=staging.number("fused_gather_bytes_per_s", fused),
            fused_scatter_bytes_per_s=staging.number("fused_scatter_bytes_per_s", fused),
            pass_launch_s=staging.number("pass_launch_s", zero=True),
            beside_layers=staging.number("beside_layers", 0.0, zero=True),
            serving=Serving.from_fields(serving),
            calibration=found[chosen],
            calibrations=found,
            sources=fields.sources,
            assumed=tuple(fields.assumed),
        )
        for table in (device, launch, collective, staging, every, fields):
            table.finish()
        return made

    def with_calibration(self, calibration: str | Calibration) -> Hardware:
        """The same device with another of its calibrations, or with one just fitted.

        Errors: `ProfileError` for a name that the profile does not have.
        """
        if isinstance(calibration, Calibration):
            every = {**self.calibrations, calibration.name: calibration}
            return replace(self, calibration=calibration, calibrations=every)
        if calibration not in self.calibrations:
            raise ProfileError(
                f"hardware {self.name}: no calibration {calibration!r}; it has {', '.join(self.calibrations)}"
            )
        return replace(self, calibration=self.calibrations[calibration])
