"""Pointwise ops are symbols; their C expressions stand in definitions and are read by emission alone."""

import ast
import re
from pathlib import Path

import pytest

import tsfuser.ops  # noqa: F401  it defines the symbols
from tsfuser.ir.symbols import all_symbols, define, filled, find
from tsfuser.lower import accumulate  # noqa: F401
from tsfuser.schedule import rows  # noqa: F401  so do schedules and lowering

PACKAGE = Path(__file__).resolve().parents[2] / "tsfuser"
DEFINING = ("define", "unary", "binary", "_gradient", "_gradient_of_output", "rounded")
#: Functions that take a symbol, and at which place.
USING = {"pointwise": 0, "elementwise": 1, "promoted": 1, "_with_numbers": 1, "Pointwise": 1, "Compute": 2}


def calls():
    """Each call in the package: its file, the name of the function, the call."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                yield path, getattr(function, "attr", getattr(function, "id", "")), node


def words(node):
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_c_expressions_stand_in_definitions_only():
    defined = {(path, text) for path, name, call in calls() if name in DEFINING for text in words(call)}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                assert not re.search(r"\{\d\}", node.value) or (path, node.value) in defined, (
                    path,
                    node.value,
                )


def test_every_symbol_that_is_used_is_defined():
    known, used = {symbol.name for symbol in all_symbols()}, set()
    for _, name, call in calls():
        place = USING.get(name)
        if place is not None and len(call.args) > place and isinstance(call.args[place], ast.Constant):
            used.add(call.args[place].value)
    assert used <= known and len(used) > 60


@pytest.mark.parametrize("symbol", all_symbols(), ids=lambda symbol: symbol.name)
def test_the_operands_of_a_symbol_are_numbered_without_gaps(symbol):
    places = [{int(k) for k in re.findall(r"\{(\d+)\}", text)} for text in symbol.templates.values()]
    count = len(set().union(*places))
    assert set().union(*places) in (set(range(count)), {1})  # `fill` looks at no element


@pytest.mark.parametrize("symbol", all_symbols(), ids=lambda symbol: symbol.name)
def test_an_error_grows_by_a_number_for_each_operand(symbol):
    count = len({int(k) for k in re.findall(r"\{(\d+)\}", symbol.templates["f"])})
    assert len(symbol.grows) in (0, count) and all(times > 0 for times in symbol.grows)


def test_a_symbol_by_the_kind_of_its_dtype():
    assert find("add").template("i") == "wrap_add({0}, {1})" and find("add").template("c") == "({0} + {1})"
    assert find("add").cheap and not find("exp").cheap


def test_operands_are_filled_in_at_once():
    assert filled("({1} - {0})", ("{1}", "x")) == "(x - {1})"


def test_a_symbol_means_one_thing():
    assert define("copy", "{0}", cheap=True, grows=(1,)) == "copy"
    with pytest.raises(ValueError, match="copy is defined twice"):
        define("copy", "-{0}")
    with pytest.raises(TypeError, match="unknown kinds"):
        define("half_of", "({0} / 2)", floating="0")
