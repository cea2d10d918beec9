"""Which schedule takes a segment in which results depend on reductions.

In: such a segment. Out: the module that says whether it does, and how: `rows`, or `outer_rows` where the contiguous dim is kept. Example: a layer norm goes to `rows`.
"""

from __future__ import annotations

from types import ModuleType

from ..ir.call import Call
from ..segment import Segment
from . import outer_rows, rows
from .machine import Machine


def scheduler(call: Call, segment: Segment, machine: Machine) -> ModuleType:
    """The module with `accepts`, `choose` and `stages` for `segment`."""
    return outer_rows if outer_rows.applies(call, segment, machine) else rows
