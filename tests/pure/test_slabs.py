"""What becomes of norms along outer dims of many sizes: one kernel where the chip keeps a slab, and why not
where it does not."""

from dataclasses import replace

import pytest

from kit.programs import build, check_kernel, kernels, stages, tensor
from tsfuser.codegen.emit import source
from tsfuser.lower.loop_ir import For
from tsfuser.lower.pipeline import lower
from tsfuser.lower.traverse import statements
from tsfuser.schedule import propose
from tsfuser.schedule.machine import GPU
from tsfuser.schedule.outer_rows import OuterRowParams
from tsfuser.segment import Allocations, segments


def centred(builder, x):
    """x less its mean, by its deviation, along all but the last dim."""
    dims = list(range(len(x.dims) - 1))
    mean, squares = (builder.reduce(word, word, x, dims, True, x.dtype) for word in ("mean", "squares"))
    distance = builder.pointwise("sub", (x, mean), x.dtype)
    return builder.pointwise("mul", (distance, builder.pointwise("rsqrt", (squares,), x.dtype)), x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("rows", [2, 96, 512, 1000, 1024])
def test_one_kernel_of_columns_that_the_chip_keeps(rows, dtype):
    sizes = (rows, (1 << 26) // rows // 8 * 8)
    [stage] = stages(*build(centred, tensor(*sizes, dtype=dtype)))[0]
    params = stage.params
    assert isinstance(params, OuterRowParams) and eval(repr(params)) == params
    assert params.threads % 32 == 0 and params.depth >= rows
    [kernel] = kernels(centred, tensor(*sizes, dtype=dtype))
    combines = rows > 2  # of shorter ones a thread has all
    assert ("over threads y of" in str(kernel)) == ("gather_columns<" in source(kernel)) == combines
    assert kernel.shared <= GPU.shared_per_multiprocessor // params.resident - GPU.shared_reserved


CLUSTERS = replace(GPU, cluster_blocks=8)


@pytest.mark.parametrize(
    "rows, columns, dtype, blocks",
    [
        (4096, 8192, "bfloat16", 4),
        (16384, 256, "bfloat16", 16),
        (8192, 2048, "float32", 8),
        (6272, 1024, "bfloat16", 7),
        (1568, 512, "bfloat16", 7),
        (6272, 256, "bfloat16", 13),
        (1100, 4096, "float64", 2),
    ],
)
def test_one_kernel_of_columns_that_a_cluster_keeps(rows, columns, dtype, blocks):
    """Where there are few slabs, more blocks share each, so that all multiprocessors have work."""
    call, fusion = build(centred, tensor(rows, columns, dtype=dtype))
    [stage] = stages(call, fusion, CLUSTERS)[0]
    params = stage.params
    assert isinstance(params, OuterRowParams) and params.cluster and eval(repr(params)) == params
    kernel = lower(stage.segment, stage.schedule, stage.segment.name, check_kernel)
    assert call.value(kernel.cluster) == blocks and blocks * params.depth >= rows
    assert call.value(kernel.grid) >= GPU.multiprocessors // 2 and call.value(kernel.grid) % blocks == 0
    assert "store_columns_cluster<" in source(kernel) and source(kernel).count("await_mail<") == 1


@pytest.mark.parametrize("sizes", [(1 << 20, 512), (40_000, 2048), (1024, 64), (16384, 2048)], ids=str)
def test_what_a_cluster_does_not_keep_is_read_twice(sizes):
    """Too many rows, too few columns, or large clusters that would take turns."""
    assert len(kernels(centred, tensor(*sizes, dtype="bfloat16"), machine=CLUSTERS)) > 1


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ((1 << 20, 512), "outer_rows: its reduced dims have more elements than a block can keep"),
        ((1024, 64), "outer_rows: the dims that are not reduced have too few elements"),
        ((16384, 16384), "outer_rows: its reduced dims have more elements than a block can keep"),
    ],
)
def test_what_is_not_one_kernel_says_why(sizes, reason):
    call, fusion = build(centred, tensor(*sizes))
    said = []
    segments(call, fusion, Allocations(1), lambda s: said.append(propose(call, s, GPU)))
    assert reason in said[0]
    assert len(kernels(centred, tensor(*sizes))) > 1


def test_slabs_of_each_image():
    """Kept dims outside the reduced one make more slabs."""
    [stage] = stages(*build(lambda b, x: _along(b, x, 1), tensor(64, 500, 256)))[0]
    assert isinstance(stage.params, OuterRowParams)


def _along(builder, x, dim):
    return builder.pointwise("sub", (x, builder.reduce("amax", "max", x, [dim], True, x.dtype)), x.dtype)


def _softmax(builder, x, dim):
    powers = builder.pointwise("exp", (_along(builder, x, dim),), x.dtype)
    total = builder.reduce("sum", "sum", powers, [dim], True, x.dtype)
    return builder.pointwise("div", (powers, total), x.dtype), total


def test_a_thread_with_one_element():
    """No loop is left then, and what a column has one of, as the sum that is stored, needs no lane. `kernels`
    verifies that every name is defined."""
    sizes = (80, 2, 3)
    [stage] = stages(*build(lambda b, x: _softmax(b, x, 1), tensor(*sizes)))[0]
    assert isinstance(stage.params, OuterRowParams)
    assert stage.params.vector == stage.params.unroll == 1
    [kernel] = kernels(lambda b, x: _softmax(b, x, 1), tensor(*sizes))
    assert not any(isinstance(s, For) for s in statements(kernel.body))
