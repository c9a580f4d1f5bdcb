"""What is simulated: every setting of a run, where it came from, and whether it makes sense.

Decides the names, defaults and limits of the settings (the command line is generated from this table) and raises
`BadInput` for what cannot be simulated. It does not decide what a setting does: the world does.

Settings come from three layers, later ones winning: defaults, a TOML file, flags.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pushkv.sim.catalog import resolve
from pushkv.sim.errors import BadInput, unknown
from pushkv.sim.fault_file import Fault, read_faults, read_toml

__all__ = ["MODES", "Fault", "Mode", "Scenario", "Setting", "load", "settings"]

Mode = Literal["pull", "push", "pushkv"]

DEFAULT_REQUESTS = 1000

MODES: tuple[Mode, ...] = ("pull", "push", "pushkv")


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field of `Scenario` may be written.

    ``kind`` is text, file (a path), choice, whole or number. A number lies between ``low`` and ``high``; ``open_low``
    leaves ``low`` itself out. ``group`` is the heading that it stands under in the help.
    """

    help: str
    kind: Literal["text", "file", "choice", "whole", "number"] = "text"
    choices: tuple[str, ...] = ()
    low: float = 1
    high: float = math.inf
    open_low: bool = False
    group: str = "engine"

    def parse(self, where: str, value: object) -> Any:
        """``value`` as this setting's type; flags bring text, files typed values. ``where`` names it in errors."""
        if self.kind == "choice":
            if value not in self.choices:
                raise unknown(where, value, self.choices)
            return value
        if self.kind in ("text", "file"):
            if not isinstance(value, str) or not value.strip():
                raise BadInput(f"{where} {value!r} is not usable; expected {self.help}")
            return value
        return self._number(where, value)

    def _number(self, where: str, value: object) -> int | float:
        want = "a whole number" if self.kind == "whole" else "a number"
        want += f" above {self.low:g}" if self.open_low else f" from {self.low:g}"
        want += f" to {self.high:g}" if math.isfinite(self.high) else "" if self.open_low else " up"
        number: int | float = math.nan
        if isinstance(value, str):
            try:
                number = int(value) if self.kind == "whole" else float(value)
            except ValueError:
                number = math.nan
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            number = value
            if self.kind == "whole" and isinstance(value, float):
                number = int(value) if value.is_integer() else math.nan
        if not math.isfinite(number) or not self.low <= number <= self.high or (self.open_low and number == self.low):
            raise BadInput(f"{where} {value} is not possible: expected {want}")
        return number if self.kind == "whole" else float(number)


def _setting(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(help, **limits)})


def _choice(default: str, choices: tuple[str, ...], help: str, group: str) -> Any:
    return _setting(default, help, kind="choice", choices=choices, group=group)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. Build it with `load`, which checks it; a field that is None follows from the others.

    Engine settings have the defaults of vLLM V1 and hold for both sides.
    """

    model: str = _setting("qwen3-8b", "a built-in model or the path of a Hugging Face config.json", group="cluster")
    hardware: str = _setting(
        "h200", "a hardware profile, or the path of one (as pushkv calibrate writes it)", group="cluster"
    )
    fabric: str = _setting("nvlink-ucx", "a fabric profile, or the path of one", group="cluster")
    calibration: str | None = _setting(
        None,
        "an engine calibration of the hardware profile (default: the profile's own)",
        group="cluster",
    )
    prefill: int = _setting(1, "prefill engines", kind="whole", group="cluster")
    decode: int = _setting(1, "decode engines", kind="whole", group="cluster")
    prefill_tp: int = _setting(1, "tensor-parallel ranks of a prefill engine", kind="whole", group="cluster")
    decode_tp: int = _setting(1, "tensor-parallel ranks of a decode engine", kind="whole", group="cluster")

    mode: Literal["pull", "push", "pushkv"] = _choice("pushkv", MODES, "who moves the KV cache, and when", "hand-over")
    path: str = _choice("auto", ("auto", "packed", "direct"), "staged or block by block (mode pushkv)", "hand-over")
    overlap: str = _choice("chunk", ("none", "chunk"), "send chunks as they are computed (mode pushkv)", "hand-over")
    router: str | None = _choice(
        None,  # type: ignore[arg-type]
        ("concurrent", "sequential"),
        "both legs at once, or P then D (default: concurrent, sequential for pull)",
        "hand-over",
    )
    landing_gib: float = _setting(
        8.0, "landing memory per decode GPU, GiB", kind="number", low=0, open_low=True, group="hand-over"
    )
    staging_gib: float = _setting(
        8.0, "staging memory per prefill GPU, GiB", kind="number", low=0, open_low=True, group="hand-over"
    )
    faults: str | None = _setting(None, "a TOML file of [[fault]] tables", kind="file", group="hand-over")

    arrival: str = _choice("poisson", ("poisson", "uniform", "trace"), "when requests arrive", "workload")
    trace: str | None = _setting(None, "a CSV with arrival_s,input_len,output_len", kind="file", group="workload")
    qps: float = _setting(1.0, "requests per second", kind="number", low=0, open_low=True, group="workload")
    input_len: int = _setting(1024, "prompt tokens of a request", kind="whole", group="workload")
    output_len: int = _setting(128, "output tokens of a request", kind="whole", group="workload")
    requests: int | None = _setting(
        None, "how many requests (default: 1000, or all rows of the trace)", kind="whole", group="workload"
    )
    seed: int = _setting(0, "seed of everything random", kind="whole", low=0, group="workload")

    block_size: int = _setting(16, "tokens of a KV block", kind="whole")
    token_budget: int = _setting(8192, "tokens of a step at most (max-num-batched-tokens)", kind="whole")
    max_num_seqs: int = _setting(128, "requests of a step at most", kind="whole")
    gpu_memory_utilization: float = _setting(
        0.9, "part of the GPU's memory for weights and KV cache", kind="number", low=0, open_low=True, high=1
    )
    num_blocks: int | None = _setting(None, "KV blocks of an engine (default: what fits)", kind="whole")
    prefill_cached_fraction: float = _setting(
        0.0, "part of each prompt that P has cached", kind="number", low=0, high=1
    )

    fault_list: tuple[Fault, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The settings, in order, as they stand in a report."""
        values = {name: getattr(self, name) for name in settings()}
        return values | {"fault_list": [dataclasses.asdict(fault) for fault in self.fault_list]}


def settings() -> dict[str, Setting]:
    """Every setting by the name of its field, in order."""
    return {f.name: f.metadata["setting"] for f in dataclasses.fields(Scenario) if "setting" in f.metadata}


def load(path: str | None = None, flags: Mapping[str, object] | None = None, *, lenient: bool = False) -> Scenario:
    """A checked scenario from a TOML file and flags (field name to value; None means not given).

    ``lenient`` lets ``path`` and ``overlap`` pass for modes that have no such choice, as `compare` needs.
    Raises `BadInput`.
    """
    known = settings()
    values: dict[str, Any] = {}
    if path is not None:
        for key, value in read_toml("scenario", path).items():
            name = key.replace("-", "_")
            if name not in known:
                raise unknown(f"scenario {path}: setting", key, known)
            if name in values:
                raise BadInput(f"scenario {path}: {key} is there twice, with - and with _; keep one")
            values[name] = known[name].parse(f"scenario {path}: {key}", value)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for name, value in given.items():
        values[name] = known[name].parse(_flag(name), value)
    return _finish(Scenario(**values), set() if lenient else set(given))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _finish(scenario: Scenario, given: set[str]) -> Scenario:
    """Fill in what follows from other settings, and check what no single setting can know."""
    changes: dict[str, Any] = {}
    if scenario.mode != "pushkv":
        for name in ("path", "overlap"):
            if name in given:
                raise BadInput(f"{_flag(name)} belongs to --mode pushkv; mode {scenario.mode} has no choice there")
        changes |= {"path": "direct", "overlap": "none"}
    elif scenario.path == "direct":
        if "overlap" in given and scenario.overlap != "none":
            raise BadInput("--overlap chunk needs staging: use --path packed or auto, or --overlap none")
        changes["overlap"] = "none"
    if scenario.mode == "pull" and scenario.router == "concurrent" and "router" in given:
        raise BadInput(
            "--router concurrent belongs to push and pushkv: with pull the decode leg needs what the prefill leg"
            " answers; use --router sequential"
        )
    if scenario.router is None or scenario.mode == "pull":
        changes["router"] = "sequential" if scenario.mode == "pull" else "concurrent"
    if scenario.arrival == "trace":
        if scenario.trace is None:
            raise BadInput("--arrival trace needs --trace FILE, a CSV with the columns arrival_s,input_len,output_len")
    else:
        if scenario.trace is not None:
            raise BadInput(f"--trace {scenario.trace} needs --arrival trace; arrivals are now {scenario.arrival}")
        if scenario.requests is None:
            changes["requests"] = DEFAULT_REQUESTS
    if scenario.faults is not None:
        changes["fault_list"] = read_faults(scenario.faults, scenario.prefill, scenario.decode)
    scenario = dataclasses.replace(scenario, **changes)
    parts = resolve(scenario)
    return dataclasses.replace(scenario, calibration=parts.hardware.calibration.name)
