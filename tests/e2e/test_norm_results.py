"""What the backward computes again of a batch norm's result, for the activation behind it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.norm_steps import DTYPES, evaluated, operands, trained
from kit.support import assert_matches, fresh, kinds, no_fallback, script
from tsfuser.frontends.torchscript import passes

SOURCE = """def program(x: Tensor, w: Tensor{0}, b: Tensor{0}, mean: Tensor, var: Tensor, training: bool):
    y = torch.nn.functional.batch_norm(x, mean, var, {1}, training=training)
    return {2} * 0.5
"""
#: Activations whose derivatives read what the norm gives.
ACTIVATIONS = {
    "silu": "torch.nn.functional.silu(y)",
    "hardswish": "torch.nn.functional.hardswish(y)",
    "gelu": "torch.nn.functional.gelu(y)",
    "tanh": "(torch.tanh(y) * y)",
    "leaky_relu": "torch.nn.functional.leaky_relu(y, 0.25)",
    "a product with itself": "(y * y)",
    "several": "(torch.nn.functional.silu(y) + torch.sin(y))",
}


def source(activation="silu", parameters="w, b", optional=""):
    return SOURCE.format(optional, parameters, ACTIVATIONS.get(activation, activation))


def plain(text):
    scope = {"torch": torch, "Tensor": Tensor}
    exec(text, scope)
    return scope["program"]


def computed(seen):
    """How many results the groups of backwards compute, and in how many of forwards nothing is kept."""
    found = [k for o in seen for g in o.graph.findAllNodes("prim::CudaFusionGroup", True) for k in kinds(g)]
    return found.count("tsfuser::batch_norm_result"), found.count("tsfuser::kept_result")


@pytest.mark.each_value
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype, channels_last, training):
    check(device, "silu", dtype, channels_last, training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", list(ACTIVATIONS)[1:])
def test_activations(device, activation, dtype, training):
    check(device, activation, dtype, False, training)


def check(device, activation, dtype, channels_last, training):
    tensors = operands(device, dtype, channels_last=channels_last)
    gradient = torch.randn(4, 6, 9, 11, generator=torch.Generator().manual_seed(8)).to(device)
    if channels_last:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    eager, scripted = plain(source(activation)), script(source(activation))
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(scripted, tensors, gradient, training, 4)
    assert by_joint_graphs() or min(computed(seen)) >= 1
    double = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = trained(eager, double, gradient.double(), training)
    for mine, theirs, true in zip(got, trained(eager, tensors, gradient, training), exact):
        assert_matches(mine, theirs, true, ops=2000, precision=dtype)


@pytest.mark.parametrize("parameters", ["w, None", "None, b", "None, None", "weight=w, bias=b"])
@pytest.mark.parametrize("training", [True, False])
def test_parameters_that_are_not_there(device, parameters, training):
    if parameters == "None, b" and device == "cuda":
        pytest.skip("eager's derivative is an error there")
    x, w, b, mean, var = operands(device)
    text = source(parameters=parameters)
    gradient = torch.randn_like(x)

    def run(function):
        y = function(x, w, b, mean.clone(), var.clone(), training)
        return [y.detach(), *torch.autograd.grad(y, [t for t in (x, w, b) if depends(t)], gradient)]

    def depends(t):
        return t is x or (t is w and "w" in parameters.split(", ")[0]) or (t is b and "b" in parameters[-1])

    scripted, want = script(text), run(plain(text))
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            got = run(scripted)
    if parameters != "None, b":  # which is left to torch
        assert by_joint_graphs() or min(computed(seen)) >= 1
    for mine, theirs in zip(got, want):
        assert_matches(mine, theirs, ops=4000)


def test_a_norm_without_running_statistics(device):
    def program(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool):
        return F.silu(F.batch_norm(x, None, None, w, b, training=training)) * 0.5

    tensors = operands(device)
    gradient = torch.randn_like(tensors[0])
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(fresh(program), tensors, gradient, True, 4)
    assert by_joint_graphs() or min(computed(seen)) >= 1
    for mine, theirs in zip(got, trained(program, tensors, gradient, True)):
        assert_matches(mine, theirs, ops=4000)


def test_a_parameter_that_may_be_none_is_not_copied(device):
    x, w, b, mean, var = operands(device)
    text, gradient = source(optional=" | None"), torch.randn_like(x)
    scripted = script(text)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(scripted, (x, w, b, mean, var), gradient, True, 4)
    assert seen and computed(seen) == (0, 0)
    for mine, theirs in zip(got, trained(plain(text), (x, w, b, mean, var), gradient, True)):
        assert_matches(mine, theirs, ops=4000)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_kept(device, training):
    """In training the operand, but not the result; else both."""
    x, w, b, mean, var = operands(device)
    scripted, sizes = script(source()), []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with tsfuser.fuser(), no_fallback():
        for _ in range(6):
            sizes.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = scripted(x, w, b, mean.clone(), var.clone(), training)
            torch.autograd.grad(y.sum(), x)
    assert sizes.count(x.numel()) == (1 if training else 2)


def test_running_statistics_that_move_before_the_backward(device):
    """The derivative of the activation is taken where the evaluation was."""
    tensors = operands(device)
    scripted, want = script(source()), evaluated(plain(source()), tensors)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            got = evaluated(scripted, tensors)
    for mine, theirs in zip(got, want):
        assert_matches(mine, theirs, ops=4000)


def test_a_bias_that_is_written_to_before_the_backward(device):
    x, w, b, mean, var = operands(device)
    gradient = torch.randn_like(x)
    want = trained(plain(source()), (x, w, b, mean, var), gradient, True)
    scripted = script(source())
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            bias = b.detach().clone().requires_grad_()
            y = scripted(x, w, bias, mean.clone(), var.clone(), True)
            with torch.no_grad():
                bias.add_(100.0)
            gradients = torch.autograd.grad(y, (x, w, bias), gradient)
    assert by_joint_graphs() or min(computed(seen)) >= 1
    for mine, theirs in zip([y.detach(), *gradients], want):
        assert_matches(mine, theirs, ops=4000)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["silu", "a product with itself", "several"])
def test_second_derivatives(device, activation, training):
    """With respect to all operands, the bias among them, of which the backward has a copy."""
    x, w, b, mean, var = operands(device, torch.float64, (2, 3, 4, 4))
    w, b = (t.detach().double().requires_grad_() for t in (w, b))
    text = source(activation)

    def second(function):
        y = function(x, w, b, mean.double(), var.double(), training)
        first = torch.autograd.grad((y**2).sum(), (x, w, b), create_graph=True)
        return [*first, *torch.autograd.grad(sum((t**2).sum() for t in first), (x, w, b))]

    scripted, want = script(text), second(plain(text))
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(5):
            got = second(scripted)
    assert by_joint_graphs() or computed(seen)[1] >= 1
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("training", [True, False])
def test_calls_in_and_outside_training_in_turns(device, training):
    tensors = operands(device)
    gradient = torch.randn_like(tensors[0])
    scripted, eager = script(source()), plain(source())
    with tsfuser.fuser(), no_fallback():
        for turn in range(8):
            now = training if turn < 3 else bool(turn % 2)
            got = trained(scripted, tensors, gradient, now)
            for mine, theirs in zip(got, trained(eager, tensors, gradient, now)):
                assert_matches(mine, theirs, ops=4000)


@pytest.mark.parametrize("sizes", [(0, 3, 4, 4), (1, 3, 1, 2), (5, 2), (3, 4, 1), (2, 3, 5, 1, 2)])
def test_sizes(device, sizes):
    x, w, b, mean, var = operands(device, sizes=sizes)
    gradient = torch.randn_like(x)
    scripted, other = script(source()), operands(device, sizes=tuple(max(s, 2) for s in sizes))
    with tsfuser.fuser():
        trained(scripted, other, torch.randn_like(other[0]), True, 4)
        for training in (True, False):
            got = trained(scripted, (x, w, b, mean, var), gradient, training, 2)
            want = trained(plain(source()), (x, w, b, mean, var), gradient, training)
            for mine, theirs in zip(got, want):
                assert_matches(mine, theirs, ops=4000)


def test_a_result_that_the_program_has_is_kept(device):
    def program(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool):
        y = F.batch_norm(x, mean, var, w, b, training=training)
        return F.silu(y), y * 2.0, torch.sort(y, 0)[0]

    x, w, b, mean, var = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            got = torch.autograd.grad(sum(y.sum() for y in scripted(x, w, b, mean, var, True)), (x, w, b))
    assert seen and computed(seen) == (0, 0)
    want = torch.autograd.grad(sum(y.sum() for y in program(x, w, b, mean, var, True)), (x, w, b))
    for mine, theirs in zip(got, want):
        assert_matches(mine, theirs, ops=4000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_operand_that_the_forward_makes_is_not_read_rounded(device, dtype):
    def program(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool):
        return F.silu(F.batch_norm(torch.tanh(x), mean, var, w, b, training=training))

    tensors = operands(device, dtype)
    gradient = torch.randn_like(tensors[0])
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(fresh(program), tensors, gradient, True, 4)
    assert seen and computed(seen) == (0, 0)
    double = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = trained(program, double, gradient.double(), True)
    for mine, theirs, true in zip(got, trained(program, tensors, gradient, True), exact):
        assert_matches(mine, theirs, true, ops=2000, precision=dtype)


def test_statistics_that_are_rounded(device):
    """Beside parameters of 16 bits the CPU saves statistics of 16 bits: the result is kept."""
    x, w, b, mean, var = operands(device, torch.bfloat16)
    tensors = (x, *(t.detach().bfloat16().requires_grad_(t.requires_grad) for t in (w, b, mean, var)))
    gradient = torch.randn_like(x)
    scripted, eager = script(source()), plain(source())
    with tsfuser.fuser():
        got = trained(scripted, tensors, gradient, True, 4)
    double = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = trained(eager, double, gradient.double(), True)
    for mine, theirs, true in zip(got, trained(eager, tensors, gradient, True), exact):
        assert_matches(mine, theirs, true, ops=2000, precision=torch.bfloat16)
