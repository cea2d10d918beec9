"""Runs kernels by themselves, with torch and without tsfuser. `kernel_script` puts this text behind the
facts of a group, which have names in capitals here. So it imports nothing of tsfuser.

In: kernels, the tensors and numbers that they take, and the group's ops as a TorchScript graph. Out: the time
of each kernel and of the ops, and whether the results agree. Exit status 1: they do not.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

DEVICE: str = "cpu"
INPUTS: list = []  # a number, or dtype, sizes and strides of a tensor
MADE: list = []  # each tensor that kernels write: dtype, sizes, strides, and elements of its memory or None
RESULTS: list = []  # pairs: of a result of the graph and of its place in MADE
LAUNCHES: list = []  # name, source, grid, block, shared memory, arguments, and places of addresses in them
COMPILER: list = []  # for CPU tensors: the command, without files; for CUDA the options of NVRTC
HEADERS: dict = {}  # name and text of the headers that the sources include
GRAPH: str = ""
NEAR: float = 0.0  # how far apart the results may be, relatively, or absolutely where they are small
RANDOM: bool = False  # the graph draws numbers


def tensor(dtype: str, sizes: tuple, strides: tuple) -> torch.Tensor:
    """Random, in memory as in the call that was explained."""
    kind = getattr(torch, dtype)
    count = 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) if all(sizes) else 0
    if kind.is_floating_point or kind.is_complex:
        memory = torch.randn(count, dtype=torch.complex64 if kind.is_complex else torch.float32).to(kind)
    else:
        memory = torch.randint(0, 2, (count,)).to(kind)  # small, as they may be indices
    return memory.to(DEVICE).as_strided(sizes, strides)


def empty(dtype: str, sizes: tuple, strides: tuple, elements: int | None) -> torch.Tensor:
    how = {"dtype": getattr(torch, dtype), "device": DEVICE}
    if elements is None:
        return torch.empty_strided(sizes, strides, **how)
    return torch.empty(elements, **how).as_strided(sizes, strides)


def arguments(packed: bytes, addresses: list, inputs: list, made: list, flag: torch.Tensor) -> bytearray:
    """The kernel's argument struct."""
    filled = bytearray(packed)
    for offset, what, number in addresses:
        found = {"input": inputs, "made": made, "cleared": made, "flag": [flag]}[what][number]
        if what == "cleared":
            found.zero_()
        struct.pack_into("Q", filled, offset, found.data_ptr())
    return filled


def on_cpu(folder: str) -> list:
    """Functions that run a kernel with its arguments, built by the C++ compiler."""
    functions = []
    for k, (name, source, grid, block, shared, *_) in enumerate(LAUNCHES):
        path = Path(folder, f"{name}_{k}.cpp")
        path.write_text(source)
        library = path.with_suffix(".so")
        subprocess.run(
            [*COMPILER, "-iquote", folder, str(path), "-o", str(library), "-lm", "-lc"], check=True
        )
        function = getattr(ctypes.CDLL(str(library)), name)
        function.argtypes = [ctypes.c_char_p] + [ctypes.c_int64] * 6
        function.restype = None

        def run(args, function=function, grid=grid, block=block, shared=shared):
            function(bytes(args), grid, *block, shared, 0, grid)

        functions.append(run)
    return functions


def on_gpu(folder: str) -> list:
    """The same, built by NVRTC."""
    import cupy
    import numpy

    functions = []
    for name, source, grid, block, shared, *_ in LAUNCHES:
        kernel = cupy.RawKernel(source, name, (*COMPILER, f"-I{folder}"))
        if shared > 48 * 1024:
            kernel.max_dynamic_shared_size_bytes = shared

        def run(args, kernel=kernel, grid=grid, block=block, shared=shared):
            taken = numpy.frombuffer(bytes(args), numpy.dtype([("bytes", "u1", len(args))]))
            with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
                kernel((grid,), block, (taken,), shared_mem=shared)

        functions.append(run)
    return functions


def seconds(run) -> float:
    """The shortest time of some runs."""
    best = float("inf")
    for _ in range(20):
        wait()
        begun = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - begun)
    return best


def wait() -> None:
    if DEVICE.startswith("cuda"):
        torch.cuda.synchronize()


def agrees(mine: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a result is that of torch's ops, but for roundings."""
    kind = mine.dtype
    if not (kind.is_floating_point or kind.is_complex):
        return torch.equal(mine, wanted)
    wide = torch.complex128 if kind.is_complex else torch.float64
    return torch.allclose(mine.to(wide), wanted.to(wide), rtol=NEAR, atol=NEAR, equal_nan=True)


def main() -> int:
    torch.manual_seed(0)
    inputs = [tensor(*x) if isinstance(x, tuple) else x for x in INPUTS]
    made = [empty(*x) for x in MADE]
    flag = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in HEADERS.items():
            Path(folder, name).write_text(text)
        functions = on_gpu(folder) if DEVICE.startswith("cuda") else on_cpu(folder)
        for (name, _, _, _, _, packed, addresses), function in zip(LAUNCHES, functions):
            args = arguments(packed, addresses, inputs, made, flag)
            function(args)
            print(f"{seconds(lambda function=function, args=args: function(args)) * 1e6:10.1f} us  {name}")
        # all once more: what a kernel adds to has been added to in the timed runs
        for (_, _, _, _, _, packed, addresses), function in zip(LAUNCHES, functions):
            function(arguments(packed, addresses, inputs, made, flag))
    wait()
    if "tsfuser::" in GRAPH:
        import tsfuser  # noqa: F401 -- has these ops
    graph = torch._C.parse_ir(GRAPH)
    if len(list(graph.outputs())) > 1:
        graph.makeMultiOutputIntoTuple()
    group = torch._C._create_function_from_graph("group", graph)
    with torch.jit.optimized_execution(False):
        found = group(*inputs)
        print(f"{seconds(lambda: group(*inputs)) * 1e6:10.1f} us  torch's ops, one by one")
    wanted = found if isinstance(found, tuple) else (found,)
    if RANDOM:
        print("its ops draw random numbers: results are not compared")
        return 0
    if not RESULTS:
        print("the group's results are made by later kernels: nothing is compared")
        return 0
    wrong = [k for k, place in RESULTS if not agrees(made[place], wanted[k])]
    for k in wrong:
        print(f"result {k} is not that of torch's ops")
    if not wrong:
        print(f"results agree: {len(RESULTS)} compared")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
