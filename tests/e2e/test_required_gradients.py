"""Which results require a gradient, and which inputs have none: as in eager, where autodiff's graphs say
otherwise (tsfuser/frontends/torchscript/training/saved.py, `without_idle`), or torch's operator of these
graphs gives zeros, or raises (csrc_stubs/torchscript/direct.h)."""

import random

import pytest
import torch

import tsfuser
from kit.support import script

pytestmark = pytest.mark.graphs

#: Of an untrained `a`: autodiff leaves the gradients of these in the backward, which nobody asks for.
MADE = [
    "torch.mm(a, a)",
    "torch.matmul(a, a)",
    "torch.bmm(a.view(1, 4, 4), a.view(1, 4, 4)).view(4, 4)",
    "a.permute(1, 0)",
    "a.squeeze(0)",
    "a.mean([0], True)",
    "a.logsumexp([0], True)",
    "a.var(0, True, True)",
]
#: What may be the tensor b, or a view of it.
FORMS = [
    "b",
    "b.to(torch.float32)",
    "b.type_as(v)",
    "b.contiguous()",
    "b.view_as(v)",
    "b.reshape_as(v)",
    "b.narrow(0, 1, 2)",
    "b[1]",
    "b.split(2)[0]",
    "torch.dropout(b, 0.0, True)",
    "torch.relu(b)",
]
PROGRAMS = {
    "saved": "return {form}, (b * v.sum()).sin()",
    "returned": "c = {form}\n    return b, (c * v.sum()).sin(), c.cos()",
}
CALLS = 4


def check(text, *inputs):
    """Each call gives what eager gives, requires the gradients that eager's does, and has its gradients."""
    found = {}
    exec(text, {"torch": torch}, found)
    scripted = script(text)
    with tsfuser.fuser():
        for call in range(CALLS * len(inputs)):
            arguments = inputs[call // CALLS]
            results, eager = scripted(*arguments), found["f"](*arguments)
            assert [r.requires_grad for r in results] == [e.requires_grad for e in eager]
            torch.testing.assert_close(results, eager, rtol=1e-4, atol=1e-5)
            leaves = [x for x in arguments if x.requires_grad]
            gradients = [
                torch.autograd.grad(sum(t.sum() for t in given if t.requires_grad), leaves, allow_unused=True)
                for given in (results, eager)
            ]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def pair(device, a, v):
    torch.manual_seed(5)
    return [torch.rand(4, 4, device=device).requires_grad_(required) for required in (a, v)]


def program(name, made, form):
    return f"def f(a, v):\n    b = ({made} * 2).sin()\n    {PROGRAMS[name].format(form=form)}\n"


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("made", MADE)
def test_what_no_gradient_reaches_requires_none(device, made, name):
    check(program(name, made, "b.to(torch.float32)"), pair(device, False, True))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("form", FORMS)
def test_nor_does_what_shares_its_memory(device, form, name):
    check(program(name, "torch.mm(a, a)", form), pair(device, False, True))


def test_the_operand_of_a_cast_to_another_tensors_dtype(device):
    text = "def f(a, v):\n    return (torch.mm(a, a) * 2).sin().type_as(v), (v * 2).sin()\n"
    check(text, pair(device, False, True))


def test_it_follows_the_inputs_of_each_call(device):
    kinds = [(False, True), (True, True), (True, False), (False, True)]
    check(program("saved", "torch.mm(a, a)", "b.type_as(v)"), *(pair(device, *kind) for kind in kinds))


def test_double_backward(device):
    text = program("saved", "torch.mm(a, v)", "b.to(torch.float32)")
    found = {}
    exec(text, {"torch": torch}, found)
    scripted, (a, v) = script(text), pair(device, False, True)
    with tsfuser.fuser():
        for _ in range(CALLS):
            both = []
            for function in (scripted, found["f"]):
                results = function(a, v)
                (first,) = torch.autograd.grad(sum(r.square().sum() for r in results), v, create_graph=True)
                both.append(torch.autograd.grad(first.square().sum(), v))
            torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)


#: y is an operand of which eager's backward reads the size or the dtype at most, and gives it no gradient.
ASKED = [
    "{}.expand_as(y)",
    "{}.view_as(y)",
    "{}.reshape_as(y)",
    "{}.type_as(y)",
    "{}.to(y)",
    "{}.sum_to_size(y.size())",
    "{}.expand(y.size())",
    "{}.view(y.size())",
    "{} + torch.zeros_like(y)",
    "{} * torch.ones_like(y)",
    "{} * torch.full_like(y, 2.0)",
    "{} * y.size(0)",
    "torch.where(y > 0, {}, 1.0)",
    "{}.masked_fill(y > 0, 1.0)",
]
#: Their gradient is zero, whatever the result's is.
STEPS = ["torch.round", "torch.floor", "torch.ceil", "torch.trunc", "torch.sign"]


@pytest.mark.parametrize("form", ASKED)
def test_who_is_asked_for_size_or_dtype_has_no_gradient(device, form):
    """Whether it is made in the same differentiable graph, or given."""
    for y in ("(x * 2 + v).sin()", "x"):
        check(
            f"def f(x, v):\n    y = {y}\n    return {form.format('torch.round(v)')},\n",
            pair(device, True, True),
        )


@pytest.mark.parametrize("step", STEPS)
def test_a_gradient_of_zeros_is_no_missing_gradient(device, step):
    text = f"def f(x, v):\n    y = x + v * 2\n    return {step}(v * 2).expand_as(y), y.detach()\n"
    check(text, pair(device, True, True))


def test_only_some_results_get_gradients(device):
    """In whatever order: the same graph is used for all, profiled with the first."""
    made = "y = torch.tanh(x) * x\n    z = torch.sigmoid(v) + v"
    text = f"def f(x, v):\n    {made}\n    return y, z, y * z, z.cos()\n"
    found = {}
    exec(text, {"torch": torch}, found)
    scripted, inputs = script(text), pair(device, True, True)
    for chosen in [(0, 1), (0,), (1,), (2,), (0, 3), (3,), (2, 3), (0, 1, 2, 3), (1,), (0,)] * 2:
        gradients = []
        for function, context in ((scripted, tsfuser.fuser()), (found["f"], torch.jit.fuser("none"))):
            with context:
                results = function(*inputs)
                total = sum(results[k].sum() for k in chosen)
                gradients.append(torch.autograd.grad(total, inputs, allow_unused=True))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


#: What a batch norm without weights normalises, of x: an empty batch has no gradient behind it.
NORMALISED = [
    "x * 2",
    "x.sigmoid()",
    "torch.relu(x) + x",
    "x.permute(0, 1, 3, 2)",
    "x.reshape(x.size(0), x.size(1), 16)",
    "x.type_as(w).contiguous()",
    "torch.where(x > 0, x, x * 0.5)",
    "torch.nn.functional.softmax(x, 1)",
    "torch.nn.functional.layer_norm(x, [x.size(3)])",
    "torch.nn.functional.rms_norm(x, [x.size(3)])",
    "torch.matmul(x, x)",
    "torch.cat([x, x * 2], 1)",
    "x[:, 1:]",
    "x.mean([2, 3], True)",
    "torch.nn.functional.batch_norm(x * 2, None, None, training=True)",
]
EMPTY = """
def f(x, w):
    b = {}
    n = torch.nn.functional.batch_norm(b, None, None, training=True)
    return torch.tanh(n) * 2, {}(x * w.sum()).sin()
"""


def batches(device, *sizes):
    torch.manual_seed(7)
    w = torch.rand(3, device=device).requires_grad_()
    return [(torch.rand(n, 3, 4, 4, device=device).requires_grad_(), w) for n in sizes]


@pytest.mark.parametrize("other", ["b.sum() + ", ""])
@pytest.mark.parametrize("normalised", NORMALISED)
def test_an_undefined_gradient_reaches_any_op(device, normalised, other):
    check(EMPTY.format(normalised, other), *batches(device, 0))


@pytest.mark.parametrize("other", ["b.cos() + ", ""])
def test_an_undefined_gradient_comes_once_in_a_while(device, other):
    check(EMPTY.format("x.sigmoid()", other), *batches(device, 2, 0, 2))


def test_the_first_calls_are_of_no_elements_in_other_dims(device):
    text = EMPTY.format("x[:, :, 4:].sigmoid()", "")
    check(text, *batches(device, 2))


def test_second_gradients_of_an_empty_batch(device):
    text = EMPTY.format("x.sigmoid()", "b.cos() + ")
    found = {}
    exec(text, {"torch": torch}, found)
    scripted = script(text)
    with tsfuser.fuser():
        for x, w in batches(device, *[2] * CALLS, *[0] * CALLS):
            both = []
            for function in (scripted, found["f"]):
                results = function(x, w)
                (first,) = torch.autograd.grad(sum(r.square().sum() for r in results), w, create_graph=True)
                both.append(torch.autograd.grad(first.square().sum(), (x, w), allow_unused=True))
            torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)


def test_the_gradient_behind_an_empty_batch_is_empty(device):
    """Eager's batch norm gives it, where no other op does."""
    text = """
def f(x, w):
    n = torch.nn.functional.batch_norm(x * w.sum(), None, None, training=True)
    return torch.tanh(n) * 2, n.sin()
"""
    check(text, *batches(device, 2, 0))


#: y, s and r: the result of a batch norm, and its statistics, which have no gradient in eager.
STATISTICS = [
    "y * 2, s, r",
    "y * 2, s * 2, r + 1",
    "y, (s + r).sin(), r",
    "y * s + r, s",
    "y + 1, s * v[0], r",
    "y * 2, s.view(2, 2), r.view(-1)",
    "y * 2, torch.stack([s, r])",
]


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "made, training",
    [*((made, True) for made in STATISTICS), *((made, False) for made in STATISTICS[:2])],  # these are empty
)
def test_the_statistics_of_a_batch_norm_require_none(device, made, training, asked):
    text = (
        "def f(a, v):\n"
        "    m, d = torch.zeros_like(v[0]), torch.ones_like(v[0])\n"
        f"    y, s, r = torch.native_batch_norm(a * 2, v[0] * 1, v[1] * 1, m, d, {training}, 0.1, 1e-5)\n"
        f"    return {made}\n"
    )
    check(text, pair(device, *asked))


def test_second_gradients_beside_statistics(device):
    text = (
        "def f(a, v):\n"
        "    y, s, r = torch.native_batch_norm(a * 2, v[0], v[1], None, None, True, 0.1, 1e-5)\n"
        "    return y.sin(), s, r * 2\n"
    )
    found = {}
    exec(text, {"torch": torch}, found)
    scripted, (a, v) = script(text), pair(device, True, True)
    with tsfuser.fuser():
        for _ in range(CALLS):
            both = []
            for function in (scripted, found["f"]):
                first = torch.autograd.grad(function(a, v)[0].square().sum(), (a, v), create_graph=True)
                both.append(torch.autograd.grad(sum(g.square().sum() for g in first), (a, v)))
            torch.testing.assert_close(*both, rtol=1e-3, atol=1e-3)


#: Of which inputs and results require a gradient in each choice of the calls.
SEVERAL = [
    "p = a * b\n    return p.sin(), (c + d).exp(), p * (c + d)",
    "p = torch.mm(a, b)\n    q = torch.tanh(p) * c\n    return q, d.sigmoid(), p, q + d",
    "p = torch.softmax(a * 2, 1)\n    return p, p * b + c, d * 2, d",
    "p = torch.where(a > 0.5, b, c)\n    return p, p * d, (a > 0.5).float() * d",
    "q = torch.cat([b, c], 1)\n    return a.view(-1) * 2, q.sin(), d + 1",
    "p, q = a.chunk(2, 1)\n    return p * q, b.t() + c, d.exp(), p",
    "q = a.detach() * b + c.detach()\n    return q, (q * d.detach()).cos(), d * a.detach()",
    "p = (a * b).type_as(c)\n    return p, c.expand_as(d) * 2, d.round(), p + d.floor()",
    "p = a * 1.5\n    p.add_(b)\n    q = c.clone()\n    q.mul_(2)\n    return p, q, q + d",
    "p = torch.rsqrt((a * a).mean(-1, keepdim=True) + 1e-5)\n    return a * p * b, p, c / (d + 2), d[0]",
    "p = torch.addmm(a[0], b, c)\n    q = torch.mm(d, a)\n    return p.relu(), q.relu(), p * q",
    "p = torch.nn.functional.layer_norm(c, [4], d[0], d[1])\n    return (a + b).relu(), p, a.sum() * p",
]


@pytest.mark.parametrize("first", [(True, True, True, True), (True, False, True, False)])
@pytest.mark.parametrize("body", SEVERAL)
def test_each_call_requires_what_it_likes(device, body, first):
    text = f"def f(a, b, c, d):\n    {body}\n"
    exec(text, {"torch": torch}, found := {})
    scripted, chooser = script(text), random.Random(4)
    choices = [first] * CALLS + [[chooser.random() < 0.5 for _ in range(4)] for _ in range(8)]
    generator = torch.Generator().manual_seed(6)
    given = [torch.rand(4, 4, generator=generator).to(device) for _ in range(4)]
    for asked in choices:
        both = []
        for function, context in ((scripted, tsfuser.fuser()), (found["f"], torch.jit.fuser("none"))):
            inputs = [x.clone().requires_grad_(asks) for x, asks in zip(given, asked)]
            with context:
                results = function(*inputs)
                moving = [r for r in results if r.requires_grad]
                leaves = [x for x in inputs if x.requires_grad]
                gradients = [
                    torch.autograd.grad(r.square().sum(), leaves, allow_unused=True, retain_graph=True)
                    for r in moving
                ]
            both.append(([r.requires_grad for r in results], [r.detach() for r in results], gradients))
        torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)
