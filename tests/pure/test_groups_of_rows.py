"""Rows shorter than a memory access: several of them are one access, whatever their elements are made of."""

import pytest

from kit.programs import build, kernels, stages, tensor
from tsfuser.lower.loop_ir import Load, Store
from tsfuser.lower.traverse import statements
from tsfuser.ops import table
from tsfuser.schedule.pointwise import PointwiseParams
from tsfuser.schedule.short_rows import ShortRowsParams


def op(name, b, overload="", **arguments):
    return table.find(f"aten::{name}", overload).build(b, **arguments)


def mul(b, x, y):
    return b.pointwise("mul", (x, y), b.promote(x, y))


def rotated(b, x, cos, sin):
    """Interleaved pairs (x0, x1), as (x0 * cos, x1 * sin)."""
    parts = [op("select", b, "int", self=x, dim=-1, index=k) for k in range(2)]
    return op("stack", b, tensors=[mul(b, parts[0], cos), mul(b, parts[1], sin)], dim=-1)


def rotary(width=32, dtype="bfloat16", **memory):
    tables = [tensor(width, dtype=dtype) for _ in range(2)]
    return [tensor(4, 6, 64, width, 2, dtype=dtype, **memory), *tables]


def stacked(b, *tensors):
    return op("stack", b, tensors=[mul(b, x, x) for x in tensors], dim=-1)


def joined(b, x, y, z):
    """Pairs of x and y, in front of those of z, along the rows of pairs."""
    return op("cat", b, tensors=[stacked(b, x, y), mul(b, z, z)], dim=-2)


def widths(program, *arguments):
    """The lanes of all accesses to memory, in order; the kernel is verified."""
    [kernel] = kernels(program, *arguments)
    return sorted(s.lanes for s in statements(kernel.body) if isinstance(s, (Load, Store)))


@pytest.mark.parametrize("dtype, pairs", [("bfloat16", 4), ("float32", 2), ("int8", 8)])
def test_pairs_are_read_and_stored_16_bytes_at_a_time(dtype, pairs):
    """Both elements of a pair, which different ops use, come with one access."""
    assert widths(rotated, *rotary(dtype=dtype)) == [pairs, pairs, 2 * pairs, 2 * pairs]


def test_a_misaligned_address_narrows_what_is_read_or_all():
    # rows 132 bytes apart: both elements of each pair are read alone, and stored together
    assert widths(rotated, *rotary(strides=(6 * 64 * 66, 64 * 66, 66, 2, 1))) == [1, 1, 4, 4, 8]
    [stage], _ = stages(*build(stacked, *[tensor(64, 32, dtype="bfloat16", alignment=2)] * 2))
    assert isinstance(stage.params, PointwiseParams)


@pytest.mark.parametrize("count, rows", [(2, 4), (4, 2)])
def test_what_is_stacked_is_stored_in_one_access(count, rows):
    assert widths(stacked, *[tensor(64, 32, dtype="bfloat16")] * count) == [rows] * count + [8]


@pytest.mark.parametrize(
    "program, arguments",
    [(rotated, rotary(31)), *((stacked, [tensor(64, 32, dtype="bfloat16")] * count) for count in (3, 8))],
)
def test_other_rows_are_no_groups(program, arguments):
    """An odd number of pairs, rows of three elements, and some as wide as an access."""
    [stage], _ = stages(*build(program, *arguments))
    assert isinstance(stage.params, PointwiseParams)


def test_a_thread_has_rows_for_which_it_loads_the_angles_once():
    """Of four heads, in front of the tokens; a small tensor has too few rows for that."""
    heads = tensor(32, 512, 8, 32, 2, dtype="bfloat16", strides=(262144, 64, 32768, 2, 1))
    angles = [tensor(8, 32, dtype="bfloat16")] * 2
    [stage], _ = stages(*build(rotated, heads, *angles))
    assert (stage.params.along, stage.params.unroll) == ("i1", 4)
    assert widths(rotated, heads, *angles) == [4, 4, 8, 8]
    [stage], _ = stages(*build(rotated, *rotary()))
    assert (stage.params.along, stage.params.unroll) == ("", 1)


def test_an_access_ends_where_a_window_does():
    """Rows are 16 pairs of two tensors and then 6 of the third, in groups of 2, where 4 would fit."""
    arguments = [tensor(8, n, *two, dtype="bfloat16") for n, two in ((16, ()), (16, ()), (6, (2,)))]
    [stage], _ = stages(*build(joined, *arguments))
    assert isinstance(stage.params, ShortRowsParams) and stage.params.group == 2
    assert widths(joined, *arguments) == [2, 2, 4, 4]


def test_the_params_print_as_code_that_rebuilds_them():
    [stage], _ = stages(*build(rotated, *rotary()))
    assert eval(repr(stage.params)) == stage.params
