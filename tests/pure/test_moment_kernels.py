"""Means and variances: how often data are read, in how many blocks, and what threads accumulate."""

import math

import pytest

from kit.programs import build, kernels, stages, tensor
from kit.walk import planned, walk
from tsfuser.codegen.emit import source
from tsfuser.ir import size as sz
from tsfuser.ir.text import read
from tsfuser.ir.verify import verify
from tsfuser.lower.loop_ir import Load
from tsfuser.lower.pipeline import lower
from tsfuser.lower.traverse import statements
from tsfuser.ops.batch_norm import _forward
from tsfuser.ops.batch_norm_backward import _backward
from tsfuser.ops.channels import of_channels
from tsfuser.ops.reduction import squares
from tsfuser.schedule import expanded
from tsfuser.schedule.machine import GPU, HOST

MACHINES = pytest.mark.parametrize("machine", [GPU, HOST], ids=["gpu", "host"])


def channels_last(n, c, h, w, **more):
    return tensor(n, c, h, w, strides=(c * h * w, 1, c * w, c), **more)


def rows_of_channels(n, c, h, w, **more):
    return tensor(n * h * w, c, **more)


LAYOUTS = pytest.mark.parametrize("layout", [tensor, channels_last, rows_of_channels])


def forward(b, x, w, bias, mean, var):
    return _forward(b, x, w, bias, mean, var, True, b.literal(0.1), b.literal(1e-5))


def backward(b, grad, x, w, mean, rstd):
    mean, rstd = (of_channels(b, v, x) for v in (mean, rstd))
    return _backward(b, grad, x, w, mean, rstd, True, [True] * 3, x.dtype)


def moments(dims):
    return lambda b, x: squares(b, x, dims)


def traffic(call, found, x):
    """How many loads and stores of tensors of the size of `x` the stages `found` do."""
    count = {"load": 0, "store": 0}
    for stage in found:
        for word, buffers in (("load", stage.segment.loads), ("store", stage.segment.stores)):
            count[word] += sum(
                call.value(sz.product([a.extent for a in b.value.axes])) == math.prod(x.sizes)
                for b in buffers
            )
    return count


READS = pytest.mark.parametrize(
    "layout, machine, reads",
    [
        (tensor, GPU, 1),
        (channels_last, GPU, 2),
        (rows_of_channels, GPU, 2),
        (tensor, HOST, 3),
        (channels_last, HOST, 3),
    ],
)


@READS
def test_how_often_batch_norm_reads_its_operand(layout, machine, reads):
    """Once where the chip keeps a channel."""
    x = layout(32, 64, 56, 56)
    call, fusion = build(forward, x, *[tensor(64)] * 4)
    found, _ = stages(call, fusion, machine)
    assert traffic(call, found, x) == {"load": reads, "store": 1}
    assert len(found) <= 3 or machine is HOST


@READS
def test_how_often_its_derivative_reads_each_operand(layout, machine, reads):
    x = layout(32, 64, 56, 56)
    call, fusion = build(backward, x, x, *[tensor(64)] * 3)
    found, _ = stages(call, fusion, machine)
    assert traffic(call, found, x) == {"load": 2 * min(reads, 2), "store": 1} and len(found) <= 3


@LAYOUTS
@pytest.mark.parametrize(
    "sizes", [(32, 32, 56, 56), (32, 64, 56, 56), (32, 32, 112, 112), (8, 64, 112, 112), (128, 32, 28, 28)]
)
def test_few_channels_keep_all_of_a_gpu_busy(layout, sizes):
    call, fusion = build(
        moments([d for d in range(4 if layout is not rows_of_channels else 2) if d != 1]), layout(*sizes)
    )
    found, _ = stages(call, fusion)
    kernel = lower(found[0].segment, found[0].schedule, "k")
    # two blocks a multiprocessor, or nearly so, each thread with 64 bytes in flight
    assert call.value(kernel.grid) >= 256
    assert all(s.lanes == 4 for s in statements(kernel.body) if isinstance(s, Load) and s.buffer == "args.x0")


def test_rows_that_stay_on_the_chip_take_two_passes():
    def normed(b, x):
        mean, summed = squares(b, x, [1])
        return b.pointwise("normalize", (x, mean, b.pointwise("rsqrt", (summed,), x.dtype)), x.dtype)

    [kernel] = kernels(normed, tensor(512, 1024))
    assert "Moments" not in source(kernel)
    [kernel] = kernels(normed, tensor(512, 1 << 17), machine=HOST)
    assert "Moments" not in source(kernel)


@pytest.mark.parametrize("dtype, sums", [("float32", 3), ("bfloat16", 2)])
def test_blocks_that_share_a_row_meet_once_with_moments_in_two_passes_each(dtype, sums):
    """Coarse terms need no correction of the mean by a second sum."""

    def normed(b, x):
        mean, summed = squares(b, x, [1])
        return b.pointwise("normalize", (x, mean, b.pointwise("rsqrt", (summed,), x.dtype)), x.dtype)

    [kernel] = kernels(normed, tensor(512, 1 << 18, dtype=dtype))
    made = source(kernel)
    assert made.count("store_partial_x<Sum") == sums and made.count("moments_near<float>") == 1
    assert made.count("load_partial_cooperative<Moments") == 1 and "reciprocal" not in made


def test_terms_that_are_costly_to_compute_again_update_moments():
    def normed(b, x):
        powers = b.pointwise("exp", (x,), x.dtype)
        mean, summed = squares(b, powers, [1])
        return b.pointwise("normalize", (powers, mean, b.pointwise("rsqrt", (summed,), x.dtype)), x.dtype)

    [kernel] = kernels(normed, tensor(512, 1 << 18))
    assert source(kernel).count("reciprocal") == 1 and "moments_near" not in source(kernel)


def test_lanes_share_the_count_of_their_terms():
    whole, cut = (source(kernels(moments([0]), tensor(n))[0]) for n in (1 << 20, (1 << 20) + 1))
    assert "_count[1]" in whole and "_count[4]" in cut


def test_coarse_terms_are_counted_from_0():
    fine, coarse = (
        source(kernels(moments([0]), tensor(1 << 20, dtype=dtype))[0]) for dtype in ("float32", "bfloat16")
    )
    assert "_total_origin[4]" in fine and "_total_origin[" not in coarse


def test_moments_that_are_asked_for_twice_are_found_once():
    def program(b, x):
        return *squares(b, x, [0]), *squares(b, x, [0])

    for found in (kernels(program, tensor(64, 4)), kernels(program, tensor(1 << 16, 4))):
        assert source(found[0]).count("reciprocal") == 1


@pytest.mark.parametrize("sizes, dims", [((4, 64), [1]), ((64, 4), [0])])
def test_the_fusion_prints_verifies_and_reads_back(sizes, dims):
    call, fusion = build(moments(dims), tensor(*sizes))
    for one in (fusion, expanded(call, fusion, GPU)):
        assert verify(one) is None and read(str(one)) == one
    assert "'squares'" in str(fusion)


def test_no_term_is_no_squares_of_a_single_element():
    [kernel] = kernels(moments([1]), tensor(5, 1))
    assert "x0 - x0" in source(kernel)


SHAPES = [((70, 3, 5), [0, 2]), ((70, 2, 4), [0, 2]), ((9, 3, 2100), [0, 2]), ((5, 3, 17), [0, 2]),
          ((1100, 3), [0]), ((4, 0, 3), [0, 2]),
          ((0, 4, 3), [0, 2]), ((3, 1, 40), [0, 2]), ((5, 7, 66, 3), [0, 2])]  # fmt: skip


@MACHINES
@pytest.mark.parametrize("sizes, dims", SHAPES, ids=str)
def test_what_threads_touch(sizes, dims, machine):
    walk(*planned(moments(dims), tensor(*sizes), machine=machine))


@pytest.mark.parametrize(
    "sizes", [(9, 3, 84), (5, 2, 10, 30), (3, 5, 7), (40, 2, 10_000), (3, 1, 100_001)], ids=str
)
@pytest.mark.parametrize(
    "program, images, channels", [(forward, 1, 4), (backward, 2, 3)], ids=["forward", "backward"]
)
def test_what_threads_touch_in_channels(sizes, program, images, channels):
    """A channel is a row of as many pieces as there are images; long ones take cooperative blocks."""
    few = math.prod(sizes) < 10_000
    call, allocations, made = planned(program, *[tensor(*sizes)] * images, *[tensor(sizes[1])] * channels)
    assert any(kernel.cooperative for kernel in made) is not few
    walk(call, allocations, made, whole=few)


@pytest.mark.parametrize("channels", [64, 512, 2048])
def test_all_blocks_of_split_moments_run_at_once(channels):
    """With a few more, these would run when the others are done, and most multiprocessors would wait."""
    call, fusion = build(moments([0, 2, 3]), channels_last(32, channels, 64, 64, dtype="bfloat16"))
    first = stages(call, fusion)[0][0]
    kernel = lower(first.segment, first.schedule, first.segment.name)
    slots = GPU.multiprocessors * kernel.resident
    assert kernel.leads and slots * 0.8 < call.value(kernel.grid) <= slots
