"""The rewrites of a typed graph before its groups are chosen, in order.

In: a graph whose values carry types. Out: the same graph, changed in place, on which more nodes can be
grouped. Order of `REWRITES`, and why:

  lower_simple_tuples   before anything asks who reads a value: a tuple hides the readers of its items
  functionalize         before types are inferred: it makes ops whose results were never profiled
  order_sums            before all that looks at layouts
  make_room             before types are inferred, too: it makes copies, for groups to make. What is kept
                        for a backward is packed, and may have room
  make_matrix_room      the same for products of two matrices
  pack_operands         behind them, for it drops what packs without need
  infer_missing_types   before groups: a node with an untyped value is not fused
  copy_reshapes         after the types: it looks at strides
  split_biases          where an option asks for it; after the types, since it looks at sizes
"""

from __future__ import annotations

from collections.abc import Callable

from .. import _C
from .bias import split_biases
from .copied_reshapes import copy_reshapes
from .functionalize import functionalize
from .matmul_operands import pack_operands
from .matrix_room import make_matrix_room
from .operand_room import make_room
from .sum_orders import order_sums
from .types import infer_missing_types
from .wrapper import Graph

REWRITES: tuple[tuple[str, Callable[[Graph], object]], ...] = (
    ("lower_simple_tuples", _C.lower_simple_tuples),
    ("functionalize", functionalize),
    ("order_sums", order_sums),
    ("make_room", make_room),
    ("make_matrix_room", make_matrix_room),
    ("pack_operands", pack_operands),
    ("infer_missing_types", infer_missing_types),
    ("copy_reshapes", copy_reshapes),
    ("split_biases", split_biases),
)
