"""Typed graphs written by hand, as the graph pass sees them after the profile nodes are gone.

Example: `graph({"%x": FULL}, "%a = aten::relu(%x)", "%a")`.
"""

from collections import deque

import torch

from kit.support import kinds
from tsfuser.frontends.torchscript import passes
from tsfuser.graph.wrapper import GROUP
from tsfuser.grouping.support import Refusals

CUDA, CPU = "cuda:0", "cpu"


def typed(*sizes, dtype="Float", device=CUDA):
    """A tensor type as the profile records it: `Float(4, 8, strides=[8, 1], requires_grad=0,
    device=cuda:0)`."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    dims = ", ".join(map(str, sizes)) + ", " if sizes else ""
    return f"{dtype}({dims}strides={strides[: len(sizes)]}, requires_grad=0, device={device})"


FULL = typed(4, 8)
XY = {"%x": FULL, "%y": FULL}


_CONSTANTS = {"None": "NoneType = prim::Constant()", "True": "bool = prim::Constant[value=1]()"}
_CONSTANTS["False"] = "bool = prim::Constant[value=0]()"


def graph(inputs, body, outputs, types=None):
    """A graph whose `inputs` are a dict of names and types. Each line of `body` is `%name =
    kind(operands)`, where a bare number, True, False or None stands for a constant. A result gets the type
    in `types`, or `FULL`, or, in `%name : type = ...`, the one that is written."""
    lines, constants = [], {}

    def operand(text):
        text = text.strip()
        if text.startswith("%"):
            return text
        if text not in constants:
            constants[text] = f"%c{len(constants)}"
            number = f"{'float' if '.' in text else 'int'} = prim::Constant[value={text}]()"
            lines.insert(0, f"  {constants[text]} : {_CONSTANTS.get(text, number)}")
        return constants[text]

    for line in filter(None, map(str.strip, body.splitlines())):
        left, right = line.split(" = ", 1)
        kind, _, rest = right.partition("(")
        name, _, its_type = left.partition(" : ")
        operands = ", ".join(operand(x) for x in rest.rstrip(")").split(",") if x.strip())
        lines.append(f"  {name} : {its_type or (types or {}).get(name, FULL)} = {kind}({operands})")
    head = ", ".join(f"{name} : {its_type}" for name, its_type in inputs.items())
    text = "\n".join(lines)
    return torch._C.parse_ir(f"graph({head}):\n{text}\n  return ({outputs})\n")


_alive = deque(maxlen=20)  # nodes die with their graph


def fuse_graph(before, refusals=None):
    """The graph after the pass. A pass that fails is an error, since a warning is one in these tests."""
    after = passes.fuse(before, refusals or Refusals())
    _alive.append(after)
    return after


def fused(*args, **kwargs):
    """The groups of `graph(...)` after the pass, in their order; each as the list of its kinds."""
    return [kinds(node) for node in fuse_graph(graph(*args, **kwargs)).findAllNodes(GROUP, True)]
