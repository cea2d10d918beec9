"""Facts about ops stand in their rows: no other file of the product names an op of the table, but those that
make or recognise such nodes in torch's graphs."""

import ast
import re
from pathlib import Path

import pytest

from tsfuser.ops import table

ROOT = Path(__file__).resolve().parents[2]
#: Of an op of the table, and of its in-place form.
NAMES = {form for row in table.all_rows() for form in (row.name, f"{row.name}_")}
#: The files that may name ops, which ops, and why.
ALLOWED = {
    "tsfuser/frontends/torchscript/training/formulas.py": (
        "where mul to type_as masked_fill bitwise_not max min gt lt eq div softmax log_softmax",
        "autodiff's formulas, and eager's in their place, are made of these",
    ),
    "tsfuser/frontends/torchscript/training/recompute.py": (
        "_autocast_to_full_precision",
        "the cast whose operand is saved in its place",
    ),
    "tsfuser/frontends/torchscript/training/relu_mask.py": (
        "_batch_norm_impl_index _batch_norm_impl_index_backward gt relu clone is_positive",
        "the pattern that it rewrites, and what it becomes",
    ),
    "tsfuser/graph/bias.py": ("add t unsqueeze", "the nodes that it makes"),
    "tsfuser/graph/effects.py": ("mul add", "here they are ops on lists of numbers"),
    "tsfuser/graph/evaluate.py": (
        "add sub mul neg eq ne lt le gt ge __and__ __or__",
        "here they are ops on numbers of the host",
    ),
    "tsfuser/graph/functionalize.py": (
        "full_like fill type_as",
        "the nodes that it makes, and what torch's own pass makes of `fill_`",
    ),
    "tsfuser/graph/layout_hints.py": ("laid_out", "the nodes that it makes"),
    "tsfuser/graph/matmul_operands.py": ("packed", "the nodes that it makes"),
    "tsfuser/grouping/support.py": ("eq", "here it compares numbers of the host"),
    "tsfuser/knobs.py": ("add", "an example in a message"),
    "tsfuser/planning/eager_random.py": (
        "rand_like randn_like native_dropout",
        "the ops that it compares with eager's",
    ),
    "csrc_stubs/torchscript/differentiable.cpp": (
        "clamp native_dropout",
        "ops that autodiff differentiates wrongly, each in a way of its own",
    ),
    "csrc_stubs/torchscript/differentiable_forms.cpp": (
        "to where masked_fill type_as _autocast_to_full_precision _autocast_to_reduced_precision",
        "the forms that it rewrites, and what they become",
    ),
    "csrc_stubs/torchscript/in_place.cpp": (
        "type_as relu relu_ dropout _autocast_to_full_precision",
        "the nodes that it makes, and the ops that it moves them behind or takes out",
    ),
    "csrc_stubs/torchscript/operators.cpp": (
        "is_positive packed laid_out add_optional",
        "torch has no kernels for these",
    ),
}
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder, suffixes in (("tsfuser", (".py",)), ("csrc_stubs", (".cpp", ".h")))
    for path in (ROOT / folder).rglob("*")
    if path.suffix in suffixes and not path.is_relative_to(ROOT / "tsfuser" / "ops")
)


def strings_of(text):
    """The string constants of Python code, without docstrings."""
    tree = ast.parse(text)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and id(n) not in said and isinstance(n.value, str)
    ]


def names_in(path, text):
    """Ops of the table that the file names: `aten::add` in strings, `c10::aten::add` in C++, and in strings
    that are lists of words with no namespace, from two ops on."""
    if path.endswith(".py"):
        strings = strings_of(text)
    else:
        strings = [re.sub(r"//.*", "", text)]
    found = {name for s in strings for name in re.findall(r"\b(?:aten|prim|tsfuser)::\w+", s)} & NAMES
    for words in map(str.split, strings):
        ops = {f"aten::{word}" for word in words} & NAMES
        found |= ops if len(ops) > 1 and 2 * len(ops) > len(words) else set()
    return {name.partition("::")[2] for name in found}


@pytest.mark.parametrize("path", FILES)
def test_no_other_file_names_an_op_of_the_table(path):
    allowed = set(ALLOWED.get(path, ("",))[0].split())
    assert names_in(path, (ROOT / path).read_text()) == allowed


def test_what_is_allowed_is_a_file_and_has_a_reason():
    assert set(ALLOWED) <= set(FILES)
    assert all(reason for _, reason in ALLOWED.values())


@pytest.mark.parametrize(
    "path, text, names",
    [
        ("a.py", 'x = ("aten::add", "aten::no_such_op", "aten::add_(%x)")', {"add", "add_"}),
        ("a.py", 'x = "add sub relu".split()', {"add", "sub", "relu"}),
        ("a.py", '"""aten::add"""\nx = "add the bias to it, sub"', set()),
        ("a.cpp", "if (k == c10::aten::relu)  // aten::add", {"relu"}),
    ],
)
def test_names_are_found_in_both_languages(path, text, names):
    assert names_in(path, text) == names
