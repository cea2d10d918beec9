"""Behaviours of nvFuser that no other test names; `tests/parity.py` lists all."""

import pytest
import torch
from support import assert_matches, fuse, groups, kinds, no_fallback, script

import tsfuser

pytestmark = pytest.mark.graphs


def test_inference_is_fused_in_the_second_call_and_training_in_the_third(device):
    source = "def f(x, w):\n    return ((x * w + 1.0).relu() * w).tanh()\n"
    x, w = (torch.rand(4, 6, device=device) for _ in range(2))
    launches = []
    for gradients, scripted in ((False, script(source)), (True, script(source))):
        x.requires_grad_(gradients)
        with tsfuser.fuser():
            for _ in range(3):
                before = tsfuser.stats()["launches"]
                out = scripted(x, w)
                if gradients:
                    out.sum().backward()
                launches.append(tsfuser.stats()["launches"] > before)
    assert launches == [False, True, True, False, False, True]


def test_chunks_are_strided_inputs_of_a_group(device):
    scripted = script(
        "def f(x):\n    y = (x * 2.0).softmax(1)\n    a, b = y.chunk(2, 1)\n    return (a * b + 1.0).relu()\n"
    )
    x = torch.randn(4, 6, device=device)
    fuse(scripted, x)
    found = sorted(kinds(group) for group in groups(scripted))
    assert found == [["aten::mul", "aten::add", "aten::relu"], ["aten::mul", "aten::softmax"]]
    a, b = (x * 2.0).softmax(1).chunk(2, 1)
    with no_fallback():
        assert_matches(scripted(x), (a * b + 1.0).relu(), ops=12)


@pytest.mark.parametrize("rank, fused", [(8, 1), (9, 0)])
def test_nine_dims_are_not_fused(device, rank, fused):
    scripted = script("def f(x):\n    return (x * 2.0 + 1.0).relu()\n")
    x = torch.randn(*[1] * (rank - 2), 2, 3, device=device)
    assert len(groups(fuse(scripted, x))) == fused
    assert_matches(scripted(x), (x * 2.0 + 1.0).relu(), ops=3)


def test_a_cast_rounds(device):
    scripted = script("def f(x):\n    return x.to(torch.float16).to(torch.float32) * 4.0 + 1.0\n")
    x = torch.rand(100, device=device)
    fuse(scripted, x)
    with no_fallback():
        assert torch.equal(scripted(x), x.half().float() * 4.0 + 1.0)


@pytest.mark.parametrize("op", ["torch.nn.functional.linear(x, x)", "torch.mm(x, x)", "x.matmul(x)"])
def test_products_of_matrices_are_not_fused(device, op):
    scripted = script(f"def f(x):\n    return ({op} + 1.0).relu()\n")
    fuse(scripted, torch.rand(5, 5, device=device))
    assert [kinds(group) for group in groups(scripted)] == [["aten::add", "aten::relu"]]


SCANS = "torch.cumsum(x, 0)", "x.index_select(0, i)", "x.gather(0, i[:, None])", "x.argmax(0)"


@pytest.mark.parametrize("op", SCANS)
def test_scans_and_indices_are_not_fused(device, op):
    scripted = script(f"def f(x, i):\n    return ({op} + 1).relu()\n")
    x, i = torch.rand(5, 5, device=device), torch.tensor([0, 3], device=device)
    fuse(scripted, x, i)
    assert [kinds(group) for group in groups(scripted)] == [["aten::add", "aten::relu"]]


def test_many_ranks_and_dtypes_stay_right(device):
    scripted = script("def f(x):\n    return (x * 2 + 1).relu()\n")
    inputs = [torch.ones([2] * rank, device=device, dtype=dtype) for rank in (1, 2, 3, 4)
              for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64)]  # fmt: skip
    with tsfuser.fuser():
        for _ in range(3):
            for x in inputs:
                scripted(x)
        before = tsfuser.stats()["launches"]
        for x in inputs:
            assert torch.equal(scripted(x), (x * 2 + 1).relu())
    assert tsfuser.stats()["launches"] == before + len(inputs)


def test_a_forked_call_is_fused(device):
    scripted = script(
        "def part(x):\n    return (x * 2.0 + 1.0).relu()\n\n"
        "def f(x):\n    other = torch.jit.fork(part, x)\n    return part(x) + torch.jit.wait(other)\n"
    )
    x = torch.randn(4, 6, device=device)
    fuse(scripted, x)
    before = tsfuser.stats()["launches"]
    assert_matches(scripted(x), 2 * (x * 2.0 + 1.0).relu(), ops=4)
    assert tsfuser.stats()["launches"] >= before + 2
