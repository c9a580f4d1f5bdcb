"""Typed reading of numbers out of profile and config mappings.

Decides how a number may be written (plain, or as a table with its source) and what makes it unusable. Does not decide
which fields a profile has, and reads no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class ProfileError(ValueError):
    """A profile, a model config or a table of measurements cannot be used; the message is one line for the user."""


@dataclass(slots=True)
class Fields:
    """One table of a profile, read field by field.

    A number is written plain (`x = 1.0`) or with where it comes from (`x = { value = 1.0, source = "...", assumed =
    true }`). Sources and assumptions gather under dotted names, so that reports can print them.

    Errors: `ProfileError` that names the profile and the field and says what would be right.
    """

    owner: str
    values: Mapping[str, Any]
    prefix: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ProfileError(f"{self.owner}: {self.prefix.rstrip('.') or 'the profile'} must be a table")

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """Finite positive number (`zero` allows 0 too), in the unit that the key's ending names."""
        raw = self._raw(key, default)
        if isinstance(raw, bool) or not isinstance(raw, int | float):
            raise ProfileError(f"{self.owner}: {self.prefix}{key} is {raw!r}, expected a number")
        number = float(raw)
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            want = "a finite number, 0 or more" if zero else "a finite number above 0"
            raise ProfileError(f"{self.owner}: {self.prefix}{key} is {raw!r}, expected {want}")
        return number

    def fraction(self, key: str, default: float | None = None) -> float:
        """Number in (0, 1]."""
        number = self.number(key, default)
        if number > 1:
            raise ProfileError(f"{self.owner}: {self.prefix}{key} is {number!r}, expected a fraction in (0, 1]")
        return number

    def count(self, key: str, default: int | None = None, *, zero: bool = False) -> int:
        """Whole number above 0 (`zero` allows 0 too)."""
        number = self.number(key, default, zero=zero)
        if number != int(number):
            raise ProfileError(f"{self.owner}: {self.prefix}{key} is {number!r}, expected a whole number")
        return int(number)

    def text(self, key: str, default: str | None = None) -> str:
        raw = self._raw(key, default)
        if not isinstance(raw, str) or not raw:
            raise ProfileError(f"{self.owner}: {self.prefix}{key} is {raw!r}, expected a non-empty text")
        return raw

    def table(self, key: str, *, optional: bool = False) -> Fields:
        """Sub-table that shares this table's sources and assumptions."""
        self.read.add(key)
        inner = self.values.get(key, {} if optional else None)
        if inner is None:
            raise ProfileError(f"{self.owner}: table [{self.prefix}{key}] is missing")
        return Fields(self.owner, inner, f"{self.prefix}{key}.", self.sources, self.assumed)

    def tables(self) -> Iterator[str]:
        """Names of the sub-tables, in the order of the file."""
        return (key for key, value in self.values.items() if isinstance(value, Mapping))

    def finish(self) -> None:
        """Refuse fields that nobody read: a misspelt number must not be ignored in silence."""
        odd = [key for key in self.values if key not in self.read]
        if odd:
            raise ProfileError(
                f"{self.owner}: unknown field {self.prefix}{odd[0]}; known here: {', '.join(sorted(self.read))}"
            )

    def _raw(self, key: str, default: Any) -> Any:
        self.read.add(key)
        raw = self.values.get(key, default)
        if raw is None:
            raise ProfileError(f"{self.owner}: field {self.prefix}{key} is missing")
        if isinstance(raw, Mapping):
            name = f"{self.prefix}{key}"
            odd = set(raw) - {"value", "source", "assumed"}
            if "value" not in raw or odd:
                raise ProfileError(f"{self.owner}: {name} must have value and may have source and assumed")
            if "source" in raw:
                self.sources[name] = str(raw["source"])
            if raw.get("assumed", False):
                self.assumed.append(name)
            raw = raw["value"]
        return raw
