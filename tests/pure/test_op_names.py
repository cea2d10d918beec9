"""Facts about ops stand in `tsfuser/ops`: no other file of the product has a list of ops, with or without a
row, and none names an op of the table but those that make or recognise such nodes in torch's graphs."""

import ast
import re
from pathlib import Path

import pytest
import torch

from tsfuser.ops import table

ROOT = Path(__file__).resolve().parents[2]
#: Of an op of the table, and of its in-place form.
NAMES = {form for row in table.all_rows() for form in (row.name, f"{row.name}_")}
#: The folders that make and recognise nodes: they may name ops, though not so many in one list.
#: All of torch's and ours.
ALL_NAMES = NAMES | {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
NODES = ("tsfuser/frontends/", "csrc_stubs/torchscript/")
LIST = 5
#: Files whose lists of that many names are no facts about tensors' ops, but about ops on numbers; or, in the
#: file of one twin, the schemas that it stands for; or which views of autodiff's may be copies.
OTHER_LISTS = (
    "csrc_stubs/torchscript/batch_checks.cpp",
    "csrc_stubs/torchscript/front.cpp",
    "csrc_stubs/torchscript/part_twin.cpp",
    "csrc_stubs/torchscript/static_values.cpp",
    "csrc_stubs/torchscript/views_apart.cpp",
    "tsfuser/frontends/dynamo/fx/sizes.py",
    "tsfuser/frontends/dynamo/translation/numbers.py",
    "tsfuser/graph/evaluate.py",
)
#: The other files that may name ops, which ops, and why.
ALLOWED = {
    "csrc_stubs/call/store.cpp": ("store add_at", "the ops that it defines"),
    "csrc_stubs/call/max_pool.cpp": ("max_pool max_pool_backward", "the ops that it defines"),
    "csrc_stubs/call/roundings.cpp": ("rounded unrounded", "the ops that it defines"),
    "csrc_stubs/call/seeded_dropout.cpp": ("seeded_dropout", "the op that it defines"),
    "csrc_stubs/call/place_gradients.cpp": (
        "nll_loss_backward gather_backward extreme_backward sums_at sums_by_place",
        "the ops that it defines",
    ),
    "csrc_stubs/group/step_list_build.cpp": ("all", "here it is over a list of bools of the host"),
    "csrc_stubs/interpreter/number_ops.cpp": ("view_as_dtype", "an op that it defines"),
    "tsfuser/graph/size_tensors.py": (
        "add sub mul div floor_divide",
        "of 0-dim tensors and of ints they are other ops",
    ),
    "tsfuser/graph/copied_reshapes.py": (
        "reshape reshaped contiguous ordered slice _grad_sum_to_size",
        "the nodes that it makes, and of which, and what is a whole; and what gives a gradient",
    ),
    "tsfuser/grouping/gelu_forms.py": ("gelu add mul pow tanh", "what gelu is written out with"),
    "tsfuser/grouping/lone_biases.py": ("add", "a bias is added by"),
    "tsfuser/graph/bias.py": ("add t unsqueeze", "the nodes that it makes"),
    "tsfuser/graph/effects.py": ("mul add", "here they are ops on lists of numbers"),
    "tsfuser/graph/evaluate.py": (
        "add sub mul neg eq ne lt le gt ge __and__ __or__",
        "here they are ops on numbers of the host",
    ),
    "tsfuser/graph/functionalize.py": (
        "full_like fill as_written",
        "the nodes that it makes, and what torch's own pass makes of `fill_`",
    ),
    "tsfuser/graph/kinds.py": ("view gelu add", "examples of what users may write"),
    "tsfuser/graph/layout_hints.py": ("laid_out", "the nodes that it makes"),
    "tsfuser/graph/matmul_operands.py": (
        "packed rows with_room",
        "the nodes that it makes, and a reader of rows",
    ),
    "tsfuser/graph/matrix_room.py": (
        "_to_copy t contiguous",
        "the copies and views that it makes, or sees through",
    ),
    "tsfuser/graph/operand_room.py": (
        "dim flatten numel reshape size view",
        "what reads a product that may be a part of a larger tensor",
    ),
    "tsfuser/graph/sum_orders.py": ("add", "sums are what it orders"),
    "tsfuser/grouping/support.py": ("eq", "here it compares numbers of the host"),
    "tsfuser/joint/autocast.py": (
        "_autocast_to_reduced_precision _autocast_to_full_precision",
        "torch's marks of autocast, which become casts",
    ),
    "tsfuser/joint/casts.py": ("to _to_copy", "the casts that it writes, and of which"),
    "tsfuser/joint/cut.py": (
        "softmax _softmax log_softmax _log_softmax",
        "what walks over rows, like its gradient",
    ),
    "tsfuser/joint/example_types.py": ("to", "a cast of a tensor without memory has no device"),
    "tsfuser/joint/joins.py": ("cat", "what it nests"),
    "tsfuser/joint/parts.py": ("add", "a bias is added by"),
    "tsfuser/joint/loss_heads.py": (
        "log_softmax _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss2d_forward",
        "the nodes that it writes out, their gradient, and the losses that read them",
    ),
    "tsfuser/joint/norms.py": (
        "native_layer_norm batch_norm native_group_norm _fused_rms_norm to "
        "_native_batch_norm_legit_functional native_batch_norm_backward",
        "the norms that it writes out, and the nodes that it makes",
    ),
    "tsfuser/joint/results.py": (
        "relu6 hardtanh softplus leaky_relu hardtanh_backward softplus_backward leaky_relu_backward",
        "activations with another derivative, by the result",
    ),
    "tsfuser/graph/roundings.py": ("rounded", "the nodes that it makes"),
    "tsfuser/joint/seeds.py": (
        "dropout_seed dropout_mask native_dropout native_dropout_backward",
        "the nodes that it makes, and of which",
    ),
    "tsfuser/joint/reverse.py": ("to type_as _grad_sum_to_size", "the nodes that it makes"),
    "tsfuser/joint/partial.py": ("add", "sums of gradients, of which one may be missing"),
    "tsfuser/joint/terms.py": (
        "neg add sub rsub mul div pow eq ne lt le gt ge bitwise_and bitwise_or logical_not",
        "operators of Python",
    ),
    "tsfuser/knobs.py": ("add", "an example in a message"),
    "tsfuser/planning/eager_random.py": (
        "rand_like randn_like native_dropout",
        "the ops that it compares with eager's",
    ),
}
#: Where facts about ops stand: rows, derivatives, and results, each beside the kind that it is of.
FACTS = (
    "tsfuser/ops",
    "tsfuser/joint/rules",
    "tsfuser/joint/expansions.py",
    "tsfuser/joint/meta_results.py",
    "tsfuser/joint/norm_expansions.py",
)
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder, suffixes in (("tsfuser", (".py",)), ("csrc_stubs", (".cpp", ".h")))
    for path in (ROOT / folder).rglob("*")
    if path.suffix in suffixes and not any(path.is_relative_to(ROOT / place) for place in FACTS)
)


def strings_of(tree):
    """The string constants below a node of Python code, without docstrings."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in said)
    return [n.value for n in nodes if isinstance(n.value, str)]


def known(strings, names=NAMES):
    """Those of the names that are in strings or C++: `aten::add`, and in lists of words with no namespace,
    from two ops on."""
    found = {name for s in strings for name in re.findall(r"\b(?:aten|prim|tsfuser)::\w+", s)} & names
    for words in map(str.split, strings):
        ops = {f"aten::{word}" for word in words} & names
        found |= ops if len(ops) > 1 and 2 * len(ops) > len(words) else set()
    return {name.partition("::")[2] for name in found}


def names_in(path, text):
    """Ops of the table that the file names."""
    return known(strings_of(ast.parse(text)) if path.endswith(".py") else [re.sub(r"//.*", "", text)])


def attributes_of(tree):
    """Ops below a node of Python code that are named as attributes, `torch.ops.aten.add.Tensor`."""
    found = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for said in found for name in re.findall(r"\baten\.(\w+)", said)}


def says_what_to_do(node):
    """Whether it is a dict that has a function for each op, rather than a fact."""
    values = node.values if isinstance(node, ast.Dict) else []
    inner = [n for value in values for n in (value.elts if isinstance(value, ast.Tuple) else [value])]
    return any(isinstance(n, ast.Name) for n in inner)


def lists_of(tree):
    """The outermost lists, sets, dicts, strings and comparisons below a node of Python code."""
    kinds = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Constant, ast.JoinedStr, ast.BoolOp, ast.Compare)
    for node in ast.iter_child_nodes(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, kinds) and not says_what_to_do(node):
            yield node
        elif not isinstance(node, kinds) and not is_docstring:
            yield from lists_of(node)


def longest_list(path, text):
    """The most ops that one list, set, dict, string or comparison of the file names."""
    if path.endswith(".py"):
        lists = [
            known(strings_of(node), ALL_NAMES) | attributes_of(node) for node in lists_of(ast.parse(text))
        ]
    else:
        texts = re.findall(r"\{[^{};]*\}", re.sub(r"//.*", "", text))
        lists = [known([said], ALL_NAMES) for said in texts]
    return max(map(len, lists), default=0)


@pytest.mark.parametrize("path", [path for path in FILES if path not in OTHER_LISTS])
def test_no_other_file_has_a_list_of_ops(path):
    assert longest_list(path, (ROOT / path).read_text()) < LIST


@pytest.mark.parametrize("path", [path for path in FILES if not path.startswith(NODES)])
def test_no_other_file_names_an_op_of_the_table(path):
    allowed = set(ALLOWED.get(path, ("",))[0].split())
    assert names_in(path, (ROOT / path).read_text()) <= allowed


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


@pytest.mark.parametrize(
    "path, text",
    [
        ("a.py", 'x = frozenset(("aten::add", "aten::sub", "aten::exp", "aten::relu", "aten::mul"))'),
        ("a.py", 'x = frozenset("add sub exp relu mul".split())'),
        ("a.py", 'x = frozenset("mm conv2d upsample_nearest2d lstm cumsum".split())'),
        ("a.py", 'x = tuple(f"aten::{name}" for name in "mm bmm mv dot cumsum".split())'),
        ("a.py", "x = (aten.mm.default, aten.view.dtype, aten.bmm, torch.ops.aten.mv.default, aten.dot)"),
        ("a.py", 'x = {"aten::add": 1, "aten::sub": 2, "aten::exp": 1, "aten::relu": 2, "aten::mul": 3}'),
        ("a.py", 'x = k == "aten::mm" or k in ("aten::bmm", "aten::mv") or k in ("aten::dot", "aten::add")'),
        (
            "a.cpp",
            "kinds = {c10::aten::add, c10::aten::sub, c10::aten::exp, c10::aten::relu, c10::aten::mul};",
        ),
    ],
)
def test_a_list_is_found_in_both_languages(path, text):
    assert longest_list(path, text) == LIST


def test_functions_for_ops_are_no_list_of_facts():
    said = "{aten.add.Tensor: _add, aten.sub.Tensor: _sub, aten.mm.default: (aten.mv.default, 2, _mm)}"
    assert longest_list("a.py", said) == 0
    assert longest_list("a.py", said.replace("_add", "1").replace("_sub", "2").replace("_mm", "3")) == 4
