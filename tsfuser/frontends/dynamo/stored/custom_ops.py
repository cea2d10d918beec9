"""Ops from outside torch as texts that tell them from ops of the same name.

In: an op that a graph calls. Out: a text of its schema, and of the code by which it is traced: what it
returns for fake tensors, and its derivative. Its kernels do not belong to it: a stored graph calls those of
the process that runs it. Raises Refusal where the code may do something else though its text is the same, as
where it reads an object of the program's, and for ops whose code is not known: those of C++, and of other
ways to register than `torch.library.custom_op`. Example:

    of_op(torch.ops.mylib.twice.default)   # "mylib::twice(Tensor x) -> Tensor ..."
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ....errors import Refusal

#: Namespaces and modules that belong to torch and Python.
OF_TORCH = ("aten", "prims", "prim", "tsfuser", "quantized_decomposed")
MODULES = ("torch", "_operator", "operator", "math", "builtins")
#: Functions by which code reaches what its text does not name.
_DOORS = frozenset(
    "eval exec compile __import__ globals locals vars getattr setattr delattr open input".split()
)
#: A kernel that was registered in C++.
_CPP = re.compile(r": registered at \S+\.(c|cc|cpp|cu|cxx|h|hpp|cuh|mm):")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...))
_ATOMS_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.device)


def of_op(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> str:
    """Raises Refusal."""
    return _Text().op(op)


def of_module(module: torch.nn.Module) -> dict[str, str]:
    """For each such op of the module's graphs, a digest of its text. Raises Refusal."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    targets = {
        str(node.target): node.target for graph in graphs for node in graph.nodes if is_custom(node.target)
    }
    return {name: _digest(of_op(target)) for name, target in sorted(targets.items())}


def are_unchanged(digests: Mapping[str, str]) -> bool:
    """Whether the ops are here, and what they were where `of_module` gave these digests."""
    try:
        return all(_digest(of_op(_named(name))) == digest for name, digest in digests.items())
    except (AttributeError, Refusal):
        return False


def is_custom(target: Any) -> bool:
    """Whether it is an op from outside torch."""
    is_op = isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return is_op and str(target).split(".")[0] not in OF_TORCH


def _named(name: str) -> Any:
    found = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Text:
    """`seen`: functions and ops that the text has by now, which may call each other."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def op(self, op: Any) -> str:
        if isinstance(op, torch._ops.OpOverloadPacket):
            return " ".join(self.op(getattr(op, name)) for name in op.overloads())
        name = op._schema.name
        if name.split("::")[0] in OF_TORCH or op in self.seen:
            return str(op)
        self.seen.add(op)
        made = _definition(name)
        if op is not made._opoverload:
            raise Refusal(f"{name} has several overloads")
        traced = (made._abstract_fn, made._setup_context_fn, made._backward_fn, made._vmap_fn)
        casts = sorted(getattr(made, "_autocast_dtype", {}).items())
        tags = sorted(map(str, op.tags))
        return f"{op._schema} {tags} {casts} {' '.join(map(self.value, traced))}"

    def value(self, value: Any) -> str:
        """Something that code reads."""
        if type(value) in _ATOMS or isinstance(value, _ATOMS_OF_TORCH):
            return repr(value)
        if type(value) in (tuple, frozenset):
            items = map(self.value, value)
            return f"{type(value).__name__}({', '.join(items if type(value) is tuple else sorted(items))})"
        if isinstance(value, types.CodeType):
            return self.code(value, {})
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return self.op(value)
        if isinstance(value, torch._library.custom_ops.CustomOpDef):
            return self.op(value._opoverload)
        if isinstance(value, types.ModuleType) and _is_torchs(value.__name__):
            return value.__name__
        if isinstance(value, (type, types.FunctionType)) and _is_torchs(value.__module__):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.FunctionType):
            return self.function(value)
        raise Refusal(f"the code of an op reads a {type(value).__name__}, which may change")

    def function(self, function: types.FunctionType) -> str:
        if function in self.seen:
            return function.__qualname__
        self.seen.add(function)
        if function.__dict__.keys() - {"__wrapped__"}:
            raise Refusal(f"{function.__qualname__} has attributes")
        closure = zip(function.__code__.co_freevars, function.__closure__ or ())
        held = {name: self.value(cell.cell_contents) for name, cell in closure}
        defaults = (
            self.value(function.__defaults__),
            [(name, self.value(v)) for name, v in (function.__kwdefaults__ or {}).items()],
        )
        return f"{self.code(function.__code__, function.__globals__)} {held} {defaults}"

    def code(self, code: types.CodeType, known: dict[str, Any]) -> str:
        """With all that it reads of the globals `known`. Lines belong to it, as errors name them."""
        facts = (
            (code.co_filename, code.co_firstlineno, code.co_qualname if hasattr(code, "co_qualname") else ""),
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
            (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            (code.co_code.hex(), getattr(code, "co_exceptiontable", b"").hex()),
        )
        inner = [
            self.code(constant, known) if isinstance(constant, types.CodeType) else self.value(constant)
            for constant in code.co_consts
        ]
        read = [f"{name}: {self.value(value)}" for name, value in _read(code, known)]
        return f"{facts} {inner} {read} {[self.op(op) for op in _called(code)]}"


def _definition(name: str) -> Any:
    """What `torch.library.custom_op` has made, if nobody else registers something for the op."""
    made = torch._library.custom_ops.OPDEFS.get(name)
    if made is None:
        raise Refusal(f"{name} was not made by torch.library.custom_op, so its code may change")
    entry = torch._library.simple_registry.singleton.find(name)
    prefix = name.replace("::", "/")
    registered = {key for key in torch.library._impls if key.rsplit("/", 1)[0] == prefix}
    others = (
        made._torch_dispatch_fns,
        made._disabled_kernel,
        getattr(made, "_used_triton_kernels", None),
        entry.torch_dispatch_rules._data,
        getattr(getattr(entry, "effect", None), "_effect", None),
        registered - made._lib._op_impls,
        not _is_own_fake(getattr(entry.fake_impl, "kernel", None)),
        made._opoverload.py_kernels,
        _CPP.search(torch._C._dispatch_dump(name)),
    )
    if any(others):
        raise Refusal(f"{name} has parts that may change, such as kernels of Triton or rules for modes")
    return made


def _is_own_fake(kernel: Any) -> bool:
    """Whether it calls what `register_fake` of the op was given, perhaps behind torch's check of its file."""
    function = getattr(kernel, "func", None)
    if getattr(function, "__qualname__", "") == "_check_pystubs_once.<locals>.inner":
        held = dict(zip(function.__code__.co_freevars, function.__closure__))
        function = held["func"].cell_contents
    return getattr(function, "__qualname__", "").startswith("CustomOpDef.")


def _is_torchs(module: str | None) -> bool:
    return (module or "").split(".")[0] in MODULES


def _read(code: types.CodeType, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that the code reads. Raises Refusal where it may read others."""
    for step in dis.get_instructions(code):
        name = str(step.argval)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS"):
            raise Refusal(f"the code of an op has {step.opname}")
        if step.opname == "IMPORT_NAME" and not _is_torchs(name):
            raise Refusal(f"the code of an op imports {name}")
        if step.opname == "IMPORT_FROM" and name == "ops":
            raise Refusal("the code of an op imports ops")
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if name in known:
                yield name, known[name]
            elif name in _DOORS or not hasattr(builtins, name):
                raise Refusal(f"the code of an op reads {name}")


def _called(code: types.CodeType) -> Iterator[Any]:
    """The ops that the code names as `torch.ops.mylib.twice`. Raises Refusal where it may reach others."""
    steps = list(dis.get_instructions(code))
    for k, step in enumerate(steps):
        if step.opname in _ATTRIBUTES and step.argval == "ops":
            names = [s.argval for s in steps[k + 1 : k + 3] if s.opname in _ATTRIBUTES]
            if len(names) != 2:
                raise Refusal("the code of an op looks into torch.ops")
            yield getattr(getattr(torch.ops, names[0]), names[1])
