"""Losses of class indices in training with `torch.compile(backend="tsfuser")`: what is saved, how many
kernels run, and gradients near float64's."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.support import assert_matches

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]

IGNORED = 2


def operands(shape, dtype, device, **options):
    x = torch.randn(shape, device=device).mul(3).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    if target.numel() > 1:
        target.view(-1)[1] = IGNORED % shape[1]
    weight = torch.rand(shape[1], device=device) if options.get("weighs") else None
    return x, target, weight


def loss_of(x, target, weight, reduction="mean", smoothing=0.0):
    """As models of language have it: in float32, of logits in 16 bits."""
    wide = x if x.dtype is torch.float64 else x.float()
    weight = weight if weight is None else weight.to(wide.dtype)
    return F.cross_entropy(
        wide, target, weight, ignore_index=IGNORED, reduction=reduction, label_smoothing=smoothing
    )


def gradient(function, x, *others, **options):
    x = x.detach().clone().requires_grad_()
    loss = function(x, *others, **options)
    loss.backward(torch.full_like(loss, 0.5))
    return loss.detach(), x.grad


def assert_trains(function, x, *others, **options):
    compiled = torch.compile(function, backend="tsfuser")
    for _ in range(2):
        mine = gradient(compiled, x, *others, **options)
        eager, exact = (gradient(function, t, *others, **options) for t in (x, x.double()))
        for one in zip(mine, eager, exact):
            assert_matches(*one, ops=x.size(1) + 10)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("shape", [(9, 33), (3, 5, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(device, dtype, shape, weighs, reduction):
    x, target, weight = operands(shape, dtype, device, weighs=weighs)
    assert_trains(loss_of, x, target, weight, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(9, 33), (3, 5, 4, 2), (1, 7), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_losses_in_16_bits(device, dtype, shape, reduction):
    """Of a product, whose result is saved instead of the logarithm of its softmax."""
    x, target, _ = operands(shape, dtype, device)

    def loss(x, target):
        logits = x.transpose(1, -1) @ torch.eye(shape[1], dtype=x.dtype, device=x.device)
        return F.cross_entropy(logits.transpose(1, -1), target, ignore_index=IGNORED, reduction=reduction)

    assert_trains(loss, x, target)


@pytest.mark.parametrize("shape", [(1, 33), (9, 1), (1, 1), (2, 3, 1)])
def test_sizes_of_one(device, shape):
    x, target, weight = operands(shape, torch.float32, device, weighs=True)
    assert_trains(loss_of, x, target, weight, reduction="sum")


def test_smoothed_labels(device):
    assert_trains(loss_of, *operands((9, 33), torch.bfloat16, device), smoothing=0.1)


def test_each_row_is_ignored(device):
    """The mean is 0 / 0, and its gradient NaN or 0 as eager's."""
    x, target, _ = operands((4, 5), torch.float32, device)
    assert_trains(loss_of, x, torch.full_like(target, IGNORED), None)


def test_rows_of_infinities(device):
    x, target, _ = operands((6, 5), torch.float32, device)
    x[0, 1], x[2, 3], x[4] = float("inf"), float("-inf"), float("-inf")
    assert_trains(loss_of, x, target, None, reduction="none")


def test_two_numbers_of_each_row_are_saved_and_the_backward_is_one_kernel(device):
    """Beside the logits: 16 bits for each of them, where eager saves 32 more."""
    x, target, _ = operands((16, 200), torch.bfloat16, device)

    def function(x, target):
        return loss_of(x * 2, target, None)

    saved = []
    x.requires_grad_()
    run = torch.compile(function, backend="tsfuser")
    run(x, target).backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = run(x, target)
    assert sum(t.nbytes for t in saved) <= x.nbytes + target.nbytes + 2 * 16 * 4 + 64
    before = tsfuser.stats()["launches"]
    loss.backward()
    assert tsfuser.stats()["launches"] == before + 1
    backward = str(tsfuser.explain(run, x, target)).partition("graph 1, backward")[2]
    assert "pointwise:" in backward  # a row's gradient has one class: nothing is summed up
    assert "nll_loss_backward  at" not in backward


def test_other_numbers_of_rows_and_classes(device):
    """One graph serves them."""
    run = torch.compile(loss_of, backend="tsfuser", dynamic=True)
    for rows, classes in ((9, 33), (4, 10), (17, 50)):
        x, target, _ = operands((rows, classes), torch.float32, device)
        exact = gradient(loss_of, x.double(), target, None)
        for one in zip(gradient(run, x, target, None), gradient(loss_of, x, target, None), exact):
            assert_matches(*one, ops=60)


def test_the_op_gives_what_eagers_gives(device):
    """Where a group does not take it. Its shape is known without running it, too."""
    for shape in ((5, 7), (2, 3, 4, 5)):
        x, target, _ = operands(shape, torch.float32, device)
        total, one = torch.tensor(float(target.numel())).to(x), torch.ones((), device=device)
        eager = torch.ops.aten.nll_loss2d_backward if x.dim() == 4 else torch.ops.aten.nll_loss_backward
        given = (target, None, 1, IGNORED, total)
        mine = torch.ops.tsfuser.nll_loss_backward(one, x.shape, *given)
        assert torch.equal(mine, eager(one, x, *given))
        torch.library.opcheck(
            torch.ops.tsfuser.nll_loss_backward.default,
            (one, list(x.shape), *given),
            test_utils=("test_schema", "test_faketensor"),
        )
