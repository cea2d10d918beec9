"""Lazy conjugates and negatives: groups read resolved copies of them, and run fused."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fresh, fuse, groups, no_fallback, train

LAZY = {
    "conjugate": torch.conj,
    "conjugate twice": lambda z: z.conj().t().conj().conj().t(),
    "negative": lambda z: z.conj().imag,
    "negative conjugate": lambda z: torch._neg_view(z).conj(),
    "transposed": lambda z: z.t().conj(),
    "every other": lambda z: z.conj()[:, ::2],
    "expanded": lambda z: z.conj()[:1].expand(5, 9),
    "empty": lambda z: z.conj()[:0],
    "one element": lambda z: z.conj()[:1, :1],
}


def numbers(*sizes, device, dtype=torch.complex64):
    return torch.randn(sizes, dtype=dtype, device=device)


def beamformer(x, weights):
    y = x.conj()
    power = (y * weights + weights).abs()
    return power * 2.0 + 1.0, y * x


def weighted(x, y):
    return (x * y + 1.0).abs() + y.abs(), x * 2.0


def match(ours, theirs, exact=None, ops=6):
    """`assert_matches` of tensor after tensor."""
    assert len(ours) == len(theirs)
    for k, (a, b) in enumerate(zip(ours, theirs)):
        assert_matches(a, b, exact and exact[k], ops=ops)


def calls(function, *inputs, times=3):
    """The result of the last of some calls."""
    for _ in range(times):
        result = function(*inputs)
    return result


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_conjugate_made_in_the_program(device, dtype):
    x, weights = numbers(8, 33, device=device, dtype=dtype), numbers(33, device=device, dtype=dtype)
    with no_fallback():
        scripted = fuse(beamformer, x, weights)
        assert groups(scripted)
        match(scripted(x, weights), beamformer(x, weights), ops=5)


@pytest.mark.parametrize("kind", LAZY)
def test_lazy_arguments(device, kind):
    x = LAZY[kind](numbers(5, 9, device=device))
    y = torch.randn(x.shape, dtype=x.dtype, device=device)
    with no_fallback():
        scripted = fuse(weighted, x, y)
        match(scripted(x, y), weighted(x, y), ops=6)


def test_lazy_and_other_tensors_share_plans(device):
    """A group that was planned for tensors that are not lazy takes lazy ones, and the other way around. Each
    call conjugates what is conjugate in that call."""
    x, y = numbers(5, 9, device=device), numbers(5, 9, device=device)
    with no_fallback():
        scripted = fuse(weighted, x, y)
        plans = tsfuser.stats()["plans_built"]
        for a in (x.conj(), x, x.conj(), y, y.conj()):
            match(scripted(a, y), weighted(a, y), ops=6)
    assert tsfuser.stats()["plans_built"] == plans


def written(x, weights):
    y = x.conj()
    y.mul_(weights).add_(1.0)
    return y * 2.0, (y * weights).abs() + 1.0


def test_writes_to_a_lazy_tensor(device):
    """The memory that it is a view of has the conjugates of the written values."""
    x, weights = numbers(8, 33, device=device), numbers(33, device=device)
    scripted = fuse(written, x.clone(), weights)
    for _ in range(2):
        ours, theirs = x.clone(), x.clone()
        with no_fallback():
            result = scripted(ours, weights)
        match(result, written(theirs, weights), ops=6)
        assert_matches(ours, theirs, ops=3)


def returned(x, y):
    z = x.conj()
    return z, z.to(y.dtype), z * y + y


def test_a_lazy_tensor_that_is_returned_stays_lazy(device):
    x, y = numbers(8, 33, device=device), numbers(8, 33, device=device)
    with no_fallback():
        ours, theirs = fuse(returned, x, y)(x, y), returned(x, y)
    assert [r.is_conj() for r in ours] == [r.is_conj() for r in theirs]
    assert [r.data_ptr() == x.data_ptr() for r in ours] == [r.data_ptr() == x.data_ptr() for r in theirs]
    match(ours, theirs, ops=3)


def test_scripted_training_with_a_negative(device):
    """Autodiff does not differentiate complex numbers, but their parts may be lazily negative."""

    def loss(x, y):
        return torch.tanh(x * y + 1.0) * y

    x = numbers(8, 33, device=device).conj().imag.requires_grad_()
    y = torch.randn(33, device=device, requires_grad=True)
    assert x.is_neg()
    with no_fallback():
        scripted = fresh(loss)
        with tsfuser.fuser():
            result, ours = train(scripted, [x, y])
        assert groups(scripted)
    eager, theirs = train(loss, [x, y])
    match([result, *ours], [eager, *theirs], ops=40)


def test_check_and_explain_find_groups_that_read_copies(device):
    x, y = numbers(5, 9, device=device).conj(), numbers(5, 9, device=device)
    report = tsfuser.check(weighted, x, y)
    assert report and report.unfused == ()
    assert "unfused" not in str(tsfuser.explain(weighted, x, y))


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten")
class TestCompiled:
    def test_complex_training(self, device):
        """The backward of a complex product multiplies by conjugates."""

        def loss(x, weights):
            product = (x * weights + weights) * torch.tanh(x.real)
            return (product * product.conj()).real.sum(1)

        x, weights = numbers(8, 33, device=device), numbers(33, device=device)
        given = [t.requires_grad_() for t in (x, weights)]
        compiled = torch.compile(loss, backend="tsfuser")
        with no_fallback():
            ours = calls(lambda: torch.autograd.grad(compiled(x, weights).sum(), given))
        theirs = torch.autograd.grad(loss(x, weights).sum(), given)
        exact = [t.detach().to(torch.complex128).requires_grad_() for t in given]
        exact = torch.autograd.grad(loss(*exact).sum(), exact)
        match(ours, theirs, exact, ops=60)

    @pytest.mark.parametrize("kind", LAZY)
    def test_lazy_arguments(self, device, kind):
        x = LAZY[kind](numbers(5, 9, device=device))
        y = torch.randn(x.shape, dtype=x.dtype, device=device)
        with no_fallback():
            ours = calls(torch.compile(weighted, backend="tsfuser"), x, y)
        match(ours, weighted(x, y), ops=6)

    @pytest.mark.parametrize("kind", ["conjugate", "negative"])
    def test_writes_to_a_lazy_argument(self, device, kind):
        def update(x, y):
            x.mul_(y).add_(1.0)
            return x * 2.0

        z = numbers(5, 9, device=device)
        ours, theirs = z.clone(), z.clone()
        y = torch.randn_like(LAZY[kind](z))
        compiled = torch.compile(update, backend="tsfuser")
        with pytest.warns(tsfuser.TsfuserWarning, match="lazy conjugate or negative"):
            for _ in range(3):
                assert_matches(compiled(LAZY[kind](ours), y), update(LAZY[kind](theirs), y), ops=12)
                assert_matches(ours, theirs, ops=12)
