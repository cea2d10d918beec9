"""Results that are views of a leaf, though an op stands between that may make a new tensor: they are views
for autograd, too (csrc_stubs/torchscript/views_apart.cpp). Seen where the leaf is a part of a tensor without
gradient and is written to behind the call: the view has no gradient for it any more, as in eager."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, script

pytestmark = pytest.mark.graphs

#: Ops that give the leaf back, which no schema says.
CASTS = ["{}.type_as(z)", "{}.to(torch.float32)", "{}.to(z)", "{}.float()", "{}.to(z.dtype)"]
CASTS += ["torch.dropout({}, 0.5, False)", "{}.contiguous()", "{}.positive()", "{}.sum_to_size({}.size())"]
#: What stands around one, in any order.
VIEWS = ["{}.reshape(-1)", "{}.view(-1)", "{}.unsqueeze(0)", "{}.transpose(0, 1)", "{}[1]", "{}.expand(3, 4)"]
PROGRAMS = {
    "alone": "return [{form}]",
    "twice": "y = {form}\n    return [y, y.unsqueeze(0)]",
    "with a reader": "y = {form}\n    return [y, (y * 2.0 + 1.0).sin()]",
    "with a maker of its dtype": "z = (z * 2.0).sin()\n    y = {form}\n    return [y, z]",
    "in a branch": "y = x * 2.0\n    if s > 0.0:\n        y = {form}\n    return [y]",
    "behind a sum": "y = {form}\n    return [y, (y + z.sum()).sin() * 2.0]",
    "with a sibling": "y = {form}\n    w = {form}\n    return [y, (w * 2.0 + 1.0).sin()]",
}


def steps(function, writes):
    """What comes of a call whose leaf is written to behind it, as tensors and Nones."""
    base = (torch.arange(13.0) / 8)[1:]  # so that the leaf is a view of a tensor without gradient
    x = base.view(3, 4).requires_grad_()
    z = torch.linspace(1, 2, 4)
    results = function(x, z, 1.0)
    ends = [r for r in results if r.requires_grad]
    before = [r.detach().clone() for r in results]
    if writes:
        with torch.no_grad():
            x.add_(1)
    found = [r.detach() for r in results]
    gradient = torch.autograd.grad([r.sum() for r in ends], [x], allow_unused=True)[0] if ends else None
    return [r.requires_grad for r in results], before + found, gradient


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("cast", CASTS)
def test_a_view_of_a_leaf_that_is_cast_to_its_own_dtype(cast, name, writes):
    forms = [cast, *(cast.replace("{}", v) for v in VIEWS), *(v.format(cast) for v in VIEWS)]
    for form in forms:
        text = f"def f(x, z, s: float):\n    {PROGRAMS[name].format(form=form.replace('{}', 'x'))}\n"
        eager, scripted = plain(text), script(text)
        with tsfuser.fuser():
            for _ in range(4):
                required, tensors, gradient = steps(scripted, writes)
                wanted_required, wanted, wanted_gradient = steps(eager, writes)
                assert required == wanted_required, form
                for mine, theirs in zip(tensors, wanted, strict=True):
                    assert_matches(mine, theirs, strides=False)
                assert (gradient is None) == (wanted_gradient is None), form
                if gradient is not None:
                    assert_matches(gradient, wanted_gradient, strides=False)


#: Results that share the memory of a copy, of which there is one.
COPIES = {
    "a part of it": "y = {copy}\n    return y[0], y",
    "parts of it": "y = {copy}\n    return y[1:], y[:1], y",
    "behind an op": "y = {copy}\n    w = (z * 2.0).sin()\n    return y[0], y.unsqueeze(0), w",
    "a comparison reads it": "y = {copy}\n    w = torch.sort(y, 0)[0] > 0.5\n    return y[1:], y, w, z * 2.0",
}
MADE = ["x.reshape(-1)", "x.flatten()", "x.contiguous()", "x.reshape_as(z)", "x.reshape(4).flatten()"]


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("copy", MADE)
def test_results_that_share_a_copy(copy, name, required):
    text = f"def f(x, z):\n    {COPIES[name].format(copy=copy)}\n"
    eager, scripted = plain(text), script(text)
    with tsfuser.fuser():
        for _ in range(4):
            x = torch.randn(2, 2).t().requires_grad_(required)
            z = torch.randn(4)
            seen = []
            for function in (scripted, eager):
                results = function(x, z)
                memory = [t.untyped_storage().data_ptr() for t in (*results, x, z)]
                seen.append(([memory.index(place) for place in memory], [t.stride() for t in results]))
            assert seen[0] == seen[1]


#: Results that are one tensor in eager: an op's result and a cast of it are both returned.
TOGETHER = {
    "with its operand": "y = {made}\n    return y.type_as(z), y",
    "in a branch": "y = x\n    if n > 0:\n        y = {made}\n    return y.type_as(z), y",
    "with a view of its operand": "y = {made}\n    return y.type_as(z), y.view(-1)",
    "as a view": "y = {made}\n    return y.type_as(z).view(-1), y",
    "of a view": "y = {made}\n    return y.view(-1).type_as(z), y",
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("made", ["x + 1.0", "torch.sigmoid(x)", "x * z.sum() + 1.0"])
def test_a_cast_of_what_is_returned_is_the_same_tensor(made, name):
    """What is written to one is seen in the gradients of both."""
    text = f"def f(x, z, n: int):\n    {TOGETHER[name].format(made=made)}\n"
    eager, scripted = plain(text), script(text)
    with tsfuser.fuser():
        for _ in range(5):
            found = []
            for function in (scripted, eager):
                x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
                z = torch.linspace(1, 2, 4)
                results = function(x, z, 1)
                one = results[0].data_ptr() == results[1].data_ptr()
                results[0].mul_(2.0)
                try:
                    (gradient,) = torch.autograd.grad(sum(r.sum() for r in results), x)
                except RuntimeError:  # sigmoid has saved its result
                    gradient = None
                found.append((one, gradient))
            assert found[0][0] == found[1][0]
            assert (found[0][1] is None) == (found[1][1] is None)
            if found[0][1] is not None:
                assert_matches(found[0][1], found[1][1], strides=False)
