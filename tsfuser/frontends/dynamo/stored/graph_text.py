"""A graph of TorchDynamo as a text that tells it from every other.

In: the module, and AOTAutograd's arguments: its parameters and buffers, then the inputs. Out: a text. Raises
Refusal for a value that a text cannot tell, such as a function from outside torch, or where torch may decide
by something that is not written down: any doubt is a miss. Example, a line of it:

    3 call_function torch._C._nn.linear (#0, #1, #2) {} File "model.py", line 12, in forward

The lines of the program belong to it, as errors name them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ....errors import Refusal
from . import custom_ops
from .custom_ops import MODULES

#: Dynamo's notes at nodes that do not affect the graphs of AOTAutograd.
_HARMLESS = frozenset(
    "example_value tensor_dict grapharg nn_module_stack source_fn_stack stack_trace creation_timestamp "
    "torch_fn original_aten from_node desc tensor_meta val".split()
)
#: The same at the module.
_HARMLESS_OF_MODULE = frozenset("dynamo_flat_name_to_original_fqn dynamo_compile_id backend_id".split())
#: Ops that run a submodule, and do only what its text says.
_WITH_SUBGRAPH = ("tag_activation_checkpoint", "cond")
_ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
_LARGEST_CONSTANT = 4096  # bytes; of more, the text would take long to make


def graph_text(module: fx.GraphModule) -> str:
    """The nodes of the module. Raises Refusal."""
    return "\n".join(_lines(module))


def arguments_text(args: Sequence[Any]) -> str:
    """What AOTAutograd knows of the arguments: tensors, and sizes that vary. Raises Refusal."""
    storages: set[int] = set()
    lines = []
    for value in args:
        if isinstance(value, torch.SymInt):
            lines.append(f"size {value.node.expr}")
            continue
        lines.append(_tensor(value))
        storage = value.untyped_storage()
        if storage._cdata in storages:
            raise Refusal("two arguments share memory")
        storages.add(storage._cdata)
    return "\n".join(lines)


def _lines(module: fx.GraphModule) -> Iterator[str]:
    unknown = set(module.meta) - _HARMLESS_OF_MODULE
    if unknown:
        raise Refusal(f"the graph has {', '.join(sorted(map(str, unknown)))}")
    numbers: dict[fx.Node, int] = {}
    for number, node in enumerate(module.graph.nodes):
        unknown = set(node.meta) - _HARMLESS
        if unknown:
            raise Refusal(f"{node} has {', '.join(sorted(map(str, unknown)))}")
        what = _target(module, node)
        given = f"{_value(node.args, numbers)} {_value(node.kwargs, numbers)}"
        yield f"{number} {node.op} {what} {given} {node.meta.get('stack_trace', '')}"
        numbers[node] = number


def _target(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":
        return _attribute(module, str(node.target))
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        raise Refusal(f"{node} is a {node.op}")
    return _function(node.target)


def _function(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target)
        return f"op {name} {custom_ops.of_op(target)}" if custom_ops.is_custom(target) else f"op {name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() not in _WITH_SUBGRAPH:
            raise Refusal(f"{target.name()} runs code that is not in the graph")
        return f"higher order {target.name()}"
    name = fx.node._get_qualified_name(target)
    if name.split(".")[0] not in MODULES:
        raise Refusal(f"{name} is no function of torch, so its code may change")
    return name


def _attribute(module: fx.GraphModule, name: str) -> str:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, fx.GraphModule):
        return "graph {\n" + "\n".join(_lines(found)) + "\n}"
    if isinstance(found, torch.nn.Parameter):
        return f"parameter {_tensor(found)}"
    if type(found) is torch.Tensor:
        return f"constant {_tensor(found)} {_content(found)}"
    raise Refusal(f"{name} is a {type(found).__name__}")


def _content(tensor: torch.Tensor) -> str:
    """What AOTAutograd might make a number of."""
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > _LARGEST_CONSTANT:
        raise Refusal("it has a constant that is large, or not in the CPU's memory")
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(raw.tolist())).hexdigest()


def _tensor(value: Any) -> str:
    """All that decides how a tensor is traced. Raises Refusal for subclasses."""
    fake = isinstance(value, torch._subclasses.FakeTensor)
    if not fake and type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise Refusal(f"an argument is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise Refusal("an argument is sparse, nested or quantized")
    facts = (
        isinstance(value, torch.nn.Parameter),
        str(value.dtype),
        str(value.device),
        *(_number(number) for number in (*value.shape, *value.stride())),
        _number(value.storage_offset()),
        _number(value.untyped_storage().nbytes()),
        value.requires_grad,
        value.is_leaf,
        value._is_view(),
        value.is_inference(),
        value.is_conj(),
        value.is_neg(),
    )
    return repr(facts)


def _number(number: Any) -> str:
    """An int, or what it is of sizes that vary."""
    return str(number.node.expr if isinstance(number, torch.SymInt) else number)


def _value(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    """An argument of a node."""
    if isinstance(value, fx.Node):
        return f"#{numbers[value]}"
    if isinstance(value, float) and math.isnan(value):
        raise Refusal("it has the constant NaN, which has many bit patterns")
    if type(value) in _ATOMS or isinstance(value, torch.device):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(_value(item, numbers) for item in value)
        return f"{type(value).__name__}({items})"
    if isinstance(value, dict):
        items = ", ".join(f"{_value(k, numbers)}: {_value(item, numbers)}" for k, item in value.items())
        return f"{{{items}}}"
    if isinstance(value, slice):
        return f"slice{_value((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _function(value)
    raise Refusal(f"a node has a {type(value).__name__} for an argument")
