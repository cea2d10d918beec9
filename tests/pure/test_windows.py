"""Values that are chosen by their place: as text, verified, and with vectors that no window cuts through."""

from dataclasses import replace

import pytest

from kit.programs import add, build, kernels, relu, stages, tensor
from tsfuser.ir import size as sz
from tsfuser.ir.fusion import Within
from tsfuser.ir.text import read
from tsfuser.ir.values import Window
from tsfuser.ir.verify import verify
from tsfuser.ops import table


def joined(b, *tensors):
    made = table.find("aten::cat").build(b, tensors=[relu(b, tensors[0]), *tensors[1:]], dim=-1)
    return add(b, made, b.literal(2.5))


def stored_and_padded(b, x):
    """A maximum that is stored before it is read in another place."""
    largest = b.reduce("amax", "max", x, [1], False, x.dtype)
    return table.find("aten::constant_pad_nd").build(b, self=largest, pad=[2, 1], value=None)


@pytest.mark.parametrize(
    "program, arguments",
    [(joined, [tensor(6, 8), tensor(6, 4), tensor(6, 1)]), (stored_and_padded, [tensor(6, 8)])],
)
def test_text_rebuilds_a_fusion_with_windows(program, arguments):
    fusion = build(program, *arguments)[1]
    assert verify(fusion) is None and "window(" in str(fusion)
    assert read(str(fusion)) == fusion


def test_a_window_of_other_axes_does_not_verify():
    fusion = build(joined, tensor(6, 8), tensor(6, 4))[1]
    rows = Window(fusion.axes[:1], sz.const(0), sz.const(2))
    ops = tuple(replace(op, window=rows) if isinstance(op, Within) else op for op in fusion.ops)
    assert "does not vary over the axes of its window" in verify(replace(fusion, ops=ops))


@pytest.mark.parametrize("left, right, vector", [(8, 4, 4), (8, 6, 2), (6, 4, 2), (5, 7, 1), (4, 9, 1)])
def test_no_window_cuts_through_a_vector(left, right, vector):
    """Rows are as long as both, pieces begin and end at multiples of a vector."""
    call, fusion = build(joined, tensor(64, left), tensor(64, right))
    [stage], _ = stages(call, fusion)
    assert stage.params.vector == vector


def side_by_side(count):
    def program(b, *tensors):
        made = [relu(b, x) for x in tensors]
        return table.find("aten::stack").build(b, tensors=made, dim=-1)

    return program, [tensor(64, 32) for _ in range(count)]


@pytest.mark.parametrize("count, vector", [(4, 4), (8, 1), (3, 1)])
def test_a_row_of_chosen_values_is_a_vector(count, vector):
    """In float32 of four at most, and not of three, whose addresses do not allow it; each lane chooses."""
    program, arguments = side_by_side(count)
    [stage], _ = stages(*build(program, *arguments))
    assert stage.params.vector == vector
    kernels(program, *arguments)


def test_a_row_of_what_is_read_in_windows_is_no_vector():
    """Of rows of four each tensor has two: a vector of four would read past its end."""
    arguments = [tensor(64, 2), tensor(64, 2)]
    [stage], _ = stages(*build(joined, *arguments))
    assert stage.params.vector == 2
