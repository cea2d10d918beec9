"""What the backward computes again instead of having it kept."""

import os

import pytest
import torch
from torch import Tensor

import tsfuser
from kit import prefork
from kit.opsweep import plain
from kit.support import ROOT, assert_matches, fresh, no_fallback, script, train
from tsfuser import options
from tsfuser.frontends.torchscript import passes
from tsfuser.graph.wrapper import GROUP, is_tensor

pytestmark = pytest.mark.graphs


def rms_norm(x: Tensor, w: Tensor):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def gated(x: Tensor, w: Tensor):
    return torch.nn.functional.gelu(x + w) * torch.sigmoid(x)


def centred(x: Tensor, w: Tensor):
    d = x - x.mean(-1, keepdim=True)
    return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5) * w


def cast_norm(x: Tensor, w: Tensor):
    """As transformers' Llama has it; the casts change nothing."""
    h = (x + 1.0).to(torch.float32)
    h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(torch.float32)


def shared(x: Tensor, w: Tensor):
    """The result that could be dropped is one of the function's."""
    y = torch.exp(x * w)
    return y, torch.tanh(y) * w


def mixed(x: Tensor, w: Tensor):
    """Values of two dtypes."""
    h = x.to(torch.bfloat16)
    return (h * w.to(torch.bfloat16)).float() * torch.exp(h.float() * 0.25)


def wide_softmax(x: Tensor, w: Tensor):
    return torch.softmax(x * 0.5 + w, -1, dtype=torch.float32) * 2.0


def softmax_of_wide(x: Tensor, w: Tensor):
    return torch.softmax((x * 0.5 + w).to(torch.float32), -1) * 2.0


PROGRAMS = [rms_norm, gated, centred, mixed, cast_norm, wide_softmax, softmax_of_wide]


def operands(device, sizes=(7, 65)):
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(s, generator=generator).to(device).requires_grad_() for s in (sizes, sizes[-1:])]


def forward_tensors(scripted, x, w):
    """How many tensors of all elements the groups of the forward store."""
    from tsfuser.frontends.torchscript import passes

    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(3):
            train(scripted, (x, w), calls=1)
    [subgraph] = [
        n.g("Subgraph")
        for o in seen
        for n in o.graph.findAllNodes(GROUP, True)
        if any(word in str(n.g("Subgraph")) for word in ("exp", "rsqrt", "gelu(", "softmax("))
    ][:1]
    return sum(
        v.type().kind() == "TensorType" and v.type().sizes() == list(x.shape) for v in subgraph.outputs()
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients(device, program):
    x, w = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, (x, w))
    want, expected = train(program, (x, w), calls=1)
    exact, exact_gradients = train(program, [t.detach().double().requires_grad_() for t in (x, w)], calls=1)
    for got, eager, true in zip([out, *gradients], [want, *expected], [exact, *exact_gradients]):
        assert_matches(got, eager, true, ops=80, precision=torch.bfloat16 if program is mixed else None)


@pytest.mark.parametrize("program", [centred, rms_norm])
def test_the_backward_reads_a_value_once(device, program):
    """Autodiff keeps each operand of each op: `d * d` and `d / s` keep d three times."""
    x, w = operands(device)
    with tsfuser.fuser(), passes.watching() as seen:
        train(fresh(program), (x, w), calls=4)
    groups = [n for o in seen for n in o.graph.findAllNodes(GROUP, True)]
    whole = [
        sum(is_tensor(v) and v.type().sizes() == list(x.shape) for v in n.g("Subgraph").inputs())
        for n in groups
    ]
    assert max(whole) == 2  # the gradient and d, or x


def test_a_product_of_what_is_kept_is_not_stored(device):
    assert forward_tensors(fresh(rms_norm), *operands(device)) == 1


def test_what_is_asked_for_its_device_is_not_stored(device):
    """As autodiff's formula for `to` asks the operand: stored are x + 1 and the result."""
    assert forward_tensors(fresh(cast_norm), *operands(device)) == 2


@pytest.mark.parametrize("program", [wide_softmax, softmax_of_wide])
def test_what_nothing_reads_any_more_is_not_stored(device, program):
    """Autodiff's formulas ask the operand of softmax, or of the cast, for its dtype: stored are softmax and
    the result."""
    narrow = [t.detach().to(torch.bfloat16).requires_grad_() for t in operands(device)]
    assert forward_tensors(fresh(program), *narrow) == 2


def narrow_norm(x: Tensor, w: Tensor):
    return torch.nn.functional.silu(torch.layer_norm(x, [65], w, w).float())


def softmax_in_its_dtype(x: Tensor, w: Tensor):
    return torch.softmax(x * w, -1, dtype=x.dtype) * 2.0


@pytest.mark.parametrize(
    "program, dtype, bytes",  # of an element, besides x
    [
        (narrow_norm, torch.bfloat16, 2),
        (softmax_in_its_dtype, torch.float32, 0),
    ],
)
def test_the_bytes_that_are_kept(device, program, dtype, bytes):
    """Of a cast to float32 its operand, also if autodiff keeps that only to ask for its dtype."""
    x, w = (t.detach().to(dtype).requires_grad_() for t in operands(device))
    scripted, saved = fresh(program), []
    with tsfuser.fuser():
        for _ in range(3):
            train(scripted, (x, w), calls=1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            scripted(x, w)
    whole = [t for t in saved if t.shape == x.shape and t.data_ptr() != x.data_ptr()]
    assert sum(t.itemsize for t in whole) <= bytes


def test_a_result_of_the_program_is_kept_once(device):
    x, w = operands(device)
    scripted = fresh(shared)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            x.grad = w.grad = None
            y, z = scripted(x, w)
            (y * 0.5 + z).sum().backward()
        got = [y, z, x.grad, w.grad]
    x.grad = w.grad = None
    y, z = shared(x, w)
    (y * 0.5 + z).sum().backward()
    for a, b in zip(got, [y, z, x.grad, w.grad]):
        assert_matches(a, b, ops=80)


@pytest.mark.parametrize("program", [rms_norm, gated, centred])
def test_double_backward(device, program):
    x, w = (t.detach().double().requires_grad_() for t in operands(device, (3, 5)))
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            train(scripted, (x, w), calls=1)
        numbers = {"nondet_tol": 1e-12}  # not each call is fused
        assert torch.autograd.gradcheck(scripted, (x, w), **numbers)
        assert torch.autograd.gradgradcheck(scripted, (x, w), **numbers)


def asked_for_its_dtype(x: Tensor, w: Tensor):
    """The product is a result of the differentiable graph, which the program only asks for its dtype."""
    v = torch.matmul(x.t(), x)
    h = v.to(torch.float64)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (w.to(torch.float64) * h).to(v.dtype)


def asked_for_its_sizes(x: Tensor, w: Tensor):
    v = torch.matmul(x.t(), x)
    h = torch.tanh(v.to(torch.float64) * w) * w
    return torch.matmul(h, x.t()).view(v.size(1), x.size(0))


def asked_by_another(x: Tensor, w: Tensor):
    v = torch.matmul(x.t(), x)
    h = v.to(torch.float64)
    return torch.exp(h * w).type_as(v) * h.pow(3)


def given_and_left(x: Tensor, w: Tensor):
    v = torch.matmul(x.t(), x)
    h = v.to(torch.float64)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    return h, v.detach()


def factor_is_asked(x: Tensor, w: Tensor):
    """What asks a computed product for its dtype asks its factor: that is a result, and kept, too."""
    h = torch.tanh(x) * x
    return (w * h.to(torch.float64)).to(h.dtype)


def factor_of_a_norm_is_asked(x: Tensor, w: Tensor):
    x = torch.tanh(x) * x
    dtype = x.dtype
    h = x.to(torch.float64)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(dtype)


def left_and_kept(x: Tensor, w: Tensor):
    h = torch.exp(x * 0.5)
    return torch.sigmoid(h * w) * h, h.detach()


@pytest.mark.parametrize("disabled", [(), ("recompute",)])
@pytest.mark.parametrize(
    "program",
    [
        asked_for_its_dtype,
        asked_for_its_sizes,
        asked_by_another,
        given_and_left,
        factor_is_asked,
        factor_of_a_norm_is_asked,
        left_and_kept,
    ],
)
def test_double_backward_through_results_without_a_gradient(device, program, disabled):
    """The backward reads what they are computed of, or themselves, or computes something of that."""
    x, w = (t.detach().double().requires_grad_() for t in operands(device, (3, 5)))
    scripted = fresh(program)

    def first(*given):
        results = scripted(*given)
        return results if isinstance(results, Tensor) else results[0]

    with options.override(disable=disabled), tsfuser.fuser():
        for _ in range(4):
            train(first, (x, w), calls=1)
        assert torch.autograd.gradcheck(first, (x, w), nondet_tol=1e-12)
        assert torch.autograd.gradgradcheck(first, (x, w), nondet_tol=1e-12)


def test_a_mask_is_not_drawn_again(device):
    """The gradient is that of the mask that the forward had."""

    def program(x: Tensor, w: Tensor):
        return torch.dropout(torch.exp(x * w), 0.5, True) * w

    x, w = operands(device, (64, 129))
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            x.grad = None
            y = scripted(x, w)
            y.sum().backward()
    expected = torch.where(y != 0, torch.exp(x * w) * 2 * w * w, 0.0)
    torch.testing.assert_close(x.grad, expected)


def test_the_backward_takes_the_branches_of_the_forward(device):
    """Though what a group stores of `y` has fewer digits than what it compares."""

    def program(x: Tensor, w: Tensor, v: Tensor):
        y = torch.softmax(x * w, -1) * 4.0
        y = y - y.mean(-1, True)
        z = torch.layer_norm(y, [8]) * w
        return torch.where(z > 0.3, v * 64.0, v), z * w, torch.where(y > 0.3, v * 64.0, v), y * w

    x, w = (t.detach().bfloat16().requires_grad_() for t in operands(device, (512, 8)))
    v = torch.ones_like(x, requires_grad=True)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            y, p, z, q = scripted(x, w, v)
            [first] = torch.autograd.grad(y.sum() + p.sum(), v, retain_graph=True)
            [second] = torch.autograd.grad(z.sum() + q.sum(), v)
    assert torch.equal(first, y) and torch.equal(second, z)


def test_a_write_to_a_result_is_seen(device):
    """A result of the program that the backward needs is kept, and not computed again."""

    def program(x: Tensor, w: Tensor):
        h = x * w
        y = torch.exp(h)
        return y, torch.tanh(y * w) * h

    x, w = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            y, z = scripted(x, w)
            z.sum().backward(retain_graph=True)
        with torch.no_grad():
            y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_what_is_written_to_before_the_backward(device):
    """Autodiff keeps x + w, not x, and so does the forward."""

    def program(x: Tensor, w: Tensor):
        return torch.nn.functional.gelu(x + w) * w

    x, w = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            w.grad = None
            source = x.detach().clone()
            y = scripted(source, w)
            source.fill_(float("nan"))
            y.sum().backward()
        got = w.grad
    w.grad = None
    program(x.detach(), w).sum().backward()
    assert_matches(got, w.grad, ops=80)


def test_what_is_cast_to_its_own_dtype_may_be_written_to_before_the_backward(device):
    """Autodiff keeps the cast's operand, which nothing reads: values are not computed of it again."""

    def program(x: Tensor):
        v = x.to(torch.float32) - 1.5
        return torch.pow(2.0, -v * v)

    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            x = torch.linspace(-2, 2, 33, device=device, requires_grad=True)
            y = scripted(x)
            with torch.no_grad():
                x.add_(1)
            y.sum().backward()
    x, got = torch.linspace(-2, 2, 33, device=device, requires_grad=True), x.grad
    program(x).sum().backward()
    assert_matches(got, x.grad, ops=8)


SWITCHED = """
import sys; sys.path[:0] = ["tests", "tests/e2e"]
from test_recompute import forward_tensors, fresh, operands, rms_norm
print(forward_tensors(fresh(rms_norm), *operands("cpu")))
"""


@pytest.mark.parametrize("words, stored", [("", 1), ("recompute", 2)])
def test_the_option(words, stored):
    environment = {**os.environ, "PYTORCH_NVFUSER_DISABLE": words, "PYTHONPATH": str(ROOT)}
    run = prefork.run(["-c", SWITCHED], env=environment, cwd=ROOT)
    assert run.stdout.split() == [str(stored)], run.stderr


def test_what_a_product_of_matrices_reads_is_kept():
    """Its backward would have it in memory all the same."""
    from tsfuser.frontends.torchscript.training.differentiable import rewrite

    def graphs(reader):
        forward = torch._C.parse_ir(
            "graph(%x : Tensor, %w : Tensor):\n  %n : Tensor = aten::mul(%x, %w)\n  return (%n, %x, %w, %n)"
        )
        forward.eraseOutput(0)
        backward = torch._C.parse_ir(
            f"graph(%x : Tensor, %w : Tensor, %n : Tensor):\n  %g : Tensor = {reader}(%n, %x)\n"
            "  %h : Tensor = aten::mul(%g, %w)\n  return (%h)"
        )
        return forward, backward

    def kept(reader):
        forward, *_ = rewrite(*graphs(reader), 0, [], [], [0, 1, 2])
        return [value.node().kind() for value in forward.outputs()]

    assert kept("aten::mm") == ["prim::Param", "prim::Param", "aten::mul"]  # x, w, n
    assert kept("aten::mul") == ["prim::Param", "prim::Param"]  # x, w


def test_a_cast_to_what_may_be_integers_is_kept():
    """It would jump. What has a gradient is no integer."""
    from tsfuser.frontends.torchscript.training.differentiable import rewrite

    def graphs(gradients):
        forward = torch._C.parse_ir(
            "graph(%x : Tensor, %w : Tensor):\n  %n : Tensor = aten::type_as(%x, %w)\n  return (%x, %w, %n)"
        )
        names = "".join(f"%g{k} : Tensor, " for k in range(gradients))
        return forward, torch._C.parse_ir(
            f"graph({names}%x : Tensor, %w : Tensor, %n : Tensor):\n  %r : Tensor = aten::mul(%n, %x)\n"
            f"  %s : Tensor = aten::mul(%r, {'%g0' if gradients else '%w'})\n"
            "  %t : Tensor = aten::mul(%s, %w)\n  return (%t)"
        )

    forward, *_ = rewrite(*graphs(0), 0, [], [], [0, 1, 2])
    assert [value.node().kind() for value in forward.outputs()] == [
        "prim::Param",
        "prim::Param",
        "aten::type_as",
    ]  # x, w, n
    forward, _, gradients, kept = rewrite(*graphs(1), 0, [2], [], [0, 1, 2])
    assert [value.node().kind() for value in forward.outputs()] == ["prim::Param", "prim::Param"]  # x, w
    assert (gradients, kept) == ([], [0, 1])


def gated_linear(x: Tensor, w: Tensor, v: Tensor):
    """SwiGLU: under autocast both products are narrow, and multiplied in float32."""
    return torch.nn.functional.silu(torch.nn.functional.linear(x, w)) * torch.nn.functional.linear(x, v)


def autocast_tensors(device):
    generator = torch.Generator().manual_seed(12)
    return [
        torch.randn(s, generator=generator).to(device).requires_grad_() for s in ((6, 16), (24, 16), (24, 16))
    ]


def kept_under_autocast(device):
    """The tensors of its result's sizes that the forward of `gated_linear` saves: (kind of op, dtype)."""
    from tsfuser.frontends.torchscript.training import differentiable

    rewritten, whole = [], differentiable.recompute.compute_again

    def watched(kept, *rest):
        dropped = whole(kept, *rest)
        rewritten.append([v.node().kind() for j, v, _ in kept.of_outputs() if j not in dropped])
        return dropped

    scripted, tensors = fresh(gated_linear), autocast_tensors(device)
    differentiable.recompute.compute_again = watched
    try:
        with tsfuser.fuser(), torch.autocast(device, torch.bfloat16):
            for _ in range(3):
                scripted(*tensors).float().sum().backward()
    finally:
        differentiable.recompute.compute_again = whole
    return rewritten[0]


def test_under_autocast_the_narrow_product_is_kept(device):
    kept = kept_under_autocast(device)
    assert kept.count("aten::linear") == 2  # silu's operand, and the other factor
    assert "aten::_autocast_to_full_precision" not in kept


def test_gradients_under_autocast(device):
    scripted, tensors = fresh(gated_linear), autocast_tensors(device)

    def run(function, calls=1):
        for _ in range(calls):
            for t in tensors:
                t.grad = None
            with torch.autocast(device, torch.bfloat16):
                out = function(*tensors)
            out.float().square().sum().backward()
        # TorchScript's autocast multiplies in float32
        return [out.detach().float(), *(t.grad for t in tensors)]

    with tsfuser.fuser(), no_fallback():
        got = run(scripted, 4)
    for mine, theirs in zip(got, run(gated_linear)):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() < 2e-2 * theirs.abs().max()


def test_second_derivatives_under_autocast(device):
    """Through the narrow product, too, whose gradient comes in its dtype."""
    scripted, tensors = fresh(gated_linear), autocast_tensors(device)

    def second(function):
        with torch.autocast(device, torch.bfloat16):
            out = function(*tensors)
        first = torch.autograd.grad(out.float().square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    expected = second(gated_linear)
    with tsfuser.fuser():
        for _ in range(4):
            got = second(scripted)
    for mine, theirs in zip(got, expected):
        assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_what_a_product_reads_is_not_computed_again(device):
    """It is in memory anyway."""
    from tsfuser.frontends.torchscript.training.differentiable import rewrite

    forward = torch._C.parse_ir(
        "graph(%x : Tensor, %w : Tensor):\n  %n : Tensor = aten::mul(%x, %w)\n"
        "  %y : Tensor = aten::mm(%n, %w)\n  return (%y, %x, %w, %n)"
    )
    backward = torch._C.parse_ir(
        "graph(%x : Tensor, %w : Tensor, %n : Tensor):\n  %g : Tensor = aten::mul(%n, %x)\n  return (%g)"
    )
    forward, *_ = rewrite(forward, backward, 1, [], [], [1, 2, 3])
    assert [v.node().kind() for v in forward.outputs()] == ["aten::mm", "prim::Param", "aten::mul"]


def test_what_no_gradient_passes_through_asks_for_none(device):
    """TorchScript differentiates a part of a program whose inputs ask for no gradient, and has a view in it
    ask for one that it cannot get."""

    def program(x: Tensor, c: Tensor):
        v = torch.std(c * 0.5, [-1], unbiased=False, keepdim=False)
        return torch.exp(-x * x), torch.sigmoid(v * 2.0) * v, v.squeeze()

    x, _ = operands(device)
    c = torch.randn(5, 1, device=device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            got = scripted(x, c)
    want = program(x, c)
    assert [t.requires_grad for t in got] == [True, False, False]
    for mine, theirs in zip(got, want):
        assert_matches(mine, theirs, ops=8)
    [gradient] = torch.autograd.grad(got[0].sum(), x)
    assert_matches(gradient, torch.autograd.grad(want[0].sum(), x)[0], ops=8)


def test_what_autocast_need_not_cast_is_the_tensor_itself(device):
    """Read in the group, too, it would be a result of it, and copied."""
    graph = torch._C.parse_ir(
        """graph(%x : Tensor):
             %yes : bool = prim::Constant[value=1]()
             %wide : Tensor = aten::_autocast_to_full_precision(%x, %yes, %yes)
             %square : Tensor = aten::mul(%wide, %wide)
             %y : Tensor = aten::exp(%square)
             %both : (Tensor, Tensor) = prim::TupleConstruct(%wide, %y)
             return (%both)"""
    )
    function = torch._C._create_function_from_graph("cast", graph)
    x = torch.randn(5, 33, device=device)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(3):
            wide, y = function(x)
        assert wide.data_ptr() == x.data_ptr() and torch.allclose(y, torch.exp(x * x))
        for _ in range(3):
            wide, y = function(x.bfloat16())
    assert wide.dtype == torch.float32 and torch.equal(wide, x.bfloat16().float())
    first = next(group for o in seen for group in o.graph.findAllNodes(GROUP, True))
    assert first.outputsSize() == 1


@pytest.mark.parametrize("view", ["x", "x.reshape(-1)", "x.view(6)", "x.transpose(0, 1)", "x.unsqueeze(0)"])
@pytest.mark.parametrize(
    "text", ["torch.log_softmax(h, -1)", "torch.softmax(h, 0)", "torch.tanh(h) * h", "torch.exp(h) + h * 2"]
)
def test_an_input_that_is_cast_may_be_written_to_before_the_backward(device, view, text):
    """Its cast is kept, not computed again of a view of the input, which autodiff keeps, too."""
    source = f"def f(x: Tensor):\n    h = {view}.to(torch.float16)\n    return {text}\n"
    eager, scripted = plain(source), script(source)
    gradients = []
    for function in (eager, scripted):
        x = torch.linspace(-2, 2, 6, device=device).view(2, 3).requires_grad_()
        with tsfuser.fuser():
            for _ in range(5):
                out = function(x)
                with torch.no_grad():
                    x.mul_(0.5)
                [gradient] = torch.autograd.grad(out.float().square().sum(), x)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02)
