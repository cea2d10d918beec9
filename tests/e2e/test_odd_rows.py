"""Rows of a few odd lengths, which have accesses of one element: a warp works on several of them, and each
thread of a row has several elements (`schedule/row_choice.py`)."""

import pytest
import torch

from kit.programs import build, stages, tensor
from kit.support import fused_as_eager
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
