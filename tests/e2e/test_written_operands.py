"""Operands and results that the program writes to between forward and backward: what the backward needs
raises, as in eager, and nothing else does.

All ops of torch's list that the op table names, in each of the forms of kit/written.py, with each choice of
operands that require a gradient. Here every sixth op, another sixth for each form; with --long all.
"""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.batch import collecting
from kit.opinfo import Program, named, programs
from kit.opsweep import plain, single_nodes
from kit.support import assert_matches, script
from kit.written import FORMS, differences
from tsfuser.frontends.torchscript.training import recompute

STEP = 6
#: Ops of which a form was wrong, or which op_db has without weights.
CALLS = {
    "floor": "torch.div(x0, x1, rounding_mode='floor')",
    "dividend": "torch.div(x0, x2, rounding_mode='trunc')",
    "group_norm": "torch.nn.functional.group_norm(x0, 2, x1, x2)",
    "rms_norm": "torch.nn.functional.rms_norm(x0, [4], x1)",
    "rms_norm of a result": "torch.nn.functional.rms_norm(x0 * 2.0, [4], x1)",
    "instance_norm": "torch.nn.functional.instance_norm(x0, weight=x1, bias=x2)",
    "where": "torch.where(x0 > 0.5, x0 * 2, 1.0)",
    "std": "torch.std(x0, [1], False)",
    "leaky_relu": "torch.nn.functional.leaky_relu(x0, 0.125)",
    "relu6": "torch.nn.functional.relu6(x0 * 9.0)",
    "softplus": "torch.nn.functional.softplus(x0 * 9.0)",
    "softplus_small": "torch.nn.functional.softplus(x0, 2.0, 0.5)",
    "viewed": "torch.nn.functional.relu6(x0 * 9.0).view(-1)",
    "erfinv": "torch.erfinv(x0)",
}
#: What gives no gradient to its operand, and is in no differentiable graph.
READERS = ["{}.detach()", "{}.data", "{}.long()", "torch.max({}, 0)[1]", "torch.topk({}, 2)[1]"]
#: What is made of y, a product with v, in ops that are in no differentiable graph, and what is returned.
ENDS = {
    "a comparison": "return torch.sort(y, 0)[0] > 0.5, z",
    "several ops, an index": "u = torch.mm(torch.sort(y, 0)[0], x).trace()\n    return torch.argmax(u), z",
    "another differentiable graph": "u = torch.sort(y, 0)[0]\n    return torch.isnan(u.relu() * v), z",
    "a branch": "u = y\n    if s > 0.0:\n        u = torch.sort(y, 0)[0]\n    return torch.isinf(u), z",
    "a result beside a comparison": "u = torch.sort(y, 0)[0]\n    return u > 0.5, z + u",
    "what is written to": "u = torch.sort(z, 0)[0]\n    u.copy_(y)\n    return torch.isnan(u), z + u",
    "a view that is written to": "u = torch.sort(z, 0)[0]\n    u[0].copy_(y[0])\n    return u > 0.5, z + u",
    "a list": 'u = torch.einsum("ij,jk->ik", [y, z])\n    return torch.isnan(u), z + u',
    "a loop": "u = x\n    for i in range(2):\n        u = torch.sort(y, 0)[0] @ u\n    return u > 0.5, z + u",
}
#: Autodiff calls a function for the gradients of some of them, whether these are needed or not.
VIEWS = [
    "{}.permute([1, 0])",
    "{}.permute([1, 0]).reshape(-1)",
    "{}.permute([0, 1]).contiguous()",
    "{}.permute([0, 1]).flatten().unsqueeze(0)",
    "{}.t().reshape(-1)",
    "{}.transpose(0, 1)",
    "{}.expand(3, 2, 2)[0]",
    "{}.chunk(1, 1)[0].permute([1, 0])",
]
#: Of y, the result of an activation whose derivative autodiff computes from the result.
WRITES = {
    "behind a reader": "z = y * 2.0\n    y.add_(1)\n    return z, y",
    "to a view": "z = y * 2.0\n    y.view(-1).add_(1)\n    return z, y",
    "to a part": "z = y + 2.0\n    y[0].fill_(1.0)\n    return z, y",
    "behind a branch": "z = y * 2.0\n    if y.size(0) > 1:\n        y.add_(1)\n    return z, y",
}


def check(all_programs, form):
    found = []
    with single_nodes(), tsfuser.fuser(), collecting():
        for program in all_programs:
            found += differences(program, form)
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS)
def test_calls(form, call):
    arguments = [torch.rand(2, 4, 4), torch.rand(4) + 0.5, torch.rand(4) + 0.5]
    text = f"def f(x0: Tensor, x1: Tensor, x2: Tensor):\n    return {CALLS[call]}\n"
    check([Program(text, arguments, call)], form)


@pytest.mark.parametrize("form", FORMS)
def test_ops(request, form):
    whole = request.config.getoption("--long")
    ops = [i for i in named() if torch.float32 in i.supported_backward_dtypes("cpu")]
    ops = ops if whole else ops[FORMS.index(form) :: STEP]
    check((p for i in ops for p in tensors_of(i, 4 if whole else 1)), form)


def tensors_of(info, count):
    """Programs of the op that give a tensor, and that TorchScript takes."""
    for program in programs(info, torch.float32, "cpu", count):
        try:
            script(program.source)
            made = plain(program.source)(*program.arguments)
        except Exception:
            continue
        if isinstance(made, Tensor) and made.is_floating_point():
            yield program


@pytest.mark.graphs
@pytest.mark.parametrize("activation", ["relu6({})", "softplus({})"])
@pytest.mark.parametrize("name", WRITES)
def test_the_program_writes_to_the_result(name, activation):
    made = activation.format("x * 9.0 - 2.0")
    text = f"def f(x: Tensor):\n    y = torch.nn.functional.{made}\n    {WRITES[name]}\n"
    eager, scripted = plain(text), script(text)
    with tsfuser.fuser():
        for _ in range(4):
            found = []
            for function in (eager, scripted):
                x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
                made = function(x)
                found.append((*made, *torch.autograd.grad(made[0].sum() + made[1].square().sum(), x)))
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.graphs
@pytest.mark.parametrize("reader", READERS)
def test_an_operand_of_what_only_integers_are_made_of_or_what_has_no_history(reader):
    made = reader.format("(y * v)")
    text = f"def f(x: Tensor, v: Tensor):\n    y = x * 1.5\n    return {made}, y.sin()\n"
    eager, scripted = plain(text), script(text)
    with tsfuser.fuser():
        for function in (eager, *[scripted] * 5):
            x, v = torch.linspace(1, 2, 4).requires_grad_(), torch.rand(4).requires_grad_()
            still, moving = function(x, v)
            with torch.no_grad():
                v.add_(1)
            moving.sum().backward()
            assert v.grad is None and not still.requires_grad
            torch.testing.assert_close(x.grad, 1.5 * torch.cos(1.5 * x.detach()))


@pytest.mark.graphs
@pytest.mark.parametrize("end", ENDS)
def test_the_backward_raises_as_eager_for_an_operand_of_what_others_read(end):
    """Whether it needs the operand depends on whether a gradient comes for any of the readers' results."""
    text = f"def f(x: Tensor, v: Tensor, s: float):\n    z = x * 1.5\n    y = z * v\n    {ENDS[end]}\n"
    eager, scripted = plain(text), script(text)

    def outcome(function):
        x, v = torch.linspace(1, 2, 16).view(4, 4).requires_grad_(), torch.ones(4, 4)
        _, moving = function(x, v, 1.0)
        v.add_(1)
        try:
            return torch.autograd.grad(moving.sum(), x)[0]
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)

    with tsfuser.fuser():
        for _ in range(5):
            expected, found = outcome(eager), outcome(scripted)
            assert (found is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(found, expected)


@pytest.mark.graphs
@pytest.mark.parametrize("cast", ["x.reshape(-1).type_as(x)", "x.view(4).float()", "x.flatten().to(z.dtype)"])
def test_a_view_of_an_operand_that_is_only_cast_is_written(cast):
    """The backward asks it for its dtype."""
    scripted, z = script(f"def f(x: Tensor, z: Tensor):\n    return {cast}\n"), torch.ones(2)
    with tsfuser.fuser():
        for _ in range(5):
            x = torch.ones(2, 2, requires_grad=True)
            y = scripted(x, z)
            with torch.no_grad():
                x.add_(1)
            y.sum().backward()
            assert torch.equal(x.grad, torch.ones(2, 2))


@pytest.mark.graphs
@pytest.mark.parametrize(
    "norm, dtype",
    [
        ("group_norm(x, 1)", torch.float32),
        ("instance_norm(x)", torch.float32),
        ("rms_norm(x, [4])", torch.bfloat16),
        ("rms_norm(x.detach(), [4], w)", torch.float32),
    ],
)
def test_what_a_norm_copies_is_written_where_its_gradient_is_cast(norm, dtype):
    """That of a product may come in another dtype, so it is cast to that of the saved tensor."""
    text = f"def f(x: Tensor, w: Tensor, z: Tensor):\n    return z * torch.nn.functional.{norm}\n"
    eager, scripted, z = plain(text), script(text), torch.tensor(2.0)
    given = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    with tsfuser.fuser():
        for _ in range(5):
            found = []
            for function in (eager, scripted):
                x, w = given.clone().transpose(1, 2).requires_grad_(), torch.ones(4).requires_grad_()
                y = function(x, w, z)
                with torch.no_grad():
                    x.add_(1)
                found.append(torch.autograd.grad(y.sum() + y.square().sum(), [w if "w" in norm else x])[0])
            assert_matches(found[1], found[0], ops=200)


@pytest.mark.graphs
@pytest.mark.parametrize("mode", ["'floor'", "'trunc'", "None"])
@pytest.mark.parametrize("other", ["2", "0.5", "s", "y", "y[0]"])
@pytest.mark.parametrize("view", ["x", "x.unsqueeze(-1)", "x.permute(1, 0)"])
@pytest.mark.parametrize("before", [False, True])
def test_the_dividend_of_a_rounded_quotient_is_written(view, other, mode, before):
    """Also where the function ran without gradients before, so that its fallback is differentiated."""
    quotient = f"torch.div({view}, {other}, rounding_mode={mode})"
    text = f"def f(x: Tensor, y: Tensor, s: float):\n    return {quotient} * 2\n"
    scripted, eager = script(text), plain(text)
    calls = [(scripted, False)] * 4 * before + [(scripted, True)] * 4 + [(eager, True)]
    with tsfuser.fuser():
        for function, leaf in calls:
            x = torch.full((2, 2), 1.5).requires_grad_(leaf)
            out = function(x, torch.ones(2, 2), 3.0)
            if leaf:
                with torch.no_grad():
                    x.add_(1)
                (found,) = torch.autograd.grad(out, x, torch.ones_like(out))
                assert found.shape == x.shape and bool((found == 0).all()) == (mode != "None")


@pytest.mark.graphs
@pytest.mark.parametrize(
    "view", ["{}.permute([0, 1]).contiguous()", "{}.permute([1, 0, 2]).contiguous()", "{}.view(0, 2, 2)"]
)
def test_the_operand_of_a_batch_norm_of_nothing_is_written(view):
    """Eager keeps none."""
    made = view.format("x").replace("[0, 1]", "[0, 1, 2]")
    norm = "torch.nn.functional.batch_norm(y, None, None, training=True, eps=0.25)"
    text = f"def f(x: Tensor):\n    y = {made}\n    return {norm}\n"
    scripted, eager = script(text), plain(text)
    with tsfuser.fuser():
        for function in [scripted] * 5 + [eager]:
            x = torch.ones(0, 2, 2, requires_grad=True)
            y = function(x)
            with torch.no_grad():
                x.add_(1)
            (found,) = torch.autograd.grad(y.sum(), x)
            assert found.shape == x.shape


@pytest.mark.graphs
@pytest.mark.parametrize("view", VIEWS)
def test_the_other_factor_of_a_view_without_gradient_is_written(view):
    """The product keeps only the view."""
    text = f"def f(x: Tensor, w: Tensor):\n    return {view.format('w')} * x\n"
    scripted, w = script(text), torch.rand(2, 2)
    with tsfuser.fuser():
        for _ in range(5):
            x = torch.tensor(2.0, requires_grad=True)
            y = scripted(x, w)
            with torch.no_grad():
                x.add_(1)
            y.sum().backward()
            torch.testing.assert_close(x.grad, w.sum())


@pytest.mark.graphs
@pytest.mark.parametrize("made", ["v.sin() * v", "torch.layer_norm(v, [4])"])
def test_an_operand_that_is_asked_for_its_dtype_has_no_gradient(made):
    """So autograd, which knows that before the backward, need not reach what it was made of."""
    text = f"def f(x: Tensor, v: Tensor):\n    return x.sin().type_as({made})\n"
    scripted = script(text)
    with tsfuser.fuser():
        for _ in range(5):
            x, v = (torch.rand(4).requires_grad_() for _ in range(2))
            y = scripted(x, v)
            with torch.no_grad():
                v.add_(1)
            y.sum().backward()
            assert v.grad is None
            torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.graphs
@pytest.mark.parametrize("activation", ["relu6", "softplus"])
def test_a_result_that_nothing_writes_to_is_saved_and_no_operand(activation):
    """The product saves it anyway."""
    text = (
        f"def f(x: Tensor, w: Tensor):\n    return torch.mm(torch.nn.functional.{activation}(x * 9.0), w)\n"
    )
    scripted, memory = script(text), set()
    x, w = (torch.rand(4, 4).requires_grad_() for _ in range(2))

    def pack(tensor):
        memory.add(tensor.data_ptr())
        return tensor

    with tsfuser.fuser():
        for _ in range(5):
            memory.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = scripted(x, w)
            y.sum().backward()
    assert memory - {w.data_ptr()} and len(memory) == 2


#: What is done with y, the result of a convolution, of which a norm keeps a copy in float32 under autocast;
#: and whether the program keeps y as it is, so that the backward may cast it again.
FATES = {
    "it is only read": ("", "return n", True),
    "it is read by others": ("z = y * 2.0", "return n + z.permute(0, 2, 3, 1)", True),
    "it is written to": ("y.add_(1.0)", "return n, y.sum()", False),
    "a view of it is written to": ("y[0].add_(1.0)", "return n, y.sum()", False),
    "it is written to in a branch": ("if s > 0.0:\n        y.mul_(2.0)", "return n, y.sum()", False),
    "it is returned": ("", "return n, y", False),
    "a view of it is returned": ("", "return n, y.view(-1)", False),
    "it is returned in a list": ("", "return n, [y]", False),
    "it is returned by a cast that casts nothing": ("", "return n, y.type_as(y)", False),
    "it is returned by a dropout that drops nothing": ("", "return n, torch.dropout(y, 0.5, False)", False),
    "it is returned by a sum of nothing": ("", "return n, y.sum_to_size(y.shape)", False),
}


@pytest.mark.graphs
@pytest.mark.parametrize("fate", FATES)
def test_a_cast_is_made_again_of_what_the_program_leaves_as_it_is(fate, monkeypatch):
    """Where it does not, the backward reads what the forward read. Eager's layer norm of bfloat16 casts
    nothing on the CPU, so TorchScript without fusion is asked."""
    between, end, left = FATES[fate]
    text = f"""
def f(x: Tensor, k: Tensor, w: Tensor, s: float):
    y = torch.nn.functional.conv2d(x, k)
    n = torch.nn.functional.layer_norm(y.permute(0, 2, 3, 1), [4], w, None)
    n = torch.tanh(n) * 2.0
    {between or "pass"}
    {end}
"""
    kept = []
    keep = recompute._save_operand_instead
    monkeypatch.setattr(
        recompute,
        "_save_operand_instead",
        lambda saved, cast, *rest: kept.append(cast) or keep(saved, cast, *rest),
    )
    x, k = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 2, 2, requires_grad=True)
    w = torch.randn(4, requires_grad=True)

    def ran(function):
        with torch.autocast("cpu", torch.bfloat16):
            made = function(x, k, w, 1.0)
        n, others = (made[0], made[1:]) if isinstance(made, tuple) else (made, ())
        with torch.no_grad():
            for other in others:
                (other[0] if isinstance(other, list) else other).fill_(7.0)
        return torch.autograd.grad(n.float().square().sum(), (k, w))

    with torch.jit.fuser("none"):
        unfused = script(text)
        expected = [ran(unfused) for _ in range(5)][-1]
    scripted = script(text)
    with tsfuser.fuser():
        for _ in range(5):
            found = ran(scripted)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)
    assert bool(kept) == (left and not by_joint_graphs())  # which make it again by other means
