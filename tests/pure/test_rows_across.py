"""Rows are not taken as rows where a large operand lies across them in memory; a small one may, which many
rows share."""

import pytest

from kit.programs import build, stages, tensor
from tsfuser.ops.batch_norm import _forward
from tsfuser.schedule.machine import GPU
from tsfuser.schedule.row_params import RowParams


def across(rows, columns):
    """A tensor whose columns lie in memory one behind the other."""
    return tensor(rows, columns, strides=(1, rows))


def softmax(b, *values):
    x = values[0] if len(values) == 1 else b.pointwise("add", values, values[0].dtype)
    largest = b.reduce("amax", "max", x, [-1], True, x.dtype)
    powers = b.pointwise("exp", (b.pointwise("sub", (x, largest), x.dtype),), x.dtype)
    made = b.pointwise("div", (powers, b.reduce("sum", "sum", powers, [-1], True, x.dtype)), x.dtype)
    return b.contiguous(made)


def kinds(program, *args):
    return [type(stage.params) for stage in stages(*build(program, *args), GPU)[0]]


def test_a_small_operand_may_lie_across():
    """As the bias of an attention, of which heads are the innermost dim."""
    assert kinds(softmax, tensor(64, 4096, 49), across(4096, 49)) == [RowParams]


@pytest.mark.parametrize("rows, as_rows", [(64, True), (4096, False)])
def test_a_large_one_may_not(rows, as_rows):
    assert (kinds(softmax, across(rows, 1024)) == [RowParams]) == as_rows


@pytest.mark.parametrize("size, as_rows", [(4, True), (28, False)])
def test_statistics_of_channels_last_images(size, as_rows):
    """With a result that is row-major, as in front of a channel shuffle."""

    def program(b, x):
        return b.contiguous(_forward(b, x, None, None, None, None, True, b.literal(0.1), b.literal(1e-5))[0])

    c, s = 58, size
    image = tensor(32, c, s, s, strides=(c * s * s, 1, c * s, c))
    assert (RowParams in kinds(program, image)) == as_rows
