"""The pass that asks once for a loop whether all that it reads is inside of windows.

In: statements of a kernel of the host. Out: statements of the same meaning. A padded window has a condition
for each of its places; where no lane changes them, a compiler makes no vectors of a loop that asks for each.
Example, of a pooling in channels last:

    for lane in n: { a = in_a ? x[i + lane]; c = where(in_a, a, 0); S }
becomes
    if in_a: for lane in n: { a = x[i + lane]; c = a; S }
    else:    for lane in n: { a = in_a ? x[i + lane]; c = where(in_a, a, 0); S }
"""

from __future__ import annotations

from dataclasses import replace

from . import index as ix
from .branches import chosen, condition, is_text
from .index import Var
from .loop_ir import Body, Compute, For, If, Load, Stmt
from .traverse import defined, with_bodies


def whole_windows(body: Body) -> Body:
    """Loops over lanes have a form in which all that they read where it is inside of a window is inside."""
    made = (with_bodies(s, whole_windows) for s in body)
    return tuple(_asked_once(s) if isinstance(s, For) and s.bind == "simd" else s for s in made)


def _asked_once(loop: For) -> Stmt:
    changing = {defined(s) for s in loop.body} | {loop.var}
    guards: dict[str, ix.Expr] = {}  # of what is read inside of a window, and copies of it
    whole: list[Stmt] = []
    conditions: dict[ix.Expr, None] = {}
    for s in loop.body:
        if isinstance(s, Load):
            if s.guard is not None and not ix.names(s.guard) & changing:
                guards[s.name] = s.guard
        elif isinstance(s, Compute) and s.operands:
            asked = condition(s)
            if s.symbol in ("copy", "convert") and s.operands[0] in guards:
                guards[s.name] = guards[s.operands[0]]
            elif asked is not None and asked not in changing and is_text(s, 2) and s.operands[1] in guards:
                conditions[guards[s.operands[1]]] = conditions[Var(asked)] = None
                s = chosen(s, 1)
        whole.append(s)
    asks = ix.both(conditions)
    if asks is None:
        return loop
    inside = tuple(
        replace(s, guard=None) if isinstance(s, Load) and s.guard in conditions else s for s in whole
    )
    return If(asks, (replace(loop, body=inside),), (loop,))
