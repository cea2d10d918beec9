"""Lines of the user's program, for nodes.

In: an FX node, with the stack that TorchDynamo noted, outermost call first; nodes of the backward have the
stack of their forward. Out: the innermost line outside torch's own code, for errors and logs. Example:
`place_of(node)` -> `("model.py", 12, "return self.norm(x) * 2")`.
"""

from __future__ import annotations

import os
import re

import torch
from torch import fx

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .*\n(?! *File ")(.*)', re.MULTILINE)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def place_of(node: fx.Node) -> tuple[str, int, str] | None:
    """File, line, and text of the line; None if no line is known."""
    for file, line, text in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if not is_of_torch(file):
            return file, int(line), text.strip()
    return None


def is_of_torch(file: str) -> bool:
    """Whether the file belongs to torch."""
    return file.startswith(_TORCH)
