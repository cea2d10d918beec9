"""Differentiable graphs that get lists of tensors, or tensors that may be None: no check of torch looks at
their gradients (csrc_stubs/torchscript/unchecked_graph.h)."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, script

pytestmark = pytest.mark.graphs

#: t of x[2, 8, 8], u of that size, and w[8, 8]; the lists hold u and what is computed from it.
PROGRAMS = {
    "views": "l = [u, u * w]\n"
    "    t = torch.cat([q.view(q.size(0), -1) for q in l], 1).view(u.size(0), -1).sum(1)",
    "of products": "l = [u, u @ w]\n    t = torch.cat([q.view(q.size(0), -1) for q in l], 1)\n"
    "    t = t.view(u.size(0), 2, l[1].size(1), -1).sum(1)",
    "reshapes": "l = [u, u @ w]\n    t = torch.cat([q.reshape(q.size(0), -1) for q in l], 1)\n"
    "    t = t.view(u.size(0), 2, 8, -1).tanh() * 2.0",
    "as they are": "l = [u, u * w]\n    t = torch.cat([q for q in l], 1).tanh() * 2.0",
    "stacked": "l = [u, torch.tanh(u * w)]\n"
    "    t = torch.stack([q.view(q.size(0), -1) for q in l], 1).tanh() * x.mean()",
    "one of them": "l = [u.detach(), u * w]\n"
    "    t = torch.cat([q.view(q.size(0), -1) for q in l], 1).view(u.size(0), -1).sum(1)",
}
NONE, FIRST, SECOND, LAST, ALL = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "required",
    [
        [FIRST] * 4 + [ALL, SECOND, LAST, FIRST, ALL],
        [ALL] * 4 + [FIRST, NONE, LAST, SECOND, ALL],
        [SECOND] * 4 + [LAST, FIRST, ALL, NONE],
        [NONE] * 3 + [ALL] * 4 + [FIRST, LAST],
    ],
    ids=["first", "all", "second", "none"],
)
def test_what_lists_hold_may_require_gradients_or_not(device, name, required):
    source = f"def f(x: Tensor, u: Tensor, w: Tensor):\n    {PROGRAMS[name]}\n    return x * 2.0, t * 1.5\n"
    eager, scripted = plain(source), script(source)
    generator = torch.Generator().manual_seed(5)
    with tsfuser.fuser():
        for call, flags in enumerate(required):
            shapes = ((2, 8, 8), (2, 8, 8), (8, 8))
            inputs = [torch.randn(s, generator=generator, dtype=torch.float64).to(device) for s in shapes]
            results = []
            for f in (scripted, eager):
                given = [t.clone().requires_grad_(bool(flag)) for t, flag in zip(inputs, flags)]
                with torch.set_grad_enabled(call != 6):
                    out = f(*given)
                found = list(out)
                wanted = [t for t in out if t.requires_grad]
                if wanted:
                    sum((t * t).sum() for t in wanted).backward()
                results.append((found, [t.grad for t in given]))
            (mine, slopes), (theirs, expected) = results
            assert [t.requires_grad for t in mine] == [t.requires_grad for t in theirs], call
            assert [g is None for g in slopes] == [g is None for g in expected], call
            for got, want in zip(mine + slopes, theirs + expected):
                if want is not None:
                    assert_matches(got.detach(), want.detach(), ops=200)


#: Of x[8, 8] and w[8], a `Tensor?`; "alone": nothing else has a gradient.
OPTIONAL = {
    "layer norm": "torch.layer_norm(torch.tanh(x * 2.0), [8], w)",
    "layer norm alone": "torch.layer_norm(torch.sort(x, 0)[0].detach(), [8], w)",
    "batch norm": "torch.batch_norm(torch.tanh(x * 2.0), w, w, None, None, True, 0.1, 1e-5, False)",
    "bias": "torch.ops.aten.linear(torch.tanh(x * 2.0), x, w)",
    "bias alone": "torch.ops.aten.linear(torch.relu(x.detach() * 2.0), x.detach(), w)",
}


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize(
    "required",
    [
        [(1, 1)] * 5 + [(1, 0), (0, 1), (0, 0), (1, 1)],
        [(1, 0)] * 5 + [(1, 1), (0, 1), (0, 0), (1, 0)],
        [(0, 1)] * 5 + [(1, 0), (1, 1), (0, 0), (0, 1)],
    ],
    ids=["both", "x", "w"],
)
def test_what_may_be_none_may_require_a_gradient_or_not(device, name, required):
    head = "from typing import Optional\n\n"
    source = f"def f(x: Tensor, w: Optional[Tensor]):\n    return {OPTIONAL[name]} * 1.5\n"
    eager, scripted = plain(head + source), script(source)
    generator = torch.Generator().manual_seed(7)
    with tsfuser.fuser():
        for call, flags in enumerate(required):
            made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((8, 8), (8,))]
            results = []
            for f in (scripted, eager):
                given = [t.to(device, copy=True).requires_grad_(bool(k)) for t, k in zip(made, flags)]
                out = f(*given)
                if out.requires_grad:
                    (out * out.detach().cos()).sum().backward()
                results.append([out, *(t.grad for t in given)])
            assert results[0][0].requires_grad == results[1][0].requires_grad, call
            for got, want in zip(*results):
                assert (got is None) == (want is None), call
                if want is not None:
                    assert_matches(got.detach(), want.detach(), ops=200)
