"""What must hold of Loop IR after every pass, and how a Kernel is read back from its code.

In: a Kernel, or what `kernel.code()` has made. Out: None, or the first thing wrong with it as a sentence; the
Kernel. Example:

    lower(segment, schedule, name, after=lambda step, kernel: print(step, verify(kernel)))
"""

from __future__ import annotations

import re
from typing import get_args

from ..ir.code import read as read_record
from .index import Expr
from .kernel import Kernel, Param, Tile
from .loop_ir import (
    AwaitCluster,
    Barrier,
    BlockReduce,
    BlockScan,
    ClusterReduce,
    ColumnReduce,
    CooperativeReduce,
    For,
    If,
    Stmt,
    Store,
    Total,
)  # fmt: skip
from .traverse import defined, used

_BARRIERS = (Barrier, BlockReduce, CooperativeReduce, AwaitCluster, ClusterReduce, ColumnReduce, BlockScan)


def read(text: str) -> Kernel:
    """The Kernel that `Kernel.code` has printed."""
    return read_record(text, Kernel, Param, Tile, Total, *get_args(Stmt), *get_args(Expr))


def verify(kernel: Kernel) -> str | None:
    """None if every name is defined before its use and in scope, defined once in its scope, and no barrier
    stands in a loop."""
    fields = {f"args.{p.name}" for p in kernel.params}
    known = (
        fields
        | {t.name for t in kernel.tiles}
        | {"blockIdx.x", "batch_block", "threadIdx.x", "threadIdx.y", "blockDim.x", "blockDim.y"}
    )
    if len(fields) != len(kernel.params):
        return "two fields of the argument struct have one name"
    return _body(kernel.body, known, False)


def _base(name: str) -> str:
    """`x0_v[u]` -> `x0_v`."""
    return name.partition("[")[0]


def _body(body: tuple[Stmt, ...], known: set[str], looped: bool) -> str | None:
    known = set(known)
    here: set[str] = set()
    for s in body:
        for name in used(s) if not isinstance(s, (For, If)) else ():
            missing = [n for n in re.split(r"[\[\]]", name) if n and not n.isdigit() and n not in known]
            if missing:
                return f"{missing[0]} is used by {s} before it is defined"
        if isinstance(s, Store) and _base(s.buffer) not in known:
            return f"{s.buffer} is stored to but not known"
        if looped and isinstance(s, _BARRIERS):
            return f"{s} stands in a loop, whose trip count may differ between threads"
        complaint = _inner(s, known, looped)
        if complaint:
            return complaint
        name = defined(s)
        if name is not None and "[" not in name:
            if name in here:
                return f"{name} is defined twice"
            here.add(name)
            known.add(name)
        elif name is not None and _base(name) not in known:
            return f"the array of {name} is not declared"
    return None


def _inner(s: Stmt, known: set[str], looped: bool) -> str | None:
    if isinstance(s, For):
        return _body(s.body, known | {s.var}, looped or s.bind != "rows")
    if isinstance(s, If):
        return _body(s.yes, known, looped) or _body(s.no, known, looped)
    return None
