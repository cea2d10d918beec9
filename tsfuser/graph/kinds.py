"""Kinds of nodes as users name them.

In: a name. Out: the kind of a node, as graphs have it; `ValueError`, with similar names, if torch has no
such op. Example: `known_kind("prim::view_copy")` -> `"aten::view"`, and `known_kind("aten::geluu")` raises
"no op is called 'aten::geluu'; did you mean 'aten::gelu'?".
"""

from __future__ import annotations

import re

import torch

from ..ops import table
from ..option_parsers import did_you_mean


def known_kind(name: str) -> str:
    """nvFuser's names of views stand for torch's."""
    kind = re.sub(r"^prim::(\w+)_copy$", r"aten::\1", name)
    rows = {row.name for row in table.all_rows()}
    known = "::" in kind and torch._C._jit_get_schemas_for_operator(kind)
    if kind not in rows and not known:
        like = did_you_mean(kind, sorted(rows)) or "; a kind of node is like aten::add"
        raise ValueError(f"no op is called {kind!r}{like}")
    return kind
