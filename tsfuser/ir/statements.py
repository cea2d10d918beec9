"""Runs the text that the compiler's levels print: assignments of records, tuples, sizes and literals. It is a
small part of Python: there are no attributes but members of enums, no loops, and no names but the given ones.

In: the text, and what its names mean. Out: the names with all that the text assigns. Example:

    run("a0 = axis('a0', leaf(0, 'size0_0') * 4)", vocabulary())["a0"]

Each argument of a record or function is compared with the type that is written there. A text that does not
fit raises `SyntaxError`, with the line and a sentence, whatever is wrong with it.
"""

from __future__ import annotations

import ast
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from .size import Size

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def record(text: str, kind: type, names: Mapping[str, Any]) -> Any:
    """The record of type `kind` that `text` assigns to the type's name in lower case."""
    found = run(text, names).get(kind.__name__.lower())
    if not isinstance(found, kind):
        raise SyntaxError(f"it assigns no {kind.__name__} to {kind.__name__.lower()}")
    return found


def run(text: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """`names`, and what the assignments of `text` add to them."""
    scope = dict(names)
    for statement in _parsed(text).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                scope[name] = _evaluated(value, scope)
            case _:
                raise _error(statement, "is not an assignment to a name")
    return scope


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text, "<text>")
    except SyntaxError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; nested too deeply
        raise SyntaxError(str(error) or "it is nested too deeply") from None


def _evaluated(node: ast.expr, names: Mapping[str, Any]) -> Any:
    try:
        return _value(node, names)
    except SyntaxError:
        raise
    except RecursionError:
        raise _error(node, "is nested too deeply") from None
    except Exception as error:  # of a function that was called with operands of the right types
        raise _error(node, f"does not work: {error}") from None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=constant) if constant is not Ellipsis and not isinstance(constant, bytes):
            return constant
        case ast.Name(id=name):
            if name not in names:
                raise _error(node, "is not defined")
            return names[name]
        case ast.Attribute(value=ast.Name(id=name), attr=member):
            kind = names.get(name)
            if not (isinstance(kind, type) and issubclass(kind, Enum) and member in kind.__members__):
                raise _error(node, "is not a member of an enum")
            return kind[member]
        case ast.Tuple(elts=elements):
            return tuple([_value(element, names) for element in elements])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_number(left, names), _number(right, names))
        case ast.Call(func=ast.Name(), args=positional, keywords=keywords):
            return _called(node, positional, keywords, names)
    raise _error(node, "is not part of the printed form")


def _number(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """An operand: a number, or a size."""
    found = _value(node, names)
    if not isinstance(found, (int, float, complex, Size)):
        raise _error(node, "is neither a number nor a size")
    return found


def _called(
    node: ast.Call, positional: list[ast.expr], keywords: list[ast.keyword], names: Mapping[str, Any]
) -> Any:
    function = _value(node.func, names)
    if not callable(function) or isinstance(function, type) and issubclass(function, Enum):
        raise _error(node.func, "cannot be called")
    signature, hints = _signature(function)
    words = {k.arg or "**": _value(k.value, names) for k in keywords}
    try:
        bound = signature.bind(*[_value(x, names) for x in positional], **words)
    except TypeError as error:
        raise _error(node, f"does not work: {error}") from None
    for name, argument in bound.arguments.items():
        if name in hints and not _fits(argument, hints[name]):
            raise _error(node, f"has a {name} that is {_short(repr(argument))}")
    return function(*bound.args, **bound.kwargs)


@lru_cache(maxsize=None)
def _signature(function: Callable) -> tuple[inspect.Signature, dict[str, Any]]:
    """How it is called, and the types of its parameters."""
    return inspect.signature(function), get_type_hints(function)


def _fits(x: Any, kind: Any) -> bool:
    """Whether `x` is of the type that an annotation says."""
    if kind is Any or kind is object:
        return True
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(x, part) for part in parts)
    if origin is tuple:
        if not isinstance(x, tuple):
            return False
        if parts[-1:] == (Ellipsis,):
            return all(_fits(item, parts[0]) for item in x)
        return len(x) == len(parts) and all(map(_fits, x, parts))
    if kind is float:
        return isinstance(x, (int, float))
    return isinstance(x, origin or kind)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _error(node: ast.AST, complaint: str) -> SyntaxError:
    """`complaint` about the text of `node`."""
    text = ast.unparse(node).split("\n")[0]
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
    return SyntaxError(f"line {line}: {_short(text)} {complaint}", ("<text>", line, column, text))
