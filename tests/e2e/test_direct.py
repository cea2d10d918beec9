"""Differentiable graphs that run directly do what torch's operator does (csrc_stubs/torchscript/direct.h)."""

import gc
import threading
from typing import List

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import tsfuser
from kit.support import CALLS, all_graphs, assert_matches, fresh, groups, no_fallback, script
from tsfuser import _C
from tsfuser.debug.observe import observing
from tsfuser.frontends.torchscript import passes

pytestmark = pytest.mark.graphs


def program(x, w):
    return torch.tanh(x * w) * torch.sigmoid(w + x)


def two_results(x, w):
    y = torch.exp(torch.tanh(x) * w)
    return y, y * w + x


def pair(device, *sizes, requires_grad=(True, True)):
    torch.manual_seed(3)
    return [torch.randn(*(sizes or (4, 8)), device=device).requires_grad_(r) for r in requires_grad]


class Directly:
    """`with Directly(n):` fails where other than `n` differentiable graphs ran directly inside."""

    def __init__(self, expected):
        self.expected = expected

    def __enter__(self):
        self.before = _C.direct_calls()

    def __exit__(self, kind, *_):
        if kind is None:
            assert _C.direct_calls() - self.before == self.expected


def steps(function, inputs, calls=1):
    for _ in range(calls):
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        leaves = [x for x in inputs if x.requires_grad]
        found = torch.autograd.grad(sum(r.square().sum() for r in results), leaves)
    return [r.detach() for r in results], found


def warm(function, inputs):
    scripted = fresh(function)
    with tsfuser.fuser():
        steps(scripted, inputs, calls=5)
    return scripted


@pytest.fixture
def ready(device):
    """The program, scripted, whose next call runs directly, and operands."""
    inputs = pair(device)
    return warm(program, inputs), inputs


def compare(scripted, function, inputs, ops=20):
    for mine, theirs in zip(steps(scripted, inputs), steps(function, inputs)):
        for a, b in zip(mine, theirs):
            assert_matches(a, b, ops=ops)


@pytest.mark.parametrize("function", [program, two_results])
def test_results_and_gradients(device, function):
    inputs = pair(device)
    scripted = warm(function, inputs)
    with Directly(2), no_fallback():
        compare(scripted, function, inputs)
        compare(scripted, function, pair(device, 7, 5))


def centred(x: torch.Tensor, w: torch.Tensor, dims: List[int], keepdim: bool):
    y = x * w
    return torch.tanh(y - y.mean(dims, keepdim)) * w


def test_loops_over_dims_that_the_call_names(device):
    """The backward of a mean goes over its dims, whose number only the call knows."""
    inputs, scripted = pair(device, 5, 5), fresh(centred)

    def of(function, dims, keepdim):
        return lambda x, w: function(x, w, dims, keepdim)

    with tsfuser.fuser():
        steps(of(scripted, [1], True), inputs, calls=5)
    for dims in ([1], [0], [-1], [0, 1], [1, 0], [-2]):
        for keepdim in (True, False):
            with Directly(1), no_fallback():
                compare(of(scripted, dims, keepdim), of(centred, dims, keepdim), inputs)


@pytest.mark.parametrize(
    "text", ["((x * 2.0).mm(w.t()) + 1.0).tanh()", "((x * w)[i] + 1.0).relu().mean([0], True)"]
)
def test_errors_have_the_traceback_of_torchscript(text):
    """On the host only: CUDA's context does not survive an index that is out of range."""
    scripted = script(f"def f(x, w, i):\n    return {text}\n")
    x, w = pair("cpu")
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 9])
    with tsfuser.fuser():
        steps(lambda x, w: scripted(x, w, good), (x, w), calls=5)
        with Directly(1):
            scripted(x, w, good)
        wrong = (x, w, bad) if "[i]" in text else (x, torch.ones(3, 3, requires_grad=True), good)
        with pytest.raises(RuntimeError, match="Traceback of TorchScript(.|\n)*<--- HERE") as error:
            scripted(*wrong)
    assert str(error.value).strip().splitlines()[-1].startswith("RuntimeError: ")


def test_the_graphs_of_torchs_operator_are_still_there(ready):
    scripted, inputs = ready
    steps(scripted, inputs)
    assert sum("prim::CudaFusionGroup" in str(graph) for graph in all_graphs(scripted)) == 2
    assert "prim::CudaFusionGroup" in str(scripted.graph_for(*inputs))


def test_requires_grad_changes_between_calls(device, ready):
    scripted, _ = ready
    for requires_grad in ((True, False), (False, True), (True, True)):
        for _ in range(4):
            compare(scripted, program, pair(device, requires_grad=requires_grad))
    with Directly(0):
        assert not scripted(*pair(device, requires_grad=(False, False))).requires_grad
        with torch.no_grad():
            assert not scripted(*pair(device)).requires_grad
    with Directly(1):
        compare(scripted, program, pair(device))


def test_the_graph_is_kept_or_freed(ready):
    scripted, inputs = ready
    with Directly(1):
        result = scripted(*inputs).sum()
    first = torch.autograd.grad(result, inputs, retain_graph=True)
    second = torch.autograd.grad(result, inputs)
    for a, b in zip(first, second):  # the first backward of a kind may run unfused
        assert_matches(a, b, ops=20)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(result, inputs)


def test_double_backward(ready):
    scripted, inputs = ready

    def second(function):
        (first,) = torch.autograd.grad(function(*inputs).sum(), inputs[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), inputs)

    for _ in range(3):
        with Directly(1):
            found = second(scripted)
        for mine, theirs in zip(found, second(program)):
            assert_matches(mine, theirs, ops=50)


def test_hooks_of_tensors_and_nodes(ready):
    scripted, (x, w) = ready
    seen = []
    with Directly(1):
        result = scripted(x, w)
    result.register_hook(lambda g: g * 2)
    result.grad_fn.register_prehook(lambda g: seen.append("before"))
    result.grad_fn.register_hook(lambda inputs, outputs: seen.append(len(inputs)))
    assert "DifferentiableGraphBackward" in result.grad_fn.name()
    (found,) = torch.autograd.grad(result.sum(), (x,))
    (expected,) = torch.autograd.grad(program(x, w).sum(), (x,))
    assert_matches(found, 2 * expected, ops=20)
    assert seen == ["before", 2]


def test_hooks_of_saved_tensors(device):
    def packed(function, inputs):
        seen = []

        def unpack(saved):
            seen.append("unpack")
            return saved.clone()

        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(tuple(t.shape)), t)[1], unpack):
            result = function(*inputs).sum()
        return torch.autograd.grad(result, inputs), seen

    inputs = pair(device)
    scripted = fresh(program)
    with tsfuser.fuser():
        steps(scripted, inputs, calls=3)
        before, seen_before = packed(scripted, inputs)
        steps(scripted, inputs, calls=3)
    with Directly(1):
        after, seen = packed(scripted, inputs)
    assert seen == seen_before and "unpack" in seen
    for a, b in zip(before, after):
        assert_matches(a, b, ops=20)


def test_a_saved_tensor_that_is_written_to(ready):
    scripted, (x, w) = ready
    with Directly(1):
        result = scripted(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_result_that_is_written_to(device):
    inputs = pair(device)
    scripted = warm(two_results, inputs)
    with Directly(1):
        first, second = scripted(*inputs)
    second.mul_(2)  # which no gradient needs
    found = torch.autograd.grad(second.sum(), inputs)
    for mine, theirs in zip(found, torch.autograd.grad(2 * two_results(*inputs)[1].sum(), inputs)):
        assert_matches(mine, theirs, ops=20)
    first, second = scripted(*inputs)
    first.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


@pytest.mark.parametrize("which", [0, 1])
def test_a_result_that_nothing_is_made_of(device, which):
    inputs = pair(device)
    scripted = warm(two_results, inputs)
    for _ in range(3):
        with Directly(1):
            found = torch.autograd.grad(scripted(*inputs)[which].sum(), inputs, allow_unused=True)
        expected = torch.autograd.grad(two_results(*inputs)[which].sum(), inputs, allow_unused=True)
        for mine, theirs in zip(found, expected):
            assert_matches(mine, theirs, ops=20)


def test_gradients_that_nobody_asks_for(ready):
    scripted, (x, w) = ready
    with Directly(1):
        result = scripted(x, w)
    (found,) = torch.autograd.grad(result.sum(), (w,))
    assert_matches(found, torch.autograd.grad(program(x, w).sum(), (w,))[0], ops=20)
    assert x.grad is None and w.grad is None


def test_anomaly_mode_names_the_node(device):
    def root(x, w):
        return torch.sqrt(x * w) * w * x

    inputs = pair(device)
    scripted = warm(root, inputs)
    with torch.autograd.detect_anomaly(check_nan=True), Directly(1):
        result = scripted(torch.zeros_like(inputs[0]).requires_grad_(), inputs[1])
        with pytest.raises(RuntimeError, match="DifferentiableGraphBackward.*returned nan values"):
            result.sum().backward()


def test_autocast(device):
    def layer(x, w):
        return torch.relu(torch.nn.functional.linear(x, w) * 2.0 + 1.0) * 0.5

    inputs = pair(device, 8, 8)
    kind = torch.device(device).type
    with torch.autocast(kind, torch.bfloat16):
        scripted = warm(layer, inputs)
        before = _C.direct_calls()
        found = steps(scripted, inputs)
        assert _C.direct_calls() > before
        expected = steps(fresh(layer), inputs)  # which torch profiles
    for mine, theirs in zip(found[0] + list(found[1]), expected[0] + list(expected[1])):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


def test_memory_is_given_back(device):
    def shifted(x, w):
        return torch.tanh(x + 1.0) + torch.sigmoid(w)  # reads x once, and keeps its tanh

    inputs = pair(device)
    scripted = warm(shifted, inputs)
    x, w = (t.detach() * 1 for t in inputs)
    base = x.requires_grad_()
    with Directly(1):
        operand = base * 2
        memory = StorageWeakRef(operand.untyped_storage())
        result = scripted(operand, w.requires_grad_())
    del operand
    gc.collect()
    assert memory.expired()
    result.sum().backward()
    assert base.grad is not None


def test_what_is_saved_dies_with_the_backward(ready):
    scripted, (x, w) = ready
    operand = x * 1.0
    memory = StorageWeakRef(operand.untyped_storage())
    with Directly(1):
        result = scripted(operand, w).sum()
    del operand
    gc.collect()
    assert not memory.expired()
    result.backward()
    assert memory.expired()


def test_the_function_goes_before_the_backward(device):
    inputs = pair(device)
    scripted = warm(program, inputs)
    with Directly(1):
        result = scripted(*inputs).sum()
    del scripted
    gc.collect()
    found = torch.autograd.grad(result, inputs)
    for mine, theirs in zip(found, torch.autograd.grad(program(*inputs).sum(), inputs)):
        assert_matches(mine, theirs, ops=20)


def test_other_ranks_and_dtypes_take_the_fallback_inside(device, ready):
    scripted, _ = ready
    with tsfuser.fuser():
        for dtype, sizes in ((torch.float64, (4, 8)), (torch.float32, (2, 3, 5)), (torch.float32, (1, 8))):
            inputs = [t.detach().to(dtype).requires_grad_() for t in pair(device, *sizes)]
            for _ in range(4):
                with Directly(1):
                    compare(scripted, program, inputs)


def test_a_graph_that_computes_the_backward_of_batch_norm_and_residual(device):
    def block(x, w, b, mean, var, other):
        y = torch.batch_norm(x, w, b, mean, var, True, 0.1, 1e-5, False)
        return torch.relu(y + other)

    def inputs():
        torch.manual_seed(5)
        x, other = (torch.randn(3, 4, 5, 5, device=device, requires_grad=True) for _ in range(2))
        w, b = (torch.rand(4, device=device, requires_grad=True) for _ in range(2))
        return [x, w, b, torch.zeros(4, device=device), torch.ones(4, device=device), other]

    scripted = warm(block, inputs())
    mine, theirs = inputs(), inputs()
    with Directly(1):
        found = steps(scripted, mine)
    for a, b in zip(found, steps(block, theirs)):
        for c, d in zip(a, b):
            assert_matches(c, d, ops=200)
    for a, b in zip(mine[3:5], theirs[3:5]):
        assert_matches(a, b, ops=20)


def test_an_operand_that_is_handed_on_keeps_its_history(device):
    def cast(x, w):
        return torch.tanh(x.type_as(w)) * w, w.type_as(x) * 2.0

    inputs = pair(device)
    scripted = warm(cast, inputs)
    nodes = [x.grad_fn for x in inputs]
    operand = inputs[0] * 1.0
    node = operand.grad_fn
    compare(scripted, cast, inputs)
    scripted(operand, inputs[1])
    assert operand.grad_fn is node and [x.grad_fn for x in inputs] == nodes


def test_threads(device, ready):
    scripted, _ = ready
    failures = []

    def work(seed):
        try:
            for _ in range(20):
                inputs = pair(device, 3 + seed, 8)
                compare(scripted, program, inputs)
        except Exception as error:
            failures.append(error)

    with Directly(80):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_not_while_torch_is_told_to_optimise_nothing(ready):
    scripted, inputs = ready
    with torch.jit.optimized_execution(False), Directly(0):
        compare(scripted, program, inputs)
    with Directly(1):
        result = scripted(*inputs).sum()
    with torch.jit.optimized_execution(False):
        torch.autograd.grad(result, inputs)


def test_a_call_that_is_remembered_is_observed(device, ready):
    scripted, inputs = ready
    steps(scripted, inputs)
    seen = []
    with observing(seen.append):
        steps(scripted, inputs)
    assert len(seen) == 2 and not any(run.reason for run in seen)


def test_a_remembered_call_is_planned_again_after_a_reset(ready):
    scripted, inputs = ready
    steps(scripted, inputs)
    tsfuser.reset()
    before = tsfuser.stats()["plans_built"]
    with no_fallback(), Directly(1):
        compare(scripted, program, inputs)
    assert tsfuser.stats()["plans_built"] == before + 2


def test_a_guard_remembers_its_own_calls_only(device):
    """One group, by its text, behind guards that were made for other types."""
    usual, rows = warm(program, pair(device)), warm(program, pair(device, 1, 8))
    assert {node.i("cache_id") for node in groups(usual)} == {node.i("cache_id") for node in groups(rows)}
    steps(rows, pair(device, 1, 8))
    with tsfuser.fuser(), passes.watching() as seen:
        steps(usual, pair(device, 1, 8), calls=4)
    assert seen, "no fallback was made for the types that the guards refuse"


def test_an_input_that_an_op_hands_on_requires_no_gradient_afterwards(device):
    """`type_as` gives its operand back, which the differentiable graph returns."""
    source = """
def f(x, z):
    kept = z.type_as(torch.sigmoid(z))
    y = torch.clamp(x, max=0.5).mean(-1, keepdim=True) + kept
    for i in range(x.dim()):
        y = y * 0.5 + kept
    return torch.sigmoid(z)
"""
    scripted = script(source)
    with tsfuser.fuser():
        for _ in range(CALLS):
            x, z = torch.ones((), device=device).requires_grad_(), torch.ones((), device=device) * 0.5
            scripted(x, z)
            assert not z.requires_grad
