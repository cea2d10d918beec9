"""What the threads of a kernel touch: nothing out of bounds, nothing misaligned, every element of a result
once."""

import random

import pytest

from kit.programs import add, relu, tensor, total
from kit.walk import planned, walk
from tsfuser.ir.dtypes import DOUBLE, HALF
from tsfuser.lower.loop_ir import Load
from tsfuser.lower.traverse import statements
from tsfuser.schedule.machine import GPU, HOST

MACHINES = pytest.mark.parametrize("machine", [GPU, HOST], ids=["gpu", "host"])


@MACHINES
def test_an_operand_that_does_not_move_along_the_reduced_axis(machine):
    """Its vector load leaves the loop, and the length of that load must not share a name with that of the
    store."""
    walk(
        *planned(lambda b, x, y: total(b, add(b, x, y), [0]), tensor(300, 1), tensor(1, 30), machine=machine)
    )


def test_splits_of_an_odd_number_of_sums_begin_aligned():
    x, bias = tensor(1 << 16, 1, strides=(1, 1)), tensor(1027)
    call, allocations, kernels = planned(lambda b, x, y: total(b, add(b, x, y), [0]), x, bias)
    assert len(kernels) == 2
    walk(call, allocations, kernels, whole=False)


@MACHINES
def test_no_element_of_an_empty_operand_is_read(machine):
    """Expanded to size 0: nothing moves, so the load leaves the loop over the reduced dims."""
    walk(
        *planned(
            lambda b, x, y: total(b, add(b, x, y), [0]),
            tensor(0, 1, strides=(0, 0)),
            tensor(8),
            machine=machine,
        )
    )
    walk(*planned(lambda b, x: total(b, relu(b, x), [0]), tensor(0, strides=(0,)), machine=machine))


@MACHINES
def test_a_reduced_axis_between_kept_ones_of_size_0(machine):
    walk(
        *planned(
            lambda b, x: total(b, relu(b, x), [1], True),
            tensor(32, 17, 0, strides=(17, 1, 1)),
            machine=machine,
        )
    )


@MACHINES
def test_sums_of_sums_come_after_all_that_they_need(machine):
    """Two chains: the first ones differ in what they reduce, the second ones do not."""

    def program(b, x, y, u, v):
        first = total(b, x, [0])
        second = total(b, add(b, first, u), [0])
        other = total(b, y, [0])
        last = total(b, add(b, other, v), [0])
        return add(b, second, last), add(b, first, other)

    walk(*planned(program, tensor(2, 3, 4), tensor(5, 3, 4), tensor(3, 4), tensor(3, 4), machine=machine))


def selected(b, x, index, y):
    dims = (index.dims[0], None if x.dims[1] is None else b.fresh_axis(x.dims[1].extent))
    rows = b.lookup("index_select", x, dims, (None, 1), {0: index})
    return add(b, rows, y)


@pytest.mark.each_value(("columns", "place"))
@MACHINES
@pytest.mark.parametrize("columns", [1, 2, 4, 5, 8, 33, 64])
@pytest.mark.parametrize(
    "place",
    [
        dict(),
        dict(alignment=4),
        dict(strides=(66, 1)),
        dict(strides=(1, 9)),
        dict(strides=(0, 1)),
        dict(strides=(64, 2)),
    ],
)
def test_rows_of_a_table_are_read_as_vectors_where_its_addresses_allow(machine, columns, place):
    x, index, y = tensor(9, columns, **place), tensor(7, dtype="int64"), tensor(7, columns)
    walk(*planned(selected, x, index, y, machine=machine))
    walk(*planned(lambda b, *v: total(b, selected(b, *v), [0]), x, index, y, machine=machine))
    walk(*planned(lambda b, *v: total(b, selected(b, *v), [1]), x, index, y, machine=machine))


def test_rows_of_a_dense_table_are_read_as_vectors():
    def widths(*args):
        return {
            s.lanes
            for s in statements(planned(selected, *args)[2][0].body)
            if isinstance(s, Load) and s.buffer == "args.x0"
        }

    index, y = tensor(7, dtype="int64"), tensor(7, 64)
    assert widths(tensor(9, 64), index, y) == {4}
    assert widths(tensor(9, 64, strides=(66, 1)), index, y) == {2}
    assert widths(tensor(9, 64, strides=(64, 1), alignment=4), index, y) == {1}
    assert widths(tensor(9, 64, strides=(1, 9)), index, y) == {1}


def test_indices_that_differ_along_a_row_are_looked_up_one_by_one():
    def program(b, x, index):
        return relu(b, b.lookup("gather", x, index.dims, (None, 1), {0: index}))

    _, _, [kernel] = planned(program, tensor(9, 64), tensor(7, 64, dtype="int32"))
    found = {s.buffer: s.lanes for s in statements(kernel.body) if isinstance(s, Load)}
    assert found == {"args.x0": 1, "args.x1": 4}


def pointwise(b, x, y):
    return add(b, x, y), relu(b, y)


def converted(b, x, y):
    return b.cast(add(b, x, y), HALF), relu(b, x)


def summed(b, x, y):
    s = add(b, x, y)
    kept = [d for d, axis in enumerate(s.dims) if axis is None or b.call.decide(axis.extent % 2)]
    dims = [d for d in range(len(s.dims)) if d not in kept]
    return (s, total(b, s, dims), total(b, b.cast(s, DOUBLE), dims, True)) if dims else s


def strides_of(r, sizes):
    """Dense in any order, with gaps, broadcast, or arbitrary."""
    kind, order = r.randrange(5), list(range(len(sizes)))
    if kind == 0:
        order.reverse()
    else:
        r.shuffle(order)
    strides, step = [0] * len(sizes), 1
    for d in order:
        strides[d], step = step, step * max(sizes[d], 1)
        if kind == 2 and r.random() < 0.4:
            step += r.choice([1, 2, 4, 16])
    if kind == 3:
        strides = [r.choice([0, s]) for s in strides]
    return tuple(strides) if kind < 4 else tuple(r.choice([0, 1, 2, 3, s]) for s in strides)


def arguments(r):
    """Two tensors that broadcast."""
    base = [r.choice([0, 1, 2, 3, 4, 5, 8, 17, 33]) for _ in range(4)]
    dtypes = r.choice(
        [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("int8", "float16")]
    )
    ranks = r.choice([(1, 1), (2, 2), (2, 1), (3, 3), (3, 2), (4, 4), (4, 1)])
    made = []
    for rank, dtype in zip(ranks, dtypes):
        sizes = [1 if r.random() < 0.08 else n for n in base[4 - rank :]]
        made.append(
            tensor(*sizes, dtype=dtype, strides=strides_of(r, sizes), alignment=r.choice([256, 16, 8, 4]))
        )
    return made


@pytest.mark.parametrize("program", [pointwise, converted, summed])
def test_random_sizes_and_strides(program, request):
    r = random.Random(program.__name__)
    tried = 0
    while tried < (3000 if request.config.getoption("--long") else 15):
        args, machine = arguments(r), r.choice([GPU, GPU, HOST])
        if sum(n > 1 for n in args[0].sizes) * max(args[0].sizes, default=1) > 150:
            continue
        try:
            walk(*planned(program, *args, machine=machine))
        except AssertionError as error:
            raise AssertionError(f"{args} on {machine.name}: {error}") from error
        tried += 1
