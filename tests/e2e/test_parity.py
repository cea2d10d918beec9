"""Behaviours of nvFuser that no other test names; `tests/kit/parity.py` lists all."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fuse, groups, kinds, no_fallback, script
from tsfuser import options

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


def test_names_in_a_graph(device):
    """Views and added biases have aten's names, not `prim::*_copy` and `prim::add_optional`."""
    body = "y = torch.nn.functional.linear(x * 2.0, w, b).relu()\n    return (y.unsqueeze(0) + 1.0).tanh()"
    inputs = [torch.rand(shape, device=device) for shape in ((2, 3, 4, 8), (5, 8), (5,))]
    with options.override(enable={"linear_decomposition": ""}):
        scripted = fuse(script(f"def f(x, w, b):\n    {body}\n"), *inputs)
    text = str(scripted.graph_for(*inputs))
    assert "aten::unsqueeze" in text and "_copy" not in text and "add_optional" not in text
    assert any("aten::unsqueeze" in kinds(group) for group in groups(scripted))


BRANCHES = """
def f(x, w, least: float):
    if bool(x.sum() > least):
        y = torch.mm(torch.sigmoid(x) * 4.0, w)
        y = y.relu() * 2.0
    else:
        y = torch.tanh(x) * 3.0
    return y
"""


def test_groups_of_a_branch_that_did_not_run(device):
    """What follows from the types of inputs is fused, what reads a product that has not been seen is not."""
    x = torch.rand(4, 4, device=device)
    scripted = fuse(script(BRANCHES), x, x, 100.0)
    found = sorted(map(kinds, groups(scripted)))
    asked = ["aten::sum", "aten::gt"]
    assert found == [["aten::sigmoid", "aten::mul"], asked, ["aten::tanh", "aten::mul"]]
    assert_matches(scripted(x, x, -100.0), (torch.mm(torch.sigmoid(x) * 4.0, x)).relu() * 2.0, ops=8)


def test_a_reduction_over_a_dim_that_changes(device):
    source = "def f(x, i: int):\n    return (x.sum(i) * 2.0 + 1.0).relu()\n"
    scripted, x = script(source), torch.rand(4, 4, 4, device=device)
    with tsfuser.fuser():
        for i in (0, 1, 2, 0, 1, 2):
            assert_matches(scripted(x, i), (x.sum(i) * 2.0 + 1.0).relu(), ops=4)
    [group] = groups(scripted)
    assert kinds(group)[-4:] == ["aten::sum", "aten::mul", "aten::add", "aten::relu"]


def changed_behind_autograd(x):
    y = torch.exp(x)
    y.add_(1.0)
    return y * 2.0


def test_a_functional_form_raises_no_version_error(device):
    """One of the limits in docs/guide.md: eager's backward finds that the result of exp has been changed."""
    x = torch.rand(4, 4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed_behind_autograd(x).sum().backward()
    with tsfuser.fuser():
        scripted = script("def f(x):\n    y = torch.exp(x)\n    y.add_(1.0)\n    return y * 2.0\n")
        for _ in range(4):
            x.grad = None
            scripted(x).sum().backward()
            assert_matches(x.grad, 2 * torch.exp(x.detach()), ops=4)


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
