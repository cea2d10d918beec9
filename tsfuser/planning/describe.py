"""A plan as text to read: what it allocates and launches, with a name for every size that is computed.

In: a call, what its plan allocates, its kernels. Out: text, in which each formula stands once, with its value
in the call that the plan was made for. Example:

    rows = size0_0 * size0_1  # now 192
    allocate 0, add_0: float32[size0_0, size0_1, 40], strides [stride0_0, 40, 1]
    launch fused_add: grid rows (now 192), block 1 x 1, shared 0 bytes, 4 arguments of 32 bytes, 0 registers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..codegen import emit
from ..ir import size as sz
from ..ir.call import Call
from ..ir.code import SizeNames
from ..ir.size import Size


class Allocated(NamedTuple):
    """A tensor that a plan allocates."""

    name: str
    dtype: str
    sizes: tuple[Size | int, ...]
    strides: tuple[Size | int, ...]


def described(call: Call, allocated: Sequence[Allocated], compiled: Sequence) -> str:
    """The text. `compiled`: the plan's kernels, each with `kernel` and `function`."""
    kernels = [c.kernel for c in compiled]
    wishes: list[tuple[str, Size | int]] = []
    for k in kernels:
        # a kernel's own names for its arguments come first
        wishes += [
            (p.name.replace("[", "_").removesuffix("]"), p.source[1])
            for p in k.params
            if p.source[0] == "size"
        ]
        wishes += [("blocks", k.grid), ("threads_x", k.block_x), ("threads_y", k.block_y)]
        wishes += [("shared_bytes", k.shared), ("grain", k.grain)]
    for a in allocated:
        wishes += [(f"{a.name}_size{d}", size) for d, size in enumerate(a.sizes)]
        wishes += [(f"{a.name}_stride{d}", stride) for d, stride in enumerate(a.strides)]
    names = SizeNames([(name, sz.as_size(size)) for name, size in wishes], all_formulas=True)

    def text(size: Size | int) -> str:
        size = sz.as_size(size)
        return str(size.a) if size.is_const else names.of(size)

    def now(size: Size | int) -> str:
        size = sz.as_size(size)
        return text(size) if size.is_const else f"{text(size)} (now {call.value(size)})"

    defined = {name: size for size, name in names.named.items()}
    lines = [
        f"{line}  # now {call.value(defined[line.partition(' = ')[0]])}"
        for line in names.lines
        if defined[line.partition(" = ")[0]].op != "leaf"
    ]
    for k, a in enumerate(allocated):
        sizes, strides = (", ".join(map(text, x)) for x in (a.sizes, a.strides))
        lines.append(f"allocate {k}, {a.name}: {a.dtype}[{sizes}], strides [{strides}]")
    for k, c in zip(kernels, compiled):
        block = " x ".join(map(now, (k.block_x, k.block_y)))
        arguments = f"{len(k.params)} arguments of {emit.struct_layout(k.params)[1]} bytes"
        lines.append(
            f"launch {k.name}: grid {now(k.grid)}, block {block}, shared {now(k.shared)} bytes, {arguments}, "
            f"{c.function.registers} registers"
        )
    return "\n".join(lines)
