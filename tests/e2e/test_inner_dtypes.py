"""Casts to the dtype of another value of their own group."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.support import assert_matches, fresh, no_fallback
from tsfuser.frontends.torchscript import passes
from tsfuser.graph.wrapper import GROUP, all_nodes

pytestmark = pytest.mark.graphs


def norm(x: Tensor, y: Tensor, w: Tensor):
    """As transformers' models write an RMS norm."""
    x = x + y
    dtype = x.dtype
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(dtype)


def twice(x: Tensor, y: Tensor, w: Tensor):
    x = x * y
    dtype = x.dtype
    h = torch.exp(x.to(torch.float32))
    return h.to(dtype) + w, (h * 2.0).to(dtype) * w


def returned(x: Tensor, y: Tensor, w: Tensor):
    """The program reads the number, too."""
    x = x + y
    dtype = x.dtype
    h = torch.tanh(x.to(torch.float32))
    return h.to(dtype) * w, torch.zeros(2, dtype=dtype)


def elsewhere(x: Tensor, y: Tensor, w: Tensor):
    """The cast reads nothing else of the group, and has other sizes."""
    x = torch.tanh(x + y)
    v = torch.exp(w.to(torch.float32)).to(x.dtype)
    return torch.mm(x, y.t()), v * 2.0


def tensors(device, dtype, sizes=(5, 33)):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in (sizes, sizes, sizes[-1:])]


def groups(seen):
    return [node for found in seen for node in all_nodes(found.graph) if node.kind() == GROUP]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("program", [norm, twice, returned, elsewhere], ids=lambda f: f.__name__)
def test_results(device, program, dtype):
    inputs, scripted = tensors(device, dtype), fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            got = scripted(*inputs)
    want, exact = program(*inputs), program(*(t.double() for t in inputs))
    results = (got, want, exact) if isinstance(got, tuple) else ((got,), (want,), (exact,))
    for mine, theirs, true in zip(*results, strict=True):
        assert_matches(mine, theirs, true, ops=40)


@pytest.mark.parametrize("program", [norm, twice, returned, elsewhere], ids=lambda f: f.__name__)
def test_one_group(device, program):
    inputs, scripted = tensors(device, torch.bfloat16), fresh(program)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(3):
            scripted(*inputs)
    assert len(groups(seen)) == 1


def test_another_dtype(device):
    """Of a later call: the number is asked again."""
    scripted = fresh(norm)
    with tsfuser.fuser():
        for dtype in [torch.bfloat16] * 3 + [torch.float32, torch.float64, torch.float16]:
            inputs = tensors(device, dtype)
            got = scripted(*inputs)
            assert got.dtype == dtype
            assert_matches(got, norm(*inputs), norm(*(t.double() for t in inputs)), ops=40)
