"""A division by a number that is part of the code, or by a value of a row, takes a GPU no branch."""

from dataclasses import replace

import pytest

from kit.programs import add, build, kernels, stages, tensor, total
from tsfuser.codegen.emit import source
from tsfuser.ir.budgets import with_fast_forms
from tsfuser.ops.arithmetic import div
from tsfuser.schedule.machine import GPU, HOST


def symbols(divisor, dtype="float32", device="cuda:0"):
    """The symbols of `x / divisor`."""
    x = tensor(64, 64, dtype=dtype, device=device)
    _, fusion = build(lambda b, x: div(b, x, b.literal(divisor)), x, device=device)
    return [op.symbol for op in fusion.ops], fusion


@pytest.mark.each_value(("divisor", "dtype"))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool", "float64"])
@pytest.mark.parametrize("divisor", [3.0, 3, -1.4142135623730951, 2.0, 0.0, True, float("nan")])
def test_by_a_number_it_is_the_product_with_a_reciprocal_as_in_eager(dtype, divisor):
    found, fusion = symbols(divisor, dtype)
    assert found == ["times_reciprocal"]
    assert fusion.ops[0].name == "div"


@pytest.mark.parametrize("divisor, device", [(3j, "cuda:0"), (3.0, "cpu")])
def test_other_divisions_by_numbers_stay(divisor, device):
    assert symbols(divisor, "float32", device)[0] == ["div"]


def forms(program, *args, machine=GPU):
    """The symbols of the divisions of a program, and of their operands."""
    found, _ = stages(*build(program, *args), machine)
    words = ("div", "quotient", "scale", "reciprocal")
    ops = [op for stage in found for op in stage.segment.ops]
    return [op.symbol for op in ops if any(word in getattr(op, "symbol", "") for word in words)]


PARTS = ["divisor_scale", "divisor_reciprocal"]
X = tensor(256, 1000)
LAST = tensor(8, 64, 32, 32, strides=(65536, 1, 2048, 64))


def by_sum(b, x):
    return div(b, x, total(b, x, [1], True))


@pytest.mark.parametrize(
    "program, args, expected",
    [
        (by_sum, [X], [*PARTS, "shared_quotient"]),
        (div, [X, tensor(256, 1)], [*PARTS, "shared_quotient"]),
        (div, [X, tensor(1, 1)], [*PARTS, "shared_quotient"]),
        (div, [X, tensor()], [*PARTS, "shared_quotient"]),
        (div, [tensor(256, 1000, dtype="int32"), tensor(256, 1)], [*PARTS, "shared_quotient"]),
        (lambda b, x, y: (div(b, x, y), div(b, add(b, x, x), y)), [X, tensor(256, 1)],
         [*PARTS, "shared_quotient", "shared_quotient"]),
        # each element has a divisor of its own, or neighbours have
        (div, [X, X], ["div"]),
        (div, [X, tensor(1000)], ["div"]),
        (div, [tensor(256, 1), X], ["div"]),
        (div, [tensor(256, 1), tensor(256, 1)], ["div"]),
        (div, [tensor(), tensor()], ["div"]),
        (div, [LAST, tensor(8, 64, 1, 1)], ["div"]),  # neighbours are of different channels
        (div, [LAST, tensor(8, 1, 32, 32)], [*PARTS, "shared_quotient"]),
        (by_sum, [tensor(256, 1000, dtype="float64")], ["div"]),
    ],
)  # fmt: skip
def test_what_depends_on_the_divisor_of_a_row_alone_is_computed_once(program, args, expected):
    assert forms(program, *args) == expected


def test_processors_divide():
    assert forms(by_sum, X, machine=HOST) == ["div"]


def test_quotients_in_16_bits_have_their_fast_form():
    """It is the fast form of a division: budgets allow both or neither."""
    x = tensor(256, 1000, dtype="bfloat16")
    fusion = with_fast_forms(build(by_sum, x)[1])
    assert [op.symbol for op in fusion.ops if "div" in op.name] == ["fast_div"]
    found, _ = stages(build(by_sum, x)[0], fusion)
    assert [op.symbol for op in found[0].segment.ops if op.name == "div"][-1] == "fast_shared_quotient"


@pytest.mark.parametrize("dtype, rows", [("float32", 512), ("bfloat16", 384)])
def test_schedules_are_those_of_plain_divisions(dtype, rows):
    """The cut into segments has asked whether there is one, before."""

    def program(b, x, y):
        shared = div(b, x, y)
        return div(b, shared, total(b, shared, [1], True))

    for columns in (64, 1000):
        args = tensor(64, rows, columns, dtype=dtype), tensor(64, rows, 1, dtype=dtype)
        call, fusion = build(program, *args)
        [stage] = stages(call, fusion)[0]
        [plain] = stages(call, fusion, replace(GPU, has_fast_forms=False))[0]
        assert stage.params == plain.params and stage.schedule.placements == plain.schedule.placements
        symbols = [getattr(op, "symbol", "") for op in (*plain.segment.ops, *stage.segment.ops)]
        assert symbols.count("div") == 3 and symbols.count("shared_quotient") == 1


def test_the_parts_of_a_divisor_stand_before_the_loop_over_its_row():
    [kernel] = kernels(by_sum, X)
    text = source(kernel)
    made = text.index("= divisor_reciprocal(")
    assert text.count("divisor_scale(") == 1 and made < text.index("= shared_quotient(")
    assert "for (" in text[made : text.index("= shared_quotient(")]
