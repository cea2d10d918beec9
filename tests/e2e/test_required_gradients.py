"""Which results require a gradient, and which inputs have none: as in eager, where autodiff's graphs say
otherwise (tsfuser/frontends/torchscript/training/saved.py, `without_idle`)."""

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
