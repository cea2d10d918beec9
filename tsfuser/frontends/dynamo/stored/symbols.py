"""Sizes that vary: what is known of them before a graph is traced, and what has been asked meanwhile.

In: AOTAutograd's arguments, some of them sizes. Out: a text for the key, with the bounds of each size; and,
once the graph has been traced, a guard: the answers to all that tracing has asked about the sizes. A record
serves a call whose sizes give the same answers, as one process serves such calls with one graph. Example:

    s77 in [2, int_oo]          # of the key
    "Ne(L['t0'], 7)"            # the guard: tracing has asked whether it is 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ....errors import Refusal


def symbols_text(args: Sequence[Any]) -> str:
    """The sizes among the arguments, with their bounds. Raises Refusal for sizes that depend on elements of
    tensors, or on other sizes."""
    known = environment()
    if known is None:
        return ""
    for symbol in known.var_to_range:
        if symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT, SymT.FLOAT)):
            raise Refusal("a size depends on elements of tensors, or a float varies")
    lines = []
    for size in sizes_among(args):
        expression = size.node.expr
        if not expression.is_Symbol and not expression.is_number:
            raise Refusal(f"an argument is the size {expression}")
        bounds = known.var_to_range.get(expression)
        lines.append(f"{expression} in [{bounds and bounds.lower}, {bounds and bounds.upper}]")
    return "\n".join(lines)


def sizes_among(args: Sequence[Any]) -> list[torch.SymInt]:
    return [value for value in args if isinstance(value, torch.SymInt)]


def holds(guard: str | None, args: Sequence[Any]) -> bool:
    """Whether the sizes of this call give the answers that the guard is about."""
    if guard is None:
        return True
    known = environment()
    hints = [size.node.hint for size in sizes_among(args)]
    return known is not None and None not in hints and bool(known.evaluate_guards_expression(guard, hints))


def environment() -> ShapeEnv | None:
    """What torch knows of sizes in the graph that it traces now."""
    context = torch._guards.TracingContext.try_get()
    mode = context.fake_mode if context else None
    return mode.shape_env if mode else None
