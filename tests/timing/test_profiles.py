"""Packaged profiles load; broken ones are refused with one line."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

import pytest

from pushkv.model.timing import Fabric, Hardware, ProfileError, Serving, profiles


def test_the_names_of_the_design_are_there() -> None:
    assert {"h200", "h100", "trn2", "cpu"} <= set(profiles.names("hardware"))
    assert {"nvlink-ucx", "efa-p5en", "ib-8x400", "tcp", "roce-8x200"} <= set(profiles.names("fabric"))
    assert {"qwen3-8b", "qwen3-32b", "llama-3.3-70b"} <= set(profiles.names("models"))


@pytest.mark.parametrize("name", profiles.names("hardware"))
def test_hardware_loads_with_each_of_its_calibrations(name: str) -> None:
    hardware = profiles.hardware(name)
    for calibration in hardware.calibrations:
        assert hardware.with_calibration(calibration) == profiles.hardware(name, calibration)
        assert hardware.with_calibration(calibration).calibration.name == calibration


def test_a_lone_request_pays_its_way_in_and_out_and_one_scheduling() -> None:
    hardware = profiles.hardware("h200")
    serving = hardware.serving
    assert serving.request_s(0) == pytest.approx(2.0e-3 + 1.5e-3 + 0.25e-3)
    assert serving.request_s(10_000) - serving.request_s(0) == pytest.approx(9e-3)
    assert {"serving.client_in_s", "serving.transfer_poll_s"} <= set(hardware.assumed)
    assert {f"serving.{item.name}" for item in fields(Serving)} <= set(hardware.sources)


@pytest.mark.parametrize("name", profiles.names("fabric"))
def test_fabric_loads_and_says_what_it_assumes(name: str) -> None:
    fabric = profiles.fabric(name)
    assert "wire.drain_s" in fabric.assumed
    assert set(fabric.assumed) <= set(fabric.sources)


@pytest.mark.parametrize(
    ("kind", "load"), [("hardware", profiles.hardware), ("fabric", profiles.fabric), ("model", profiles.model)]
)
def test_unknown_name_lists_those_there_are(kind: str, load: Any) -> None:
    with pytest.raises(ProfileError, match=rf"no {kind} profile '\.\./x'; there are "):
        load("../x")


def test_unknown_kind_and_calibration_are_refused() -> None:
    with pytest.raises(ProfileError, match="no profiles of kind"):
        profiles.names("planet")
    with pytest.raises(
        ProfileError, match="no calibration 'fast'; it has eager-prefill, eager-2, eager-2-queue, eager-push"
    ):
        profiles.hardware("h200", "fast")
    with pytest.raises(ProfileError, match="no calibration 'fast'"):
        profiles.hardware("h200").with_calibration("fast")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("device.memory_bytes", None, "field device.memory_bytes is missing"),
        ("device", None, r"table \[device\] is missing"),
        ("device", 3, "device must be a table"),
        ("calibration.compiled.context_efficiency", 1.5, r"expected a fraction in \(0, 1\]"),
        ("calibration.compiled.graph_tokens", 1.5, "expected a whole number"),
        ("calibration.compiled.request_s", 4e-3, "unknown field calibration.compiled.request_s"),
        ("launch", None, r"table \[launch\] is missing"),
        ("launch.launch_queue", 0, "expected a finite number above 0"),
        ("serving.schedule_s", None, "field serving.schedule_s is missing"),
        ("serving.schedule", 1.0, "unknown field serving.schedule"),
        ("device.memory_bytes", math.inf, "expected a finite number above 0"),
        ("device.memory_bytes", {"source": "?"}, "must have value"),
        ("device.memory_bytes", {"value": 1.0, "sauce": "?"}, "must have value"),
        ("device.speed", 1.0, "unknown field device.speed"),
        ("staging.pass_launch_s", -1.0, "expected a finite number, 0 or more"),
        ("calibration.compiled.launch_s", 1.0, "unknown field calibration.compiled.launch_s"),
        ("calibration.compiled.matrix_efficiency", "high", "expected a number"),
        ("default_calibration", "", "expected a non-empty text"),
        ("default_calibration", "none", "no calibration 'none'"),
        ("surprise", 1, "unknown field surprise"),
    ],
)
def test_broken_hardware_is_refused_in_one_line(path: str, value: Any, says: str) -> None:
    with pytest.raises(ProfileError, match=says) as caught:
        Hardware.from_mapping("mine", _changed(profiles.read("hardware", "h200"), path, value))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("hardware mine:")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("wire.nics_per_device", 1.5, "expected a whole number"),
        ("wire.latency_s", math.nan, "expected a finite number, 0 or more"),
        ("posting.write", None, r"table \[posting.write\] is missing"),
        ("posting.read.call", 1.0, "unknown field posting.read.call"),
        ("wire.write_efficiency", 0, "expected a finite number above 0"),
    ],
)
def test_broken_fabric_is_refused_in_one_line(path: str, value: Any, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        Fabric.from_mapping("mine", _changed(profiles.read("fabric", "tcp"), path, value))


def _changed(profile: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(profile)
    *folders, last = path.split(".")
    table = made
    for folder in folders:
        table = table[folder]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return made
