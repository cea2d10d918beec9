"""What the e2e tests share: running a function fused, looking into its graphs, comparing with eager.

Example:
    scripted = fuse(function, x)       # four calls under tsfuser.fuser()
    assert_matches(scripted(x), function(x), function(x.double()), ops=3)
"""

import contextlib
import os
import types
from pathlib import Path

import torch

import tsfuser
from kit import prefork, quick
from tsfuser import _C, options
from tsfuser.debug.plans import plans_of

ROOT = Path(__file__).resolve().parents[2]
#: Two groups, one of them in a forked call, as source for `script`.
FORKED = """
def inner(x):
    return torch.relu(x + 1.0) * 2.0

def forked(x):
    a = torch.jit.fork(inner, x)
    b = torch.tanh(x * 3.0)
    return torch.jit.wait(a) + b
"""
#: Inference is fused in call 2, training in call 3, with settled branches one later: the last one surely is.
CALLS = 5


def fresh(function):
    """A scripted function with an executor of its own: torch.jit.script caches by function object, so a copy
    is scripted."""
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__annotations__ = function.__annotations__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return torch.jit.script(copy)


def script(source):
    """Script functions from source text; the last one defined is returned, as a fresh one each time."""
    unit = torch.jit.CompilationUnit(source)
    return getattr(
        unit, [line for line in source.splitlines() if line.startswith("def ")][-1].split("(")[0][4:]
    )


def fuse(function, *inputs, calls=CALLS):
    """`function` (Python or scripted), called on `inputs` until torch has handed its graph to tsfuser."""
    scripted = fresh(function) if isinstance(function, types.FunctionType) else function
    with tsfuser.fuser():
        for _ in range(calls):
            scripted(*inputs)
    return scripted


def through(function, door, **how):
    """`function` compiled, or scripted and called until it is fused; `how`: options of torch.compile."""
    if door == "compile":
        return torch.compile(function, backend="tsfuser", fullgraph=True, **how)
    scripted = torch.jit.script(function)

    def thrice(*arguments):
        with tsfuser.fuser():
            for _ in range(3):
                result = scripted(*arguments)
        return result

    return thrice


def train(function, inputs, calls=CALLS):
    """Run forward and backward `calls` times; returns the last outputs and gradients (None where no gradient
    is required). The incoming gradient is random, not all ones, and the same in each call with inputs of the
    same shape."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    for _ in range(calls):
        for x in leaves:
            x.grad = None
        out = function(*inputs)
        generator = torch.Generator().manual_seed(17)
        gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
        out.backward(gradient)
    return out.detach(), [x.grad for x in leaves]


def all_graphs(scripted):
    """The optimised graphs of a scripted function: of its plan, and forward and backward of differentiable
    graphs, and of fallbacks that ran; of packed joint graphs also the node. Each as a torch._C.Graph."""
    found = []

    def visit(state):
        for plan in plans_of(state):
            found.extend([plan.graph, *_C.joint_graphs(plan.code)])
            for both in _C.differentiable_states(plan.code):
                for inner in both:
                    if inner is not None:  # what no call has run has no plan
                        visit(inner)

    visit(scripted.get_debug_state())
    return found


def groups(scripted):
    """The fusion groups of a scripted function, in all its graphs but the fallbacks."""
    return [
        node for graph in all_graphs(scripted) for node in graph.findAllNodes("prim::CudaFusionGroup", True)
    ]


def stored(group):
    """How many tensors a group returns; the dtype of one that is not stored may be a result, too."""
    return sum(value.type().kind() == "TensorType" for value in group.outputs())


def kinds(group):
    """The kinds of a group's nodes; constants are left out, and checks of the dtypes of ops in place."""
    left_out = ("prim::Constant", "tsfuser::as_written")
    return [node.kind() for node in group.g("Subgraph").nodes() if node.kind() not in left_out]


EPSILON = {
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
}
EPSILON |= {torch.complex32: 2.0**-10, torch.complex64: 2.0**-23, torch.complex128: 2.0**-52}
ULPS = 8  # an elementary function's error: libm and CUDA give 1 to 4 ulps, on either side


def tolerance(dtype, ops):
    """The relative error that `ops` dependent operations, computed in `dtype`, may show."""
    return EPSILON[dtype] * ULPS * max(ops, 1)


def assert_matches(actual, eager, reference=None, ops=1, strides=True, precision=None):
    """`actual` has eager's dtype, shape, strides and device, its NaN and inf where eager has them, and lies
    as near to the float64 `reference` (eager itself where None) as `ops` operations, or eager, do. They are
    done in the dtype of the result or, where the program has less precise values, in `precision`. NaN and inf
    may also be where the reference has them: torch's kernels differ by processor there, as oneDNN's gelu of
    inf does. Integers and bools are equal."""
    assert (actual.dtype, actual.shape, actual.device) == (eager.dtype, eager.shape, eager.device)
    if strides and actual.numel() > 0:
        assert relevant_strides(actual) == relevant_strides(eager)
    if eager.dtype not in EPSILON:
        assert torch.equal(actual, eager), worst(actual != eager, actual, eager)
        return
    wide = torch.complex128 if eager.is_complex() else torch.float64
    fused, plain = actual.to(wide), eager.to(wide)
    exact = plain if reference is None else reference.to(wide)
    same = _equal(fused, plain) | (_equal(fused, exact) & ~torch.isfinite(exact))
    allowed = tolerance(precision or actual.dtype, ops) * exact.abs().clamp(min=1) + 2 * (plain - exact).abs()
    near = torch.isfinite(plain) & ((fused - exact).abs() <= allowed)
    assert bool((same | near).all()), worst(~(same | near), actual, eager)


def _equal(a, b):
    return (a == b) | (torch.isnan(a) & torch.isnan(b))


def relevant_strides(tensor):
    """The strides that say where elements are: those of dims of more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def worst(wrong, actual, eager):
    """What differs, as a sentence: how many elements, and the first three."""
    where = wrong.flatten().nonzero()[:3, 0].tolist()
    pairs = [f"[{i}] {actual.flatten()[i].item()!r}, eager {eager.flatten()[i].item()!r}" for i in where]
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ: {'; '.join(pairs)}"


def copy_of(x, device=None):
    """`x` in memory of its own, here or on `device`, with its strides and storage offset: `clone` and `to`
    make dense tensors."""
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())
    memory = memory.clone() if device is None else memory.to(device, copy=True)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def incoming_gradient(result):
    """A gradient for `result` that is the same in every dtype: quarters, exact in all."""
    count = max(result.numel(), 1)
    steps = (torch.arange(count, device=result.device) * 7 % 13 - 6).to(torch.float64) / 4
    return steps[: result.numel()].reshape(result.shape).to(result.dtype)


def captured(function):
    """The CUDA graph of `function()`, and what that returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = function()
    # torch writes a first random seed on the stream of the capture, which no replay on another one waits for.
    torch.cuda.synchronize()
    return graph, outs


@contextlib.contextmanager
def no_fallback():
    """Inside, a group that cannot run fused raises instead of running unfused: what a test compares was
    fused."""
    _C.set_fallback_enabled(False)
    try:
        with options.override(no_fallback=1):
            yield
    finally:
        _C.set_fallback_enabled(True)


@contextlib.contextmanager
def counted():
    """Yields a dict that holds, after the block, how much each counter of `tsfuser.stats()` rose."""
    before, rise = tsfuser.stats(), {}
    yield rise
    after = tsfuser.stats()
    for name, now in after.items():
        then = before[name]
        if isinstance(now, dict):  # reasons, with how often each was met
            rise[name] = {k: n - then.get(k, 0) for k, n in now.items() if n != then.get(k, 0)}
        else:
            rise[name] = now - then


def run_python(folder, source, timeout=300, whole_end=False, **environment):
    """Run a program from a file of its own in `folder` (scripting needs the source), in a process of its own,
    which ends as `prefork.run` says; returns (exit status, stdout, stderr). Its kernels are made at -O0."""
    path = Path(folder) / "program.py"
    path.write_text(source)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": quick.compiler(), **environment}
    done = prefork.run([path], env=env, timeout=timeout, whole_end=whole_end)
    assert "gave up on a graph" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def fused_as_eager(text, *inputs, ops=20, scripted=None):
    """The scripted program of the expression `text` of `x`, `y`, `z`, once it has run fused and been compared
    with eager; `scripted`: take that one, which has run before."""
    source = f"def f({', '.join('xyz'[: len(inputs)])}):\n    return {text}\n"
    scripted, plain = scripted or script(source), script(source)
    with torch.jit.fuser("fuser0"), torch.no_grad():
        eager = plain(*inputs)
        exact = plain(*(t.double() if t.is_floating_point() else t for t in inputs))
    with no_fallback(), torch.no_grad():
        fuse(scripted, *inputs)
        result = scripted(*inputs)
    assert_matches(result, eager, exact, ops=ops)
    return scripted
