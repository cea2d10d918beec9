"""What stays where is the schedule's word, and lowering obeys."""

from dataclasses import replace

import pytest

from kit.programs import add, build, relu, stages, tensor, total
from tsfuser.ir.dtypes import FLOAT
from tsfuser.lower.loop_ir import Array, Compute, Fetch, Scratch
from tsfuser.lower.pipeline import lower
from tsfuser.lower.traverse import statements
from tsfuser.lower.verify import verify
from tsfuser.schedule.loops import Schedule
from tsfuser.schedule.machine import GPU, HOST
from tsfuser.schedule.placement import kept_terms
from tsfuser.schedule.sweeps import Sweeps
from tsfuser.schedule.verify import verify as verify_schedule


def softmax(b, x):
    largest = b.reduce("amax", "max", x, [-1], True, x.dtype)
    powers = b.pointwise("exp", (b.pointwise("sub", (x, largest), x.dtype),), x.dtype)
    return b.pointwise("div", (powers, b.reduce("sum", "sum", powers, [-1], True, x.dtype)), x.dtype)


def dropped(b, x):
    """Random numbers, which two sweeps over a row need."""
    noise = b.pointwise("mul", (x, b.uniform(x)), x.dtype)
    return add(b, noise, b.reduce("sum", "sum", noise, [-1], True, x.dtype))


def of_two(b, x, y):
    """Two sweeps need the sum of two inputs."""
    return normalised(b, add(b, x, y))


def of_costly_and_one(b, x, y):
    """Of the power of x and y one value is made, which alone the second sweep needs."""
    power = b.pointwise("exp", (x,), x.dtype)
    product = b.pointwise("mul", (power, y), x.dtype)
    return normalised(b, b.pointwise("mul", (product, add(b, power, y)), x.dtype))


def of_two_and_columns(b, x, y):
    """Three sums over all rows leave no registers for x and y."""
    added = add(b, x, y)
    sums = tuple(total(b, b.pointwise("convert", (v,), FLOAT), [0]) for v in (x, y, added))
    return normalised(b, added), *sums


def of_two_and_one(b, x, y):
    """Two sweeps need the sum, and the second sweep needs each of the inputs."""
    added = add(b, x, y)
    return add(b, add(b, normalised(b, added), x), y)


def used_twice(b, x, y):
    """Of the sum of two inputs two values are made, which the second sweep needs."""
    added = add(b, x, y)
    first, second = (b.pointwise("mul", (added, b.literal(k)), x.dtype) for k in (2.5, 3.5))
    return b.pointwise("mul", (normalised(b, first), normalised(b, second)), x.dtype)


def normalised(b, x):
    return b.pointwise("div", (x, b.reduce("sum", "sum", x, [-1], True, x.dtype)), x.dtype)


def curve(b, x):
    """What a sum needs of `erf(x)` is a product, and the quotient needs nothing else."""
    half = b.pointwise("mul", (b.pointwise("erf", (x,), x.dtype), b.literal(0.5)), x.dtype)
    return normalised(b, b.pointwise("mul", (x, half), x.dtype))


def capped(b, x):
    """The largest and the powers need the cap of x; what a later sweep saves is made from it."""
    return softmax(b, b.pointwise("mul", (b.pointwise("tanh", (x,), x.dtype), b.literal(30.0)), x.dtype))


def curve_twice(b, x):
    """The quotient is of something else made of `erf(x)`."""
    bent = b.pointwise("erf", (x,), x.dtype)
    summed = b.reduce("sum", "sum", add(b, bent, x), [-1], True, x.dtype)
    return b.pointwise("div", (b.pointwise("mul", (bent, x), x.dtype), summed), x.dtype)


def two_costly(b, x, y):
    return normalised(
        b,
        b.pointwise("mul", (b.pointwise("erf", (x,), x.dtype), b.pointwise("tanh", (y,), y.dtype)), x.dtype),
    )


def one_is_stored(b, x):
    bent = b.pointwise("erf", (x,), x.dtype)
    return normalised(b, add(b, bent, x)), bent


def costly_of_what_is_kept(b, x):
    """Of two costly values, one made of the other, later sweeps need both."""
    bent = b.pointwise("erf", (x,), x.dtype)
    return add(b, normalised(b, b.pointwise("exp", (bent,), x.dtype)), bent)


def transposed(b, x, y):
    return add(b, x, relu(b, y))


SQUARE = [tensor(64, 64), tensor(64, 64, strides=(1, 64))]


@pytest.mark.parametrize(
    "program, args, machine, where, names",
    [
        (softmax, [tensor(2048, 512)], GPU, "register", ["exp_2"]),
        (softmax, [tensor(2048, 512)], HOST, "scratch", ["exp_2"]),
        (curve, [tensor(2048, 512)], GPU, "register", ["mul_2"]),
        (curve, [tensor(2048, 512)], HOST, "scratch", ["mul_2"]),
        (curve_twice, [tensor(2048, 512)], GPU, "register", ["erf_0"]),
        (capped, [tensor(2048, 512, dtype="bfloat16")], GPU, "register", ["mul_1", "exp_4"]),
        (capped, [tensor(2048, 512)], HOST, "scratch", ["mul_1", "exp_4"]),
        (two_costly, [tensor(2048, 512), tensor(2048, 512)], GPU, "register", ["mul_2"]),
        (one_is_stored, [tensor(2048, 512)], GPU, "register", ["add_1"]),
        (costly_of_what_is_kept, [tensor(2048, 512)], GPU, "register", ["erf_0", "exp_1"]),
        (costly_of_what_is_kept, [tensor(2048, 512)], HOST, "scratch", ["erf_0", "exp_1"]),
        (softmax, [tensor(2048, 20000)], GPU, "register", []),  # too long for registers
        (dropped, [tensor(2048, 512)], HOST, "scratch", ["mul_1"]),
        (dropped, [tensor(2048, 512)], GPU, "register", ["mul_1"]),  # instead of x and random numbers
        (of_two, [tensor(2048, 512)] * 2, GPU, "register", ["add_0"]),  # instead of both
        (of_two, [tensor(2048, 512, dtype="bfloat16")] * 2, GPU, "register", ["add_0"]),
        (of_two, [tensor(2048, 512), tensor(2048, 1)], GPU, "register", ["add_0"]),  # as many registers
        (of_two, [tensor(2048, 512, dtype="bfloat16"), tensor(2048, 1)], GPU, "register", []),  # twice
        (of_two_and_one, [tensor(2048, 512)] * 2, GPU, "register", []),  # one is needed beside it
        (used_twice, [tensor(2048, 512)] * 2, GPU, "register", ["add_0"]),  # by two, in all uses
        (of_two, [tensor(2048, 512)] * 2, HOST, "scratch", []),
        (of_costly_and_one, [tensor(2048, 512)] * 2, GPU, "register", ["mul_3"]),  # so nothing needs exp_0
        (of_two, [tensor(512, 1 << 16)] * 2, GPU, "register", []),  # shared memory holds both
        (transposed, SQUARE, GPU, "tile", ["x1"]),
        (transposed, SQUARE, HOST, "tile", ["x1"]),
        (softmax, [tensor(3, 1 << 20)], GPU, "prefetched", ["x0"]),
        (softmax, [tensor(512, 1 << 16)], GPU, "held", ["x0"]),
        (softmax, [tensor(512, 1 << 16)], GPU, "register", []),  # they hold the row
    ],
)
def test_a_schedule_says_what_stays_where(program, args, machine, where, names):
    [stage] = stages(*build(program, *args), machine)[0]
    assert list(stage.schedule.values_in(where)) == names


def test_nothing_is_saved_instead_of_what_shared_memory_holds():
    x = tensor(8192, 2048, dtype="bfloat16")
    [stage, *_] = stages(*build(of_two_and_columns, x, x))[0]
    assert list(stage.schedule.values_in("prefetched")) == ["x0", "x1"]
    assert not stage.schedule.values_in("register")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_row_kernel_is_planned_with_as_many_looks_at_its_ops_as_a_short_one(dtype, monkeypatch):
    looks, ops_for = [], Sweeps.ops_for
    monkeypatch.setattr(Sweeps, "ops_for", lambda *given: looks.append(0) or ops_for(*given))

    def looks_at(length):
        def program(b, x):
            for _ in range(length):
                x = b.pointwise("mul", (x, b.literal(1.5)), x.dtype)
            return normalised(b, x)

        looks.clear()
        stages(*build(program, tensor(2048, 512, dtype=dtype)))
        return len(looks)

    assert looks_at(60) == looks_at(6) > 0


def costly_of_costly(b, x):
    return normalised(b, b.pointwise("tanh", (b.pointwise("erf", (x,), x.dtype),), x.dtype))


def columns_of_costly(b, x):
    """What only sums of columns need is kept by no sweep."""
    return b.reduce("sum", "sum", b.pointwise("erf", (normalised(b, x),), x.dtype), [0], False, x.dtype)


@pytest.mark.parametrize(
    "program, count",
    [(softmax, 1), (curve, 1), (curve_twice, 1), (costly_of_costly, 1), (columns_of_costly, 0)],
)
def test_registers_are_counted_for_what_is_kept(program, count):
    call, fusion = build(program, tensor(2048, 512))
    [stage, *_] = stages(call, fusion)[0]
    assert kept_terms(stage.segment) == count
    assert len(stage.schedule.values_in("register")) == count


def test_what_is_kept_leaves_fewer_registers_for_columns():
    """Rows of 2048 float32, of which 16 elements, their 16 curves and 48 sums were too much for a thread."""

    def program(b, x, y):
        bent = b.pointwise("erf", (x,), x.dtype)
        product = b.pointwise("mul", (bent, y), x.dtype)
        shared = b.pointwise("mul", (bent, b.reduce("sum", "sum", product, [-1], True, x.dtype)), x.dtype)
        return shared, *(total(b, v, [0]) for v in (product, y, shared))

    call, fusion = build(program, tensor(8192, 2048), tensor(8192, 2048))
    [stage, *_] = stages(call, fusion)[0]
    assert stage.params.unroll == 2 and not stage.params.prefetched


def computed(kernel, symbol):
    return [s.name for s in statements(kernel.body) if isinstance(s, Compute) and s.symbol == symbol]


def test_what_is_placed_nowhere_is_computed_again():
    [stage] = stages(*build(softmax, tensor(2048, 512)))[0]
    saved = lower(stage.segment, stage.schedule, "k")
    assert len(computed(saved, "exp")) == 1
    assert any(isinstance(s, Array) and s.name == "exp_2_kept" for s in statements(saved.body))
    again = lower(stage.segment, replace(stage.schedule, placements=()), "k")
    assert verify(again) is None
    assert len(computed(again, "exp")) == 2
    assert not any(isinstance(s, Array) and s.name.endswith("_kept") for s in statements(again.body))


def test_any_value_of_a_row_can_be_saved():
    """Lowering has no opinion on what is worth a register."""
    for machine, where, kind in ((GPU, "register", Array), (HOST, "scratch", Scratch)):
        [stage] = stages(*build(softmax, tensor(2048, 512)), machine)[0]
        schedule = replace(stage.schedule, placements=()).with_values_in(where, ["exp_2"])
        kernel = lower(stage.segment, schedule, "k")
        assert verify(kernel) is None
        assert [s.name for s in statements(kernel.body) if isinstance(s, kind) and "kept" in s.name] == [
            "exp_2_kept"
        ]


def test_without_a_placement_nothing_is_fetched():
    [stage] = stages(*build(softmax, tensor(3, 1 << 20)))[0]
    fetching = lower(stage.segment, stage.schedule, "k")
    assert any(isinstance(s, Fetch) for s in statements(fetching.body))
    plain = lower(stage.segment, replace(stage.schedule, placements=()), "k")
    assert verify(plain) is None
    assert not any(isinstance(s, Fetch) for s in statements(plain.body))


def test_cooperative_blocks_combine_a_softmax_once():
    [stage] = stages(*build(softmax, tensor(3, 1 << 20)))[0]
    assert stage.schedule.reduction.cooperative.online_softmax == (("amax_0", "sum_3"),)
    assert "OnlineSoftmax" in str(lower(stage.segment, stage.schedule, "k"))
    how = stage.schedule.reduction
    twice = replace(how, cooperative=replace(how.cooperative, online_softmax=()))
    assert "OnlineSoftmax" not in str(lower(stage.segment, replace(stage.schedule, reduction=twice), "k"))


def test_a_value_stays_in_one_place():
    [stage] = stages(*build(softmax, tensor(2048, 512)))[0]
    schedule: Schedule = stage.schedule
    assert verify_schedule(schedule.with_values_in("scratch", ["exp_2"])) == "exp_2 stays in two places"
    assert verify_schedule(schedule.with_values_in("cloud", ["sub_1"])) == "no value stays in cloud"
