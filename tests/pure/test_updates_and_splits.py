"""Arguments that a Fusion changes in place, and axes that are split in the whole of it."""

from dataclasses import replace

import pytest

from programs import add, build, relu, stages, tensor
from tsfuser.errors import Refusal
from tsfuser.ir.dtypes import FLOAT, UINT8
from tsfuser.ir.fusion import Empty
from tsfuser.ir.text import read
from tsfuser.ir.verify import verify


def following(b, x, running):
    """Sums of columns, which `running` follows."""
    sums = b.reduce("sum", "sum", x, [0], False, x.dtype)
    b.update(running, add(b, running, sums), counted=True)
    return relu(b, sums)


def test_an_update_survives_the_text_and_is_stored_once():
    call, fusion = build(following, tensor(4, 8), tensor(8))
    assert [(u.index, u.counted) for u in fusion.updates] == [(1, True)]
    assert verify(fusion) is None and read(str(fusion)) == fusion
    stores = [store for s in stages(call, fusion)[0] for store in s.segment.stores]
    assert [(s.kind, s.index) for s in stores if s.kind == "update"] == [("update", 1)]


def test_a_damaged_update_does_not_verify():
    fusion = build(following, tensor(4, 8), tensor(8))[1]
    assert "argument 7" in verify(replace(fusion, updates=(replace(fusion.updates[0], index=7),)))


@pytest.mark.parametrize(
    "program, running, reason",
    [
        (lambda b, x, r: (following(b, x, r), add(b, x, r)), tensor(8), "other readers"),
        (lambda b, x, r: (following(b, x, r), following(b, x, r)), tensor(8), "twice"),
        (following, tensor(8, strides=(0,)), "overlaps itself"),
        (lambda b, x, r: following(b, x, relu(b, r)), tensor(8), "not an argument"),
        (lambda b, x, r: b.update(r, add(b, r, x), False) or x, tensor(8), "another dtype or rank"),
    ],
)
def test_an_update_that_could_go_wrong_is_refused(program, running, reason):
    with pytest.raises(Refusal, match=reason):
        build(program, tensor(4, 8), running)


def test_results_that_are_no_values():
    fusion = build(lambda b, x: (relu(b, x), None, 3, Empty(UINT8)), tensor(4))[1]
    assert fusion.results == (("output", 0), ("undefined", 0), ("integer", 3), ("empty", "uint8"))
    assert read(str(fusion)) == fusion


def grouped(count):
    """x minus the sums of its groups of columns."""

    def program(b, x):
        halves = b.split(x, 1, count)
        sums = b.reduce("sum", "sum", halves, [2], True, FLOAT)
        return b.merged(b.pointwise("sub", "({0} - {1})", (halves, sums), FLOAT), 1, x.dims[1])

    return program


def test_a_split_axis_is_two_loops_everywhere():
    call, fusion = build(lambda b, x: (grouped(3)(b, relu(b, x)), relu(b, x)), tensor(4, 12))
    assert verify(fusion) is None and read(str(fusion)) == fusion
    assert [call.value(a.extent) for a in fusion.axes] == [4, 3, 4]
    assert all(len(op.output.dims) == 3 for op in fusion.ops)
    assert [call.value(s) for s in fusion.inputs[0].strides] == [12, 4, 1]
    out = fusion.outputs[0]
    assert ([call.value(s) for s in out.sizes], [call.value(s) for s in out.steps]) == ([4, 12], [12, 4, 1])


@pytest.mark.parametrize("count", [1, 12])
def test_a_split_into_one_is_none(count):
    fusion = build(grouped(count), tensor(4, 12))[1]
    assert len(fusion.axes) == 2 and verify(fusion) is None


def test_axes_that_meet_are_split_alike():
    call, fusion = build(lambda b, x, y: add(b, grouped(3)(b, x), grouped(3)(b, y)), tensor(4, 12), tensor(4, 12))
    assert [call.value(a.extent) for a in fusion.axes] == [4, 3, 4] and verify(fusion) is None


@pytest.mark.parametrize(
    "program, reason",
    [
        (lambda b, x: grouped(2)(b, grouped(3)(b, x)), "grouped in two ways"),
        (lambda b, x: grouped(5)(b, x), "evenly"),
        (lambda b, x: grouped(0)(b, x), "evenly"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(program, reason):
    with pytest.raises(Refusal, match=reason):
        build(program, tensor(4, 12))
