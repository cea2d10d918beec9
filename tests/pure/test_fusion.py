"""The Fusion: building, text, verification, segments."""

from dataclasses import replace

import pytest

from kit.programs import add, build, relu, stages, tensor, total
from tsfuser.errors import Refusal
from tsfuser.ir.call import ScalarArg
from tsfuser.ir.dtypes import DOUBLE, INT64
from tsfuser.ir.fusion import Lookup, Pointwise, Random, Value
from tsfuser.ir.text import read
from tsfuser.ir.verify import verify
from tsfuser.ops import casts
from tsfuser.schedule import expanded
from tsfuser.schedule.machine import GPU
from tsfuser.schedule.schedulers import is_one_pass
from tsfuser.segment import Allocations, BufferKind, segments


def scaled(builder, x, y, n):
    product = builder.pointwise("mul", (add(builder, x, y), n), x.dtype)
    return relu(builder, product), total(builder, product, [0], True), x


def scaled_fusion():
    return build(scaled, tensor(4, 8), tensor(8), ScalarArg("float"))[1]


def test_text_rebuilds_the_fusion():
    fusion = scaled_fusion()
    assert read(str(fusion)) == fusion
    assert "pointwise('mul'" in str(fusion)


def test_literals_survive_the_text():
    for number in (True, 3, -2.5, float("inf"), 1e-30):
        _, fusion = build(lambda b, x: b.pointwise("add", (x, b.literal(number)), x.dtype), tensor(4))
        assert read(str(fusion)) == fusion


def test_what_is_built_verifies():
    assert verify(scaled_fusion()) is None


@pytest.mark.parametrize("damage, complaint", [
    (lambda f: replace(f, ops=f.ops[1:]), "before it is defined"),
    (lambda f: replace(f, ops=f.ops + f.ops[:1]), "defined twice"),
    (lambda f: replace(f, outputs=(replace(f.outputs[0], sizes=()),)), "0 sizes"),
    (lambda f: replace(f, ops=(replace(f.ops[0], symbol="lerp"), *f.ops[1:])), "takes more operands"),
    (lambda f: replace(f, ops=(replace(f.ops[0], symbol="nothing"), *f.ops[1:])), "no symbol nothing"),
])  # fmt: skip
def test_a_damaged_fusion_does_not_verify(damage, complaint):
    assert complaint in verify(damage(scaled_fusion()))


def test_sizes_that_meet_become_one_axis():
    call, fusion = build(add, tensor(4, 8), tensor(4, 8))
    assert len(fusion.axes) == 2
    assert [str(s) for s in call.decisions if s.op == "eq" and not s.b.is_const] != []


def test_a_size_of_one_is_broadcast():
    _, fusion = build(add, tensor(4, 1), tensor(8))
    assert fusion.inputs[0].value.dims[1] is None
    assert len(fusion.outputs[0].value.axes) == 2


def test_sizes_that_do_not_broadcast_are_refused():
    with pytest.raises(Refusal, match="3 and 4 do not broadcast"):
        build(add, tensor(3), tensor(4))


def test_dead_ops_and_inputs_are_dropped():
    def program(builder, x, y):
        add(builder, x, y)
        return relu(builder, x)

    _, fusion = build(program, tensor(4), tensor(4))
    assert [op.name for op in fusion.ops] == ["relu"] and len(fusion.inputs) == 1


def test_an_argument_that_is_returned_stays_that_argument():
    assert scaled_fusion().results == (("output", 0), ("output", 1), ("input", 0))


def test_layout_of_the_first_operand_that_decides():
    channels_last = tensor(2, 8, 4, 4, strides=(128, 1, 32, 8))
    call, fusion = build(add, channels_last, tensor(8, 1, 1))
    strides = [call.value(s) for s in fusion.outputs[0].strides]
    assert strides == [128, 1, 32, 8]


def split(program, *args):
    call, fusion = build(program, *args)
    return segments(
        call,
        expanded(call, fusion, GPU),
        Allocations(len(fusion.outputs)),
        lambda s: is_one_pass(call, s, GPU),
    )


def test_pointwise_outputs_of_fewer_axes_ride_along():
    parts = split(lambda b, x, y: (add(b, x, y), relu(b, y)), tensor(4, 8), tensor(8))
    assert len(parts) == 1 and len(parts[0].stores) == 2


def test_outputs_over_unrelated_axes_are_separate_kernels():
    assert len(split(lambda b, x, y: (relu(b, x), relu(b, y)), tensor(4), tensor(5))) == 2


def test_an_empty_axis_does_not_swallow_the_smaller_output():
    parts = split(lambda b, x, y: (add(b, x, y), relu(b, y)), tensor(0, 8), tensor(8))
    assert len(parts) == 2


def test_a_reduction_stores_elementwise_results_on_the_way():
    def program(builder, x, y):
        s = add(builder, x, y)
        return s, total(builder, s, [0])

    parts = split(program, tensor(64, 8), tensor(8))
    assert len(parts) == 1 and len(parts[0].reductions) == 1 and len(parts[0].stores) == 2


def test_what_needs_the_total_comes_after_it():
    def program(builder, x, y):
        return add(builder, x, total(builder, add(builder, x, y), [0], True))

    first, second = split(program, tensor(64, 8), tensor(8))
    assert first.reductions and not second.reductions
    assert {b.kind for b in second.loads} == {BufferKind.INPUT, BufferKind.ALLOCATION}


def test_a_large_reduction_is_split_over_blocks():
    call, fusion = build(lambda b, x: total(b, x, [0]), tensor(1 << 16, 64))
    found, temporaries = stages(call, fusion)
    assert len(found) == 2 and len(temporaries) == 1 and found[0].params.split
    call, fusion = build(lambda b, x: total(b, x, [0]), tensor(16, 64))
    assert len(stages(call, fusion)[0]) == 1


def test_pointwise_record_is_data():
    op = scaled_fusion().ops[0]
    assert isinstance(op, Pointwise) and op == replace(op) and hash(op.output) == hash(replace(op.output))


def noisy(builder, x, row):
    unused = builder.uniform(x)
    first, second = builder.uniform(row), builder.uniform(x, DOUBLE)
    assert unused.dims == x.dims
    return add(builder, add(builder, x, first), second)


def test_random_ops_are_numbered_in_order_and_survive_the_text():
    _, fusion = build(noisy, tensor(4, 1, 8), tensor(8))
    assert [(op.stream, op.output.dtype.name) for op in fusion.randoms] == [(0, "float32"), (1, "float64")]
    assert verify(fusion) is None and read(str(fusion)) == fusion


def test_a_random_op_counts_in_the_order_of_memory_without_gaps():
    call, fusion = build(noisy, tensor(4, 1, 8), tensor(8))
    assert [call.value(s) for s in fusion.randoms[1].linear_strides] == [8, 8, 1]
    for strides, expected in (((200, 1, 20), [40, 1, 5]), ((1, 80, 16), [1, 32, 4]), ((0, 8, 1), [40, 8, 1])):
        call, fusion = build(noisy, tensor(4, 5, 8, strides=strides), tensor(8))
        assert [call.value(s) for s in fusion.randoms[1].linear_strides] == expected


def looked_up(builder, x, index, y):
    rows = builder.lookup("index_select", x, (index.dims[0], x.dims[1]), (None, 1), {0: index})
    return relu(builder, add(builder, rows, y))


def test_a_lookup_survives_the_text_and_its_table_is_no_input():
    call, fusion = build(looked_up, tensor(5, 8, strides=(16, 1)), tensor(3, dtype="int64"), tensor(3, 8))
    assert verify(fusion) is None and read(str(fusion)) == fusion
    [op] = fusion.lookups
    assert op.table == 0 and [i.index for i in fusion.inputs] == [1, 2]
    assert [call.value(s) for s in (*op.strides, *op.steps, *op.extents)] == [0, 1, 16, 5]
    assert read(str(fusion)).axes == op.output.axes  # none for the rows of the table


@pytest.mark.parametrize(
    "change, complaint",
    [
        (dict(strides=()), "0 strides"),
        (dict(operands=(Value("other", INT64, ()),)), "before it is defined"),
        (dict(steps=()), "1 indices and 0 steps"),
    ],
)
def test_a_damaged_lookup_does_not_verify(change, complaint):
    _, fusion = build(looked_up, tensor(5, 8), tensor(3, dtype="int64"), tensor(3, 8))
    ops = tuple(replace(op, **change) if isinstance(op, Lookup) else op for op in fusion.ops)
    assert complaint in verify(replace(fusion, ops=ops))


def test_a_table_that_is_elementwise_is_computed_where_it_is_looked_up():
    def program(b, x, y, index):
        table = relu(b, add(b, x, b.reduce("sum", "sum", y, [1], True, y.dtype)))
        return b.lookup("gather", table, index.dims, (0, None), {1: index})

    call, fusion = build(program, tensor(4, 5), tensor(4, 5), tensor(4, 3, dtype="int64"))
    assert verify(fusion) is None and [op.table for op in fusion.lookups] == [0]
    names = [op.name for op in fusion.ops]
    assert names == ["sum", "gather", "add", "relu", "gather"]
    assert [call.value(a.extent) for a in fusion.ops[2].output.axes] == [4, 3]


def test_sums_are_not_looked_up_in_their_group():
    def program(b, x, index):
        table = b.reduce("sum", "sum", x, [1], False, x.dtype)
        return b.lookup("gather", table, index.dims, (None,), {0: index})

    with pytest.raises(Refusal, match="is computed in its group"):
        build(program, tensor(5, 6), tensor(3, dtype="int64"))


@pytest.mark.parametrize("change, complaint", [
    (dict(stream=3), "not numbered in order"),
    (dict(operands=()), "axes of its operand"),
    (dict(linear_strides=()), "0 steps"),
])  # fmt: skip
def test_a_damaged_random_op_does_not_verify(change, complaint):
    _, fusion = build(noisy, tensor(4, 8), tensor(8))
    ops = tuple(
        replace(op, **change) if isinstance(op, Random) and op.stream == 0 else op for op in fusion.ops
    )
    assert complaint in verify(replace(fusion, ops=ops))


def to(b, x, copy=False):
    return casts.to_dtype_layout(b, x, device="cuda:0", copy=copy)


MOVES = {
    "to": to,
    "copy": lambda b, x: to(b, x, True),
    "to_other": lambda b, x: casts.to_other(b, x, b.tensor(1)),
    "type_as": lambda b, x: casts.type_as(b, x, b.tensor(1)),
    "_to_copy": lambda b, x: casts.to_copy(b, x, device="cuda:0"),
}


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MOVES)
def test_a_number_from_the_cpu_that_is_moved_may_leave_a_group(name, dtype, behind):
    """Eager has it on the group's device then: it is computed, never the input itself."""

    def program(b, x, y):
        made = MOVES[name](b, x)
        return b.pointwise("neg", (made,), made.dtype) if behind else made

    args = tensor(dtype=dtype, device="cpu"), tensor(5)
    _, fusion = build(program, *args)
    assert len(fusion.outputs) == 1
    with pytest.raises(Refusal, match="is on the CPU"):
        build(lambda b, x, y: b.pointwise("neg", (x,), x.dtype), *args)
