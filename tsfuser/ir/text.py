"""A Fusion as code that rebuilds it.

In: a Fusion, or text. Out: text, or a Fusion: `read(write(f)) == f`. The code is Python over the names below and nothing else. Example of a line:

    add_0 = pointwise("add", "({0} + {1})", (x0, 1), float32, tensor("add_0", float32, (a0, a1)))
"""

from __future__ import annotations

from . import size as sz
from .dtypes import DTYPES
from .fusion import Axis, Fusion, NumberInput, Op, Output, Pointwise, Reduce, TensorInput, Value
from .size import Size


def write(fusion: Fusion) -> str:
    """Code that builds `fusion`, one statement an op."""
    lines = [f"{leaf.b} = leaf({leaf.a}, {leaf.b!r})" for leaf in _leaves(fusion)]
    lines += [f"{axis.name} = axis({axis.name!r}, {axis.extent.text()})" for axis in fusion.axes]
    for i in fusion.inputs:
        lines.append(f"{i.value.name} = {_tensor(i.value)}")
    for n in fusion.numbers:
        lines.append(f"{n.value.name} = number({n.value.name!r}, {n.value.dtype})")
    for op in fusion.ops:
        lines.append(f"{op.output.name} = {_tensor(op.output)}")
    inputs = "".join(f"    input({i.value.name}, {i.index}, {_sizes(i.strides)}, {i.alignment.text()}, {i.by_value}),\n" for i in fusion.inputs)
    numbers = "".join(f"    number_input({n.value.name}, {n.index}),\n" for n in fusion.numbers)
    ops = "".join(f"    {_op(op)},\n" for op in fusion.ops)
    outputs = "".join(f"    output({o.value.name}, {_sizes(o.sizes)}, {_sizes(o.strides)}),\n" for o in fusion.outputs)
    parts = [("inputs", inputs), ("numbers", numbers), ("ops", ops), ("outputs", outputs)]
    lines += [f"{name} = (\n{text})" if text else f"{name} = ()" for name, text in parts]
    return "\n".join(lines + [f"fusion = Fusion(inputs, numbers, ops, outputs, {fusion.results!r})"])


def read(text: str) -> Fusion:
    """The Fusion that `text` builds. Raises SyntaxError or NameError where it is not such code."""
    names = {d.name: d for d in DTYPES.values()}
    names |= {"leaf": sz.leaf, "ceildiv": sz.ceildiv, "min": sz.minimum, "max": sz.maximum, "eq": sz.eq, "lt": sz.lt, "le": sz.le, "pow2": sz.pow2,
              "nextpow2": sz.nextpow2, "const": sz.const}  # fmt: skip
    names |= {"axis": lambda name, extent: Axis(name, sz.as_size(extent)), "tensor": Value, "Fusion": Fusion, "output": Output, "input": TensorInput}
    names |= {"number": lambda name, dtype: Value(name, dtype, None), "number_input": NumberInput, "pointwise": Pointwise, "reduce": Reduce}
    names |= {"literal": lambda value, dtype: Value(repr(value), dtype, None, value), "inf": float("inf"), "nan": float("nan")}
    exec(compile(text, "<fusion>", "exec"), {"__builtins__": {}, "True": True, "False": False}, names)  # noqa: S102
    return names["fusion"]


def _leaves(fusion: Fusion) -> list[Size]:
    sizes = [a.extent for a in fusion.axes]
    for i in fusion.inputs:
        sizes += [*i.strides, i.alignment]
    for o in fusion.outputs:
        sizes += [*o.sizes, *o.strides]
    found: dict[Size, None] = {}
    while sizes:
        size = sizes.pop()
        if size.op == "leaf":
            found[size] = None
        elif not size.is_const:
            sizes += [size.a, size.b]
    return sorted(found, key=lambda leaf: leaf.a)


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _sizes(sizes) -> str:
    return _tuple([f"const({s.a})" if s.is_const else s.text() for s in sizes])


def _tensor(value: Value) -> str:
    return f"tensor({value.name!r}, {value.dtype}, {_tuple(['None' if a is None else a.name for a in value.dims])})"


def _operand(value: Value) -> str:
    return value.name if value.literal is None else f"literal({value.literal!r}, {value.dtype})"


def _op(op: Op) -> str:
    operands = _tuple([_operand(v) for v in op.operands])
    if isinstance(op, Reduce):
        return f"reduce({op.name!r}, {op.combine!r}, {operands}, {_tuple([a.name for a in op.axes])}, {op.output.name})"
    return f"pointwise({op.name!r}, {op.template!r}, {operands}, {op.compute}, {op.output.name})"
