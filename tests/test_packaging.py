"""The distribution holds what the tree holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOPS = ("model", "reference", "router", "sim")


def test_every_package_is_listed() -> None:
    found = {
        "pushkv." + ".".join(init.parent.relative_to(ROOT).parts)
        for top in TOPS
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_package_is_typed() -> None:
    assert all((ROOT / top / "py.typed").is_file() for top in TOPS)


def test_every_data_file_is_covered() -> None:
    """Profiles are the only files besides modules that an installed package needs."""
    others = {
        path
        for top in TOPS
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    profiles = ROOT / "model" / "timing" / "profiles"
    assert {p for p in others if p.name != "py.typed"} == set(profiles.rglob("*.toml"))
    assert PROJECT["tool"]["setuptools"]["package-data"]["pushkv.model.timing"] == ["profiles/**/*.toml"]


def test_the_lock_names_no_place_but_pypi() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    sources = {tuple(package["source"].items()) for package in lock["package"]}
    assert sources == {(("registry", "https://pypi.org/simple"),), (("editable", "."),)}
    urls = [wheel["url"] for package in lock["package"] for wheel in package.get("wheels", ())]
    assert urls
    assert all(url.startswith("https://files.pythonhosted.org/") for url in urls)


def test_the_core_needs_three_libraries() -> None:
    assert {line.split(">")[0] for line in PROJECT["project"]["dependencies"]} == {"msgspec", "numpy", "simpy"}
