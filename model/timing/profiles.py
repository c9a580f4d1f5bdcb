"""The packaged profiles, by name.

Decides where packaged profiles lie and which names exist. The only module of `pushkv.model` that reads files, and only
those that come with the package; a user's own profile is parsed by the caller and given to `from_mapping` or
`from_config`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from .fabric import Fabric
from .fields import ProfileError
from .hardware import Hardware
from .shapes import ModelShape

_KINDS = ("hardware", "fabric", "models")


def names(kind: str) -> list[str]:
    """Names of the packaged profiles of a kind: "hardware", "fabric" or "models"."""
    if kind not in _KINDS:
        raise ProfileError(f"no profiles of kind {kind!r}; kinds are {', '.join(_KINDS)}")
    folder = files(__package__) / "profiles" / kind
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read(kind: str, name: str) -> dict[str, Any]:
    """Parsed packaged profile. Errors: `ProfileError` that lists the names there are."""
    if name not in names(kind):
        raise ProfileError(f"no {kind.removesuffix('s')} profile {name!r}; there are {', '.join(names(kind))}")
    text = (files(__package__) / "profiles" / kind / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def hardware(name: str, calibration: str | None = None) -> Hardware:
    """Packaged hardware profile; `calibration` as in `Hardware.from_mapping`. Errors: `ProfileError`."""
    return Hardware.from_mapping(name, read("hardware", name), calibration)


@cache
def fabric(name: str) -> Fabric:
    """Packaged fabric profile. Errors: `ProfileError`."""
    return Fabric.from_mapping(name, read("fabric", name))


@cache
def model(name: str) -> ModelShape:
    """Packaged model shape. Errors: `ProfileError`."""
    return ModelShape.from_config(name, read("models", name))
