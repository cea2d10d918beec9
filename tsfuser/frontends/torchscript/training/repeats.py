"""Copies of repeated elements that a differentiable graph returns are made by a group.

A reshape that copies counts as new where nobody can tell (graph/copied_reshapes.py). For a result of a
differentiable graph that is a reshape of views of an input, this was settled when torch made the graph: it
lets no such graph return what may share memory with its input, but for reshapes of repeated elements that the
program only reads (csrc_stubs/torchscript/twin_rows.cpp, `write_reshape`). Before:

    %e = aten::expand(%u, %s, 0);  %r = aten::reshape(%e, %t);  return (%r)
after:
    %e = aten::expand(%u, %s, 0);  %r = tsfuser::reshaped(%e, %t);  return (%r)

In: `SavedValues` of a differentiable graph. Out: its forward, changed in place."""

from __future__ import annotations

from ....graph.copied_reshapes import RESHAPE, RESHAPED
from ....graph.wrapper import graph_outputs, inputs, insert
from .saved import SavedValues, is_of_an_input


def copy_repeats(saved: SavedValues) -> None:
    """Rewrites the reshapes."""
    forward = saved.forward
    for result in graph_outputs(forward)[: saved.real]:
        node = result.node()
        if node.kind() == RESHAPE and is_of_an_input(node.inputsAt(0)):
            made = insert(forward, node, RESHAPED, inputs(node)).output()
            made.setType(result.type())
            result.replaceAllUsesWith(made)
