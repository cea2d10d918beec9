"""Values that cost much and have few elements are stored before the kernels that read them often; what only
one side of a choice needs is computed on that side only."""

import functools

import pytest

from kit.programs import add, build, kernels, relu, stages, tensor, total
from tsfuser.ir import size as sz
from tsfuser.ir.fusion import Within
from tsfuser.lower.loop_ir import Compute, For, If, Load
from tsfuser.lower.traverse import statements
from tsfuser.ops import table
from tsfuser.ops.parts import part_of
from tsfuser.schedule.machine import GPU, HOST
from tsfuser.segment.tables import MOST_TABLES, WORTH_A_TABLE


def op(b, name, *values):
    return b.pointwise(name, values, values[0].dtype)


def mul(b, x, y):
    return op(b, "mul", x, y)


def rotation(b, x, angles):
    return add(b, mul(b, x, op(b, "cos", angles)), op(b, "sin", angles))


def halves(b, x):
    half = sz.const(32)
    return [part_of(b, "slice", x, len(x.dims) - 1, start, half) for start in (sz.const(0), half)]


def gradient_of_rotation(b, g, angles):
    """As autograd writes it: the second half of the product goes to the first half of the gradient."""
    left, right = halves(b, mul(b, g, op(b, "sin", angles)))
    moved = table.find("aten::cat").build(b, tensors=[right, op(b, "neg", left)], dim=-1)
    return add(b, mul(b, g, op(b, "cos", angles)), moved)


def reads(stage):
    return [load.value.name.rpartition("_")[0] for load in stage.segment.loads]


def symbols(stage):
    return [op.symbol for op in stage.segment.ops if hasattr(op, "symbol")]


LARGE = tensor(16, 12, 512, 64), tensor(512, 64)


@pytest.mark.parametrize("machine", [GPU, HOST], ids=["gpu", "host"])
@pytest.mark.parametrize("batch, count", [(16, 2), (4, 1)])
def test_sines_of_positions_are_computed_once(machine, batch, count):
    x = tensor(batch, 12, 512, 64)
    assert (batch * 12 * 512 * 64 >= WORTH_A_TABLE) == (count == 2)
    found, temporaries = stages(*build(rotation, x, LARGE[1]), machine)
    assert len(found) == count and len(temporaries) == 2 * (count - 1)
    if count == 2:
        assert sorted(symbols(found[0])) == ["cos", "sin"] and set(symbols(found[1])) == {"mul", "add"}
        assert sorted(reads(found[1])) == ["", "cos", "sin"]


def test_a_reduction_reads_what_is_stored():
    found, _ = stages(*build(lambda b, x, a: total(b, mul(b, x, op(b, "sin", a)), [0, 1, 2]), *LARGE))
    assert symbols(found[0]) == ["sin"] and "sin" not in symbols(found[1])


@pytest.mark.parametrize(
    "program, what",
    [
        (lambda b, x, a: mul(b, x, relu(b, a)), "a relu is cheap"),
        (lambda b, x, a: mul(b, x, op(b, "exp", a)), "an exponential is no sine"),
        (lambda b, x, a: op(b, "sin", add(b, x, a)), "the sine has all elements"),
    ],
)
def test_what_stays_in_one_kernel(program, what):
    assert len(stages(*build(program, *LARGE))[0]) == 1, what


def test_values_behind_a_reduction_stay_in_its_pass():
    def program(b, x):
        return mul(b, x, op(b, "sin", total(b, x, [3], keepdim=True)))

    assert len(stages(*build(program, LARGE[0]))[0]) == 1


def test_nearly_as_many_elements_are_not_worth_it():
    def program(b, x, a):
        return mul(b, x, op(b, "sin", a))

    assert len(stages(*build(program, tensor(7, 1 << 19), tensor(1 << 19)))[0]) == 1
    assert len(stages(*build(program, tensor(8, 1 << 19), tensor(1 << 19)))[0]) == 2


def test_an_output_over_the_same_axes_is_stored_with_them():
    def program(b, x, a):
        double = add(b, a, a)
        return mul(b, x, op(b, "sin", double)), double

    first, second = stages(*build(program, *LARGE))[0]
    assert len(first.segment.stores) == 2 and len(second.segment.stores) == 1


def test_tables_of_tables_have_their_own_kernels():
    """pow over 64 elements, sin over 2^15 of them and 64, product over all."""

    def program(b, x, t, rates):
        angles = mul(b, t, op(b, "pow", rates, rates))
        return mul(b, x, op(b, "sin", angles))

    args = tensor(8, 1 << 15, 64), tensor(1 << 15, 1), tensor(64)
    found, _ = stages(*build(program, *args))
    assert [s.segment.name for s in found] == ["fused_pow", "fused_mul_sin", "fused_mul"]


def test_a_kernel_reads_so_many_tables_at_most():
    def program(b, x, a):
        for _ in range(MOST_TABLES + 4):
            a = op(b, "sin", a)
            x = mul(b, x, a)
        return x

    first, second = stages(*build(program, *LARGE))[0]
    assert len(first.segment.stores) == MOST_TABLES and len(second.segment.loads) == MOST_TABLES + 1
    assert symbols(second).count("sin") == 4


def test_halves_are_read_where_they_are():
    """The sine is stored along both halves, each of which reads its own; nothing is computed twice."""
    call, fusion = build(gradient_of_rotation, *LARGE)
    found, _ = stages(call, fusion)
    assert len(found) == 2 and sorted(symbols(found[0])) == ["cos", "sin", "sin"]
    windows = {load.value.name: len(load.windows) for load in found[1].segment.loads}
    assert sorted((n[:3], w) for n, w in windows.items() if n[0] != "x") == [
        ("cos", 0),
        ("sin", 1),
        ("sin", 1),
    ]
    loads = [
        s for k in kernels(gradient_of_rotation, *LARGE) for s in statements(k.body) if isinstance(s, Load)
    ]
    assert sum(s.guard is not None and "_in" in str(s.guard) for s in loads) == 6


def test_what_two_copies_compute_alike_is_computed_once():
    def program(b, x, y, angles):
        return add(b, gradient_of_rotation(b, x, angles), gradient_of_rotation(b, y, angles))

    _, fusion = build(program, LARGE[0], *LARGE)
    assert sum(getattr(op, "symbol", "") == "sin" for op in fusion.ops) == 2
    assert sum(isinstance(op, Within) for op in fusion.ops) == 1


def parts(b, x, y):
    costly = [op(b, "tanh", op(b, "exp", x)), op(b, "atan", op(b, "log", y))]
    return table.find("aten::cat").build(b, tensors=costly, dim=1)


def test_a_choice_of_rows_is_a_branch():
    [kernel] = kernels(parts, tensor(64, 8, 64), tensor(64, 8, 64))
    [choice] = [s for s in kernel.body if isinstance(s, If)]
    sides = [
        [s.symbol for s in statements(side) if isinstance(s, Compute)] for side in (choice.yes, choice.no)
    ]
    assert "exp" in sides[0] and "log" not in sides[0]
    assert "log" in sides[1] and "exp" not in sides[1]
    assert not any("where" in side for side in sides)


def test_choices_that_have_nothing_in_common_do_not_multiply():
    """Five cats, each cut elsewhere, would be 32 loops."""

    def program(b, *tensors):
        costly = [(op(b, "tanh", op(b, "exp", x)), y) for x, y in tensors]
        made = [table.find("aten::cat").build(b, tensors=pair, dim=1) for pair in costly]
        return functools.reduce(lambda x, y: add(b, x, y), made)

    def five(b, *tensors):
        return program(b, *zip(tensors[::2], tensors[1::2]))

    sizes = [n for k in range(1, 6) for n in (k, 8 - k)]
    [kernel] = kernels(five, *(tensor(64, n, 64) for n in sizes))
    assert sum(isinstance(s, For) and s.bind == "vector" for s in statements(kernel.body)) <= 4


def test_a_cheap_choice_is_none():
    def program(b, x, y):
        return table.find("aten::cat").build(b, tensors=[relu(b, x), add(b, y, y)], dim=1)

    [kernel] = kernels(program, tensor(64, 8, 64), tensor(64, 8, 64))
    assert not any(isinstance(s, If) for s in statements(kernel.body))
    assert any(isinstance(s, For) and s.bind == "vector" for s in kernel.body)


def test_a_choice_that_spares_a_load_by_each_lane_is_a_branch():
    """Lanes of a vector that read down a column read a sector each, which the other half does not need."""

    def program(b, x, y):
        return table.find("aten::cat").build(b, tensors=[x, y], dim=2)

    down = tensor(2, 64, 8, 64, strides=(64 * 8 * 64, 1, 64 * 64, 64))
    [kernel] = kernels(program, tensor(2, 64, 8, 64), down)
    [choice] = [s for s in kernel.body if isinstance(s, If)]
    read = [{s.buffer for s in statements(side) if isinstance(s, Load)} for side in (choice.yes, choice.no)]
    assert read == [set(), {"args.x1_2"}]


@pytest.mark.parametrize("rows, vector", [(512, 1), (1 << 16, 4)])
def test_sines_of_few_elements_have_a_thread_each(rows, vector):
    def params(name):
        def program(b, t, rates):
            return op(b, name, mul(b, t, rates))

        [stage] = stages(*build(program, tensor(rows, 1), tensor(64)))[0]
        return stage.params.vector, stage.params.unroll

    assert params("sin") == (vector, 1)
    assert params("exp") == (4, 4)
