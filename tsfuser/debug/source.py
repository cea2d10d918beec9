"""Where a node comes from: the line of the user's program.

In: nodes of optimised graphs, with the places of the calls that were inlined. Out: `Place`s in the user's own
files: a node of `torch/nn/functional.py` is led back to the line that called it. Example:
`Sources(graph).place(node)` -> `Place("model.py", 12, "h = self.norm(x)", "functional.py:2987")`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .. import _C
from ..torchscript.graph import all_blocks

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


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
    """The places of one program. `graph`: as scripted. A program that was scripted from a string has the file
    name `<string>`, as autodiff's formulas have; it is told from them by its lines."""

    def __init__(self, graph: torch._C.Graph):
        inlined = graph.copy()
        torch._C._jit_pass_inline(inlined)
        nodes = (node for block in all_blocks(inlined) for node in block.nodes())
        self._own = {frame for node in nodes for frame in _C.frames(node) if frame[0] == "<string>"}

    def place(self, node: torch._C.Node) -> Place:
        """The innermost line of the program that the node stands for; one of torch's own code where the
        program has none."""
        frames = _C.frames(node)
        formula = bool(frames) and frames[0][0] == "<string>" and frames[0] not in self._own
        within = "autodiff's formulas" if formula else ""
        for file, line, _, text in frames:
            if file.startswith(_TORCH):
                within = within or f"{os.path.basename(file)}:{line}"
            elif file != "<string>" or (file, line, _, text) in self._own:
                return Place(file, line, text.strip(), within)
        if frames and not formula:  # a module of torch's own
            file, line, _, text = frames[0]
            return Place(file, line, text.strip())
        return Place(within=within)
