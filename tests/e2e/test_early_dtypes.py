"""What asks for the dtype or the device of a result asks what these follow from
(csrc_stubs/torchscript/early_dtypes.cpp), as the noise of a stochastic depth does."""

import itertools
import warnings

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.support import assert_matches, fresh, kinds, script
from tsfuser.frontends.torchscript import passes

pytestmark = pytest.mark.graphs


def scaled(x: Tensor, scale: Tensor, residual: Tensor):
    """The end of a ConvNeXt's block: of the noise everything is known before it is scaled."""
    y = scale * torch.nn.functional.linear(torch.tanh(x), torch.ones_like(x[:3])).permute(1, 0)
    noise = torch.full([y.size(0), 1], 0.5, dtype=y.dtype, device=y.device)
    return y * noise + residual


def added_and_moved(x: Tensor, scale: Tensor, residual: Tensor):
    y = ((torch.sort(x, 0)[0] - scale) * residual).t()
    ones = torch.ones([y.size(0), 1], dtype=y.dtype, device=y.device)
    return torch.sigmoid(y * ones) * y


def extremes(x: Tensor, scale: Tensor, residual: Tensor):
    y = torch.max(torch.sort(x, 0)[0], scale)
    ones = torch.ones([1], dtype=y.dtype, device=y.device)
    return torch.tanh(torch.min(y, residual) * ones) * ones


def rotated(x: Tensor, scale: Tensor, residual: Tensor):
    """A rotary embedding: halves of one tensor are joined the other way round."""
    y = torch.sort(x, 0)[0]
    z = y * scale + torch.cat((-y[..., 2:], y[..., :2]), -1) * residual
    return torch.sigmoid(z * torch.ones([1], dtype=z.dtype, device=z.device)) * z


def operands(device, shapes, dtypes=(torch.float64,) * 3):
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) * 2 for s in shapes]
    return [t.to(device, dtype) for t, dtype in zip(made, dtypes, strict=True)]


SHAPES = {
    scaled: ((6, 5), (3, 1), (3, 6)),
    added_and_moved: ((6, 5), (5,), (6, 1)),
    extremes: ((6, 5), (5,), (6, 1)),
    rotated: ((6, 4), (4,), (6, 1)),
}


def gradients(function, tensors):
    moving = [t.detach().clone().requires_grad_() for t in tensors]
    result = function(*moving)
    return [result.detach(), *torch.autograd.grad(result.double().square().sum(), moving)]


@pytest.mark.parametrize("program", SHAPES)
def test_one_group_computes_what_is_scaled_and_the_rest(device, program):
    tensors, scripted = operands(device, SHAPES[program]), fresh(program)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(4):
            got = gradients(scripted, tensors)
    forward = [o.graph for o in seen if o.graph.findNode("prim::AutogradAllNonZero") is None]
    groups = [kinds(g) for graph in forward for g in graph.findAllNodes("prim::CudaFusionGroup", True)]
    joint = {scaled: 2, added_and_moved: 4, extremes: 4, rotated: 4}[program]
    pointwise = ("aten::mul", "aten::sub", "aten::max", "aten::min", "aten::maximum", "aten::minimum")
    assert max(sum(kind in pointwise for kind in g) for g in groups) >= joint
    for mine, theirs in zip(got, gradients(program, tensors), strict=True):
        torch.testing.assert_close(mine, theirs)


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("program", [added_and_moved, extremes, rotated])
def test_other_dtypes_and_ranks(device, program, request):
    """In later calls, too, the result has eager's dtype: a tensor without dims promotes less. By default each
    third of the combinations, in which all shapes and dtypes are."""
    scripted, step = fresh(program), 1 if request.config.getoption("--long") else 3
    with tsfuser.fuser():
        for _ in range(4):
            gradients(scripted, operands(device, SHAPES[program]))
        x, scale, residual = SHAPES[program]
        ranks = (SHAPES[program], (x, (), residual), (x, scale, ()), (scale, (), ()))
        cases = itertools.product(itertools.product(DTYPES, DTYPES[:2], DTYPES[2:]), ranks)
        for dtypes, shapes in itertools.islice(cases, 0, None, step):
            tensors = operands(device, shapes, dtypes)
            got, want = gradients(scripted, tensors), gradients(program, tensors)
            true = gradients(program, [t.double() for t in tensors])
            rounding = max(torch.finfo(dtype).eps for dtype in dtypes)
            for mine, theirs, exact in zip(got, want, true, strict=True):
                assert mine.dtype == theirs.dtype
                allowed = 2 * (theirs - exact).abs().max() + 4 * rounding * exact.abs().max()
                assert (mine - exact).abs().max() <= allowed


@pytest.mark.parametrize("program", [added_and_moved, extremes])
def test_whole_numbers(device, program):
    scripted, dtypes = fresh(program), (torch.int32, torch.float32, torch.int64)
    with tsfuser.fuser():
        for _ in range(5):
            got = scripted(*operands(device, SHAPES[program], dtypes))
    assert_matches(got, program(*operands(device, SHAPES[program], dtypes)), ops=8)


RANKS = {
    "gets a dim": "y = a * b; y.unsqueeze_(0); z = y + x",
    "a copy gets a dim": "y = a.clone(); y.unsqueeze_(0); z = y + x",
    "loses its dims": "y = x.double().mean(0, keepdim=True) * b; y.squeeze_(); z = y * x",
    "an operand of an operand": "y = a * b; u = y * 2.0 + y; y.unsqueeze_(0); z = (y - u) * x",
    "is joined": "y = torch.cat([-a[None], a.unsqueeze(0) * b]); z = y.sum() * x[:1] + (y * b)[:1]",
    "gets a dim and is joined": "y = a.neg(); y.unsqueeze_(0); z = torch.cat([y, -y, y]) + x",
    "loses a dim behind a join": "y = torch.cat([b[None], -b[None]])[:1]; y.squeeze_(); z = y * x + x",
    "is resized": "y = a * a; torch.exp(x.double(), out=y); z = y + x",
}


@pytest.mark.parametrize("program", RANKS)
@pytest.mark.parametrize("training", [False, True])
def test_an_operand_whose_rank_changes(device, program, training):
    """A tensor without dims promotes less, and an op in place may give it some, or take them."""
    if training and program == "is resized":
        pytest.skip("an error in eager")
    lines = [*RANKS[program].split("; "), "return z * torch.ones([3], dtype=z.dtype, device=z.device)"]
    text = "\n    ".join(("def f(a, b, x):", *lines)) + "\n"
    scripted = script(text)
    exec(text, {"torch": torch}, eager := {})
    a, b = (torch.tensor(n, dtype=torch.float64, device=device) for n in (0.5, 1.5))
    x = torch.randn(3, device=device)
    with tsfuser.fuser(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a resize
        given = lambda: [t.clone().requires_grad_(training) for t in (a, b, x)]
        want = eager["f"](*given())
        for _ in range(5):
            got = scripted(*given())
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)


def test_a_number_on_the_cpu_stands_beside_any_device(device):
    def program(x: Tensor, number: Tensor):
        y = (number * torch.sort(x, 0)[0]) * 2.0
        z = number + torch.sort(x, 0)[0]
        return y * torch.ones([1], dtype=y.dtype, device=y.device), z * torch.ones(
            [1], dtype=z.dtype, device=z.device
        )

    x, number = torch.randn(4, 3, device=device), torch.tensor(0.5, dtype=torch.float64)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(5):
            got = scripted(x, number)
    for mine, theirs in zip(got, program(x, number), strict=True):
        assert_matches(mine, theirs, ops=4)


def test_batch_norm(device):
    """Its result has its input's dtype, so that the noise needs not wait for it."""

    def program(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor):
        y = torch.nn.functional.batch_norm(torch.sort(x, 0)[0], None, None, weight, bias, True)
        noise = torch.full([y.size(0), 1, 1, 1], 0.5, dtype=y.dtype, device=y.device)
        return y * noise + residual

    def call(function, dtype):
        x, residual = (torch.randn(4, 3, 5, 5, device=device).to(dtype).requires_grad_() for _ in range(2))
        parameters = [torch.rand(3, device=device).requires_grad_() for _ in range(2)]
        result = function(x, *parameters, residual)
        return [result.detach(), *torch.autograd.grad(result.double().square().sum(), [x, *parameters])]

    scripted = fresh(program)
    with tsfuser.fuser(), passes.watching() as seen:
        for dtype in (torch.float32,) * 4 + (torch.bfloat16,):
            torch.manual_seed(3)
            got = call(scripted, dtype)
            torch.manual_seed(3)
            want = call(program, dtype)
            for mine, theirs in zip(got, want, strict=True):
                assert mine.dtype == theirs.dtype
                assert (mine - theirs).abs().max() <= 4 * torch.finfo(dtype).eps * theirs.abs().max()
    groups = [kinds(g) for o in seen for g in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    assert any("aten::mul" in g and any("batch_norm" in kind for kind in g) for g in groups)
