"""Whether groups give eager's random numbers on a device: they are compared, once a process.

In: a device. Out: the `Grid` of eager's random kernels on it, for `Builder.eager`; or a Refusal, since the
CPU's numbers come one after another, and another torch may have other kernels. Example:
`grid_of("cuda:0").blocks` is 1056 on an H200.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.call import Call, TensorArg
from ..ir.dtypes import DTYPES
from ..ir.eager_random import Grid
from ..ops import table
from .compile import compile_fusion
from .plan import native

_THREADS = 256  # of a block of eager's kernels
_RATE = 0.3  # of the dropouts that are compared
_DTYPES = tuple(getattr(torch, name) for name in table.FLOATING)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_found: dict[str, Grid | str] = {}  # cache: device -> its grid, or why there is none
_lock = threading.RLock()


def grid_of(device: str) -> Grid:
    """The grid of eager's random kernels on `device`. Raises Refusal where its numbers cannot be had."""
    if not device.startswith("cuda"):
        raise Refusal(f"eager's random numbers on the {device} come one after another, from one thread")
    with _lock:
        if device not in _found:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise Refusal("eager's random numbers were not compared before a CUDA graph was captured")
            _found[device] = _compared(device)
        found = _found[device]
    if isinstance(found, str):
        raise Refusal(found)
    return found


def _compared(device: str) -> Grid | str:
    """The grid, where a few tensors of all dtypes get the numbers that eager gives; else what differs."""
    try:
        torch.cuda.init()  # else there are no generators yet
        properties = torch.cuda.get_device_properties(device)
        grid = Grid(
            properties.multi_processor_count * (properties.max_threads_per_multi_processor // _THREADS)
        )
        with torch.no_grad(), torch.cuda.device(device):
            for name, tensors in samples(grid, device).items():
                differing = [op for op, equal in compare(grid, tensors).items() if not equal]
                if differing:
                    return f"this torch has other random numbers for {', '.join(differing)} of {name}"
        return grid
    except (
        Exception
    ) as error:  # no device, no compiler, a torch without some name: random ops are left to torch
        return f"eager's random numbers could not be compared ({type(error).__name__}: {error})"


def samples(grid: Grid, device: str) -> dict[str, list[torch.Tensor]]:
    """By what they show: tensors of all floating dtypes."""
    most = grid.blocks * _THREADS

    def of(size: int, skipped: int = 0) -> list[torch.Tensor]:
        return [torch.ones(size + skipped, dtype=dtype, device=device)[skipped:] for dtype in _DTYPES]

    return {
        "one element": of(1),
        "an odd number of elements": of(1023),
        "pairs of elements": of(4098),
        "more elements than threads": of(9 * most + 2048),
        "misaligned memory": of(4096, 1),
        "a transposed tensor": [x.view(32, 64).t() for x in of(2048)],
        "a transposed tensor of odd size": [x.view(31, 33).t() for x in of(1023)],
    }


def compare(grid: Grid, tensors: list[torch.Tensor]) -> dict[str, bool]:
    """Op and dtype -> whether a plan gives each bit that eager gives, and leaves its generator in the same
    state, when all ops run in a row. The state is put back."""
    plan = _plan(grid, tensors)
    generator = torch.cuda.default_generators[tensors[0].device.index]
    state = generator.get_state()
    try:
        generator.manual_seed(8191)
        expected = [result for x in tensors for op in _EAGER.values() for result in op(x)]
        after = generator.get_offset()
        generator.manual_seed(8191)
        found = plan.run(tensors)
        advance = generator.get_offset() == after
    finally:
        generator.set_state(state)
    names = [
        f"{op} in {str(x.dtype)[6:]}"
        for x in tensors
        for op in ("rand_like", "randn_like", "dropout", "dropout")
    ]
    equal = {"advance of the generator": advance}
    for name, ours, theirs in zip(names, found, expected):
        equal[name] = equal.get(name, True) and torch.equal(_bits(ours), _bits(theirs))
    return equal


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.itemsize])


_EAGER = {
    "rand_like": lambda x: (torch.rand_like(x),),
    "randn_like": lambda x: (torch.randn_like(x),),
    "native_dropout": lambda x: torch.native_dropout(x, _RATE, True),
}


def _plan(grid: Grid, tensors: list[torch.Tensor]):
    """A native plan of all ops on each of `tensors`."""
    device = str(tensors[0].device)
    call = Call(tuple(_described(x) for x in tensors))
    builder = Builder(call, device, DTYPES["float32"], lambda device: grid)
    for index in range(len(tensors)):
        x = builder.tensor(index)
        dropped: dict[str, Any] = {"input": x, "p": builder.literal(_RATE), "train": True}
        drawn = [("aten::rand_like", {"self": x}), ("aten::randn_like", {"self": x})]
        for name, arguments in [*drawn, ("aten::native_dropout", dropped)]:
            made = table.find(name).build(builder, **arguments)
            for result in made if isinstance(made, tuple) else (made,):
                builder.output(result)
    return native(compile_fusion(call, builder.finish(), device))


def _described(x: torch.Tensor) -> TensorArg:
    address = x.data_ptr()
    return TensorArg(
        str(x.dtype)[6:], str(x.device), tuple(x.shape), x.stride(), min(address & -address, 256)
    )
