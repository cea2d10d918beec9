"""Hand-made plans, graphs and host kernels for the tests of `tsfuser._C`.

In: a shape of test. Out: a scripted function that holds one group, and plans that serve it. Example:

    f = group_function(ADD, inputs=2)
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

ADD = """
graph(%a : Tensor, %b : Tensor):
  %one : int = prim::Constant[value=1]()
  %r : Tensor = aten::add(%a, %b, %one)
  return (%r)
"""

KERNELS = r"""
#include <cstdint>
#include <cstring>
#include <atomic>
#include <csignal>
#include <pthread.h>
#include <unistd.h>
#include <sys/syscall.h>
#define KERNEL(name) \
  extern "C" void name(const void* args, int64_t grid, int64_t block_x, int64_t block_y, int64_t shared, \
                       int64_t begin, int64_t end)

struct Add { const float* a; const float* b; float* c; int64_t n; };
KERNEL(add) {
  const Add& x = *static_cast<const Add*>(args);
  for (int64_t i = begin * block_x; i < end * block_x && i < x.n; ++i) x.c[i] = x.a[i] + x.b[i];
}

struct BatchedAdd { int32_t ends[3]; alignas(16) Add structs[3]; };  // as runtime/batched.h has it
KERNEL(batched_add) {
  const BatchedAdd& all = *static_cast<const BatchedAdd*>(args);
  for (int64_t block = begin; block < end; ++block) {
    int k = 0;
    while (all.ends[k] <= block) ++k;
    const int64_t own = block - (k ? all.ends[k - 1] : 0);
    add(&all.structs[k], grid, block_x, block_y, shared, own, own + 1);
  }
}

struct Copy { char* to; char bytes[64]; };  // what the parameter buffer holds, so that a test can look at it
KERNEL(copy) {
  const Copy& x = *static_cast<const Copy*>(args);
  std::memcpy(x.to, x.bytes, 64);
}

struct Threads { int64_t* ids; };
KERNEL(threads) {  // each block writes which thread ran it
  for (int64_t i = begin; i < end; ++i) {
    static_cast<const Threads*>(args)->ids[i] = syscall(SYS_gettid);
    usleep(2000);
  }
}

KERNEL(interrupt) { kill(getpid(), SIGINT); }

struct Parameters { int64_t* out; };
KERNEL(parameters) {
  int64_t* out = static_cast<const Parameters*>(args)->out;
  out[0] = grid; out[1] = block_x; out[2] = block_y; out[3] = shared; out[4] = begin; out[5] = end;
}
"""


#: Those that these tests compute with: name -> number of its c10::ScalarType.
DTYPES = {"bool": 11, "int32": 3, "int64": 4, "float32": 6, "float64": 7, "complex64": 9}


def extension():
    """`tsfuser._C` without `tsfuser/__init__`, so that these tests stand on nothing but the extension."""
    if "tsfuser._C" not in sys.modules:
        folders = [ROOT / "tsfuser", *(Path(p) / "tsfuser" for p in sys.path)]
        path = next(p for folder in folders for p in sorted(folder.glob("_C.*.so")))
        spec = importlib.util.spec_from_file_location("tsfuser._C", path)
        sys.modules["tsfuser._C"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["tsfuser._C"])
        sys.modules["tsfuser._C"].set_dtypes(DTYPES)
    return sys.modules["tsfuser._C"]


def compile_kernels(folder) -> dict:
    source, library = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
    source.write_text(KERNELS)
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    subprocess.run(
        [*compiler.split(), "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    loaded = ctypes.CDLL(str(library))
    names = ("add", "batched_add", "copy", "threads", "parameters", "interrupt")
    return {name: ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in names}


def group_function(subgraph: str, inputs: int, guard=None, cache_id=None, patterns=None):
    """A function of `inputs` arguments that runs one group; with `guard`, a list of types, it returns what
    the guard says instead, which opens after so many `patterns`. Several results come as a tuple."""
    sub = torch._C.parse_ir(subgraph)
    graph = torch._C.Graph()
    values = [graph.addInput() for _ in range(inputs)]
    for value, inner in zip(values, sub.inputs()):
        value.setType(inner.type())
    if guard is not None:
        node = graph.create("prim::CudaFusionGuard", values, 1)
        node.tys_("types", guard)
        if patterns is not None:
            node.i_("patterns", patterns)
        node.output().setType(torch._C.BoolType.get())
        graph.appendNode(node)
        graph.registerOutput(node.output())
    else:
        node = graph.create("prim::CudaFusionGroup", values, len(list(sub.outputs())))
        node.g_("Subgraph", sub)
        if cache_id is not None:
            node.i_("cache_id", cache_id)
        graph.appendNode(node)
        for output, inner in zip(node.outputs(), sub.outputs()):
            output.setType(inner.type())
            graph.registerOutput(output)
        if len(list(sub.outputs())) != 1:
            graph.makeMultiOutputIntoTuple()
    return torch._C._create_function_from_graph("f", graph)


def add_plan(native, kernels, block=128, keepalive=None):
    """c = a + b for two contiguous float vectors of equal size; others are of another class."""
    # leaves: 0 n, 1 stride, 2 alignment, 3 n, 4 stride, 5 alignment; the instructions' results from 6 on
    program = [
        ("eq", 0, 3),
        ("eq", 1, 4),
        ("const", block, 0),
        ("ceildiv", 0, 8),
        ("const", 1, 0),
        ("const", 0, 0),
    ]
    args = [(0, "input", 0), (8, "input", 1), (16, "allocation", 0), (24, "int64", 0)]
    launch = native.Launch("host", kernels["add"], "add", 9, 8, 10, 11, 10, 32, args)
    return native.Plan(
        6,
        program,
        [(1, 6, 1), (2, 7, 1)],
        [("float32", [0], [10])],
        [launch],
        [("allocation", 0)],
        "",
        keepalive,
    )


def refusing_plan(native, leaves: int, reason: str):
    return native.Plan(leaves, [], [], [], [], [], reason)
