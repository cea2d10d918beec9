"""Sums of matrix products behind torch.compile: each product is added in place as soon as it is made."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from kit.allocations import allocations
from kit.compiled_models import LSTMCell
from kit.support import assert_matches
from tsfuser.frontends.dynamo.rewrites.product_sums import add_as_made

pytestmark = pytest.mark.graphs

ADDED = ["mm", "addmm", "addmm"]


def products_of(function, *sizes, dtype=torch.float32, tracing="fake"):
    """The kinds of the nodes that multiply or add in the function's FX graph, once products are added as they
    are made, and whether it still gives what it gave."""
    values = [torch.randn(s).to(dtype) for s in sizes]
    module = make_fx(function, tracing_mode=tracing)(*values)
    before = copy.deepcopy(module)
    add_as_made(module)
    module.graph.lint()
    for found, expected in zip(module(*values), before(*values)):
        assert_matches(found, expected, ops=1 << 8)
        assert found.stride() == expected.stride()
    names = [n.target._schema.name for n in module.graph.nodes if n.op == "call_function"]
    return [n.removeprefix("aten::") for n in names if n.split("::")[1] in ("mm", "addmm", "add", "bmm")]


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_products_are_added_as_they_are_made(tracing):
    def gradients(a, b, c, d, e, f):
        return (a @ b + c @ d + e @ f,)

    def transposed(a, b, c, d, e, f):
        first = (a @ b).t().t() + (c @ d).t().t()
        return ((e @ f).t().t().t() + first.t(),)

    sizes = (4, 5), (5, 6), (4, 3), (3, 6), (4, 2), (2, 6)
    assert products_of(gradients, *sizes, tracing=tracing) == ADDED
    assert products_of(transposed, *sizes, tracing=tracing) == ADDED
    assert products_of(gradients, *sizes, dtype=torch.bfloat16, tracing=tracing) == ADDED


def test_a_sum_of_two_that_is_returned():
    assert products_of(lambda a, b, c: (a @ b + a @ c,), (3, 3), (3, 3), (3, 3)) == ["mm", "addmm"]


UNCHANGED = {
    "a sum of two that is read": (lambda a, b: (torch.tanh(a @ b + b @ a),), ["mm", "mm", "add"]),
    "a product read twice": (lambda a, b: ((p := a @ b) + b @ a, p), ["mm", "mm", "add"]),
    "twice the same product": (lambda a, b: ((p := a @ b) + p,), ["mm", "add"]),
    "one transposed": (lambda a, b: (a @ b + (b @ a).t(),), ["mm", "mm", "add"]),
    "a factor": (lambda a, b: (torch.add(a @ b, b @ a, alpha=2),), ["mm", "mm", "add"]),
    "no product": (lambda a, b: (a + b @ a,), ["mm", "add"]),
    "rows": (lambda a, b: (a[:1] @ b + b @ a,), ["mm", "mm", "add"]),
    "an earlier product, added to a later sum": (
        lambda a, b: (p := a @ a, q := b @ b, r := a @ b, q + r + p)[3:],
        ["mm", "mm", "mm", "add", "add"],
    ),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_stays_an_addition(case):
    function, kinds = UNCHANGED[case]
    assert products_of(function, (4, 4), (4, 4)) == kinds


def test_integers_stay():
    values = [torch.ones(3, 3, dtype=torch.int64)] * 2
    module = make_fx(lambda a, b: (a @ b + b @ a,))(*values)
    add_as_made(module)
    assert torch.ops.aten.addmm.default not in {n.target for n in module.graph.nodes}


class Steps(nn.Module):
    """One layer, many times."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        for _ in range(12):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_weight_takes_the_memory_of_one(dtype, device):
    """Each of the 12 is 40 times as large as what a step saves."""
    width = 320
    model = Steps(width).to(device, dtype)
    exact = copy.deepcopy(model).double()
    run = torch.compile(model, backend="tsfuser")
    x = torch.randn(8, width, device=device, dtype=dtype)

    def gradients(function, module, x):
        return torch.autograd.grad(function(x).sum(), list(module.parameters()))

    for _ in range(3):
        found = gradients(run, model, x)
    eager = gradients(model, model, x)
    wide = gradients(exact, exact, x.double())
    for values in zip(found, eager, wide):
        assert_matches(*values, ops=1 << 10)
    del found, eager, wide
    each = model.layer.weight.nbytes
    made, peak = allocations(lambda: gradients(run, model, x), device)
    assert peak < 3 * each
    if dtype == torch.float32:  # of 16 bits, products on the CPU have copies of their own
        assert made < 3 * each


@pytest.mark.usefixtures("forgotten", "fused_or_error")
def test_an_lstm_gives_the_gradients_of_eager(device):
    model = LSTMCell(16).to(device)
    exact = copy.deepcopy(model).double()
    run = torch.compile(model, backend="tsfuser", fullgraph=True)
    for rows in (4, 4, 5, 6):
        x = torch.randn(5, rows, 16, device=device)

        def gradients(function, module, x):
            h, c = function(x)
            return torch.autograd.grad((h * c).sum(), list(module.parameters()))

        found, eager = gradients(run, model, x), gradients(model, model, x)
        for values in zip(found, eager, gradients(exact, exact, x.double())):
            assert_matches(*values, ops=1 << 8)


def test_products_that_somebody_holds_are_not_written_over(forgotten, fused_or_error, device):
    def function(a, b):
        p, q = a @ b, b @ a
        return p + q + a @ a, torch.addmm(p, a, a), p

    run = torch.compile(function, backend="tsfuser")
    for _ in range(3):
        a, b = (torch.randn(9, 9, device=device) for _ in range(2))
        before = a.clone(), b.clone()
        for found, expected in zip(run(a, b), function(a, b)):
            assert_matches(found, expected, ops=1 << 8)
        assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_an_input_that_a_product_is_added_to_is_not_written_over(forgotten, fused_or_error, device):
    run = torch.compile(lambda c, a, b: torch.addmm(c, a, b), backend="tsfuser")
    c, a, b = (torch.randn(9, 9, device=device) for _ in range(3))
    before = c.clone()
    for _ in range(2):
        assert_matches(run(c, a, b), torch.addmm(c, a, b), ops=1 << 8)
        assert torch.equal(c, before)
