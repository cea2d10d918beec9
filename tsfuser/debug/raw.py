"""A kernel by itself: its source as a `cupy.RawKernel`, and what a plan launches it with.

In: a planned kernel and the inputs of its group. Out: a `Launch`, which CuPy takes. Example:

    kernel = tsfuser.explain(scripted, x).kernels[0]
    launch = kernel.arguments(x=x)
    kernel.raw()(launch.grid, launch.block, launch.args, shared_mem=launch.shared_mem)
    launch.tensors[0]  # what the kernel has stored
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from .. import options
from ..codegen.emit import WITHOUT_CONTRACTION, struct_layout
from ..errors import Refusal
from ..ir import size as sz
from ..ir.call import Call, TensorArg
from ..ir.dtypes import BFLOAT16, DTYPES, DType
from ..ir.size import Size
from ..lower.kernel import Kernel, Param
from ..planning import dumps
from ..target import cuda
from ..target.function import Function
from .arguments import described


def _format(dtype: DType) -> str:
    """The same in NumPy, where it has that dtype; else bytes."""
    known = dtype.kind != "f" or (dtype.computes and dtype is not BFLOAT16)
    letter = "?" if dtype.kind == "b" else "u" if dtype.is_unsigned else dtype.kind if known else "V"
    return letter if letter == "?" else f"{letter}{dtype.itemsize}"


#: What an argument's source is called where its address is filled in later.
_ADDRESSES = {
    "input": "input",
    "update": "input",
    "allocation": "made",
    "cleared": "cleared",
    "flag": "flag",
}
_FORMATS = {d.ctype: _format(d) for d in DTYPES.values()} | {"random_state": ("u8", (4,))}


@dataclass(frozen=True)
class Launch:
    """`grid`, `block`, `args` and `shared_mem` (bytes) as a `cupy.RawKernel` takes them; `args` is one
    struct, whose fields print with their names. `tensors`: what the plan allocates, the group's outputs
    first. `inputs` are held, since `args` has only their addresses."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Any, ...]
    shared_mem: int
    tensors: tuple[torch.Tensor, ...]
    inputs: tuple[Any, ...] = field(repr=False)


#: A tensor that a plan allocates: dtype name, sizes, strides, and elements of the memory where it has gaps.
Made = tuple[str, tuple, tuple, Optional[Size]]


@dataclass(frozen=True)
class Planned:
    """A kernel in its plan. `names`: of the group's inputs; `numbers`: their values in the call that was
    explained, None for tensors; `call`: that for which the plan was made; `allocated`: what the plan
    allocates, the last `seeds` of which are seeds."""

    group: int
    device: str
    names: tuple[str, ...]
    numbers: tuple[Any, ...]
    call: Call
    allocated: tuple[Made, ...]
    kernel: Kernel
    function: Function
    seeds: int = 0
    #: of the group: what its results are (`Fusion.results`), its ops, and its kernels with their sources
    results: tuple[tuple[str, Any], ...] = ()
    graph: str = ""
    siblings: list[tuple[Planned, str]] = field(default_factory=list, repr=False, compare=False)

    def inputs(self) -> tuple[str, ...]:
        """The group's inputs: names and descriptions."""
        return tuple(f"{name}: {arg}" for name, arg in zip(self.names, self.call.args))

    def raw(self, source: str) -> Any:
        """A `cupy.RawKernel`."""
        if not self.device.startswith("cuda"):
            raise ValueError(
                f"{self.kernel.name} is a kernel for CPU tensors, which CuPy does not launch: explain the "
                "program with CUDA tensors, on a machine with a GPU"
            )
        if self.kernel.cluster:
            raise ValueError(f"{self.kernel.name} is launched in clusters, which CuPy cannot do")
        shared = self.call.value(sz.as_size(self.kernel.shared))
        try:
            return cuda.raw_kernel(
                dumps.whole(source),
                self.kernel.name,
                shared,
                fma=not options.disabled("fma") and not source.startswith(WITHOUT_CONTRACTION),
                max_registers=options.get("max_registers"),
            )
        except Refusal as error:
            raise ValueError(str(error)) from None

    def launch(
        self, inputs: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], named: dict[str, Any]
    ) -> Launch:
        """`findings.Kernel.arguments`."""
        given = self._by_name(named) if named and not inputs else inputs
        if named and inputs:
            raise ValueError(f"{self.kernel.name} takes its inputs by place or by name, not some by each")
        inputs = self._complete(tuple(_torch(x) for x in given))
        call = self._call(inputs)
        value = lambda size: call.value(sz.as_size(size))
        tensors = tensors or tuple(self._allocated(value, *made) for made in self.allocated)
        k = self.kernel
        return Launch(
            (value(k.grid), 1, 1),
            (value(k.block_x), value(k.block_y), 1),
            (self._args(call, inputs, tensors),),
            value(k.shared),
            tensors,
            inputs,
        )

    def _allocated(self, value: Callable, dtype: str, sizes, strides, elements) -> torch.Tensor:
        """A new tensor, of `allocated`; `value` gives sizes of the call."""
        shape, steps = [value(n) for n in sizes], [value(n) for n in strides]
        how = {"dtype": getattr(torch, dtype), "device": self.device}
        if elements is None:
            return torch.empty_strided(shape, steps, **how)
        return torch.empty(value(elements), **how).as_strided(shape, steps)

    def _by_name(self, named: dict[str, Any]) -> tuple[Any, ...]:
        """Inputs in the group's order. TorchScript's names end in a number where there are several values
        of one variable (`x.1`): the variable's name does. Raises ValueError for names that are not there."""
        variables = [name.partition(".")[0] for name in self.names]
        wanted = [v for v, a in zip(variables, self.call.args) if isinstance(a, TensorArg) or v in named]
        if sorted(wanted) != sorted(named):
            raise ValueError(
                f"{self.kernel.name} takes {', '.join(self.inputs())}; given: {', '.join(named)}"
            )
        return tuple(named[v] for v in wanted)

    def _complete(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """All inputs, where perhaps only the tensors are given. Raises ValueError for any other number."""
        if len(inputs) == len(self.names):
            return inputs
        waiting = list(inputs)
        if len(waiting) != sum(isinstance(a, TensorArg) for a in self.call.args):
            raise ValueError(f"{self.kernel.name} takes {len(self.names)} inputs: {', '.join(self.inputs())}")
        pairs = zip(self.call.args, self.numbers)
        return tuple(waiting.pop(0) if isinstance(a, TensorArg) else number for a, number in pairs)

    def _call(self, inputs: tuple[Any, ...]) -> Call:
        """The call with these inputs. Raises ValueError where the plan is for others."""
        call = Call(tuple(map(described, inputs)))
        for text, have, wanted in zip(self.inputs(), call.args, self.call.args):
            if _kind(have) != _kind(wanted):
                raise ValueError(f"{have} is not like the input {text} that the kernel was made for")
        for size, answer in self.call.decisions.items():
            if call.value(size) != answer:
                raise ValueError(
                    f"the kernel was made for calls in which {size} is {answer}; now it is {call.value(size)}"
                )
        return call

    def _args(self, call: Call, inputs: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> Any:
        """The kernel's argument struct, as an array of one element."""
        struct = self._struct()
        for p in self.kernel.params:
            struct[p.name] = self._field(p, call, inputs, tensors)
        return struct

    def _struct(self) -> Any:
        """The struct, filled with zeros."""
        import numpy

        offsets, size = struct_layout(self.kernel.params)
        return numpy.zeros(
            1,
            numpy.dtype(
                {
                    "names": [p.name for p in self.kernel.params],
                    "formats": ["u8" if p.is_pointer else _FORMATS[p.ctype] for p in self.kernel.params],
                    "offsets": offsets,
                    "itemsize": size,
                }
            ),
        )

    def packed(self) -> tuple[bytes, list[tuple[int, str, int]]]:
        """The struct for the call that was explained, without addresses, and for each of these where it
        belongs, and which memory it is of: the number of an `input`, or of an allocation of the plan (`made`;
        `cleared` before the launch), or a `flag`."""
        struct, addresses = self._struct(), []
        numbers = tuple(1 if number is None else number for number in self.numbers)
        for p, offset in zip(self.kernel.params, struct_layout(self.kernel.params)[0]):
            kind, *what = p.source
            if kind in _ADDRESSES:
                addresses.append((offset, _ADDRESSES[kind], *(what or [0])[:1]))
            elif kind == "seed":
                addresses.append((offset, "made", len(self.allocated) - self.seeds + what[0]))
            elif kind == "seeded":
                raise ValueError(f"{self.kernel.name} draws the numbers of a seed of another group")
            elif kind == "random":
                struct[p.name] = _random(self.device)
            elif kind != "element":
                struct[p.name] = self._field(p, self.call, numbers, ())
        return struct.tobytes(), addresses

    def _field(self, p: Param, call: Call, inputs: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> Any:
        """What C++ fills the field with (csrc_stubs/call/plan.cpp)."""
        kind, *what = p.source
        if kind in ("input", "update"):
            return inputs[what[0]].data_ptr()
        if kind in ("allocation", "cleared"):
            tensor = tensors[what[0]]
            return (tensor.zero_() if kind == "cleared" else tensor).data_ptr()
        if kind == "seed":
            return tensors[len(tensors) - self.seeds + what[0]].data_ptr()
        if kind == "size":
            return call.value(what[0])
        if kind == "number":
            return _number(inputs[what[0]], p.ctype)
        if kind == "element":
            return inputs[what[0]].reshape(1).view(torch.uint8).numpy().tobytes()
        if kind == "random":
            return _random(self.device)
        if kind == "seeded":
            address = inputs[what[0]].data_ptr()
            return [address, address + 8, 0, 1]
        return 0  # a flag: kernels for CUDA tensors have none


def _torch(value: Any) -> Any:
    """A CuPy array as the tensor in the same memory; other values as they are."""
    return torch.as_tensor(value) if hasattr(value, "__cuda_array_interface__") else value


def _kind(arg: Any) -> tuple:
    """What two arguments of one class of calls have in common before any size is looked at."""
    if isinstance(arg, TensorArg):
        return TensorArg, arg.dtype, arg.device, arg.rank
    return type(arg), getattr(arg, "kind", None), len(getattr(arg, "values", ()) or ())


def _number(value: Any, ctype: str) -> Any:
    """A number argument, or a tensor that holds one, as a field of type `ctype`."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    if ctype.startswith("complex"):
        return complex(number)
    real = number.real if isinstance(number, complex) else number
    return bool(number) if ctype == "bool" else int(real) if "int" in ctype else real


def _random(device: str) -> list[int]:
    """Seed and offset of the device's generator as it is now; it does not advance."""
    if device == "cpu":
        return [torch.initial_seed(), 0, 0, 0]
    generator = torch.cuda.default_generators[torch.device(device).index or 0]
    return [generator.initial_seed(), generator.get_offset(), 0, 0]
