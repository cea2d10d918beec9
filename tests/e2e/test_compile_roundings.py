"""16-bit norms under torch.compile: forward and backward see the same numbers, and errors are at most those
of eager."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.eager_on_cuda import EagerOnCuda

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

ROWS, DRAWS = 64, 2
NARROW = [torch.bfloat16, torch.float16]


def parameters(x, size):
    """A weight and a bias with which a norm has its statistics in float32: on CPUs those of 16-bit operands
    have to be float32 for that, on CUDA they must not."""
    dtype = torch.float32 if x.device.type == "cpu" and x.dtype is not torch.float64 else x.dtype
    return torch.ones(size, dtype=dtype, device=x.device), torch.zeros(size, dtype=dtype, device=x.device)


def norm(x):
    return F.layer_norm(x, x.shape[-1:], *parameters(x, x.size(-1)))


def read_by_a_product(x, y):
    return norm(x * y) @ (x * y).mT


def computed_again(x, y):
    return norm(F.gelu(x).exp()) * y


def tanh(x, y):
    return norm(torch.tanh(x)) * y


def softmax_of_columns(x, y):
    return norm(torch.softmax(x * y, 0))


def log_softmax(x, y):
    return norm(torch.log_softmax(x * y, -1))


def norm_of_a_norm(x, y):
    return norm(norm(x * y) * y + x)


def norm_behind_a_product(x, y):
    return norm(F.silu(norm(x * y) @ y.mT) * 0.3)


def residual(x, y):
    total = x + y
    return norm(total) + total * 0.25


def rms_norm(x, y):
    return F.rms_norm(torch.tanh(x) * y, x.shape[-1:])


def group_norm(x, y):
    return F.group_norm((x * y).exp(), 1, *parameters(x, x.size(1)))


def written_out(x, y):
    z = (x * y).exp()
    distance = z - z.mean(-1, keepdim=True)
    return distance * torch.rsqrt((distance * distance).mean(-1, keepdim=True) + 1e-3)


PROGRAMS = [
    read_by_a_product,
    computed_again,
    tanh,
    softmax_of_columns,
    log_softmax,
    norm_of_a_norm,
    norm_behind_a_product,
    residual,
    rms_norm,
    group_norm,
    written_out,
]


def trained(function, inputs, gradient):
    """The result, and the gradients of its sum, weighted by `gradient` if it is not None."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    weights = torch.ones_like(result) if gradient is None else gradient[: result.size(-1)].to(result.dtype)
    result.backward(weights.expand_as(result))
    return [result.detach(), *(x.grad for x in leaves)]


def narrow_statistics(x, y):
    return F.layer_norm(F.gelu(x).exp(), x.shape[-1:]) * y


@pytest.mark.graphs
@pytest.mark.each_value
@pytest.mark.parametrize("columns", [1, 24, 200])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_errors_are_at_most_those_of_eager(program, dtype, columns, device):
    """The gradient of the sum of a norm over a whole row is 0. A norm over one element has none at
    all: the rest of a rounding, times 1 / sqrt(1e-5) = 316, would be it."""
    compiled = torch.compile(program, backend="tsfuser")
    for weighted in (False, True):
        off = torch.zeros(2, 3, dtype=torch.double)
        for _ in range(DRAWS):
            inputs = torch.randn(2, ROWS, columns, device=device).to(dtype).unbind()
            gradient = torch.randn(max(ROWS, columns), device=device).to(dtype) if weighted else None
            found = trained(compiled, inputs, gradient)
            with EagerOnCuda():
                eager = trained(program, inputs, gradient)
            exact = trained(program, [x.double() for x in inputs], gradient)
            for k, wanted in enumerate(exact):
                for which, one in enumerate((found, eager)):
                    off[which, k] += (one[k].double() - wanted).square().sum().item()
        ours, eagers = off.sqrt()
        assert (ours <= 1.05 * eagers + 1e-4).all(), (weighted, ours, eagers)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_statistics_of_16_bits_are_those_of_a_16_bit_value(dtype, device):
    """The only element of a row is its mean."""
    x, y = torch.randn(2, ROWS, 1, device=device).to(dtype).unbind()
    found = trained(torch.compile(narrow_statistics, backend="tsfuser"), (x, y), None)
    assert not found[0].any() and not found[1].any()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_only_what_statistics_depend_on_is_rounded(dtype, device):
    """What else reads a stored value reads it as it was computed, which is nearer to the exact one."""

    def function(x, y):
        total = x * y
        return total, total * 0.3

    x, y = torch.randn(2, ROWS, 24, device=device).to(dtype).requires_grad_()
    total, other = torch.compile(function, backend="tsfuser")(x, y)
    exact = x.detach().float() * y.detach().float()  # all digits of the product
    assert torch.equal(total, exact.to(dtype)) and torch.equal(other, (exact * 0.3).to(dtype))


def test_an_inference_rounds_only_its_results(device):
    def function(x, y):
        total = x * y
        return total, total.sum(-1)

    x, y = torch.randn(2, ROWS, 24, device=device).bfloat16()
    _, found = torch.compile(function, backend="tsfuser")(x, y)
    exact = (x.double() * y.double()).sum(-1)
    assert (found.double() - exact).abs().max() <= 1.01 * (exact.bfloat16().double() - exact).abs().max()


MIXED = {
    "layer": (lambda x, w, b: F.gelu(F.layer_norm(x * 2, (16,), w, b)), (6, 9, 16), 16),
    "group": (lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), (6, 8, 15), 8),
    "batch": (lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)), (6, 8, 5, 5), 8),
    "running": (
        lambda x, w, b: F.relu(F.batch_norm(x, w.detach() * 0, w.detach().abs(), w, b, True)),
        (6, 8, 5, 5),
        8,
    ),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("norm", MIXED)
def test_parameters_of_float32_beside_16_bits(norm, dtype):
    """torch traces the statistics that the forward saves in 16 bits, where its kernel for the CPU gives
    float32: the backward is fused all the same, and no gradient is further away than eager's."""
    function, sizes, channels = MIXED[norm]
    given = [torch.randn(sizes, dtype=dtype), torch.rand(channels), torch.rand(channels)]
    gradient = torch.randn(sizes, dtype=dtype)
    compiled = torch.compile(function, backend="tsfuser")

    def gradients(run, double=False):
        leaves = [x.to(torch.float64 if double else x.dtype).requires_grad_() for x in given]
        return torch.autograd.grad(run(*leaves), leaves, gradient.double() if double else gradient)

    ours, eager, exact = gradients(compiled), gradients(function), gradients(function, double=True)
    for a, e, x in zip(ours, eager, exact):
        assert a.dtype == e.dtype
        assert (a - x).abs().max() <= 1.1 * (e - x).abs().max() + 1e-5
    leaves = [x.requires_grad_() for x in given]
    assert ", 0 not fused" in str(tsfuser.explain(compiled, *leaves)).splitlines()[0]
