"""Ops that AOTAutograd would decompose before it asks the backend, although torch's kernels for the whole op
are faster.

In: nothing. Out: a context in which these ops are traced whole. They are those that scale images up: their
parts look elements up, and the backward of a look-up sorts the indices to which it adds. Example: the
backward of `F.interpolate(x, scale_factor=2.0)`, [32, 64, 64, 64] in float32 on an H200, is one
`upsample_nearest2d_backward`; sorting and adding would take 1.3 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey

from ....ops import without_row

aten = torch.ops.aten

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
#: They take either the sizes of the result or its factors (overload `vec`), and call those that take both.
_NAMES = sorted(name.removeprefix("aten::") for name in without_row.UPSAMPLING)


def stays_whole(op: torch._ops.OpOverload) -> bool:
    """Whether the op is one that `whole_ops` leaves whole, and so must not be decomposed elsewhere."""
    return op._schema.name in without_row.UPSAMPLING


@contextmanager
def whole_ops(sizes_vary: bool) -> Iterator[None]:
    """`sizes_vary`: sizes are symbolic. Then only ops whose backward torch knows for these stay whole."""
    saved = []
    for name in _NAMES:
        packet, backward = getattr(aten, name), getattr(aten, f"{name}_backward").default
        if sizes_vary and DispatchKey.Meta not in backward.py_kernels:
            continue
        for op, function in ((packet.vec, _scaled(packet.default)), (packet.default, None)):
            saved.append((op, dict(op.py_kernels)))
            _set(op, function)
    try:
        yield
    finally:
        for op, kernels in saved:
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _set(op: torch._ops.OpOverload, function: Callable | None) -> None:
    """Makes `function` run the op; None: torch's own kernels."""
    for key in _KEYS:
        op.py_kernels.pop(key, None)
        if function is not None:
            op.py_kernels[key] = function
    op._dispatch_cache.clear()


def _scaled(op: torch._ops.OpOverload) -> Callable:
    """The op, called with the sizes of the result or with factors: (input, sizes, align_corners if the op has
    it, factors)."""

    def call(input, output_size, *others):
        from torch._decomp.decompositions import upsample_compute_output_size

        *align, factors = others
        sizes = upsample_compute_output_size(input.size(), output_size, factors)
        return op(input, sizes, *align, *(factors or [None] * len(sizes)))

    return call
