"""Segments, schedules and kernels print as code that builds them, and are verified."""

from dataclasses import replace

import pytest

from kit.programs import add, build, relu, stages, tensor, total
from tsfuser import segment
from tsfuser.codegen.emit import source
from tsfuser.ir import size as sz
from tsfuser.ir.code import SizeNames
from tsfuser.lower import verify as kernel
from tsfuser.lower.pipeline import lower
from tsfuser.ops import table
from tsfuser.schedule import verify as schedule
from tsfuser.schedule.loops import Loop
from tsfuser.schedule.machine import GPU, HOST


def columns(b, x):
    y = add(b, x, total(b, x, [-1], True))
    return y, total(b, y, [0])


def normed(b, x):
    mean = b.reduce("mean", "mean", x, [-1], True, x.dtype)
    return add(b, x, b.reduce("squares", "squares", x, [-1], True, x.dtype)), mean


def transposed(b, x, y):
    return add(b, x, relu(b, y))


def joined(b, x, y):
    rows = table.find("aten::cat").build(b, tensors=[relu(b, x), y], dim=-1)
    return add(b, rows, b.literal(2.5))


def sums_joined(b, x, y):
    sums = b.reduce("sum", "sum", x, [1], False, x.dtype)
    heads = table.find("aten::cat").build(b, tensors=[sums, relu(b, y)], dim=0)
    padded = table.find("aten::constant_pad_nd").build(b, self=heads, pad=[1, sz.const(3)], value=None)
    return table.find("aten::flip").build(b, self=padded, dims=[0])


def looked_up(b, x):
    index = b.pointwise("abs", (x,), x.dtype)
    return add(b, index, b.literal(2.5))


def scanned(dim):
    def program(b, x):
        return relu(b, b.scan("cumsum", "sum", add(b, x, x), dim, x.dtype))

    return program


def scanned_from_the_end(b, x):
    made = b.scan("cumsum", "sum", table.find("aten::flip").build(b, self=x, dims=[1]), 1, x.dtype)
    return table.find("aten::flip").build(b, self=made, dims=[1])


SAMPLES = {
    "pointwise": (lambda b, x: relu(b, x), [tensor(64, 3, 40)]),
    "broadcast": (lambda b, x, y: add(b, x, y), [tensor(64, 40), tensor(40)]),
    "literal": (looked_up, [tensor(7)]),
    "transposed": (transposed, [tensor(64, 64), tensor(64, 64, strides=(1, 64))]),
    "rows": (normed, [tensor(2048, 1000)]),
    "cooperative": (normed, [tensor(3, 1 << 20)]),
    "clusters": (normed, [tensor(300, 50_000)]),
    "columns of clusters": (columns, [tensor(300, 50_000)]),
    "columns": (columns, [tensor(8192, 512)]),
    "outer rows": (lambda b, x: add(b, x, total(b, x, [0], True)), [tensor(512, 65536)]),
    "splits": (lambda b, x: total(b, x, [0]), [tensor(65536, 1024)]),
    "joined": (joined, [tensor(64, 24), tensor(64, 40)]),
    "joined rows": (lambda b, x, y: total(b, joined(b, x, y), [-1]), [tensor(64, 24), tensor(64, 40)]),
    "joined heads": (joined, [tensor(8, 4, 24), tensor(8, 4, 40)]),
    "sums joined": (sums_joined, [tensor(64, 24), tensor(40)]),
    "scanned rows": (scanned(1), [tensor(2048, 50_000)]),
    "scanned short rows": (scanned(1), [tensor(2048, 50)]),
    "scanned columns": (scanned(0), [tensor(2048, 500)]),
    "scanned from the end": (scanned_from_the_end, [tensor(2048, 50_000)]),
    "a scalar": (lambda b, x: relu(b, x), [tensor()]),
}
EVERY = pytest.mark.parametrize("name", SAMPLES)
MACHINES = pytest.mark.parametrize("machine", [GPU, HOST], ids=["gpu", "host"])


def staged(name, machine):
    program, args = SAMPLES[name]
    return stages(*build(program, *args), machine)[0]


@EVERY
@MACHINES
def test_a_segment_and_a_schedule_are_read_back(name, machine):
    for stage in staged(name, machine):
        assert segment.read(str(stage.segment)) == stage.segment
        assert schedule.read(str(stage.schedule)) == stage.schedule


@EVERY
@MACHINES
def test_a_kernel_is_read_back(name, machine):
    for stage in staged(name, machine):
        made = lower(stage.segment, stage.schedule, "k")
        again = kernel.read(made.code())
        assert again == made and source(again) == source(made)
        assert str(again) == str(made)  # pseudo-C


def test_what_is_read_back_is_told_from_another():
    [stage], [other] = staged("broadcast", GPU), staged("pointwise", GPU)
    assert segment.read(str(stage.segment)) != other.segment
    assert schedule.read(str(stage.schedule)) != other.schedule


def test_a_size_that_occurs_often_is_written_once():
    [stage] = staged("pointwise", GPU)
    text = str(stage.schedule)
    assert "i0_size = (size0_0 * size0_1) * size0_2" in text
    assert text.count("size0_0 * size0_1") == 1 and text.count("i0_size") >= 3


def test_names_of_sizes_differ_and_deep_formulas_are_cut():
    a, b = sz.leaf(0, "a"), sz.leaf(1, "b")
    deep = a
    for _ in range(5000):
        deep = sz.maximum(deep * b + 1, a)
    names = SizeNames([("rows", a * b), ("rows", a + b), ("deep", deep)], taken=("rows",), all_formulas=True)
    assert names.of(a * b) == "rows_2" and names.of(a + b) == "rows_3"
    assert max(map(len, names.lines)) < 150
    scope = {"leaf": sz.leaf, "max": sz.maximum}
    exec("\n".join(names.lines), scope)
    assert scope[names.of(deep)] is deep and scope["rows_2"] is a * b


def test_a_number_stands_before_an_operator():
    a = sz.leaf(0, "a")
    size = sz.binary("div", 256, a)
    assert SizeNames([("", size)]).of(size) == "(256 // a)"


def wrong_segments(s):
    load, op, store = s.loads[0], s.ops[0], s.stores[0]
    yield replace(s, loads=s.loads[1:]), f"uses {load.value.name} before it is loaded"
    yield replace(s, loads=(load, *s.loads)), f"{load.value.name} is loaded twice"
    yield replace(s, ops=(*s.ops, op)), "add_0 is defined twice"
    yield replace(s, ops=()), "add_0 is stored but not computed"
    yield replace(s, axes=s.axes[1:]), f"{s.axes[0].name} is not among the axes"
    yield replace(s, stores=(replace(store, index=-1),)), "a temporary that nobody allocates"
    yield replace(s, stores=(replace(store, strides=()),)), "2 dims and 0 strides"


def test_what_is_wrong_with_a_segment_is_said():
    [stage] = staged("broadcast", GPU)
    assert segment.verify(stage.segment) is None
    for wrong, words in wrong_segments(stage.segment):
        assert words in (segment.verify(wrong) or "")


def wrong_schedules(s):
    first, *rest = s.loops
    yield replace(s, loops=tuple(rest)), f"{first.name} is no loop"
    yield replace(s, loops=(*s.loops, Loop("more", sz.const(7)))), "more comes from no dim"
    yield replace(s, loops=(*s.loops, first)), "two loops have one name"
    yield replace(s, relations=s.relations[:-1]), "block comes from no dim"
    yield replace(s, relations=s.relations[1:]), "there is no such loop"
    yield replace(s, loops=(replace(first, bind="serial"), *rest)), "no loop is bound to blocks"
    yield replace(s, loops=(replace(first, bind="warp"), *rest)), "nothing is called warp"
    yield replace(s, loops=(*s.loops[:-1], replace(s.loops[-1], bind="thread.x"))), "2 loops are bound"
    yield replace(s, loops=(*s.loops[:-1], replace(s.loops[-1], extent=sz.const(64)))), "another extent"
    yield s.with_values_in("tile", ["x9"]), "x9, to stay in tile, is not loaded"
    yield s.with_values_in("prefetched", ["x9"]), "x9, to stay in prefetched, is not loaded"
    yield replace(s, reduction=replace(s.reduction, loops=("q",))), "there is no loop q"
    yield replace(s, reduction=replace(s.reduction, side_by_side="q")), "there is no loop q"
    yield replace(s, reduction=replace(s.reduction, side_by_side="lane")), "is accumulated over it"
    yield replace(s, reduction=replace(s.reduction, scope="room")), "nothing combines in a room"
    yield replace(s, reduction=replace(s.reduction, scope="block")), "but the scope is block"
    yield (
        replace(s, reduction=replace(s.reduction, scope="cooperative", warp=0)),
        "blocks do not share a row",
    )
    yield replace(s, reduction=replace(s.reduction, scope="grid", warp=0)), "but none are stored"


def test_what_is_wrong_with_a_schedule_is_said():
    [stage] = staged("rows", GPU)
    assert schedule.verify(stage.schedule) is None
    for wrong, words in wrong_schedules(stage.schedule):
        assert words in (schedule.verify(wrong) or ""), words


@pytest.mark.parametrize(
    "name, scopes",
    [
        ("rows", ["warp"]),
        ("cooperative", ["cooperative"]),
        ("outer rows", ["block"]),
        ("splits", ["grid", "block"]),
    ],
)
def test_a_schedule_says_who_combines(name, scopes):
    assert [stage.schedule.reduction.scope for stage in staged(name, GPU)] == scopes


@pytest.mark.parametrize("name", ["clusters", "columns of clusters"])
def test_blocks_of_a_cluster_combine_where_the_device_makes_them(name):
    stages = staged(name, replace(GPU, cluster_blocks=8, any_clusters=True))
    assert stages[0].schedule.reduction.scope == "cluster"
    assert "cluster" not in {stage.schedule.reduction.scope for stage in staged(name, GPU)}
    for stage in stages:
        assert schedule.read(str(stage.schedule)) == stage.schedule
        made = lower(stage.segment, stage.schedule, "k")
        again = kernel.read(made.code())
        assert again == made and source(again) == source(made) and str(again) == str(made)
    made = lower(stages[0].segment, stages[0].schedule, "k")
    assert "clusters of" in str(made) and "over blocks of the cluster" in str(made)
    alone = replace(stages[0].schedule.reduction, cooperative=None)
    assert "blocks do not share a row" in schedule.verify(replace(stages[0].schedule, reduction=alone))
