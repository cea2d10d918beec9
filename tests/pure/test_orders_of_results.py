"""Which kernels store results in two memory orders, and what their threads touch."""

import pytest

from kit.programs import build, kernels, relu, stages, tensor, total
from kit.walk import planned, walk
from tsfuser.codegen.emit import source
from tsfuser.ops.batch_norm import _forward
from tsfuser.ops.table import find as find_op
from tsfuser.schedule import transpose
from tsfuser.schedule.machine import GPU, HOST
from tsfuser.schedule.pointwise import PointwiseParams
from tsfuser.schedule.reduction_params import ReductionParams
from tsfuser.schedule.row_params import RowParams
from tsfuser.schedule.transpose import TransposeParams


def last(n, c, h, w, dtype="bfloat16"):
    """Channels-last images."""
    return tensor(n, c, h, w, dtype=dtype, strides=(c * h * w, 1, w * c, c))


def images(n, c, h, w, dtype="bfloat16"):
    return tensor(n, c, h, w, dtype=dtype)


def row_major(b, x):
    return find_op("tsfuser::ordered").build(b, self=x)


def turned(b, x):
    return row_major(b, find_op("aten::t").build(b, self=x))


def both(b, x):
    y = relu(b, x)
    return y, row_major(b, y)


def row_major_first(b, x):
    y = relu(b, x)
    return row_major(b, y), y


def there_and_back(b, x):
    y = relu(b, x)
    return y, turned(b, y)


def normed(b, x):
    y = relu(b, _forward(b, x, None, None, None, None, True, b.literal(0.1), b.literal(1e-5))[0])
    return y, row_major(b, y)


def summed(b, x):
    y = relu(b, x)
    return y, row_major(b, y), total(b, y, [0, 2, 3])


def softmax(b, x):
    largest = b.reduce("amax", "max", x, [1], True, x.dtype)
    powers = b.pointwise("exp", (b.pointwise("sub", (x, largest), x.dtype),), x.dtype)
    y = b.pointwise("div", (powers, b.reduce("sum", "sum", powers, [1], True, x.dtype)), x.dtype)
    return y, turned(b, y)


def disagreeing_sum(b, x, y):
    return total(b, b.pointwise("mul", (x, y), x.dtype), [0, 2, 3])


SHUFFLE = (32, 58, 28, 28)


@pytest.mark.parametrize(
    "program, args, kinds, shared, stored",
    [
        (both, [last(*SHUFFLE)], [TransposeParams], [()], [("copy_1",)]),
        # most bytes lie channels-last, so what is stored row-major goes through a tile, though it comes first
        (row_major_first, [last(*SHUFFLE)], [TransposeParams], [()], [("copy_1",)]),
        (there_and_back, [tensor(1024, 2048)], [TransposeParams], [()], [("copy_2",)]),
        (normed, [last(*SHUFFLE)], [ReductionParams, ReductionParams, TransposeParams], None, None),
        (summed, [last(*SHUFFLE)], [TransposeParams, ReductionParams], [(), ()], [("copy_1",), ()]),
        (disagreeing_sum, [images(*SHUFFLE), last(*SHUFFLE)], [TransposeParams, ReductionParams], None, None),
        (disagreeing_sum, [last(*SHUFFLE), images(*SHUFFLE)], [TransposeParams, ReductionParams], None, None),
        # a row kernel would store single elements
        (softmax, [tensor(4096, 1024)], [RowParams, TransposeParams], None, None),
        (softmax, [tensor(128, 1024)], [RowParams], None, None),
        # few elements, or a dim that would leave most of a tile empty
        (both, [last(2, 58, 28, 28)], [PointwiseParams], None, None),
        (both, [last(1024, 3, 28, 28)], [PointwiseParams], None, None),
        (both, [last(4096, 58, 3, 3)], [PointwiseParams], None, None),
        # both orders are one
        (both, [images(*SHUFFLE)], [PointwiseParams], None, None),
    ],
)
def test_kinds_of_kernels(program, args, kinds, shared, stored):
    found, _ = stages(*build(program, *args))
    assert [type(stage.params) for stage in found] == kinds
    if shared is not None:
        assert [getattr(stage.params, "shared", ()) for stage in found] == shared
        assert [getattr(stage.params, "stored", ()) for stage in found] == stored


def test_what_a_later_kernel_reads_needs_no_reduction_again():
    """The transposed result is made of the stored one, so that the maximum and the sum are not stored."""
    first, second = stages(*build(softmax, tensor(4096, 1024)))[0]
    assert [b.value.name for b in first.segment.stores] == [b.value.name for b in second.segment.loads]


def test_a_host_needs_no_tile():
    [stage] = stages(*build(both, last(*SHUFFLE)), HOST)[0]
    assert isinstance(stage.params, PointwiseParams)


def test_both_orders_are_stored_in_wide_accesses():
    text = source(kernels(there_and_back, tensor(1024, 2048, dtype="bfloat16"))[0])
    assert text.count("store(args.relu_0_out") == text.count("store(args.copy_2_out") == 2
    # a tile is full before it is stored, where it is whole and where it is cut
    assert text.count("__syncthreads()") == 2
    assert text.index("copy_2_tile[") < text.index("__syncthreads()") < text.index("store(args.copy_2_out")


@pytest.mark.parametrize("program", [both, row_major_first, summed])
@pytest.mark.parametrize("sizes", [(1, 64, 8, 16), (2, 33, 5, 7), (1, 40, 6, 9), (2, 16, 4, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_element_is_stored_once(monkeypatch, program, sizes, dtype):
    monkeypatch.setattr(transpose, "LARGE", 1)
    call, allocations, made = planned(program, last(*sizes, dtype=dtype), machine=GPU)
    assert any(kernel.tiles for kernel in made)
    walk(call, allocations, made)
