"""Sums of columns in rows that lie apart, and of what a group stores with room behind its rows
(`schedule/stored_sums.py`)."""

import pytest
import torch

from kit.native_support import group_function
from kit.programs import build, stages, tensor, total
from kit.support import assert_matches, fused_as_eager
from tsfuser.ops import table
from tsfuser.schedule import stored_sums
from tsfuser.schedule.pointwise import PointwiseParams

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]


def with_gaps(x, step=8):
    """In rows of a multiple of `step` elements, with NaN in the gaps."""
    whole = torch.full((*x.shape[:-1], -(-x.shape[-1] // step) * step), float("nan")).to(x)
    return whole[..., : x.shape[-1]].copy_(x)


def gradient(b, x, y):
    made = b.pointwise("mul", (x, y), b.promote(x, y))
    made = table.find("tsfuser::with_room").build(b, self=made, dim=-1)
    return made, total(b, made, [0], keepdim=True)


def odd(rows, columns, padded=None, **how):
    return tensor(rows, columns, dtype="bfloat16", strides=padded and (padded, 1), **how)


def test_the_sum_reads_whole_accesses_of_what_is_stored():
    first, second, *_ = stages(*build(gradient, odd(8192, 1001), odd(8192, 1001)))[0]
    assert isinstance(first.params, PointwiseParams)
    assert not second.params.inner and second.params.vector == 8


@pytest.mark.parametrize(
    "x, y",
    [
        (odd(8192, 1001, 1008), odd(8192, 1001, 1008)),  # all rows begin at whole accesses
        (odd(64, 1001), odd(64, 1001)),  # little is read twice in one kernel
        (odd(8192, 1008), odd(8192, 1008)),
        (odd(8192, 1002), odd(8192, 1002)),  # accesses of two elements will do
    ],
    ids=["apart", "few", "whole", "even"],
)
def test_else_one_kernel_does_both(x, y):
    found = stages(*build(gradient, x, y))[0]
    assert len({stage.params.inner for stage in found}) == 1 and not found[0].params.inner


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows, columns", [(37, 257), (1, 1025), (300, 140), (0, 257), (64, 9)])
def test_values(device, monkeypatch, rows, columns, dtype):
    monkeypatch.setattr(stored_sums, "LARGE", 1)
    function = group_function(
        "graph(%x : Tensor, %y : Tensor):\n  %last : int = prim::Constant[value=-1]()\n"
        "  %0 : int = prim::Constant[value=0]()\n  %keep : bool = prim::Constant[value=1]()\n"
        "  %none : NoneType = prim::Constant()\n  %dims : int[] = prim::ListConstruct(%0)\n"
        "  %s : Tensor = aten::mul(%x, %y)\n  %r : Tensor = tsfuser::with_room(%s, %last)\n"
        "  %t : Tensor = aten::sum(%r, %dims, %keep, %none)\n  return (%r, %t)",
        inputs=2,
    )
    x, y = (torch.randn(rows, columns).to(device, dtype) for _ in range(2))
    for other in (y, with_gaps(y), y[:, :1]):
        found, sums = function(x, other)
        expected = x * other
        assert_matches(found, expected, strides=False, ops=2)
        rounded = expected.double()
        assert_matches(sums, expected.sum(0, True), rounded.sum(0, True), ops=2 * rows + 2)


@pytest.mark.parametrize(
    "program", ["x.sum(0)", "(x * 2).sum(0, keepdim=True)", "x.float().mean(0)", "x.amax(0)"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows, columns", [(37, 257), (1, 1025), (700, 140), (0, 257), (9, 129)])
def test_columns_of_rows_that_lie_apart(device, program, rows, columns, dtype):
    """Nothing between the rows is read, and no vector is stored over the end."""
    if rows == 0 and "amax" in program:
        pytest.skip("an error in eager")
    x = with_gaps(torch.randn(rows, columns).to(device, dtype))
    fused_as_eager(program, x)
    if rows > 8:
        x[3, 5], x[7, -1], x[8, 0] = float("nan"), float("inf"), float("-inf")
        fused_as_eager(program, x)


@pytest.mark.parametrize("sizes, vector", [((8192, 1001), 8), ((8192, 57), 1), ((2, 4096, 1001), 1)])
def test_accesses_to_such_columns(sizes, vector):
    """A few columns are not worth a vector of which most is behind the end; where rows are columns, too, a
    vector would go on in the next row."""
    padded = -(-sizes[-1] // 8) * 8
    strides = (sizes[1] * padded, padded, 1)[-len(sizes) :]
    x = tensor(*sizes, dtype="bfloat16", strides=strides)
    dim = 0 if len(sizes) == 2 else 1
    assert stages(*build(lambda b, x: total(b, x, [dim]), x))[0][0].params.vector == vector
