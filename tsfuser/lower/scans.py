"""The scans of a kernel, element by element.

In: a schedule that says which loops go along a scan. Out: the statements of an element, and the index of
loops that go backwards. A thread that walks along columns has a running value for each:

    cumsum_1_term = x0; cumsum_1_carry[lane] := cumsum_1_carry[lane] + cumsum_1_term; cumsum_1 =
    cumsum_1_carry[lane]

Where the lanes of a thread lie along the scan, scan_parts.py has them read what threads have passed on.
"""

from __future__ import annotations

from ..ir.dtypes import DOUBLE, FLOAT, DType
from ..ir.fusion import Scan
from ..ir.symbols import define
from ..schedule.loops import Schedule
from . import index as ix
from .arguments import Params
from .combine import COMBINATIONS, conversion
from .elements import Elements
from .index import Expr, Var
from .indices import Indices
from .loop_ir import Accumulate, Compute, Stmt

_IN_DOUBLE = ("sum", "prod", "log_sum")  # of floats on a host, as torch accumulates them there

# not the symbol of a sum, whose terms may be added up in another order
define("running_add", "({0} + {1})", cheap=True)
define("or_else", "({0} ? {1} : {2})", cheap=True)


def backwards(schedule: Schedule, params: Params) -> dict[str, Expr]:
    """The loops that a scan goes along from their ends, as the index of their elements has them. The
    lanes of a vector stay in the order of memory."""
    if schedule.scanning is None or not schedule.scanning.backwards:
        return {}
    own = {x for x in schedule.scanning.loops if schedule.loop(x).bind not in ("vector", "simd")}
    own |= {x.name for x in schedule.loops if x.bind == f"thread.{schedule.scanning.axis}"}
    loops = [x for x in schedule.loops if x.name in own and not (x.extent.is_const and x.extent.a == 1)]
    return {x.name: ix.sub(ix.sub(params.size(x.extent, f"{x.name}_size"), 1), Var(x.name)) for x in loops}


def accumulator(op: Scan, schedule: Schedule) -> DType:
    """The dtype in which a scan accumulates."""
    dtype = op.output.dtype.register
    return DOUBLE if schedule.is_vectorised and dtype is FLOAT and op.combine in _IN_DOUBLE else dtype


def symbol_of(op: Scan) -> str:
    """The symbol that combines a running value with the next element."""
    symbol = COMBINATIONS[op.combine].symbol
    return "running_add" if symbol == "add" else symbol


def scanned(elements: Elements, op: Scan, at: Indices) -> list[Stmt]:
    """The statements of `op` for an element."""
    schedule, name = elements.schedule, op.output.name
    wide, register = accumulator(op, schedule), op.output.dtype.register.ctype
    elements.registers[name] = register
    have, lane = elements.registers[op.operands[0].name], Var(schedule.loops[-1].name)
    term = Compute(f"{name}_term", wide.ctype, conversion(have, wide.ctype), (op.operands[0].name,))
    carry, symbol = f"{name}_carry", conversion(wide.ctype, register)
    made = Compute(name, register, symbol, (carry,), (carry,), lane)
    if schedule.scanning.axis:  # threads pass on what they have
        return [term, made]
    dim, guard = schedule.scanning.dim, None
    if schedule.scanning.backwards:  # else those that do not exist come last
        guard = ix.both(g.condition for g in at.guards if dim in g.dims)
    return [term, Accumulate(carry, lane, symbol_of(op), term.name, guard), made]
