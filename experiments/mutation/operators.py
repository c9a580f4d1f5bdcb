"""Small mistakes, one at a time: every mutant of the functions of one module, as the code object that replaces the
function's own.

Not mutated: messages of exceptions, docstrings, annotations, defaults, and what a module runs when it is imported (the
transition tables lose one edge at a time instead, see ``edges``).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """``key`` names it in a way that survives changes elsewhere: module, function, and what became of what. ``code``
    compiles it.
    """

    key: str
    function: str
    line: int
    code: Callable[[], CodeType]


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    """What can be done to ``node``: the operator's name, and the change of a copy."""

    def with_(**fields: Any) -> Callable[[Any], ast.AST]:
        def change(copied: Any) -> ast.AST:
            for name, value in fields.items():
                setattr(copied, name, value)
            return copied  # type: ignore[no-any-return]

        return change

    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for other in COMPARE[type(op)]:
                    yield "compare", with_(ops=[*ops[:index], other(), *ops[index + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield "and/or", with_(op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield "drop", with_(values=rest) if len(rest) > 1 else lambda _, rest=rest: rest[0]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", lambda _: operand
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", lambda _: operand
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", with_(op=ARITHMETIC[type(op)]())
        case ast.Constant(value=bool() as value):
            yield "constant", with_(value=not value)
        case ast.Constant(value=int() as value):
            yield "constant", with_(value=value + 1)
        case ast.Call(func=ast.Name(id=name) as func) if name in CALLS:
            yield "call", with_(func=ast.Name(CALLS[name], func.ctx))
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.NamedExpr)):
                yield "condition", with_(test=ast.UnaryOp(ast.Not(), test))
            elif isinstance(test, (ast.BoolOp, ast.Compare)) and isinstance(node, ast.IfExp):
                pass
        case ast.AugAssign(op=op):
            if type(op) in ARITHMETIC:
                yield "arithmetic", with_(op=ARITHMETIC[type(op)]())
            yield "delete", lambda _: ast.Pass()
        case ast.Return(value=value):
            if value is None:
                yield "delete", lambda _: ast.Pass()
            elif not (isinstance(value, ast.Constant) and value.value is None):
                yield "return", with_(value=ast.Constant(None))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() | ast.Tuple(), *_]):
            yield "delete", lambda _: ast.Pass()
        case ast.Expr(value=value) if not isinstance(value, ast.Constant):
            yield "delete", lambda _: ast.Pass()
        case ast.Delete() | ast.Raise() | ast.Break() | ast.Continue():
            yield "delete", lambda _: ast.Pass()


def _sites(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of one function that may be changed, nested functions apart."""
    for name, value in ast.iter_fields(function):
        if name in ("decorator_list", "returns", "annotation", "type_comment") or isinstance(value, ast.arguments):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.JoinedStr)) or not isinstance(child, ast.AST):
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from _sites(child)


def _find(code: CodeType, qualname: str, line: int) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == qualname and constant.co_firstlineno == line:
                return constant
            if (found := _find(constant, qualname, line)) is not None:
                return found
    return None


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _short(node: ast.AST) -> str:
    first = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]
    return first if len(first) <= 90 else first[:87] + "..."


def mutants(source: str, module: str) -> Iterator[Mutant]:
    """Every mutant of every function and method of ``source``."""
    tree = ast.parse(source)
    whole = compile(tree, module, "exec")
    seen: dict[str, int] = {}
    for qualname, function in _functions(tree):
        line = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        if _find(whole, qualname, line) is None:
            continue
        for site in _sites(function):
            for operator, change in _changes(site):
                new = change(copy.copy(site))
                key = f"{module}:{qualname}: {operator}: {_short(site)} -> {_short(new)}"
                seen[key] = seen.get(key, 0) + 1
                if seen[key] > 1:
                    key += f" #{seen[key]}"
                yield Mutant(key, qualname, site.lineno, partial(_code, tree, site, new, module, qualname, line))


def _code(tree: ast.Module, old: ast.AST, new: ast.AST, module: str, qualname: str, line: int) -> CodeType:
    code = _find(_compiled(tree, old, new, module), qualname, line)
    assert code is not None
    return code


def _compiled(tree: ast.Module, old: ast.AST, new: ast.AST, module: str) -> CodeType:
    """The code of ``tree`` with ``new`` in the place of ``old``; the tree is left as it was."""
    ast.fix_missing_locations(ast.copy_location(new, old))
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
                try:
                    return compile(tree, module, "exec")
                finally:
                    setattr(parent, name, old)
            if isinstance(value, list) and any(item is old for item in value):
                index = next(i for i, item in enumerate(value) if item is old)
                value[index] = new
                try:
                    return compile(tree, module, "exec")
                finally:
                    value[index] = old
    raise AssertionError("not in the tree")


def edges(tables: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Every edge of the transition tables: (table, state, event), to be taken away."""
    for name, (_, table) in tables.items():
        for state, events in table.items():
            for event in events:
                yield name, state, event
