"""Gradients of another dtype than the results that they are for: where a half meets a float, autodiff's
formulas hand on a gradient of floats."""

import contextlib
from typing import Optional

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.opsweep import plain
from kit.support import all_graphs, assert_matches, fresh, no_fallback, script, train

pytestmark = pytest.mark.graphs

#: Results of [4, 4] of ops whose derivatives refuse a gradient of a wider dtype.
STRICT = (
    "torch.mm(x, w)",
    "torch.mv(x, w[0])",
    "torch.bmm(x.unsqueeze(0), w.unsqueeze(0)).squeeze(0)",
    "torch.matmul(x.unsqueeze(0), w).squeeze(0)",
    "torch.addmm(w[0], x, w)",
    "F.linear(x, w, w[0])",
    "torch.softmax(x, 1)",
    "torch.log_softmax(x, 1)",
    "F.layer_norm(x, [4], w[0], w[1])",
    "F.batch_norm(x, None, None, w[0], w[1], True)",
    "F.group_norm(x, 2, w[0], w[1])",
    "F.rms_norm(x, [4], w[0])",
    "F.adaptive_avg_pool2d(x.view(1, 4, 4), [4, 4]).squeeze(0)",
    "F.adaptive_avg_pool1d(x.unsqueeze(0), 4).squeeze(0)",
    "F.adaptive_avg_pool3d(x.view(1, 1, 4, 4), [1, 4, 4]).view(4, 4)",
)


def functions(*lines):
    body = "".join(f"    {line.replace('F.', 'torch.nn.functional.')}\n" for line in lines)
    source = f"def f(x: Tensor, w: Tensor, c: Tensor):\n{body}"
    return plain(source), script(source)


def operands(device, dtype, needed=True):
    generator = torch.Generator().manual_seed(2)
    x, w, c = (torch.randn(4, 4, generator=generator).to(device) for _ in range(3))
    return x.to(dtype).requires_grad_(needed), w.to(dtype).requires_grad_(needed), c


def check(eager, scripted, inputs, precision, autocast=None):
    """Gradients of eager's dtypes, and its values, before and after fusing."""
    casts = torch.autocast(inputs[0].device.type, autocast) if autocast else contextlib.nullcontext()

    def run(f):
        def call(*given):
            with casts:
                return f(*given)

        return call

    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    reference = train(eager, exact, calls=1)
    want = train(run(eager), inputs, calls=1)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            found = train(run(scripted), inputs, calls=1)
            for mine, theirs, true in zip(found[1], want[1], reference[1]):
                assert_matches(mine, theirs, true, ops=200, strides=False, precision=precision)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_that_is_wider_than_its_result(device, dtype):
    """Directly, behind an op that hands the gradient on, and added to one that the call brings."""
    lines = ["x = x * 1.5", "w = w * 0.75", "y = c"]
    for k, result in enumerate(STRICT):
        lines.append(f"y = y + {('{}', 'torch.tanh({})', '({} * 0.5)')[k % 3].format(result)} * c")
    eager, scripted = functions(*lines, "return y")
    check(eager, scripted, operands(device, dtype), dtype)


@pytest.mark.parametrize("wanted", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_a_softmax_in_another_dtype(device, op, dtype, wanted):
    """Autodiff's formula asks for the gradient in the operand's dtype, which torch's op refuses."""
    eager, scripted = functions(
        f"y = torch.{op}(x * 0.5 + w[0], 1, dtype={wanted})",
        f"z = torch.{op}(torch.tanh(x).unsqueeze(0), -1, {wanted}).to(x.dtype)",
        "return y * c + z.squeeze(0) * w",
    )
    check(eager, scripted, operands(device, dtype), max(dtype, wanted, key=lambda d: torch.finfo(d).eps))


def softmax_in(x: Tensor, w: Tensor, wanted: Optional[torch.dtype]):
    return torch.softmax(torch.tanh(x * w), 1, wanted) * 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.float64])
def test_a_softmax_whose_dtype_is_an_argument(device, dtype, wanted):
    scripted = fresh(softmax_in)
    x, w, _ = operands(device, dtype)

    def run(f):
        y = f(x, w, wanted)
        return [y, *torch.autograd.grad(y[:, 1].sum(), (x, w))]

    true = run(softmax_in)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            for mine, theirs in zip(run(scripted), true):
                assert_matches(mine, theirs, ops=8, precision=dtype)


def test_a_gradient_that_surely_has_its_dtype_is_not_cast(device):
    """The engine casts what comes, and a tanh hands on what it gets."""
    for line, casts in (("torch.tanh(torch.mm(x, w) * 0.5)", 0), ("torch.tanh(torch.mm(x, w)) * c", 1)):
        scripted = functions(f"return {line}")[1]
        with tsfuser.fuser():
            train(scripted, operands(device, torch.float32))
        graphs = [str(graph) for graph in all_graphs(scripted)]
        assert max(text.count("aten::type_as") for text in graphs) == casts


def test_calls_of_other_dtypes_than_the_first(device):
    eager, scripted = functions("y = torch.mm(torch.tanh(x), w)", "return torch.relu(y) * c")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(eager, scripted, operands(device, dtype), dtype)


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16])
def test_autocast_to_the_other_dtype_of_16_bits(device, given):
    """Ops cast such tensors themselves; the graph shows casts of float32 only."""
    other = torch.bfloat16 if given == torch.float16 else torch.float16
    eager, scripted = functions("return torch.matmul(x.transpose(0, 1), w) * 0.5")
    check(eager, scripted, operands(device, given), torch.bfloat16, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_asked_for_its_dtype_may_be_written_to_before_the_backward(device, dtype):
    """Eager's casts do not save it."""
    eager, scripted = functions("return torch.tanh(x.type_as(c))")
    x, w, c = operands(device, torch.float32)
    x, w = x.detach().to(dtype), w.detach()

    def gradient(f):
        leaf = x.clone().requires_grad_()
        y = f(leaf, w, c)
        with torch.no_grad():
            leaf.add_(1)
        y.sum().backward()
        return leaf.grad

    with tsfuser.fuser():
        for _ in range(4):
            assert_matches(gradient(scripted), gradient(eager), ops=20, precision=torch.float32)


#: What is made of x[6, 8], in 16 bits, and c[6, 8], a float, so that x has a gradient of floats.
WIDE = {
    "a sum": "return torch.tanh(x + c) * c",
    "two readers": "return (torch.tanh(x) * c + x.exp() * w[0]) * c",
    "views": "y = x.view(2, 3, 8).transpose(0, 1)\n    return torch.tanh(y * c.view(3, 2, 8)) * 0.5",
    "both operands": "return torch.tanh(x + c) * (x * w[0])",
}


def casts_of_the_engine(result, step):
    """How many casts the backward of `result` makes on its own."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result.backward(step)
    return sum(event.name == "aten::_to_copy" for event in profile.events())


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_backward_gives_in_the_dtype_of_the_input(device, name, dtype):
    """Also where a later call brings another dtype for either."""
    source = f"def f(x: Tensor, w: Tensor, c: Tensor):\n    {WIDE[name]}\n"
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser(), no_fallback():
        wide, narrow = torch.float32, dtype
        for call, dtypes in enumerate([(narrow, wide)] * 4 + [(wide, wide), (wide, narrow), (narrow, wide)]):
            generator = torch.Generator().manual_seed(4)
            x, c = (torch.randn(6, 8, generator=generator).to(device, t).requires_grad_() for t in dtypes)
            w = torch.ones(1, 8, device=device)
            step = torch.randn(eager(x, w, c).shape, generator=generator).to(device)
            for _ in range(2):
                found = []
                for function in (scripted, eager):
                    result = function(x, w, c)
                    x.grad = c.grad = None
                    count = casts_of_the_engine(result, step.to(result.dtype))
                    found.append([result, x.grad, c.grad])
                    if function == scripted:
                        casts = count
                x.grad = c.grad = None
                doubles = [t.detach().double().requires_grad_() for t in (x, w, c)]
                exact = eager(*doubles)
                exact.backward(step.to(found[0][0].dtype).double())
                for mine, theirs, true in zip(*found, (exact, doubles[0].grad, doubles[2].grad)):
                    assert_matches(mine, theirs, true, ops=100, strides=False, precision=dtype)
            assert call not in (3, 6) or casts == 0


@pytest.mark.parametrize(
    "norm", ["layer_norm({}, [64], w)", "layer_norm({}, [64], w, c[0])", "layer_norm({}, [64])"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_of_16_bits_with_a_weight_of_floats(device, norm, dtype):
    """Its gradient has the dtype of the operand, not of the weight that it asks for first."""
    if "w" in norm and (device == "cuda" or dtype == torch.float16):
        pytest.skip("eager has no such norm there")
    source = (
        "def f(x: Tensor, w: Tensor, c: Tensor):\n"
        f"    return torch.nn.functional.{norm.format('x + x')} * x\n"
    )
    eager, scripted = plain(source), script(source)
    generator = torch.Generator().manual_seed(8)
    x, w, c = (torch.randn(s, generator=generator).to(device) for s in ((64, 64), (64,), (2, 64)))
    inputs = [x.to(dtype).requires_grad_(), w.requires_grad_(), c.requires_grad_()]
    with tsfuser.fuser():
        for _ in range(5):
            found = train(scripted, inputs, calls=1)
            want = train(eager, inputs, calls=1)
            wide = [t.detach().double().requires_grad_() for t in inputs]
            exact = train(eager, wide, calls=1)
            assert_matches(found[0], want[0], exact[0], ops=100, precision=dtype)
            for mine, theirs, true in zip(found[1], want[1], exact[1]):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert_matches(mine, theirs, true, ops=200, strides=False, precision=dtype)
