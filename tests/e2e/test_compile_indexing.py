"""Gradients of indexing behind torch.compile: elements that are added where torch's op would sort."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.tracing import embeddings

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


@pytest.fixture
def added(monkeypatch):
    """Elements are added on the CPU, too."""
    monkeypatch.setattr(embeddings, "SORTING", ("cuda", "cpu"))


ADDED = {
    "one": lambda x, i, j: x[i],
    "the last": lambda x, i, j: x[..., i],
    "one of several": lambda x, i, j: x[:, i],
    "two": lambda x, i, j: x[:, i, j],
    "all": lambda x, i, j: x[i, j, i],
    "a grid": lambda x, i, j: x[i[:, None], j],
    "a matrix": lambda x, i, j: x[:, torch.stack((i, j))],
    "negative": lambda x, i, j: x[i - 3, j],
    "short": lambda x, i, j: x[i.int()],
    "two short": lambda x, i, j: x[i.int(), j.int()],
    "short and long": lambda x, i, j: x[i.int(), j],
    "none": lambda x, i, j: x[:, i[:0]],
}
ROUNDED = {"half": lambda x, i, j: x.bfloat16()[i]}  # added up in float32
SORTED = {
    "dims between": lambda x, i, j: x[i, :, j],
}


def gradients(case, device, run, dtype=torch.float32):
    """Of some calls: the gradient of the function, by `run`, and the one in eager mode, and in float64."""
    for n in (3, 5):
        x = torch.randn(n, 4, 4, device=device, dtype=dtype, requires_grad=True)
        exact = x.detach().double().requires_grad_()
        i, j = (
            torch.tensor([0, 2, 2, 1, 0, 2], device=device),
            torch.tensor([1, 1, 1, 0, 2, 0], device=device),
        )
        g = torch.randn_like(case(x, i, j))
        pairs = ((run, x), (case, x), (case, exact))
        yield [torch.autograd.grad(f(t, i, j).sin() * g, t, torch.ones_like(g))[0] for f, t in pairs]


@pytest.mark.each_value
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ADDED)
def test_elements_are_added(name, dynamic, device, added):
    run = torch.compile(ADDED[name], backend="tsfuser", fullgraph=True, dynamic=dynamic)
    for found, eager, exact in gradients(ADDED[name], device, run):
        assert_matches(found, eager, exact, ops=40)


@pytest.mark.parametrize("name", [*ADDED, *ROUNDED, *SORTED])
def test_how_it_is_done(name, device, added):
    case = {**ADDED, **ROUNDED, **SORTED}[name]
    x, i, j = (
        torch.randn(3, 4, 4, device=device, requires_grad=True),
        *torch.ones(2, 5, dtype=int, device=device),
    )
    run = torch.compile(case, backend="tsfuser")
    run(x, i, j).sum().backward()
    text = str(tsfuser.explain(run, x, i, j))
    ways = "index_add_ ", "add_at", "sums_at"  # by torch's op, or by a group
    is_added = any(way in text for way in ways)
    assert (is_added, "index_put" in text) == (name not in SORTED, name in SORTED)


@pytest.mark.parametrize("at", [(0, 5), (0, -6), (-5, 4), (4, 0)])
def test_indices_are_checked_by_dim(at, added):
    """(0, 5) would be (1, 0) in the dims that are one. On CUDA it stops the process, as in eager."""

    def function(x, i, j):
        return x.new_zeros(4, 5).index_put((i, j), x, accumulate=True) * 2

    x, (i, j) = torch.ones(1), (torch.tensor([k]) for k in at)
    run = torch.compile(function, backend="tsfuser")
    last = torch.tensor([3]), torch.tensor([4])
    assert torch.equal(run(x, *last), function(x, *last))
    with pytest.raises(IndexError):
        function(x, i, j)
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        run(x, i, j)


def test_deterministic_algorithms_sort(device, added):
    torch.use_deterministic_algorithms(True)
    try:
        run = torch.compile(ADDED["two"], backend="tsfuser")
        for found, eager, exact in gradients(ADDED["two"], device, run):
            assert_matches(found, eager, exact, ops=40)
        x, i = torch.randn(3, 4, 4, device=device, requires_grad=True), torch.tensor([1, 1], device=device)
        assert "index_put" in str(tsfuser.explain(run, x, i, i))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_indices_that_a_decomposition_changes(dtype, device):
    """torch's decomposition bounds them in the list that it is given, which it gets twice."""

    def function(x, mask, i, j):
        return torch.ops.aten._unsafe_masked_index(x * 2, mask, [i, j], -8) + 1

    training = dtype.is_floating_point
    x = torch.arange(20, device=device).view(4, 5).to(dtype).requires_grad_(training)
    i, j = (torch.randint(0, n, size, device=device) for n, size in ((4, (7, 1)), (5, (1, 9))))
    mask = torch.rand(7, 9, device=device) > 0.3
    found = [f(x, mask, i, j) for f in (torch.compile(function, backend="tsfuser"), function)]
    assert torch.equal(*found)
    if training:
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in found))
    assert tsfuser.stats()["passes_failed"] == {}
