"""Control flow and integer arithmetic inside a group, carried out while a plan is made.

Autodiff writes shape formulas as small programs: the gradient of a mean unsqueezes in an If on `keepdim`, or
in a Loop over the reduced dims. In: such a node, and what its inputs are in this call: Python ints, bools,
lists, and `Size`s for numbers that a plan does not have to know. Out: its results. A branch that is taken, or
the trips of a loop, become decisions of the call. Example: `aten::mul(3, size0_1)` -> `(size0_1 * 3)`."""

from __future__ import annotations

import operator
from collections.abc import Callable

from ..errors import Refusal
from ..ir import size as sz
from ..ir.call import Call
from ..ir.size import Size

CONTROL = frozenset(("prim::If", "prim::Loop"))
MAX_TRIPS = 64  # a loop over dims; what has more is not about shapes


def whole(call: Call, x) -> int:
    """The int behind `x`, on which the plan depends from now on."""
    return call.decide(x) if isinstance(x, Size) else x


def flag(call: Call, x) -> bool:
    return bool(whole(call, x))


def _symbolic(function: Callable, plain: Callable) -> Callable:
    """An operation that keeps sizes open."""
    return lambda call, a, b: function(a, b) if isinstance(a, Size) or isinstance(b, Size) else plain(a, b)


def _concrete(function: Callable) -> Callable:
    return lambda call, *args: function(*(whole(call, a) for a in args))


def _multiplied(call: Call, a, b):
    if isinstance(a, list) or isinstance(b, list):
        items, times = (a, b) if isinstance(a, list) else (b, a)
        return items * whole(call, times)
    return a * b


def _item(call: Call, items: list, at):
    at = whole(call, at)
    if not -len(items) <= at < len(items):
        raise Refusal("a list index out of range")
    return items[at]


def _set_item(call: Call, items: list, at, value) -> list:
    _item(call, items, at)
    items[whole(call, at)] = value
    return items


def _quotient(a: int, b: int) -> int:
    if b == 0:
        raise Refusal("an integer division by 0")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


#: kind -> its result for (call, *inputs); of plain ints, bools and lists of them
OPERATIONS: dict[str, Callable] = {
    "aten::len": lambda call, items: len(items),
    "aten::__getitem__": _item,
    "aten::_set_item": _set_item,
    "aten::add": _symbolic(operator.add, operator.add),
    "aten::sub": _symbolic(operator.sub, operator.sub),
    "aten::mul": _multiplied,
    "aten::neg": _concrete(operator.neg),
    "aten::__round_to_zero_floordiv": _concrete(_quotient),
    "aten::eq": _symbolic(sz.eq, operator.eq),
    "aten::ne": _concrete(operator.ne),
    "aten::lt": _symbolic(sz.lt, operator.lt),
    "aten::le": _symbolic(sz.le, operator.le),
    "aten::gt": _symbolic(lambda a, b: sz.lt(b, a), operator.gt),
    "aten::ge": _symbolic(lambda a, b: sz.le(b, a), operator.ge),
    "aten::__not__": _concrete(operator.not_),
    "aten::__and__": _concrete(lambda a, b: bool(a and b)),
    "aten::__or__": _concrete(lambda a, b: bool(a or b)),
    "aten::Int": lambda call, x: x if isinstance(x, Size) else int(x),
    "aten::Bool": lambda call, x: flag(call, x),
}
#: kind -> its result for (call, sizes of the tensor, *other inputs)
QUESTIONS: dict[str, Callable] = {
    "aten::size": lambda call, sizes, *at: _item(call, sizes, *at) if at else list(sizes),
    "aten::dim": lambda call, sizes: len(sizes),
    "aten::numel": lambda call, sizes: sz.product(sizes),
}
_PLAIN = frozenset(("IntType", "BoolType"))


def is_plain(type_) -> bool:
    """Whether values of the type can be computed here: ints, bools, and lists of them."""
    return type_.kind() in _PLAIN or (type_.kind() == "ListType" and type_.getElementType().kind() in _PLAIN)


def is_number(type_) -> bool:
    """Whether values of the type are numbers or lists of ints: also what autodiff leaves open, like `numel -
    1`."""
    return is_plain(type_) or type_.kind() == "NumberType"


def run_control(call: Call, node, values: dict, run_block: Callable) -> list:
    """The results of an If or Loop. `values`: the number of a value -> what it is; `run_block(block, values)`
    gives what a block returns."""
    inputs = [values[v.unique()] for v in node.inputs()]
    blocks = list(node.blocks())
    if node.kind() == "prim::If":
        return run_block(blocks[0 if flag(call, inputs[0]) else 1], values)
    trips, going, *carried = inputs
    trips, going = whole(call, trips), flag(call, going)
    if trips > MAX_TRIPS:
        raise Refusal(f"a loop of {trips} trips")
    keys = [v.unique() for v in blocks[0].inputs()]
    for trip in range(trips):
        if not going:
            break
        going, *carried = run_block(blocks[0], {**values, **dict(zip(keys, [trip, *carried]))})
        going = flag(call, going)
    return carried
