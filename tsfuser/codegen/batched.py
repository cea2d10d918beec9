"""Batched kernels: one launch does what several launches of the kernel would. The parameters of an optimizer
are many small tensors and one kernel.

In: a Kernel. Out: the same in a form whose parameter is a table of argument structs, and how many blocks each
of them has; a block finds its struct by binary search (runtime/batched.h). The table is as large as
parameters may be, so that one binary serves any number of tensors. Example: `y = x + 1` becomes

    using Table = batched<Args, 145>;
    DEVICE void fused_add_block(const Args& args, int32_t batch_block) { ... }
    KERNEL(fused_add, Table, 128) {
      const batch_place at = args.place_of(blockIdx.x);
      fused_add_block(args.structs[at.index], at.block);
    }
"""

from __future__ import annotations

from dataclasses import replace

from ..lower.index import Var
from ..lower.kernel import Kernel
from ..lower.loop_ir import Let
from .emit import struct_layout

_END = 4  # bytes of the number of blocks, one a struct
_PADDING = 12  # bytes at most between these and the structs, which are aligned to 16


def batched_form(kernel: Kernel, parameter_bytes: int) -> Kernel:
    """`kernel` in this form, with as many structs as fit into `parameter_bytes`. The kernel itself if its
    blocks depend on the launch as a whole, or if two structs do not fit."""
    count = (parameter_bytes - _PADDING) // (struct_layout(kernel.params)[1] + _END)
    alone = kernel.rooms or kernel.cooperative or kernel.cluster or kernel.leads or kernel.combines_partials
    if alone or count < 2 or any(p.source[0] in ("random", "seeded", "flag") for p in kernel.params):
        return kernel
    body = tuple(
        replace(s, value=Var("batch_block")) if isinstance(s, Let) and s.value == Var("blockIdx.x") else s
        for s in kernel.body
    )
    return replace(kernel, body=body, batch_capacity=count)
