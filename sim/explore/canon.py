"""A machine's own state as a value: copied, and written down so that two that will behave alike are written alike.

Generic over the machines' classes: it walks ``__slots__``, ``__dict__`` and msgspec fields. A frozen struct is a
value, any other an object with attributes. What an attribute means stands in two tables by its name, ``TIMES`` and
``IDLE``; a float without a role is refused, so a new time in a machine is noticed here and not by a search that never
ends.

What is left out or put relative, and why that changes nothing:

* Times are taken relative to the present: machines compare times with each other and with the present, and add spans.
  One that lies further back than ``PAST_S``, longer than any span of the settings, is put there.
* ``IDLE`` attributes are counted and never read (counters, steps, the beat's number, of which only its being above 0
  is), or number things whose identity is kept otherwise (a custody's serial).
* A heap of deadlines is its live entries in firing order. Stale ones are skipped by the machine as well; how many of
  them lie there decides only when it is rebuilt.
* Objects that are shared are numbered at their first visit; dictionaries keep their order, since machines walk them.

Names that are equal in all but name (two transfers of one kind) are interchanged by ``swapped``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from copy import copy as shallow
from enum import Enum
from itertools import count
from marshal import dumps
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import msgspec

from pushkv.model.protocol import Settings
from pushkv.model.protocol.deadlines import NEVER, Deadlines
from pushkv.sim.explore.scope import TRANSFERS, Plan, Scope

TIMES: Final = frozenset({"due", "wake_at", "at", "now", "registered_at", "_heard", "_doubted"})
SPANS: Final = frozenset({"_greet_s", "_limit"})
IDLE: Final = frozenset({"counters", "steps", "serial", "_beat", "_order"})
"""``_order`` is the ledger's and the deadlines' running number: what was numbered keeps its own."""
UNORDERED: Final = frozenset({"registered", "granted", "owner", "cells"})
"""Dictionaries of the ghost that are only looked up."""
ALL: Final = frozenset(TRANSFERS)
"""A set of both names is written so that it stays itself when they are interchanged."""
PAST_S: Final = 64.0

_CONSTANT: set[type] = {Settings, Scope, Plan, range}
_SHARED: set[type] = {int, str, float, bool, bytes, type(None), FunctionType, BuiltinFunctionType, *_CONSTANT}
_PLAIN: Final = frozenset({int, str, bool, bytes, type(None)})
_CALLS: Final = (MethodType, FunctionType, BuiltinFunctionType)
_plans: dict[type, tuple[str, ...]] = {}


def attributes(kind: type) -> tuple[str, ...]:
    """Names of the slots of ``kind``, in order; empty when its instances have a ``__dict__``."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if kind not in _plans:
        slots: list[str] = []
        for base in reversed(kind.__mro__):
            own = base.__dict__.get("__slots__", ())
            slots += [own] if isinstance(own, str) else list(own)
        _plans[kind] = tuple(name for name in slots if not name.startswith("__"))
    return _plans[kind]


def _frozen(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen


def _shared(kind: type) -> bool:
    if kind in _SHARED:
        return True
    if _frozen(kind) or issubclass(kind, (Enum, type)):
        _SHARED.add(kind)
        return True
    return False


# ---------------------------------------------------------------- copying


def clone(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that shares nothing that changes with ``value``. Frozen records are shared."""
    kind = type(value)
    if kind in _SHARED:
        return value
    copy = _COPIES.get(kind)
    if copy is None:
        if _shared(kind):
            return value
        copy = _COPIES[kind] = _copy_for(kind)
    if kind is tuple:
        return copy(value, memo)
    number = id(value)
    return memo[number] if number in memo else copy(value, memo)


def _copy_for(kind: Any) -> Callable[[Any, dict[int, Any]], Any]:
    if kind in _COPIERS:
        return _COPIERS[kind]
    slots, shared = attributes(kind), _SHARED
    if issubclass(kind, msgspec.Struct):
        return _copy_struct

    def copy(value: Any, memo: dict[int, Any]) -> Any:
        new = memo[id(value)] = kind.__new__(kind)
        for name in slots:
            part = getattr(value, name)
            setattr(new, name, part if type(part) in shared else clone(part, memo))
        return new

    def copy_dict(value: Any, memo: dict[int, Any]) -> Any:
        new = copy(value, memo) if slots else memo.setdefault(id(value), kind.__new__(kind))
        into = new.__dict__
        for name, part in value.__dict__.items():
            into[name] = part if type(part) in shared else clone(part, memo)
        return new

    return copy_dict if any("__dict__" in base.__dict__ for base in kind.__mro__) else copy


def _copy_struct(value: Any, memo: dict[int, Any]) -> Any:
    new = memo[id(value)] = shallow(value)
    for name in type(value).__struct_fields__:
        part = getattr(value, name)
        if type(part) not in _SHARED:
            setattr(new, name, clone(part, memo))
    return new


def _copy_tuple(value: Any, memo: dict[int, Any]) -> Any:
    for part in value:
        if type(part) not in _SHARED:
            return tuple([clone(part, memo) for part in value])
    return value


def _copy_dictionary(value: Any, memo: dict[int, Any]) -> Any:
    new: Any = type(value)()
    memo[id(value)] = new
    for key, part in value.items():
        new[key] = part if type(part) in _SHARED else clone(part, memo)
    return new


def _copy_list(value: Any, memo: dict[int, Any]) -> Any:
    new = memo[id(value)] = type(value)()
    for part in value:
        new.append(part if type(part) in _SHARED else clone(part, memo))
    return new


def _copy_set(value: Any, memo: dict[int, Any]) -> Any:
    new = memo[id(value)] = type(value)([clone(part, memo) for part in value])
    return new


def _copy_method(value: Any, memo: dict[int, Any]) -> Any:
    return MethodType(value.__func__, clone(value.__self__, memo))


def _copy_count(value: Any, memo: dict[int, Any]) -> Any:
    new = memo[id(value)] = count(_next_of(value))
    return new


_COPIERS: dict[type, Callable[[Any, dict[int, Any]], Any]] = {
    tuple: _copy_tuple,
    dict: _copy_dictionary,
    OrderedDict: _copy_dictionary,
    list: _copy_list,
    deque: _copy_list,
    set: _copy_set,
    frozenset: _copy_set,
    MethodType: _copy_method,
    count: _copy_count,
}
_COPIES: dict[type, Callable[[Any, dict[int, Any]], Any]] = {}


def _next_of(numbers: Any) -> int:
    return int(numbers.__reduce__()[1][0])


# ---------------------------------------------------------------- writing down


def relative(value: float, now: float) -> Any:
    """A time as far as it matters."""
    if value == NEVER:
        return "never"
    return max(value - now, -PAST_S)


class Form:
    """One walk of one machine at time ``now``."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._seen: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """``value`` as nested tuples of plain values."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        walk = _WALKS.get(kind)
        if walk is None:
            walk = _WALKS[kind] = _walk_for(kind)
        return walk(self, value)

    def visit(self, value: Any) -> Any:
        """``None`` at the first visit of an object, later its number."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            return None
        return ("@", number)

    def named(self, name: str, value: Any, kind: type) -> Any:
        """The value of attribute ``name``."""
        if name in TIMES:
            return relative(value, self._now) if type(value) is float else self.of(value)
        if name in UNORDERED:
            return tuple([(self.of(key), self.of(value[key])) for key in sorted(value)])
        if type(value) is float and name not in SPANS:
            raise TypeError(f"{kind.__name__}.{name} is a float: say in canon.TIMES or canon.SPANS what it means")
        return value if type(value) is float else self.of(value)

    def record(self, value: Any) -> Any:
        """An object with attributes."""
        again = self.visit(value)
        if again is not None:
            return again
        kind = type(value)
        parts: list[Any] = [kind.__name__]
        for name in attributes(kind):
            if name not in IDLE:
                parts.append(self.named(name, getattr(value, name), kind))
        if hasattr(value, "__dict__"):
            for name, part in value.__dict__.items():
                if name not in IDLE:
                    parts.append(self.named(name, part, kind))
        return tuple(parts)

    def deadlines(self, value: Deadlines[Any]) -> Any:
        """Live entries in firing order."""
        again = self.visit(value)
        if again is not None:
            return again
        live = sorted(entry[:2] for entry in value._heap if entry[2].due == entry[0])
        records = {entry[:2]: entry[2] for entry in value._heap}
        return ("due", *((relative(key[0], self._now), self.of(records[key])) for key in live))


def _walk_for(kind: type) -> Callable[[Form, Any], Any]:
    if issubclass(kind, Enum):
        return lambda form, value: value.value
    if _frozen(kind):
        fields = attributes(kind)
        return lambda form, value: (kind.__name__, *[form.of(getattr(value, name)) for name in fields])
    if kind in (tuple, list, deque):
        return lambda form, value: tuple([form.of(part) for part in value])
    if kind in (dict, OrderedDict):
        return _dictionary
    if kind in (set, frozenset):
        return lambda form, value: "all" if value == ALL else tuple(sorted([form.of(part) for part in value]))
    if kind in _CONSTANT or kind in _CALLS or issubclass(kind, type):
        return lambda form, value: None
    if kind is count:
        return lambda form, value: _next_of(value)
    if kind is float:
        raise TypeError("a float outside of an attribute: canon does not know what it means")
    if issubclass(kind, Deadlines):
        return Form.deadlines
    return Form.record


def _dictionary(form: Form, value: Any) -> Any:
    parts = []
    for key, part in value.items():
        if type(part) in _CALLS:
            return None  # a dispatch table: it never changes
        parts.append((form.of(key), form.of(part)))
    return tuple(parts)


_WALKS: dict[type, Callable[[Form, Any], Any]] = {}


def written(value: Any, now: float) -> bytes:
    """The canonical form of ``value``, as bytes."""
    return dumps(Form(now).of(value), 2)


def swapped(form: bytes, names: tuple[str, ...]) -> bytes:
    """The form of the same state with two names interchanged; itself when there are no two."""
    if len(names) != 2:
        return form
    one, two = names[0].encode(), names[1].encode()
    return form.replace(one, b"\0?\0").replace(two, one).replace(b"\0?\0", two)
