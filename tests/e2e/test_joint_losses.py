"""Losses of class numbers and of probabilities, in joint graphs (`tsfuser.joint`): eager's results and
gradients; and what is saved of them."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.derivatives import built
from kit.joint_calls import is_packed, leaves
from kit.support import script
from tsfuser.joint.passes import divide

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]

CALLS = 4
#: Sizes of the logits, with the classes in dim 1, or in the only one.
SIZES = [(7, 9), (5,), (3, 4, 6)]


def loss(how):
    text = f"def f(x, t, w):\n    return torch.nn.functional.cross_entropy(x * 2.0 + 1.0, t, {how}) * 3.0\n"
    exec(text, {"torch": torch}, eager := {})
    return script(text), eager["f"]


def assert_as_eager(scripted, eager, x, *others):
    x = x.double().requires_grad_()
    with tsfuser.fuser():
        for _ in range(CALLS):
            result = scripted(x, *others)
            (found,) = torch.autograd.grad(result.sum(), x)
        assert is_packed(scripted, x, *others)
    expected = eager(x, *others)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0])


def classes(size):
    return size[min(1, len(size) - 1)]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("more", ["", ", label_smoothing=0.2", ", weight=w, label_smoothing=0.2"])
@pytest.mark.parametrize("size", [*SIZES, (2, 3, 2, 1, 2)], ids=str)
def test_of_class_numbers(size, more, reduction):
    scripted, eager = loss(f"reduction='{reduction}', ignore_index=1{more}")
    places = [*size[:1], *size[2:]] if len(size) > 1 else []
    target = torch.arange(torch.Size(places).numel()).view(places) % classes(size)
    weight = torch.linspace(0.5, 1.5, classes(size), dtype=torch.float64)
    assert_as_eager(scripted, eager, torch.randn(size), target, weight)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("more", ["", ", weight=w, label_smoothing=0.2"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_of_probabilities(size, more, reduction):
    scripted, eager = loss(f"reduction='{reduction}'{more}")
    weight = torch.linspace(0.5, 1.5, classes(size), dtype=torch.float64)
    assert_as_eager(scripted, eager, torch.randn(size), torch.rand(size).double(), weight)


def saved(program, *given):
    """Dtypes and sizes of the tensors that the forward saves, besides inputs and results."""
    parts = divide(built(program, given, [t.is_floating_point() for t in given])[1])
    made = [list(parts.forward.outputs())[i].type() for i in parts.saved_outputs if i >= parts.results]
    return sorted((t.dtype().itemsize, tuple(t.sizes())) for t in made if t.kind() == "TensorType")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_loss_saves_its_logits_in_their_dtype(dtype):
    """And two numbers a row; so the log of the softmax is not stored."""

    def head(x, w, t):
        return F.cross_entropy(F.linear(x, w).float(), t)

    x, w, t = torch.randn(6, 8, dtype=dtype), torch.randn(100, 8, dtype=dtype), torch.arange(6)
    rows = [(4, ()), (4, (6, 1)), (4, (6, 1))]  # and the sum of the weights
    assert saved(head, x, w, t) == sorted([*rows, (dtype.itemsize, (6, 100))])


@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_a_softmax_is_computed_again_for_its_gradient(kind):
    def scores(q, k, m):
        return getattr(F, kind)((q @ k).float() * 0.5, -1).masked_fill(m, 0.0)

    q, k = torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(8, 10, dtype=torch.bfloat16)
    assert saved(scores, q, k, torch.arange(10) > 3) == [(2, (6, 10))]


def test_what_a_product_reads_of_a_softmax_is_saved():
    def attended(q, k, v):
        return torch.softmax(q @ k, -1) @ v

    q, k, v = (torch.randn(s) for s in ((6, 8), (8, 10), (10, 4)))
    assert saved(attended, q, k, v) == [(4, (6, 10))]


@pytest.mark.parametrize("where", ["", ", device=x.device", ", device=x.exp().device"])
def test_classes_that_the_program_makes(where):
    """The device of a tensor of numbers is known, too."""
    made = f"y = torch.zeros([3], dtype=torch.int64{where})"
    scripted = script(f"def f(x):\n    {made}\n    return torch.nn.functional.cross_entropy(x * 2, y)\n")
    (x,) = leaves((3, 5))
    with tsfuser.fuser():
        for _ in range(4):
            (found,) = torch.autograd.grad(scripted(x), x)
    (wanted,) = torch.autograd.grad(F.cross_entropy(x * 2, torch.zeros(3, dtype=torch.int64)), x)
    torch.testing.assert_close(found, wanted)
    assert is_packed(scripted, x)
