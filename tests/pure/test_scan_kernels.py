"""Kernels of scans: what they read once, how many threads share a row or a column, and what no schedule
takes."""

from dataclasses import replace

import pytest

from kit.programs import add, build, kernels, relu, stages, tensor, total
from tsfuser.codegen.emit import source
from tsfuser.errors import Refusal
from tsfuser.ir.fusion import Scan
from tsfuser.ir.text import read
from tsfuser.ir.verify import verify
from tsfuser.ops import table
from tsfuser.schedule.machine import GPU, HOST


def scan(b, x, dim, how="sum"):
    return b.scan("cumsum", how, x, dim, x.dtype)


def along(dim):
    def program(b, x):
        return relu(b, scan(b, add(b, x, x), dim))

    return program


def kept(b, x):
    """A softmax, its running sums, and a choice that reads both."""
    p = table.find("aten::softmax", "int").build(b, self=x, dim=1, dtype=None)
    before = b.pointwise("sub", (scan(b, p, 1), p), p.dtype)
    return b.pointwise("mul", (before, p), p.dtype)


def read_twice(b, x):
    y = scan(b, x, 1)
    return relu(b, y), add(b, y, total(b, x, [1], True))


def flipped(b, x):
    flip = table.find("aten::flip")
    made = scan(b, flip.build(b, self=relu(b, x), dims=[1]), 1)
    return flip.build(b, self=made, dims=[1])


def twice_from_the_end_of_columns(b, x):
    flip = table.find("aten::flip")
    made = scan(b, flip.build(b, self=relu(b, x), dims=[0]), 0)
    return flip.build(b, self=scan(b, add(b, made, made), 0, "prod"), dims=[0])


def beside_what_has_none(b, x):
    return relu(b, x), scan(b, x, 0), scan(b, x, 1)


def several(b, x):
    return scan(b, scan(b, x, 0), 1), scan(b, x, 1)


def beside_what_rows_share(b, x, y):
    """Columns whose threads pass on what they have, and a mean of them that is stored once."""
    product = b.pointwise("sin", (b.pointwise("mul", (x, y), x.dtype),), x.dtype)
    mean = b.pointwise(
        "exp",
        (table.find("aten::mean", "dim").build(b, self=x, dim=[0], keepdim=False, dtype=None),),
        x.dtype,
    )
    made = scan(b, product, 0)
    return product, made, mean, b.pointwise("mul", (made, mean), x.dtype)


PROGRAMS = {
    "rows": along(1),
    "columns": along(0),
    "a softmax before": kept,
    "from the end": flipped,
    "read twice": read_twice,
    "twice": twice_from_the_end_of_columns,
}


@pytest.mark.parametrize("machine", [GPU, HOST])
@pytest.mark.parametrize("sizes", [(5, 7), (64, 40), (4096, 3)])
def test_terms_stay_beside_what_is_stored_once(sizes, machine):
    # each of them is verified: what it reads is defined before
    made = kernels(beside_what_rows_share, tensor(*sizes), tensor(*sizes), machine=machine)
    assert any("cumsum" in str(kernel) for kernel in made)


@pytest.mark.parametrize("program", [*PROGRAMS.values(), several], ids=[*PROGRAMS, "several"])
def test_text_rebuilds_a_fusion_with_scans(program):
    fusion = build(program, tensor(64, 40))[1]
    assert verify(fusion) is None and "scan(" in str(fusion)
    assert read(str(fusion)) == fusion


def test_a_scan_along_an_axis_that_its_operand_lacks_does_not_verify():
    fusion = build(several, tensor(64, 40))[1]
    ops = tuple(replace(op, axes=()) if isinstance(op, Scan) else op for op in fusion.ops)
    assert "does not vary over the axes" in verify(replace(fusion, ops=ops))


@pytest.mark.parametrize("machine", [GPU, HOST], ids=["gpu", "host"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64"])
@pytest.mark.parametrize("sizes", [(64, 7), (64, 300), (4096, 4096), (300, 50_001), (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_is_one_kernel(program, sizes, dtype, machine):
    if program is kept and dtype == "int64":
        pytest.skip("a softmax of integers is an error")
    [kernel] = kernels(program, tensor(*sizes, dtype=dtype), machine=machine)
    assert kernel.name.startswith("fused_")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_what_registers_hold_is_read_once(program):
    text = source(kernels(program, tensor(4096, 4096))[0])
    assert text.count("load<4>(args.x0") == 1 and "args.x0[" not in text


@pytest.mark.parametrize(
    "length, threads", [(7, 8), (100, 32), (512, 32), (513, 288), (4096, 512), (50_000, 512)]
)
def test_threads_of_a_row(length, threads):
    [stage] = stages(*build(along(1), tensor(4096, length)))[0]
    assert (stage.params.warp or stage.params.across) == threads


@pytest.mark.parametrize(
    "sizes, across, down",
    [
        ((16384, 64), 4, 128),
        ((4096, 4096), 4, 128),
        ((8, 4096), 32, 2),
        ((4, 4096), 128, 1),
        ((512, 1 << 20), 128, 1),
    ],
    ids=str,
)
def test_threads_of_a_column(sizes, across, down):
    [stage] = stages(*build(along(0), tensor(*sizes)))[0]
    assert (stage.params.across, stage.params.down) == (across, down)


def test_a_flip_of_a_scan_of_a_flip_is_read_in_the_order_of_memory():
    fusion = build(flipped, tensor(64, 40))[1]
    assert [op.backwards for op in fusion.ops if isinstance(op, Scan)] == [True]
    assert "load<4>(args.x0" in source(kernels(flipped, tensor(2048, 4096))[0])


def test_scans_of_several_ways_read_one_another_from_memory():
    names = [k.name for k in kernels(several, tensor(64, 40))]
    assert len(names) == 3 and all("cumsum" in name for name in names)
    assert len(kernels(beside_what_has_none, tensor(64, 40))) == 2


def test_one_row_that_a_block_would_take_too_long_for_is_refused():
    """Of several rows torch gives each to one block, too."""
    with pytest.raises(Refusal, match="one long row"):
        kernels(along(0), tensor(1 << 20))
    assert kernels(along(0), tensor(1 << 20), machine=HOST) and kernels(along(1), tensor(3, 1 << 20))
