"""Reductions fused by TorchScript, against eager and against eager in double.

Each function holds several reductions, so that few kernels say much; `check` runs it fused, without a fallback.
"""

import pytest
import torch
from support import assert_matches, groups, no_fallback, script

import tsfuser

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COLUMNS = [1, 2, 3, 17, 31, 33, 100, 1000, 4097, 70000]


@pytest.fixture(autouse=True)
def single_nodes():
    """A group of one op is a group, too."""
    previous = torch._C._jit_set_nvfuser_single_node_mode(True)
    yield
    torch._C._jit_set_nvfuser_single_node_mode(previous)


def tuples(x):
    return x if isinstance(x, tuple) else (x,)


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


class Fused:
    """A function of TorchScript source, once for tsfuser and once, never seen by it, for eager."""

    def __init__(self, source):
        self.scripted, self.plain = script(source), script(source)

    @property
    def kinds(self):
        return {n.kind() for g in groups(self.scripted) for n in g.g("Subgraph").nodes()}


def check(function, *inputs, calls=3, ops=16, strides=True):
    """Calls the `Fused` function without a fallback and compares; the precision is that of the inputs."""
    floating = [x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    with tsfuser.fuser(), no_fallback():
        for _ in range(calls):
            actual = tuples(function.scripted(*inputs))
    assert function.kinds
    eager = tuples(function.plain(*inputs))
    exact = tuples(function.plain(*map(double, inputs)))
    for a, e, r in zip(actual, eager, exact):
        assert_matches(a, e, r, ops=ops, strides=strides, precision=floating[0] if floating and a.is_floating_point() else None)
    return actual


MANY = """
def f(x, dim: List[int], keepdim: bool):
    return (torch.sum(x, dim, keepdim), torch.mean(x, dim, keepdim), torch.amax(x, dim, keepdim), torch.amin(x, dim, keepdim),
            torch.var(x, dim, True, keepdim), torch.std(x, dim, False, keepdim), torch.linalg.vector_norm(x, 2, dim, keepdim),
            torch.linalg.vector_norm(x, 1, dim, keepdim), torch.linalg.vector_norm(x, float("inf"), dim, keepdim))
"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_reduction_over_rows(device, dtype):
    function = Fused(MANY)
    for columns in (5, 33, 1000):
        x = torch.randn(7, columns, dtype=torch.float64).to(device, dtype) + 3
        check(function, x, [1], False)
    assert "aten::var" in function.kinds


@pytest.mark.parametrize("dims, keepdim", [([0], True), ([0, 2], False), ([-1, 1], True), ([], False), ([0, 1, 2], True), ([1], False)], ids=str)
def test_every_reduction_over_any_dims(device, dims, keepdim):
    function = Fused(MANY)
    check(function, torch.randn(6, 5, 9, device=device), dims, keepdim)
    check(function, torch.randn(6, 1, 33, device=device), dims, keepdim)


FULL = """
def f(x):
    return torch.sum(x), torch.mean(x), torch.max(x), torch.min(x), torch.var(x), torch.std(x, False), torch.norm(x)
"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_reductions(device, dtype):
    function = Fused(FULL)
    for sizes in ((9,), (130, 70), (3, 5, 1200)):
        check(function, torch.randn(sizes, dtype=torch.float64).to(device, dtype))
