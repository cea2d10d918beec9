"""Arguments that a Fusion changes in place, and axes that are several loops in the whole of it."""

import contextlib
from dataclasses import replace

import pytest

from kit.programs import add, build, relu, stages, tensor, total
from tsfuser.errors import Refusal
from tsfuser.ir import size as sz
from tsfuser.ir.axes import Axes
from tsfuser.ir.call import Call
from tsfuser.ir.dtypes import FLOAT, UINT8
from tsfuser.ir.fusion import Axis, Empty, Reshape
from tsfuser.ir.text import read
from tsfuser.ir.verify import verify
from tsfuser.ir.views import merged, split, view
from tsfuser.ops.table import find
from tsfuser.segment import BufferKind


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
    assert [(s.kind, s.index) for s in stores if s.kind is BufferKind.UPDATE] == [(BufferKind.UPDATE, 1)]


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
        (
            lambda b, x, r: b.update(r, find("aten::flip", "").build(b, self=r, dims=[0]), False) or x,
            tensor(8),
            "elsewhere",
        ),
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
        halves = split(b, x, 1, count)
        sums = b.reduce("sum", "sum", halves, [2], True, FLOAT)
        return merged(b, b.pointwise("sub", (halves, sums), FLOAT), 1, x.dims[1])

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
    call, fusion = build(
        lambda b, x, y: add(b, grouped(3)(b, x), grouped(3)(b, y)), tensor(4, 12), tensor(4, 12)
    )
    assert [call.value(a.extent) for a in fusion.axes] == [4, 3, 4] and verify(fusion) is None


@pytest.mark.parametrize(
    "program, reason",
    [
        (lambda b, x: grouped(5)(b, x), "evenly"),
        (lambda b, x: grouped(0)(b, x), "evenly"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(program, reason):
    with pytest.raises(Refusal, match=reason):
        build(program, tensor(4, 12))


def test_a_split_beside_another_goes_through_memory():
    call, fusion = build(lambda b, x: grouped(2)(b, grouped(3)(b, x)), tensor(4, 12))
    assert len(reshapes(fusion)) == 1 and verify(fusion) is None


def test_random_numbers_of_a_split_axis_are_counted_as_before():
    call, fusion = build(lambda b, x: grouped(3)(b, add(b, x, b.uniform(x))), tensor(4, 12))
    assert verify(fusion) is None
    assert [call.value(s) for s in fusion.randoms[0].linear_strides] == [12, 4, 1]


# ---- merged dims


def extents(axes, loops):
    return [axes.call.value(p.extent) for a in loops for p in axes.parts(a)]


@pytest.mark.parametrize(
    "old, new, pieces",
    [
        ((4, 6), (24,), [4, 6]),
        ((24,), (4, 6), [4, 6]),
        ((4, 6), (2, 12), [2, 2, 6]),
        ((4, 6, 5), (8, 15), [4, 2, 3, 5]),
        ((2, 3, 4), (2, 3, 4), [2, 3, 4]),
        ((2, 6), (3, 4), None),
        ((4, 6), (6, 4), None),
        ((4, 6), (4, 5), None),
        ((4, 6), (4,), None),
    ],
)
def test_the_finest_pieces(old, new, pieces):
    axes = Axes(Call(()), iter_axes())
    loops = [axes.fresh(sz.const(n)) for n in old]
    shares = axes.shared_out(loops, [sz.const(n) for n in new])
    assert (shares and extents(axes, loops)) == pieces
    if pieces:
        assert [axes.call.value(sz.product([p.extent for p in share])) for share in shares] == list(new)


def iter_axes():
    """Makes axes of names of their own."""
    made = []

    def fresh(extent):
        made.append(extent)
        return Axis(f"e{len(made) - 1}", extent)

    return fresh


def reshaped(b, x, *sizes):
    return find("aten::reshape").build(b, self=x, shape=list(sizes))


def reshapes(fusion):
    return [op for op in fusion.ops if isinstance(op, Reshape)]


def test_what_meets_a_merged_dim_is_cut_as_it_is():
    """A bias and a residual are read along the dims that were merged."""
    call, fusion = build(
        lambda b, x, y, z: add(b, add(b, reshaped(b, relu(b, x), 4, 30), y), z),
        tensor(4, 5, 6),
        tensor(30),
        tensor(4, 30),
    )
    assert verify(fusion) is None and read(str(fusion)) == fusion and not reshapes(fusion)
    assert [call.value(a.extent) for a in fusion.axes] == [4, 5, 6]
    assert [[call.value(s) for s in i.strides] for i in fusion.inputs] == [[30, 6, 1], [6, 1], [30, 6, 1]]
    assert [call.value(s) for s in fusion.outputs[0].sizes] == [4, 30]
    assert len(stages(call, fusion)[0]) == 1


def test_a_merged_dim_in_two_ways_is_read_twice():
    """The rows of a square and its columns, each as one dim: no loops are those of both."""

    def program(b, x):
        y = relu(b, x)
        return add(
            b, reshaped(b, y, 36), reshaped(b, view(b, "t", y, y.dims[::-1], b.layout(y).strides[::-1]), 36)
        )

    call, fusion = build(program, tensor(6, 6))
    assert verify(fusion) is None and len(fusion.inputs) == 2 and not reshapes(fusion)


def test_what_does_not_nest_is_stored_and_read_again():
    call, fusion = build(lambda b, x: relu(b, reshaped(b, relu(b, x), 5, 12)), tensor(12, 5))
    assert verify(fusion) is None and read(str(fusion)) == fusion and len(reshapes(fusion)) == 1
    found, temporaries = stages(call, fusion)
    assert [len(s.segment.ops) for s in found] == [2, 1] and len(temporaries) == 1
    [load] = found[1].segment.loads
    assert (load.kind, load.index) == (BufferKind.ALLOCATION, temporaries[0].index)
    assert [call.value(s) for s in load.strides] == [12, 1]


@pytest.mark.parametrize("strides, temporaries", [((5, 1), 0), ((1, 12), 1)])
def test_what_is_a_result_as_well_is_stored_once(strides, temporaries):
    """If the result lies in memory row by row, as what is reshaped is read."""

    def program(b, x):
        y = relu(b, x)
        return y, relu(b, reshaped(b, y, 5, 12))

    call, fusion = build(program, tensor(12, 5, strides=strides))
    assert verify(fusion) is None and read(str(fusion)) == fusion and len(reshapes(fusion)) == 1
    assert len(stages(call, fusion)[1]) == temporaries


def test_reductions_wait_for_what_they_read_from_memory():
    """Sums before and after it, which are over the same axes."""

    def program(b, x):
        late = reshaped(b, relu(b, reshaped(b, relu(b, x), 9, 4)), 6, 6)
        return total(b, add(b, late, x), [1]), total(b, x, [1])

    call, fusion = build(program, tensor(6, 6))
    assert verify(fusion) is None and len(reshapes(fusion)) == 2 and len(fusion.axes) == 4
    stored = set()
    for stage in stages(call, fusion)[0]:
        assert not any(isinstance(op, Reshape) for op in stage.segment.ops)
        assert all(b.kind is BufferKind.INPUT or b.index in stored for b in stage.segment.loads)
        stored.update(b.index for b in stage.segment.stores)


@pytest.mark.parametrize("kind, refused", [("aten::view", True), ("aten::reshape", False)])
def test_a_view_that_eager_refuses_is_refused(kind, refused):
    """A computed value that lies in memory as its operand, transposed, does."""

    def program(b, x):
        return relu(b, find(kind).build(b, self=relu(b, x), **{"size" if refused else "shape": [12]}))

    build(program, tensor(3, 4))
    with pytest.raises(Refusal, match="error in eager") if refused else contextlib.nullcontext():
        build(program, tensor(3, 4, strides=(1, 3)))


def turned(b, x):
    y = find("aten::transpose", "int").build(b, self=x, dim0=0, dim1=1)
    return find("aten::clone").build(b, self=y, memory_format=0)


def halves(b, x):
    """The first half as it is, the second one turned."""
    first, second = (find("aten::select", "int").build(b, self=x, dim=0, index=at) for at in (0, 1))
    return relu(b, first), turned(b, second)


def both_ways(b, x):
    y = relu(b, x)
    return y, turned(b, y)


@pytest.mark.parametrize(
    "program, x, kinds",
    [
        (halves, tensor(2, 512, 1024), ["PointwiseParams", "TransposeParams"]),
        (halves, tensor(2, 32, 64), ["PointwiseParams"]),  # another launch would cost more
        (both_ways, tensor(512, 1024), ["TransposeParams"]),  # what both read is read once
    ],
)
def test_what_lies_the_other_way_in_memory_has_a_kernel_of_its_own(program, x, kinds):
    found, _ = stages(*build(program, x))
    assert [type(stage.params).__name__ for stage in found] == kinds


def column_sums(b, x):
    return b.reduce("sum", "sum", x, [0], True, x.dtype)


def viewed(b, x):
    return find("aten::squeeze", "dim").build(b, self=x, dim=0)


def bias_gradient(b, x):
    return relu(b, x), b.cast(viewed(b, column_sums(b, x)), FLOAT)


def read_twice(b, x):
    sums = column_sums(b, x)
    return sums, b.cast(viewed(b, sums), FLOAT)


def computed_on(b, x):
    return relu(b, viewed(b, column_sums(b, x)))


def _stored(program, shape):
    """By kernel, the dtypes of its stores."""
    found, _ = stages(*build(program, tensor(*shape, dtype="bfloat16")))
    return [sorted(b.value.dtype.name for b in stage.segment.stores) for stage in found]


def test_a_reduction_stores_what_is_cast_of_it():
    assert _stored(bias_gradient, (4, 8)) == [["bfloat16", "float32"]]
    assert _stored(bias_gradient, (65536, 256)) == [["bfloat16", "float32"], ["float32"]]  # and its parts


@pytest.mark.parametrize("program", [read_twice, computed_on])
def test_a_reduction_with_other_readers_is_rounded(program):
    assert _stored(program, (4, 8))[0] == ["bfloat16"] and len(_stored(program, (4, 8))) == 2
