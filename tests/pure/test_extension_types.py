"""`tsfuser/_C.pyi` declares what the extension has: mypy checks the calls of it by that file alone.

pybind11 writes the signature of each function, with all overloads, into its docstring.
"""

import ast
import re
from pathlib import Path

import pytest

import tsfuser
from tsfuser import _C

STUB = ast.parse((Path(tsfuser.__file__).parent / "_C.pyi").read_text())


def declared(body):
    """Name -> its declaration; names with an underscore are those of the file itself."""
    found = {}
    for item in body:
        if isinstance(item, (ast.FunctionDef, ast.ClassDef)):
            found[item.name] = item
        elif isinstance(item, ast.AnnAssign):
            found[item.target.id] = item
    return {name: item for name, item in found.items() if name.startswith("__") or not name.startswith("_")}


def members(owner):
    """The names that pybind11 has given a module or a class."""
    return {name for name in vars(owner) if not name.startswith("_") or name in ("__init__", "__call__")}


def signatures(function):
    """The parameters of each overload: (name or None where it has none, whether it has a default)."""
    name = function.__name__
    lines = [re.sub(r"^\d+\. ", "", line) for line in function.__doc__.splitlines()]
    for line in lines:
        if line.startswith(f"{name}(") and "*args, **kwargs" not in line:
            yield parameters(ast.parse(f"def {line}: ...").body[0].args)


def parameters(given):
    every = [*given.posonlyargs, *given.args]
    plain = len(every) - len(given.defaults)
    names = [None if a in given.posonlyargs or re.fullmatch(r"arg\d", a.arg) else a.arg for a in every]
    if every and every[0].arg == "self":
        names[0] = None  # which `/` makes nameless where all others are
    return [(name, k >= plain) for k, name in enumerate(names)]


FUNCTIONS = [
    (name, item, _C) for name, item in declared(STUB.body).items() if isinstance(item, ast.FunctionDef)
]
METHODS = [
    (name, item, getattr(_C, owner.name))
    for owner in STUB.body
    if isinstance(owner, ast.ClassDef)
    for name, item in declared(owner.body).items()
    if not item.decorator_list
]


def test_the_names_are_those_of_the_extension():
    assert set(declared(STUB.body)) == members(_C)
    for item in STUB.body:
        if isinstance(item, ast.ClassDef):
            assert set(declared(item.body)) == members(getattr(_C, item.name)), item.name


@pytest.mark.parametrize(
    ("name", "item", "owner"),
    FUNCTIONS + METHODS,
    ids=[f"{o.__name__}.{n}" for n, _, o in FUNCTIONS + METHODS],
)
def test_the_parameters_are_those_of_the_extension(name, item, owner):
    found = list(signatures(getattr(owner, name)))
    assert found
    assert all(each == parameters(item.args) for each in found)


def test_the_constants_have_their_types():
    constants = {name: item for name, item in declared(STUB.body).items() if isinstance(item, ast.AnnAssign)}
    assert {n: type(getattr(_C, n)).__name__ for n in constants} == {
        n: item.annotation.id for n, item in constants.items()
    }


def test_properties_can_be_read_alone():
    properties = [
        (getattr(_C, owner.name), name)
        for owner in STUB.body
        if isinstance(owner, ast.ClassDef)
        for name, item in declared(owner.body).items()
        if item.decorator_list
    ]
    assert properties
    for owner, name in properties:
        assert isinstance(vars(owner)[name], property) and vars(owner)[name].fset is None
