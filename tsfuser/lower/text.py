"""Loop IR as indented pseudo-C, for people.

In: a Kernel. Out: text; one line a statement. Example: `for u in 4 (unroll):`, `  x0_v = x0[row * cols + col .. +4] if count`.
"""

from __future__ import annotations

from .loop_ir import Accumulate, Accumulator, Array, Barrier, BlockReduce, Compute, For, If, Kernel, Let, Load, Pack, SetLane, Stmt, Store


def kernel_text(kernel: Kernel) -> str:
    params = ", ".join(f"{p.ctype} {p.name}" for p in kernel.params)
    head = [f"kernel {kernel.name}({params})", f"  grid {kernel.grid}, block {kernel.block_x} x {kernel.block_y}, shared {kernel.shared} bytes"]
    return "\n".join(head + _lines(kernel.body, 1))


def _lines(body: tuple[Stmt, ...], depth: int) -> list[str]:
    result = []
    for s in body:
        result.append("  " * depth + _line(s))
        if isinstance(s, For):
            result += _lines(s.body, depth + 1)
        elif isinstance(s, If):
            result += _lines(s.yes, depth + 1) + ["  " * depth + "else:"] + _lines(s.no, depth + 1)
    return result


def _line(s: Stmt) -> str:
    if isinstance(s, Let):
        return f"{s.name} = {s.value}"
    if isinstance(s, (Load, Store)):
        place = f"{s.buffer}[{s.offset}{f' .. +{s.lanes}' if s.lanes > 1 else ''}]"
        when = "".join(f" {word} {e}" for word, e in (("if", s.guard), ("first", s.count)) if e is not None)
        return f"{s.name} = {place}{when}" if isinstance(s, Load) else f"{place} = {s.value}{when}"
    if isinstance(s, Compute):
        return f"{s.name} = {s.template.format(*s.operands) if s.operands else s.template}"
    if isinstance(s, For):
        return f"for {s.var} in {s.extent} ({s.bind}):"
    if isinstance(s, If):
        return f"if {s.condition}:"
    if isinstance(s, (Pack, Array)):
        return f"{s.ctype} {s.name}[{getattr(s, 'extent', s.lanes)}]"
    if isinstance(s, SetLane):
        return f"{s.name}[{s.lane}] = {s.value}"
    if isinstance(s, Barrier):
        return "barrier"
    if isinstance(s, Accumulator):
        return f"{s.name}[{s.lanes}] := {s.identity}"
    if isinstance(s, Accumulate):
        now = f"{s.name}[{s.lane}]"
        return f"{now} := {s.combine.replace('{0}', now).replace('{1}', s.value)}" + (f" if {s.guard}" if s.guard is not None else "")
    if isinstance(s, BlockReduce):
        return f"{s.name} := {s.combine} over threads {s.axis}"
    raise TypeError(s)
