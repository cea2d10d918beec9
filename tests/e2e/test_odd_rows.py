"""Rows of a few odd lengths, which have accesses of one element: a warp works on several of them, and each
thread of a row has several elements (`schedule/row_choice.py`). Rows with gaps between them, each of which
begins at a whole access, have accesses of several elements."""

import pytest
import torch

from kit.native_support import group_function
from kit.programs import build, stages, tensor
from kit.support import assert_matches, fused_as_eager
from tsfuser.ops import table

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]

PROGRAMS = ["torch.softmax(x.neg(), -1)", "torch.layer_norm(x, [x.size(-1)]) * 2"]


def softmax(b, x, *others):
    for other in others:
        x = b.pointwise("mul", (x, other), b.promote(x, other))
    return table.find("aten::softmax", "int").build(b, self=x, dim=-1)


@pytest.mark.parametrize(
    "length, dtype, wanted",
    [
        (33, "bfloat16", (8, 6)),
        (49, "bfloat16", (8, 8)),
        (49, "float32", (8, 8)),
        (49, "float64", (16, 4)),  # more than 32 bytes of a thread gain nothing
        (65, "float32", (16, 6)),
        (129, "bfloat16", (32, 6)),  # as many elements as registers should hold
        (31, "bfloat16", (32, 4)),  # an element of each of four rows
    ],
)
def test_threads_of_a_row_and_their_elements(length, dtype, wanted):
    ((stage, *_), _) = stages(*build(softmax, tensor(4096, length, dtype=dtype)))
    assert (stage.params.warp, stage.params.unroll) == wanted


@pytest.mark.parametrize("operands, wanted", [(1, (8, 8)), (2, (16, 4)), (4, (16, 4)), (5, (32, 2))])
def test_more_operands_leave_a_row_more_threads(operands, wanted):
    ((stage, *_), _) = stages(*build(softmax, *[tensor(4096, 49)] * operands))
    assert (stage.params.warp, stage.params.unroll) == wanted


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows, length", [(37, 33), (5, 49), (7, 99)])
def test_values(program, rows, length, dtype, device):
    x = torch.randn(rows, length, dtype=torch.float64).to(dtype).to(device)
    fused_as_eager(program, x)
    x[0], x[1, 3], x[2, 4], x[3, -1] = float("-inf"), float("nan"), float("inf"), float("-inf")
    fused_as_eager(program, x)


def with_gaps(x):
    """In rows of a multiple of 8 elements, with NaN in the gaps."""
    whole = torch.full((*x.shape[:-1], -(-x.shape[-1] // 8) * 8), float("nan")).to(x)
    part = whole[..., : x.shape[-1]]
    return part.copy_(x)


@pytest.mark.parametrize(
    "program",
    [
        "torch.logsumexp(x.float(), -1)",
        "(x.float() * y).sum(-1)",
        "torch.layer_norm(x.float() + y, [x.size(-1)]).abs().sum(-1)",
        "tsfuser_with_room",
    ],
)
@pytest.mark.parametrize("rows, length", [(37, 257), (5, 1025), (9, 140), (3, 20001)])
def test_rows_that_lie_apart(program, rows, length, device):
    """Nothing between them is read, and nothing is stored there but zeros."""
    x = with_gaps(torch.randn(rows, length).to(torch.bfloat16)).to(device)
    x = with_gaps(x) if x.is_contiguous() else x
    y = with_gaps(torch.randn(rows, length).to(device))
    if program != "tsfuser_with_room":
        fused_as_eager(program, x, y)
        return
    function = group_function(
        "graph(%x : Tensor, %y : Tensor):\n  %d : int = prim::Constant[value=-1]()\n"
        "  %s : Tensor = aten::mul(%x, %y)\n  %t : Tensor = aten::tanh(%s)\n"
        "  %r : Tensor = tsfuser::with_room(%t, %d)\n  return (%r)",
        inputs=2,
    )
    found = function(x, y)
    assert found.stride() == x.stride()
    assert_matches(found, torch.tanh(x * y), strides=False, ops=2)
    assert not torch.as_strided(found, (rows, x.stride(0)), found.stride())[:, length:].any()


@pytest.mark.parametrize("length, vector", [(1025, 8), (1032, 8), (120, 8), (57, 1), (121, 1)])
def test_accesses_to_rows_that_lie_apart(length, vector):
    """A few columns are not worth a vector of which most is behind the end."""
    padded = -(-length // 8) * 8
    x = tensor(4096, length, dtype="bfloat16", strides=(padded, 1))
    ((stage, *_), _) = stages(*build(lambda b, x: table.find("aten::amax", "").build(b, self=x, dim=[1]), x))
    assert stage.params.vector == vector
