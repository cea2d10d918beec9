"""Scripted functions that a joint graph differentiates (`PYTORCH_NVFUSER_ENABLE=joint_graph`)."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed
from kit.support import counted, fresh, run_python, script
from tsfuser import _C

pytestmark = pytest.mark.usefixtures("joint_graphs")


def norm_block(x: Tensor, w: Tensor, b: Tensor):
    h = F.layer_norm(x, [6], w, b, 1e-5)
    return x + F.silu(h) * b


def mlp(x: Tensor, w: Tensor, b: Tensor):
    return F.linear(F.gelu(F.linear(x, w.view(6, 1) * b, b)), w.view(1, 6) * 1.0)


def reductions(x: Tensor, w: Tensor, b: Tensor):
    """Values that are compared, and a sum of all."""
    y = (x * w).tanh()
    return y.amax(-1, True) - (y * b).sum(0)


def attention(x: Tensor, w: Tensor, b: Tensor):
    q = x * w
    weights = F.softmax(torch.matmul(q, x.t()) * 0.5, -1)
    return torch.matmul(weights, q + b).cos()


def rotated(x: Tensor, w: Tensor, b: Tensor):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1) * w + x * b.cos()


def two(x: Tensor, w: Tensor, b: Tensor):
    h = (x * w).exp()
    return h * b, (h + b).sigmoid().sum(-1)


def written(x: Tensor, w: Tensor, b: Tensor):
    """In place, where nobody can tell."""
    y = x * w
    y += b
    return y.relu_() * 2.0


def grouped(x: Tensor, w: Tensor, b: Tensor):
    return F.group_norm(x * w, 3, w, b).sin()


def with_numbers(x: Tensor, w: Tensor, b: Tensor):
    """Functions of numbers, which are no tensors."""
    scale = 1.0 / math.sqrt(float(x.size(-1))) + math.exp(-float(w.dim()))
    return (x * w).tanh() * scale + b


PROGRAMS = [with_numbers, grouped, norm_block, mlp, reductions, attention, rotated, two, written]
MASKS = [mask for mask in itertools.product([True, False], repeat=3) if any(mask)]
SIZES = [4, 9]


def operands(rows, mask, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((rows, 6), (6,), (6,))]
    return [t.to(device, dtype).requires_grad_(wants) for t, wants in zip(made, mask)]


def outcome(function, given, asked=slice(None)):
    """Results and gradients, those of the results `asked`."""
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    shares = [torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype, device=r.device).view_as(r) for r in results]
    chosen = [(r, s) for r, s in zip(results[asked], shares[asked]) if r.requires_grad]
    wanted = [t for t in given if t.requires_grad]
    gradients = torch.autograd.grad([r for r, _ in chosen], wanted, [s for _, s in chosen], allow_unused=True)
    return [r.detach() for r in results], [r.requires_grad for r in results], gradients


def assert_as_eager(scripted, function, given, asked=slice(None)):
    (results, needs, gradients), (want, its_needs, wanted) = (
        outcome(f, given, asked) for f in (scripted, function)
    )
    assert needs == its_needs
    torch.testing.assert_close(results, want)
    assert [g is None for g in gradients] == [g is None for g in wanted]
    torch.testing.assert_close([g for g in gradients if g is not None], [g for g in wanted if g is not None])


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_are_eagers(program, mask):
    """At two sizes, with each choice of inputs that require gradients; one graph serves both sizes."""
    scripted = fresh(program)
    with tsfuser.fuser():
        for rows in (*SIZES, *SIZES):
            assert_as_eager(scripted, program, operands(rows, mask))
        assert is_packed(scripted, *operands(SIZES[0], mask))


@pytest.mark.parametrize("asked", [slice(0, 1), slice(1, 2)], ids=["first", "second"])
def test_a_result_without_a_gradient(asked):
    scripted = fresh(two)
    with tsfuser.fuser():
        for rows in (*SIZES, *SIZES):
            assert_as_eager(scripted, two, operands(rows, (True, True, True)), asked)
        assert is_packed(scripted, *operands(4, (True, True, True)))


def apart(x: Tensor, w: Tensor, b: Tensor):
    return (x * x).exp(), (w * b).sin().cos()


def test_what_no_gradient_reaches_gets_none():
    """And calls in which others reach it compile nothing new."""
    scripted = fresh(apart)
    with tsfuser.fuser():
        for call in range(12):
            asked = [slice(0, 1), slice(1, 2), slice(0, 2)][call % 3]
            with counted() as rise:
                assert_as_eager(scripted, apart, operands(4, (True, True, True)), asked)
            assert call < 8 or rise["python_calls"] == 0
        assert is_packed(scripted, *operands(4, (True, True, True)))


def test_powers_of_numbers_that_the_program_computes():
    def powers(x: Tensor, w: Tensor, s: float):
        return torch.pow(s, x) + torch.pow(w, s - 1.0) + torch.pow(s + 1.0, w) * torch.xlogy(x, s)

    scripted = fresh(powers)
    with tsfuser.fuser():
        for s in (2.0, 1.0, 0.5, 2.0):
            x, w = (torch.linspace(0, k, 5, dtype=torch.float64).requires_grad_() for k in (1, 2))
            got, want = (torch.autograd.grad(f(x, w, s).sum(), [x, w]) for f in (scripted, powers))
            torch.testing.assert_close(got, want)
        assert is_packed(scripted, x, w, 2.0)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not two], ids=lambda f: f.__name__)
def test_second_derivatives_are_eagers(program):
    """Though the first ones are computed from the values that the cut saves."""

    def second(function, given):
        (first,) = torch.autograd.grad(function(*given).cos().sum(), given[:1], create_graph=True)
        return first.detach(), torch.autograd.grad(first.square().sum(), given)

    scripted = fresh(program)
    with tsfuser.fuser():
        for rows in (*SIZES, *SIZES):
            given = operands(rows, (True, True, True))
            torch.testing.assert_close(second(scripted, given), second(program, given))
            assert_as_eager(scripted, program, given)  # the first derivatives in between, too
        assert is_packed(scripted, *operands(4, (True, True, True)))


def test_a_third_derivative():
    def cubed(x: Tensor):
        return (x * x).sin() * x.exp()

    def third(function, x):
        y = function(x)
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.detach()

    scripted, x = fresh(cubed), torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(4):
            torch.testing.assert_close(third(scripted, x), third(cubed, x))
        assert is_packed(scripted, x)


def test_calls_in_turn():
    """With and without gradients, of other dtypes and masks."""
    scripted = fresh(norm_block)
    with tsfuser.fuser():
        for dtype, mask in 3 * [
            (torch.float64, MASKS[0]),
            (torch.float32, MASKS[1]),
            (torch.float64, MASKS[2]),
        ]:
            assert_as_eager(scripted, norm_block, operands(5, mask, dtype=dtype))
            with torch.no_grad():
                given = operands(5, mask, dtype=dtype)
                result = scripted(*given)
                assert not result.requires_grad
                torch.testing.assert_close(result, norm_block(*given))


def test_a_backward_twice_and_hooks():
    scripted = fresh(norm_block)
    with tsfuser.fuser():
        for _ in range(4):
            given = operands(4, MASKS[0])
            seen = []
            result = scripted(*given)
            result.register_hook(lambda g: seen.append(g) or g * 2.0)
            for _ in range(2):
                result.sum().backward(retain_graph=True)
            expected = torch.autograd.grad(norm_block(*given).sum(), given)
            torch.testing.assert_close([t.grad for t in given], [g * 4.0 for g in expected])
            assert len(seen) == 2


def test_an_input_that_eager_saves_must_not_be_written_to():
    """And one that it does not save may."""

    def step(function, name):
        given = operands(4, MASKS[0])
        result = function(*given)
        with torch.no_grad():
            given["xwb".index(name)].add_(1.0)
        return torch.autograd.grad(result.sum(), given)

    def shifted(x: Tensor, w: Tensor, b: Tensor):
        return F.gelu(x + b) * w

    scripted = fresh(shifted)
    with tsfuser.fuser():
        for _ in range(4):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(scripted, "w")
            torch.testing.assert_close(step(scripted, "x"), step(shifted, "x"))
        assert is_packed(scripted, *operands(4, MASKS[0]))


def test_numbers_are_values_of_the_graph():
    def scaled(x: Tensor, factor: float, times: int):
        return (x * factor).sin() * times

    scripted = fresh(scaled)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    with tsfuser.fuser():
        for factor, times in ((0.5, 2), (2.5, 3), (0.5, 3)):
            got, want = scripted(x, factor, times), scaled(x, factor, times)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))
        assert is_packed(scripted, x, 0.5, 2)


def test_a_second_derivative_of_logits():
    """Beyond the bounds there is none."""

    def odds(x: Tensor, w: Tensor):
        return torch.logit(x * w, 0.1) + torch.logit(x * w)

    scripted = fresh(odds)
    x, w = torch.linspace(0.05, 0.9, 9, dtype=torch.float64), torch.linspace(0.5, 1, 9, dtype=torch.float64)
    given = [t.requires_grad_() for t in (x, w)]
    with tsfuser.fuser():
        for _ in range(3):
            found = []
            for function in (scripted, odds):
                (first,) = torch.autograd.grad(function(*given).sum(), x, create_graph=True)
                found.append((first.detach(), *torch.autograd.grad(first.sin().sum(), given)))
            torch.testing.assert_close(*found)
        assert is_packed(scripted, *given)


def test_what_has_no_second_derivative_in_eager_has_none():
    scripted = script("def f(x, w):\n    return torch.nn.functional.hardsigmoid(x * w).sin()\n")
    x, w = (torch.linspace(-2, k, 9, requires_grad=True) for k in (3, 1))
    with tsfuser.fuser():
        for _ in range(3):
            torch.autograd.grad(scripted(x, w).sum(), [x, w])
            with pytest.raises(RuntimeError, match="hardsigmoid_backward is not implemented"):
                (first,) = torch.autograd.grad(scripted(x, w).sum(), x, create_graph=True)
                torch.autograd.grad(first.sum(), [x, w])
        assert is_packed(scripted, x, w)


@pytest.mark.parametrize("op", ["silu", "mish", "gelu", "softplus", "hardswish"])
def test_second_derivatives_of_activations(op):
    """Of some, torch's derivative has none."""
    scripted = script(f"def f(x, w):\n    return torch.nn.functional.{op}(x * w)\n")
    eager = getattr(F, op)
    x, w = (torch.linspace(-2, k, 9, dtype=torch.float64, requires_grad=True) for k in (3, 1))
    with tsfuser.fuser():
        for _ in range(3):
            found = []
            for function in (scripted, lambda x, w: eager(x * w)):
                (first,) = torch.autograd.grad(function(x, w).sum(), x, create_graph=True)
                found.append((first.detach(), *torch.autograd.grad(first.sin().sum(), [x, w])))
            torch.testing.assert_close(*found)
        assert is_packed(scripted, x, w)


def viewed(x: Tensor, w: Tensor, b: Tensor):
    return (x * w).t()


def unknown(x: Tensor, w: Tensor, b: Tensor):
    return torch.special.erfcx(x * w) + b


def in_place(x: Tensor, w: Tensor, b: Tensor):
    y = x + w
    x.detach().add_(1.0)
    return y * b


@pytest.mark.parametrize("program", [viewed, in_place, unknown], ids=lambda f: f.__name__)
def test_what_is_not_packed_runs_as_before(program):
    scripted = fresh(program)
    with tsfuser.fuser():
        for rows in SIZES * 2:
            one, other = operands(rows, (False, True, True)), operands(rows, (False, True, True))
            got, want = outcome(scripted, one), outcome(program, other)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(one[0], other[0])
        assert not is_packed(scripted, *operands(4, MASKS[0]))


def test_it_is_off_by_default():
    _C.use_joint_functions(False)
    scripted = fresh(norm_block)
    with tsfuser.fuser():
        for _ in range(4):
            outcome(scripted, operands(4, MASKS[0]))
        assert not is_packed(scripted, *operands(4, MASKS[0]))


def test_the_forward_and_the_backward_are_fused(device):
    """By the same passes as all graphs; as much is saved as the cut says."""
    scripted = fresh(norm_block)
    with tsfuser.fuser():
        for _ in range(4):
            given = operands(32, MASKS[0], device, torch.float32)
            saved = []
            with counted() as forward:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                    result = scripted(*given)
            with counted() as backward:
                gradients = torch.autograd.grad(result.sum(), given)
    assert forward["launches"] == 1 and 1 <= backward["launches"] <= 3
    known = {t.untyped_storage().data_ptr() for t in (*given, result)}
    assert {t.numel() for t in saved if t.untyped_storage().data_ptr() not in known} == {32}
    torch.testing.assert_close(gradients, torch.autograd.grad(norm_block(*given).sum(), given))


def test_the_option_switches_it_on(tmp_path):
    source = """
import torch, tsfuser

@torch.jit.script
def f(x):
    return (x * x).sin().amax(-1, True)

x = torch.randn(4, 4, requires_grad=True)
with tsfuser.fuser():
    for _ in range(3):
        f(x).sum().backward()
    graph = f.graph_for(x)
print([node.hasAttribute("joint") for node in graph.findAllNodes("prim::DifferentiableGraph", True)])
"""
    status, printed, _ = run_python(tmp_path, source, PYTORCH_NVFUSER_ENABLE="joint_graph")
    assert (status, printed.strip()) == (0, "[True]")


def test_the_first_call_imports_no_dynamo(tmp_path):
    """Which takes more than a second; torch does for many an op on tensors without memory."""
    source = """
import sys, torch, tsfuser
import torch.nn.functional as F

@torch.jit.script
def f(x, w, b, classes):
    h = torch.batch_norm(F.gelu(F.linear(x * 0.5, w, b)), None, None, None, None, True, 0.1, 1e-5, False)
    y = torch.cat([torch.softmax(h, -1), F.layer_norm(h, [4], w[0], b)], 1)
    z = torch.stack([torch.log_softmax(y, 1), torch.tril(y)]).mean(0)
    return F.cross_entropy(z, classes) + F.mse_loss(F.rms_norm(y, [8]), z)

given = [torch.randn(s, requires_grad=True) for s in ((3, 4), (4, 4), (4,))]
classes = torch.zeros(3, dtype=torch.int64)
with tsfuser.fuser():
    for _ in range(6):
        f(*given, classes).backward()
    graph = f.graph_for(*given, classes)
print(len(graph.findAllNodes("prim::DifferentiableGraph", True)), "torch._dynamo" in sys.modules)
"""
    status, printed, _ = run_python(tmp_path, source, PYTORCH_NVFUSER_ENABLE="joint_graph")
    assert (status, printed.strip()) == (0, "1 False")
