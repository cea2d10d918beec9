"""The sizes and strides of all tensors of a graph in one call.

In: a graph whose inputs have those of that call in their types, and most results of the forward, too. Out:
the same graph, in which the others have them as well: torch runs each op on tensors without memory, or
`meta_results.py` says what it would give. Example:

    %y : Float(4, 8, strides=[8, 1]) = ...;  %s : Float(*, *) = aten::sum(%y, [1], True)
    ->  %s : Float(4, 1, strides=[1, 1])

They decide what the forward saves and which groups are made, but not what is computed: all hold for other
sizes. A result stays as it is if torch cannot run its op so, as where elements decide its sizes. Where sizes
decide how many dims there are, as in `squeeze` and behind it, types get dtype and device only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch

from ..errors import Refusal
from ..graph.evaluate import OPERATIONS
from ..graph.rows import Knowledge, row_of
from ..graph.types import common_device, infer
from ..graph.worth import shape
from ..graph.wrapper import (
    CONSTANT,
    LIST,
    Facts,
    Graph,
    Node,
    Value,
    constant_of,
    facts,
    graph_inputs,
    inputs,
    is_constant,
    is_plain_list,
    is_tensor,
    nodes_in,
    outputs,
    refine,
    schema,
)
from ..ir.dtypes import DTYPES
from .autocast import FULL, REDUCED, cast_to
from .meta_results import RESULTS, broadcast, like, reduced

_UNPACK, _TO_TENSOR, _TO = "prim::ListUnpack", "prim::NumToTensor", "aten::to"
_CHECKED = "tsfuser::checked_batch"  # its operand
_USUAL = 64  # the size of a dim that is not known
_FLOATS = {DTYPES[name].code: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}
_BY_CODE = {dtype.code: getattr(torch, name) for name, dtype in DTYPES.items() if hasattr(torch, name)}
_UNKNOWN = object()


def note_types(graph: Graph, numbers: Sequence[Any] = ()) -> None:
    """Refines the types of tensors. `numbers`: the inputs in that call, None where they are tensors."""
    with torch.no_grad():
        _Call(graph).run(numbers)


def bytes_of(value: Value) -> int:
    """The bytes of a tensor in that call."""
    dtype = facts(value.type()).dtype
    return elements_of(value) * (DTYPES[dtype].itemsize if dtype in DTYPES else 4)


def elements_of(value: Value) -> int:
    """The elements of a tensor in that call."""
    sizes = value.type().sizes()
    return prod(sizes) if sizes is not None else _USUAL ** (facts(value.type()).rank or 0)


class _Call:
    """What the values of a graph are in the call: tensors on `meta`, numbers, lists."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._known: dict[int, Any] = {}
        self._open: set[int] = set()  # values whose ranks may be others in calls with other sizes

    def run(self, numbers: Sequence[Any]) -> None:
        for value, number in zip_longest(graph_inputs(self._graph), numbers):
            self._known[value.unique()] = _like(value) if number is None else number
        for node in nodes_in(self._graph):
            made, is_open = self._results(node), self._is_open(node)
            for value, result in zip(outputs(node), made):
                if is_open:
                    self._open.add(value.unique())
                if is_tensor(value) and isinstance(result, torch.Tensor) and result.is_meta:
                    if is_open:
                        value.setType(refine(value.type(), Facts(_name(result), _device(node), None)))
                    else:
                        _note(value, result, _device(node))
                        result = _like(value)
                self._known[value.unique()] = result

    def _is_open(self, node: Node) -> bool:
        found = row_of(node)
        if found is not None and found[0].rank_depends_on_sizes:
            return True
        return any(v.unique() in self._open for v in inputs(node))

    def _results(self, node: Node) -> list[Any]:
        made = outputs(node)
        if node.kind() == CONSTANT:
            found = made[0].toIValue() if made[0].type().kind() != "NoneType" else None
            is_large = isinstance(found, torch.Tensor) and found.dim()
            return [found.to("meta") if is_large else found]
        given = [self._known.get(v.unique(), _UNKNOWN) for v in inputs(node)]
        known = [_like(v) if is_tensor(v) else _UNKNOWN for v in made]
        if all(v is not _UNKNOWN for v in known) and not _is_number(given):
            return known
        if any(g is _UNKNOWN for g in given):
            return [_UNKNOWN] * len(made)
        try:
            found = _by_row(node, given)
            found = _ran(node, given) if found is None else found
        except Exception:  # whatever torch says of ops that cannot run without memory
            return [_UNKNOWN] * len(made)
        return list(found) if len(made) != 1 or node.kind() == _UNPACK else [found]


def _ran(node: Node, given: list[Any]) -> Any:
    kind, found = node.kind(), schema(node)
    if kind == LIST:
        return given
    if kind == _UNPACK:
        return given[0]
    if kind == _CHECKED:
        return given[0]
    if kind in RESULTS and (result := RESULTS[kind](*given)) is not None:
        return result
    if kind in (REDUCED, FULL):
        operand = inputs(node)[0]
        target = cast_to(kind, *facts(operand.type())[:2], given[1:])
        return given[0] if target is None else given[0].to(_FLOATS[target])
    if kind == _TO_TENSOR:
        return torch.tensor(given[0])
    if kind == _TO and found is not None:
        return _cast(**dict(zip(found.arguments, given)))
    if kind in OPERATIONS and not any(isinstance(g, torch.Tensor) for g in given):
        return OPERATIONS[kind](None, *given)
    if found is None or kind.startswith("prim::"):
        raise Refusal(f"{kind} is not run")
    return _called(node, given)


def _by_row(node: Node, given: list[Any]) -> torch.Tensor | None:
    """The result of an elementwise op, or of a reduction; None for others. Torch runs many of them in Python
    on tensors without memory, and imports torch._dynamo for that, which takes up to 1.6 s."""
    found, tensors = row_of(node), [g for g in given if isinstance(g, torch.Tensor)]
    if found is None or not tensors or len(outputs(node)) != 1:
        return None
    row, its_schema = found
    rule = row.sizes if isinstance(row.sizes, str) else row.sizes[0]
    if rule not in ("broadcast", "reduced"):
        return None
    infer(node, Knowledge())
    known = facts(outputs(node)[0].type()).dtype
    dtype = _called(node, list(map(_small, given))).dtype if known is None else getattr(torch, known)
    if rule == "broadcast":
        return broadcast(tensors, dtype)
    arguments = dict(zip(its_schema.arguments, given))
    dim = arguments.get("dim")
    dims = [dim] if isinstance(dim, int) else dim or []
    return reduced(tensors[0], dims, arguments.get("keepdim", False), dtype)


def _cast(self: torch.Tensor, dtype: Any = None, other: Any = None, memory_format: Any = None, **more: Any):
    """What `to` gives, but for its device. Without a format, as torch would import sympy for it."""
    wanted = other.dtype if isinstance(other, torch.Tensor) else _BY_CODE.get(dtype, dtype) or self.dtype
    if memory_format is not None:
        return self.to(wanted, memory_format=memory_format)
    return like(self, wanted) if wanted != self.dtype or more.get("copy") else self


def _small(given: Any) -> Any:
    """The same, of a tensor one element."""
    is_meta = isinstance(given, torch.Tensor) and given.is_meta
    return torch.ones([1] * given.dim(), dtype=given.dtype) if is_meta else given


def _called(node: Node, given: list[Any]) -> Any:
    """What torch's op gives. What makes a tensor of numbers alone makes one without memory."""
    space, _, name = node.kind().partition("::")
    arguments = dict(zip(schema(node).arguments, given))
    if _makes_tensor(node):
        arguments["device"] = "meta"
    return getattr(getattr(torch.ops, space), name)(**arguments)


def _makes_tensor(node: Node) -> bool:
    """Whether the node makes a tensor of numbers, on a device that it names."""
    found = schema(node)
    return found is not None and "device" in found.arguments and not any(map(is_tensor, inputs(node)))


def _device(node: Node) -> str | None:
    """That of the results; items of a list have that of the operands of the list's node."""
    if node.kind() == _UNPACK and node.inputsAt(0).node().kind() != LIST:
        node = node.inputsAt(0).node()
    if node.kind() == CONSTANT:
        return str(node.output().toIValue().device)
    named = _device_argument(node)
    if named is not None and (
        _makes_tensor(node) or not is_constant(named) or constant_of(named) is not None
    ):
        return _named_device(named)
    lists = [v.node() for v in inputs(node) if v.node().kind() == LIST and not is_plain_list(v)]
    found = {common_device(each, Knowledge()) for each in lists or [node]}
    return found.pop() if len(found) == 1 else None


def _device_argument(node: Node) -> Value | None:
    """Where the results of the node are, where it makes tensors or moves one."""
    its_schema = schema(node)
    if its_schema is None or not (_makes_tensor(node) or node.kind() == _TO):
        return None
    return dict(zip(its_schema.arguments, inputs(node))).get("device")


def _named_device(value: Value) -> str | None:
    """None where the value does not say which of several."""
    if not is_constant(value):
        return None
    device = torch.device(constant_of(value) or torch._C._get_default_device())
    return str(device) if device.type == "cpu" or device.index is not None else None


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_number(given: list[Any]) -> bool:
    """Whether an op computes with numbers alone, of which some are tensors, as in traced programs."""
    tensors = [g for g in given if isinstance(g, torch.Tensor)]
    return all(not t.is_meta for t in tensors) if tensors else all(type(g) in (int, float) for g in given)


def _like(value: Value) -> Any:
    """A tensor as the type says; `_UNKNOWN` where it does not say all."""
    if not is_tensor(value):
        return _UNKNOWN
    sizes, strides = shape(value)
    dtype = value.type().dtype()
    if sizes is None or strides is None or dtype is None:
        return _UNKNOWN
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def _note(value: Value, seen: torch.Tensor, device: str | None) -> None:
    """Gives the value's type what it lacks. What is known of dtype and device stays."""
    known = facts(value.type())
    device = known.device or device
    if device is not None and known.rank in (None, seen.dim()):
        dtype = seen.dtype if known.dtype is None else value.type().dtype()
        like = torch.empty_strided(seen.shape, seen.stride(), dtype=dtype, device="meta")
        value.setType(torch._C.TensorType.create_from_tensor(like).with_device(torch.device(device)))
