"""Where a node comes from: the line of the user's program.

In: nodes of optimised graphs, with the places of the calls that were inlined. Out: `Place`s in the user's own
files: a node of `torch/nn/functional.py` is led back to the line that called it. Example:
`Sources(graph).place(node)` -> `Place("model.py", 12, "h = self.norm(x)", "functional.py:2987")`."""

from __future__ import annotations

import linecache
import os
import re
import sys
from dataclasses import dataclass

import torch

from .. import _C
from ..graph.wrapper import all_blocks, schema

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
#: Torch's own files where a module was saved, which may have been elsewhere.
_INSTALLED = re.compile(r".*[/\\](site|dist)-packages[/\\]torch[/\\]")


@dataclass(frozen=True)
class Place:
    """`file` is "" for nodes without a line of the program, as those of autodiff's formulas. `within`: where
    in torch's own Python code, if the line only calls that."""

    file: str = ""
    line: int = 0
    text: str = ""
    within: str = ""

    @property
    def outer(self) -> str:
        """`model.py:12`; in a notebook `In[3]:12`."""
        return f"{_shown(self.file)}:{self.line}" if self.file else "no line of the program"

    def __str__(self) -> str:
        return f"{self.outer} (in {self.within})" if self.within else self.outer


class Sources:
    """The places of one program. `graph`: as scripted. A program that was scripted from a string has the file
    name `<string>`, as autodiff's formulas have; it is told from them by its lines."""

    def __init__(self, graph: torch._C.Graph):
        inlined = graph.copy()
        torch._C._jit_pass_inline(inlined)
        nodes = [node for block in all_blocks(inlined) for node in block.nodes()]
        self._own = {frame for node in nodes for frame in _C.frames(node) if frame[0] == "<string>"}
        self._homes: dict[tuple[str, str], set[Place]] = {}
        for node in nodes:
            self._homes.setdefault(_plain(node), set()).add(self.place(node))

    def place(self, node: torch._C.Node, forward: bool = False) -> Place:
        """The innermost line of the program that the node stands for; one of torch's own code where the
        program has none. `forward`: an op that a formula of autodiff repeats in a forward graph, where there
        is but one line with such an op, is from there."""
        frames = _C.frames(node)
        formula = bool(frames) and frames[0][0] == "<string>" and frames[0] not in self._own
        found = self._line(frames, "autodiff's formulas" if formula else "")
        if found.file or not frames:
            return found
        homes = self._homes.get(_plain(node), set()) if formula and forward else set()
        if len({(home.file, home.line) for home in homes}) == 1:
            return min(homes, key=str)
        through = self._module_line(node, found.within)
        if through.file or formula:
            return through
        file, line, _, text = frames[0]  # a module of torch's own
        return Place(file, line, _text(file, line, text))

    def _line(self, frames: list[tuple], within: str) -> Place:
        """The first of the frames that is the program's own."""
        for file, line, column, text in frames:
            if file.startswith(_TORCH) or _INSTALLED.match(file):
                within = within or f"{os.path.basename(file)}:{line}"
            elif file != "<string>" or (file, line, column, text) in self._own:
                return Place(file, line, _text(file, line, text), within)
        return Place(within=within)

    def _module_line(self, node: torch._C.Node, within: str) -> Place:
        """The line that asks for the module whose tensor the node works on: torch forgets who calls what
        stands in an If without results."""
        found = Place(within=within)
        while not found.file and node.inputsSize() and node.inputsAt(0).node().kind() == "prim::GetAttr":
            node = node.inputsAt(0).node()
            found = self._line(_C.frames(node), within)
        return found


def _shown(file: str) -> str:
    """The name of a file; that of a notebook's cell, which lies in a file of IPython's."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)  # since IPython 8
    cell = named(file) if named else None
    return cell[1] if cell else os.path.basename(file)


def _text(file: str, line: int, text: str) -> str:
    """The line. Tracing notes Python's stack in its place: "model.py(12): forward"."""
    traced = text.startswith(f"{file}({line}): ")
    return (linecache.getline(file, line) if traced else text).strip()


def _plain(node: torch._C.Node) -> tuple[str, str]:
    """`aten::relu_` -> `relu`, and `aten::native_dropout`, as formulas have it, -> `dropout`; and the
    overload."""
    name = node.kind().removeprefix("aten::").removeprefix("native_").rstrip("_")
    name = {"_batch_norm_impl_index": "batch_norm", "max_pool2d_with_indices": "max_pool2d"}.get(name, name)
    found = schema(node)
    return name, found.overload if found else ""
