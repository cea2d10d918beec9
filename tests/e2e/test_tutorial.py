"""The job of nvFuser's tutorial: blocks of a transformer with dropout and a norm, trained with one shape and
with twenty, scripted and through functorch's memory_efficient_fusion, under torch.jit.fuser("fuser2")."""

import functools
import random
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import memory_efficient_fusion

from kit.autodiff_only import by_joint_graphs
from kit.support import all_graphs, assert_matches, counted, fresh, groups, kinds, no_fallback, run_python

pytestmark = pytest.mark.graphs

SIZE = (4, 7, 256)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def with_layer_norm(
    x, residual, weight, bias1, bias2, normalization_axis: int, dropout_prob: float, training: bool
):
    y = F.dropout(x + bias1, dropout_prob, training=training) + residual
    return F.layer_norm(y, (x.size(normalization_axis),), weight, bias2)


def with_primitives(
    x, residual, weight, bias1, bias2, normalization_axis: int, dropout_prob: float, training: bool
):
    y = F.dropout(x + bias1, dropout_prob, training=training) + residual
    mean = y.mean(normalization_axis, keepdim=True)
    diff = y - mean
    variance = (diff * diff).mean(normalization_axis, keepdim=True)
    return weight * ((y - mean) / torch.sqrt(variance + 1e-12)) + bias2


def with_rms_norm(
    x, residual, weight, bias1, bias2, normalization_axis: int, dropout_prob: float, training: bool
):
    y = F.dropout(x + bias1, dropout_prob, training=training) + residual
    variance = y.mul(y).mean(normalization_axis, True)
    return weight * (y / torch.sqrt(variance + 1e-12)) + bias2


DEFINITIONS = [with_layer_norm, with_primitives, with_rms_norm]
NUMBERS = {"normalization_axis": 2, "dropout_prob": 0.1}


@pytest.fixture(autouse=True)
def fused_only():
    torch.manual_seed(42)
    with warnings.catch_warnings(), no_fallback(), torch.jit.fuser("fuser2"):
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of annotations in a traced module
        yield


def parameters_of(size, device, dtype=torch.float32):
    """Two activations, a weight and two biases, all of which want a gradient; and the output's gradient."""
    x = torch.randn(*size, device=device, dtype=dtype, requires_grad=True)
    residual = torch.rand_like(x).requires_grad_()
    rows = [torch.nn.Parameter(torch.randn(size[2], dtype=dtype, device=device)) for _ in range(3)]
    return [x, residual, *rows], torch.rand_like(x)


def profile_workload(forward_func, parameters, grad_output, iteration_count=5):
    """The tutorial's loop: warm-up, then steps by the clock. Returns steps a second."""

    def step():
        output = forward_func()
        output.backward(grad_output)
        for p in parameters:
            p.grad = None

    for _ in range(3):
        step()
    start = time.perf_counter()
    for _ in range(iteration_count):
        step()
    return iteration_count / (time.perf_counter() - start)


def traced(definition, dropout_prob=0.1, training=True):
    """`definition` through memory_efficient_fusion, its numbers literals, as the tutorial has it."""

    def literal(x, residual, weight, bias1, bias2):
        return definition(x, residual, weight, bias1, bias2, 2, dropout_prob, training)

    return memory_efficient_fusion(literal)


def gradients(function, parameters, grad_output, calls=4):
    """The output and the gradients of the last of `calls` steps."""
    for _ in range(calls):
        for p in parameters:
            p.grad = None
        output = function(*parameters)
        output.backward(grad_output)
    return [output.detach()] + [p.grad for p in parameters]


def assert_as_eager(definition, function, parameters, grad_output):
    """Output and gradients, without dropout, are as near to float64 as eager's."""
    plain = functools.partial(definition, **NUMBERS, training=False)
    wide = [p.detach().double().requires_grad_() for p in parameters]
    exact = gradients(plain, wide, grad_output.double(), calls=1)
    eager = gradients(plain, parameters, grad_output, calls=1)
    for mine, e, r in zip(gradients(function, parameters, grad_output), eager, exact):
        assert_matches(mine, e, r, ops=32)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda f: f.__name__)
def test_scripted_blocks_train_fused(device, definition):
    scripted = fresh(definition)
    parameters, grad_output = parameters_of(SIZE, device)
    func = functools.partial(scripted, *parameters, **NUMBERS, training=True)
    assert profile_workload(func, parameters, grad_output) > 0
    with counted() as rise:
        profile_workload(func, parameters, grad_output)
    assert rise["launches"] >= 16 and rise["kernels_compiled"] == 0 and rise["fallbacks"] == {}
    assert any({"aten::native_dropout", "aten::dropout"} & set(kinds(g)) for g in groups(scripted))


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda f: f.__name__)
def test_blocks_through_memory_efficient_fusion_train_fused(device, definition):
    function = traced(definition)
    parameters, grad_output = parameters_of(SIZE, device)
    func = functools.partial(function, *parameters)
    profile_workload(func, parameters, grad_output)
    with counted() as rise:
        profile_workload(func, parameters, grad_output)
    assert rise["launches"] >= 16 and rise["kernels_compiled"] == 0 and rise["fallbacks"] == {}


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["scripted", "traced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda f: f.__name__)
def test_without_dropout_results_are_eagers(device, definition, dtype, how):
    if how == "traced":
        function = traced(definition, training=False)
    else:
        function = functools.partial(fresh(definition), **NUMBERS, training=False)
    with counted() as rise:
        assert_as_eager(definition, function, *parameters_of(SIZE, device, dtype))
    assert rise["launches"] > 0


@pytest.mark.parametrize("definition", [with_layer_norm, with_rms_norm], ids=lambda f: f.__name__)
def test_gradients_follow_the_mask_of_the_forward(device, definition):
    """With a weight of one and no bias, what was dropped has no gradient in x but one in the residual."""
    for function in (functools.partial(fresh(definition), **NUMBERS, training=True), traced(definition)):
        parameters, grad_output = parameters_of(SIZE, device)
        _, x, residual, *_ = gradients(function, parameters, grad_output)
        kept = x != 0
        assert 0.85 < kept.double().mean() < 0.95
        torch.testing.assert_close(x[kept], residual[kept] / 0.9, rtol=1e-5, atol=1e-6)


def random_shapes(count, size, device, dtype=torch.float32):
    """Activations and gradients whose first two sizes differ by up to 2."""
    generator = random.Random(42)
    sizes = [
        (size[0] + generator.randrange(-2, 3), size[1] + generator.randrange(-2, 3), size[2])
        for _ in range(count)
    ]
    inputs = [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in sizes]
    return inputs, [torch.rand_like(x) for x in inputs], [torch.rand_like(x) for x in inputs]


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda f: f.__name__)
def test_random_shapes_compile_what_one_shape_does(target, device, definition):
    size = (6, 9, 128) if target == "cpu-fibers" else (16, 24, 256)
    scripted = fresh(definition)
    inputs, residuals, grad_outputs = random_shapes(20, size, device)
    parameters, _ = parameters_of(size, device)

    def step(i):
        tensors = [inputs[i], residuals[i], *parameters[2:]]
        scripted(*tensors, **NUMBERS, training=True).backward(grad_outputs[i])
        for p in tensors:
            p.grad = None

    for _ in range(3):
        step(0)
    with counted() as rise:
        for i in range(20):
            step(i)
    assert (
        rise["plans_built"] == rise["kernels_compiled"] == rise["disk_hits"] == 0 and rise["fallbacks"] == {}
    )
    assert rise["launches"] >= 40
    # one plan: the guards let all shapes through, and no fallback ran; joint graphs show the program, too
    assert len(all_graphs(scripted)) == 3 + by_joint_graphs()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda f: f.__name__)
def test_random_shapes_are_right(device, definition, dtype):
    function = functools.partial(fresh(definition), **NUMBERS, training=False)
    inputs, residuals, grad_outputs = random_shapes(5, (4, 5, 256), device, dtype)
    parameters, _ = parameters_of((4, 5, 256), device, dtype)
    for x, residual, grad_output in zip(inputs, residuals, grad_outputs):
        tensors = [x, residual.requires_grad_(), *parameters[2:]]
        assert_as_eager(definition, function, tensors, grad_output)


PROGRAM = """
import functools
import torch
import torch.nn.functional as F
import tsfuser
from functorch.compile import memory_efficient_fusion

def block(x, residual, weight, bias, normalization_axis: int, dropout_prob: float, keepdim: bool):
    y = F.dropout(x + bias, dropout_prob, training=True) + residual
    variance = y.mul(y).mean(normalization_axis, keepdim)
    return weight * (y / torch.sqrt(variance + 1e-12))

def literal(x, residual, weight, bias):
    y = torch.nn.functional.dropout(x + bias, 0.1) + residual
    variance = y.mul(y).mean(2, keepdim=True)
    return weight * (y / torch.sqrt(variance + 1e-12))

device = "cuda"
x = torch.randn(8, 16, 64, device=device, requires_grad=True)
residual = torch.rand_like(x).requires_grad_()
weight, bias = (torch.nn.Parameter(torch.randn(64, device=device)) for _ in range(2))
tensors = [x, residual, weight, bias]
scripted = torch.jit.script(block)
first = functools.partial(scripted, *tensors, normalization_axis=2, dropout_prob=0.1, keepdim=True)
second = functools.partial(memory_efficient_fusion(literal), *tensors)
for func in (first, second):
    tsfuser.reset()
    for _ in range(4):
        func().backward(torch.ones_like(x))
    print("launches", tsfuser.stats()["launches"], "fallbacks", dict(tsfuser.stats()["fallbacks"]))
"""


def test_a_program_without_a_context_is_fused_by_the_environment(target, device, tmp_path):
    source = PROGRAM.replace('"cuda"', repr(device))
    launch = "fibers" if target == "cpu-fibers" else "block"
    environment = {"PYTORCH_JIT_ENABLE_NVFUSER": "1", "TSFUSER_HOST_LAUNCH": launch}
    status, out, err = run_python(tmp_path, source, **environment)
    assert status == 0, err
    for line in out.splitlines():
        _, launches, _, fallbacks = line.split(maxsplit=3)
        assert int(launches) >= 4 and fallbacks == "{}"
    assert len(out.splitlines()) == 2
