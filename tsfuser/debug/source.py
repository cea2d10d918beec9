"""Where a node comes from: the line of the user's program.

In: nodes of optimised graphs, whose places torch gives as `file:line:col` of the innermost function. Out:
`Place`s in the user's own files: a node of `torch/nn/functional.py` is led back to the line that called it.
Example: `Sources(graph).place(node)` -> `Place("model.py", 12, "h = self.norm(x)", "functional.py:2987")`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from ..torchscript.graph import all_blocks, blocks

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_CALLS = ("prim::CallFunction", "prim::CallMethod")
_MARK = "tsfuser_call_site"


@dataclass(frozen=True)
class Place:
    """`file` is "" for what no line of the program stands for, like autodiff's formulas. `within`: where in
    torch's own Python code, if the line only calls that."""

    file: str = ""
    line: int = 0
    text: str = ""
    within: str = ""

    def __str__(self) -> str:
        where = f"{os.path.basename(self.file)}:{self.line}" if self.file else "no line of the program"
        return f"{where} (in {self.within})" if self.within else where


class Sources:
    """The places of one program. `graph`: as scripted, before calls are inlined."""

    def __init__(self, graph: torch._C.Graph):
        self._callers: "dict[str, Place]" = {}
        self._known: "set[str]" = set()
        self.files: "dict[str, str]" = {}
        copy = graph.copy()
        sites = _mark_calls(copy)
        torch._C._jit_pass_inline(copy)
        self._collect(copy, sites, [])

    def place(self, node) -> Place:
        """The line of the program that the node stands for."""
        key = _key(node)
        if key not in self._known:
            return Place(within="autodiff's formulas" if key.startswith("<string>") else "")
        own = _place(node)
        if not own.file.startswith(_TORCH):
            return own
        caller = self._callers.get(key)
        inside = f"{os.path.basename(own.file)}:{own.line}"
        return Place(caller.file, caller.line, caller.text, inside) if caller else Place(within=inside)

    def _collect(self, block, sites: "list[Place]", open_: "list[Place]") -> None:
        """Walks the inlined graph in order, between the marks of the calls that are open."""
        for node in block.nodes():
            if node.hasAttribute(_MARK):
                number = node.i(_MARK)
                if number >= 0:
                    open_.append(sites[number])
                else:
                    open_.pop()
                continue
            key = _key(node)
            if key:
                self._known.add(key)
                if open_:
                    self._callers.setdefault(key, open_[-1])
            for inner in blocks(node):
                self._collect(inner, sites, open_)


def _mark_calls(graph) -> "list[Place]":
    """Puts a constant before and after each call; inlining leaves them where they are. Returns the places of
    the calls, by number."""
    sites: "list[Place]" = []
    for block in list(all_blocks(graph)):
        for node in list(block.nodes()):
            if node.kind() in _CALLS:
                _mark(graph, len(sites)).insertBefore(node)
                _mark(graph, -1).insertAfter(node)
                sites.append(_place(node))
    return sites


def _mark(graph, number: int):
    node = graph.create("prim::Constant", [], 1)
    node.i_("value", 0)
    node.i_(_MARK, number)
    node.output().setType(torch._C.IntType.get())
    return node


def _key(node) -> str:
    """`file:line:col`, or ""."""
    return str(node).partition("\n")[0].partition(" # ")[2]


def _place(node) -> Place:
    match = re.fullmatch(r"(.*):(\d+):(\d+)", _key(node))
    if not match:
        return Place()
    lines = node.sourceRange().splitlines()
    at = next((i for i, line in enumerate(lines) if "<--- HERE" in line), 0)
    return Place(match[1], int(match[2]), lines[at - 1].strip() if at else "")
