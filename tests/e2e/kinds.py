"""The two connectors that the harness can drive, and how a knob of a test is spelt in each.

Everything else in ``tests/e2e`` is the same for both: the router contract is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .servers import HOST, Spec, free_ports

HERE = Path(__file__).parent
FAULT_FILE = "fault"
"""Name of the file in a server's folder through which a test holds or breaks its writes (``faulty.py``)."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What tests set, in the words of the design. The bounds are long: nothing breaks unless a test breaks it, however
    slow the machine. ``faults.py`` has short ones.
    """

    path: str = "packed"
    """``packed``, ``chunk`` (packed, and each chunk leaves as it is computed), ``direct`` or ``auto``."""
    lease_s: float = 60.0
    """P gives up a finished prefill that nobody fetched."""
    dead_peer_s: float = 20.0
    """A silent peer is taken for dead."""
    landing_bytes: int | None = None
    staging_bytes: int | None = None
    segment_bytes: int | None = None
    orphan_s: float = 40.0
    """D waits for a prefill that P has never heard of."""
    wait_s: float = 60.0
    """D waits for a prefill at all."""
    write_s: float = 30.0
    """One write."""
    policy: str = "fail"
    """What D does with a request whose hand-over failed: ``fail`` or ``recompute``."""
    trace: bool = True
    faulty: bool = False
    """Load the connector through ``faulty.py``, so that a test can hold or break writes."""
    beside: bool = False
    """Under a ``MultiConnector``, beside vLLM's connector that stores prompts on disk."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, spelt as the connector spells them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One connector: its name in reports and in vLLM's configuration."""

    name: str
    connector: str
    """By which vLLM knows it without a module's path: its own, or by the entry point of a package."""
    paths: tuple[str, ...]
    faulty_connector: str

    def extra(self, knobs: Knobs, port: int, folder: Path, name: str) -> dict[str, Any]:
        """``kv_connector_extra_config``."""
        if self.name == "vllm":
            own = {"kv_lease_duration": int(knobs.lease_s), "push_registration_timeout": knobs.dead_peer_s}
            return own | dict(knobs.more)
        found: dict[str, Any] = {
            "host": HOST,
            "port": port,
            "path": "packed" if knobs.path == "chunk" else knobs.path,
            "overlap": "chunk" if knobs.path == "chunk" else "none",
            "lease_s": knobs.lease_s,
            "dead_peer_s": knobs.dead_peer_s,
            "beat_s": 0.3,
            "orphan_s": knobs.orphan_s,
            "wait_s": knobs.wait_s,
            "write_s": knobs.write_s,
            "fabric_drain_s": 0.5,
            "landing_bytes": knobs.landing_bytes,
            "staging_bytes": knobs.staging_bytes,
            "segment_bytes": knobs.segment_bytes,
            "trace": str(folder / f"{name}.trace.jsonl") if knobs.trace else None,
        }
        return {key: value for key, value in found.items() if value is not None} | dict(knobs.more)

    def spec(self, name: str, model: Path, folder: Path, knobs: Knobs, **settings: Any) -> Spec:
        """A server ``P...`` (prefill) or ``D...`` (decode) with this connector."""
        ports = free_ports(settings.get("tp", 1) * settings.get("dp", 1))
        port = ports[0]
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        environment |= settings.pop("environment", {})
        transfer: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": "kv_producer" if name.startswith("P") else "kv_consumer",
            "engine_id": name,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": knobs.policy,
            "kv_connector_extra_config": self.extra(knobs, port, folder, name),
        }
        if knobs.faulty:
            transfer |= {"kv_connector": self.faulty_connector, "kv_connector_module_path": "faulty"}
            environment["E2E_FAULT_FILE"] = str(folder / f"{name}.{FAULT_FILE}")
            environment["PYTHONPATH"] = str(HERE / "plugins")
        if knobs.beside:
            store = {"shared_storage_path": str(folder / f"{name}.store")}
            other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": store}
            own = {key: transfer[key] for key in ("kv_role", "engine_id", "kv_load_failure_policy")}
            del transfer["engine_id"]  # vLLM gives it to both
            transfer = {"kv_connector": "MultiConnector", **own} | {
                "kv_connector_extra_config": {"connectors": [transfer, other]}
            }
        return Spec(
            name, model, folder, transfer=transfer, environment=environment, side_ports=tuple(ports), **settings
        )


KINDS = {
    "vllm": Kind("vllm", "NixlPushConnector", ("direct",), "FaultyNixlPushConnector"),
    "pushkv": Kind("pushkv", "PushConnector", ("packed", "chunk", "direct"), "FaultyPushConnector"),
}
