"""Gradients of joint graphs at special values and operands: as eager's (`tsfuser.joint`)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed, leaves
from kit.support import fresh, groups, script
from tsfuser import options
from tsfuser.schedule.machine import Machine

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]

CALLS = 5


def assert_as_eager(scripted, eager, given, *numbers):
    """Result and gradients, in several calls."""
    with tsfuser.fuser():
        for _ in range(CALLS):
            result = scripted(*given, *numbers)
            found = torch.autograd.grad(result.sum(), given, allow_unused=True)
    expected = eager(*given, *numbers)
    torch.testing.assert_close(result, expected, equal_nan=True)
    wanted = torch.autograd.grad(expected.sum(), given, allow_unused=True)
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_where_activations_are_nan(device):
    """On the CPU eager's derivatives of some are 0 or NaN there, on CUDA they hand the gradient on."""

    def activations(x: Tensor):
        one = torch.stack([F.hardtanh(x), F.relu6(x), F.hardshrink(x), F.softshrink(x), F.hardswish(x)])
        other = torch.stack([F.celu(x), F.selu(x), F.leaky_relu(x), F.elu(x), F.silu(x)])
        return (one + other) * 2.0

    x = torch.tensor([float("nan"), 0.5], device=device).repeat(64).requires_grad_()
    scripted = fresh(activations)
    assert_as_eager(scripted, activations, [x])
    assert is_packed(scripted, x)


def test_an_angle_of_small_numbers(device):
    def angle(y: Tensor, x: Tensor):
        return torch.atan2(y, x) * 2.0

    y, x = (
        torch.tensor(v, device=device, requires_grad=True) for v in ([0.0, 1e-30, 2.0], [1e-30, 0.0, 1.0])
    )
    assert_as_eager(fresh(angle), angle, [y, x])


def test_a_tensor_asked_for_its_sizes_gets_no_gradient():
    """Nor does the result require one for it."""

    def cast(a: Tensor, b: Tensor, c: Tensor):
        p = (a * b).type_as(c)
        return p.sin(), (a * 2.0).expand_as(c).cos()

    scripted = fresh(cast)
    a, b, c = leaves((4,), (4,), (3, 4))
    with tsfuser.fuser():
        for asked in CALLS * [(False, False, True), (True, False, True)]:
            given = [t.detach().requires_grad_(asks) for t, asks in zip((a, b, c), asked)]
            results, expected = scripted(*given), cast(*given)
            assert [r.requires_grad for r in results] == [e.requires_grad for e in expected]


def test_a_gradient_that_is_undefined():
    def scaled(x: Tensor, w: Tensor):
        return torch.softmax(x * w, -1) * 2.0

    scripted, given = fresh(scaled), leaves((2, 3), (3,))
    with tsfuser.fuser():
        for _ in range(CALLS):
            scripted(*given).sum().backward()
        assert is_packed(scripted, *given)
        assert torch.autograd.gradcheck(scripted, given, check_undefined_grad=True)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_batch_norm_of_a_part_without_elements(device, weighted):
    """Torch has no statistics of it, and no gradient where there is no weight."""
    weight = "w" if weighted else "None"
    source = f"""
def f(x, w):
    n = torch.nn.functional.batch_norm(x[:, :, 4:].sigmoid(), None, None, {weight}, training=True)
    return torch.cat([torch.tanh(n) * 2.0, (x * w[:, None]).sin()], 2)
"""
    exec(source, {"torch": torch}, eager := {})
    scripted = script(source)
    for sizes in ((2, 3, 7), (2, 3, 4), (3, 3, 4)):
        assert_as_eager(scripted, eager["f"], leaves(sizes, (3,), device=device))


def test_dims_that_are_arguments():
    """Each choice of them has a packed graph."""

    def means(x: Tensor, y: Tensor, dims: list[int], keepdim: bool):
        return ((x * y).mean(dims, keepdim) * 2.0).sin()

    scripted, given = fresh(means), leaves((3, 4, 5), (4, 5))
    for dims, keepdim in ([0], True), ([0, 2], False), ([-1], True), ([0], True):
        assert_as_eager(scripted, means, given, dims, keepdim)
        assert is_packed(scripted, *given, dims, keepdim)


def test_more_choices_than_are_packed():
    """The others are right, too."""

    def shifted(x: Tensor, shift: int):
        return (x * 2.0).roll(shift, 0).sin() * x

    scripted, (x,) = fresh(shifted), leaves((40,))
    with tsfuser.fuser():
        for shift in range(40):
            (found,) = torch.autograd.grad(scripted(x, shift).sum(), x)
            torch.testing.assert_close(found, torch.autograd.grad(shifted(x, shift).sum(), x)[0])


def test_a_quotient_of_which_the_forward_saves_the_result():
    def root(x: Tensor, w: Tensor):
        return (x / w * 2.0).sqrt()

    scripted, given = fresh(root), leaves((3, 4), (4,))
    assert_as_eager(scripted, root, given)
    assert is_packed(scripted, *given)


@pytest.mark.parametrize("p", [0.0, 1.0, 0.5])
def test_a_program_that_begins_with_a_dropout(device, p):
    def dropped(x: Tensor, p: float):
        return F.dropout(x, p, training=True) * x * 2.0

    scripted, (x,) = fresh(dropped), leaves((64,), device=device, dtype=torch.float32)
    with tsfuser.fuser():
        for _ in range(CALLS):
            result = scripted(x, p)
            (found,) = torch.autograd.grad(result.sum(), x)
    assert is_packed(scripted, x, p)
    kept = result != 0
    assert {0.0: kept.all(), 1.0: not kept.any(), 0.5: 8 < kept.sum() < 56}[p]
    torch.testing.assert_close(found, kept * 4.0 * x.detach() / max(1 - p, 0.1))


def test_its_draws_are_those_of_one_dropout():
    """A graph that is replaced while torch looks at it runs nothing twice."""

    def dropped(x: Tensor):
        return F.dropout(x, 0.5, training=True) * 2.0

    scripted, (x,) = fresh(dropped), leaves((64,))
    with tsfuser.fuser():
        torch.manual_seed(5)
        found = scripted(x).detach()
        torch.manual_seed(5)
        torch.testing.assert_close(found, dropped(x).detach())


def test_tools_see_what_runs_without_gradients():
    def scaled(x: Tensor):
        return (x * 2.0).sin() + 1.0

    scripted, (x,) = fresh(scaled), leaves((5,))
    with tsfuser.fuser(), torch.no_grad():
        for _ in range(CALLS):
            scripted(x)
    assert len(groups(scripted)) == 1


def test_a_join_of_chunks(device):
    """Of which one gets no gradient. The sizes of all are known, so that no gradient is left out."""

    def joined(x: Tensor, w: Tensor):
        y = torch.sigmoid(x * w)
        _, b = y.chunk(2, -1)
        return torch.cat([b, y], 0) * 2.0

    scripted, given = fresh(joined), leaves((6,), (6,), device=device)
    assert_as_eager(scripted, joined, given)
    assert is_packed(scripted, *given)


def test_a_convolution_of_one_image(device):
    def image(x: Tensor, w: Tensor, b: Tensor):
        return F.conv2d(torch.tanh(x), w, b).sin() * 2.0

    scripted, given = fresh(image), leaves((3, 6, 5), (4, 3, 3, 3), (4,), device=device)
    assert_as_eager(scripted, image, given)
    assert is_packed(scripted, *given)


def test_a_result_that_eager_saves_must_not_be_written_to():
    def two(x: Tensor, w: Tensor):
        y = torch.exp(torch.tanh(x) * w)
        return y, y * w + x

    scripted, given = fresh(two), leaves((4, 8), (8,))
    with tsfuser.fuser():
        for _ in range(CALLS):
            first, second = scripted(*given)
            first.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                second.sum().backward()
        assert is_packed(scripted, *given)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_softmax_to_another_dtype(device, dtype):
    def scores(x: Tensor, w: Tensor, dtype: int | None):
        return torch.softmax(x * w, -1, dtype).sin() * torch.log_softmax(x, -1, dtype)

    scripted, given = fresh(scores), leaves((3, 4), (4,), device=device, dtype=torch.float32)
    assert_as_eager(scripted, scores, given, dtype)
    assert is_packed(scripted, *given, dtype)


@pytest.mark.parametrize("weighted", [True, False])
def test_seeds_of_dropouts_are_saved_instead_of_masks(device, weighted, monkeypatch):
    """Second derivatives have the same mask. On the host, too, where it does not pay."""
    monkeypatch.setattr(Machine, "computes_fast", True)

    def dropped(x: Tensor, w: Tensor):
        return (F.dropout(x * w, 0.25, training=True) * w).sin()

    scripted = fresh(dropped)
    x, w = torch.ones(33, 65, device=device, requires_grad=True), torch.ones(65, device=device)
    w.requires_grad_(weighted)
    with tsfuser.fuser():
        for _ in range(CALLS):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                y = scripted(x, w)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
    kept = (y != 0) / 0.75
    torch.testing.assert_close(first.detach(), kept * torch.tensor(1 / 0.75).cos().item())
    torch.testing.assert_close(second, -kept * kept * torch.tensor(1 / 0.75).sin().item())
    assert torch.int64 in {t.dtype for t in saved} and torch.bool not in {t.dtype for t in saved}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_are_those_of_what_is_saved(device, dtype):
    """Not of the values before their rounding: rows of two elements have no gradient then."""

    def normed(x: Tensor, b: Tensor, w: Tensor):
        h = (x + b) * 1.0
        return h, F.layer_norm(h, [2], w, w).sin()

    # eager's norm on CUDA takes weights of the operand's dtype only
    w = torch.ones(2, device=device, dtype=dtype if device == "cuda" else torch.float32)
    scripted = fresh(normed)
    large = 1024.0 if dtype is torch.float16 else 256.0
    x = torch.tensor([[0.6, 2.4]] * 8, device=device, dtype=dtype, requires_grad=True)
    b = torch.full((2,), large, device=device, dtype=dtype)
    with tsfuser.fuser():
        for _ in range(CALLS):
            y = scripted(x, b, w)[1]
            (found,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert is_packed(scripted, x, b, w)
    assert found.abs().max() < 1e-3


def test_second_derivatives_where_sizes_decide_the_dims():
    """Behind `squeeze` no rank is known, but which of the saved values have gradients."""

    def squeezed(x):
        y = torch.tanh(x).unsqueeze(0).transpose(0, -1).squeeze(-1)
        return torch.sort(y[0], 0)[0] * torch.sort(y[1], 1)[0]

    (x,) = leaves((5, 7, 6))
    scripted = fresh(squeezed)

    def second(function):
        (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    with tsfuser.fuser():
        for _ in range(4):
            got = second(scripted)
    torch.testing.assert_close(got, second(squeezed))
    assert is_packed(scripted, x)


@pytest.mark.parametrize("name", ["max", "min"])
def test_the_larger_of_two_tensors(name):
    scope = {"torch": torch}
    exec(f"def f(x, y):\n    return torch.{name}(x * 1.5, y) * 2.0\n", scope)
    x, y = leaves((4, 5), (5,))
    with torch.no_grad():
        x[0] = y / 1.5  # equal ones share the gradient
    scripted = script(f"def f(x, y):\n    return torch.{name}(x * 1.5, y) * 2.0\n")
    assert_as_eager(scripted, scope["f"], (x, y))
    assert is_packed(scripted, x, y)


@pytest.mark.parametrize("exponent", [0.5, 1.5, 0.0, -1.0, 1e39])
def test_an_exponent_that_is_an_argument(exponent):
    """For certain numbers eager takes roots, which differ at infinity."""

    def f(x, n: float):
        return torch.pow(x * 1.0, n) * 2.0

    x = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 4.0, 1.0], requires_grad=True)
    assert_as_eager(fresh(f), f, (x,), exponent)


def test_an_operand_without_a_derivative():
    """Eager raises an error, and so does the program."""

    def f(x, t, w):
        return F.binary_cross_entropy_with_logits(x * 2.0, t, w * 1.0).sin()

    scripted, (x, t, w) = fresh(f), leaves((4,), (4,), (4,))
    with tsfuser.fuser():
        for _ in range(3):
            with pytest.raises(RuntimeError, match="is not differentiable with respect to argument 'weight'"):
                scripted(x, t.detach(), w)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_loop_that_may_run_no_time(times):
    def f(x: Tensor, n: int):
        a = x * 2.0
        b = a
        for _ in range(n):
            b = b - a
        return torch.mm(a, b) - b

    scripted, (x,) = fresh(f), leaves((4, 4))
    assert_as_eager(scripted, f, (x,), times)


def test_an_input_that_the_program_writes_to_is_not_kept():
    """Though `keep_inputs` is on, which speaks for the caller."""

    def f(x: Tensor, w: Tensor):
        h = torch.exp(x * 0.5) * w
        y = torch.tanh(h) * h
        x.mul_(2.0)
        return y + x

    scripted, (x, w) = fresh(f), leaves((4, 5), (5,))
    with options.override(enable={"keep_inputs": ""}), tsfuser.fuser():
        for _ in range(4):
            got = torch.autograd.grad(scripted(x * 1.0, w).sum(), (x, w))
    torch.testing.assert_close(got, torch.autograd.grad(f(x * 1.0, w).sum(), (x, w)))


def a_result_is_written_to(x: Tensor, w: Tensor):
    y = torch.pow(x * x + 1.0, 0.5)
    z = y + 0
    u = torch.erf(y) * w
    z.abs_().add_(1)
    return u, z + 1.0


def an_operand_is_written_to(x: Tensor, w: Tensor):
    x = x.cos()
    print("")  # ends a region
    u = torch.erf(x + 0) * w
    x.add_(1)
    return u, x * w


@pytest.mark.parametrize("program", [a_result_is_written_to, an_operand_is_written_to])
def test_a_region_that_is_not_packed_knows_what_the_program_writes_to(program):
    """Without elements it is not. For torch `y + 0` is `y`, of which the derivative of erf is made."""
    scripted, given = fresh(program), leaves((0, 4), (4,))
    with tsfuser.fuser():
        for _ in range(CALLS):
            u, z = scripted(*given)
            got = torch.autograd.grad(u.sum() + z.sum(), given)
    u, z = program(*given)
    torch.testing.assert_close(got, torch.autograd.grad(u.sum() + z.sum(), given))


def test_a_missing_gradient_is_no_zero_where_a_derivative_is_infinite():
    def f(x):
        return torch.cos(x * 1.5) * 2.0, torch.log(x) * 3.0

    scripted, x = fresh(f), torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    with tsfuser.fuser():
        for k in (0, 1, 0, 1):
            (got,) = torch.autograd.grad(scripted(x)[k].sum(), x)
            torch.testing.assert_close(got, torch.autograd.grad(f(x)[k].sum(), x)[0])
    assert is_packed(scripted, x)


def test_a_program_that_begins_with_a_loop_that_writes_to_a_list():
    def f(x: Tensor, n: int):
        flags, y = [False, False], x
        for _ in range(n):
            flags[0] = not flags[0]
            y = torch.sin(y) * 2.0
        return y * 3.0 if flags[0] else y + 1.0

    scripted, (x,) = fresh(f), leaves((4, 4))
    assert_as_eager(scripted, f, (x,), 3)


def test_a_permutation_that_is_none_is_the_ops_own_error():
    def turned(x: Tensor, n: int):
        return torch.tanh(x).permute(0, n, 1).sin() * 2.0

    scripted, x = fresh(turned), torch.rand(2, 3, 4).requires_grad_()
    with tsfuser.fuser():
        for n in (2, 2, 2, 1, 1):
            if n == 2:
                (found,) = torch.autograd.grad(scripted(x, n).sum(), x)
                torch.testing.assert_close(found, torch.autograd.grad(turned(x, n).sum(), x)[0])
            else:
                with pytest.raises(RuntimeError, match="permute"):
                    scripted(x, n)
