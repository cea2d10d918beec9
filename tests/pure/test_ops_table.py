"""The op table by itself: well-formed rows, refusals, inferred dtypes and ranks. No torch."""

import inspect
import re
import string

import pytest

from tsfuser.errors import Refusal
from tsfuser.ir import size as sz
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, ListArg, ScalarArg, TensorArg
from tsfuser.ir.dtypes import BFLOAT16, BOOL, DTYPES, FLOAT, HALF, INT64
from tsfuser.ir.fusion import Pointwise, Reduce
from tsfuser.ir.symbols import find as find_symbol
from tsfuser.ops import table, unsupported
from tsfuser.ops.elementwise import fit, round_number, rounded
from tsfuser.ops.table import find
from tsfuser.ops.trials import UNKNOWN, NodeArg

ROWS = list(table.all_rows())


def tensor(dtype, rank=1):
    return NodeArg("tensor", dtype, rank)


def number(kind, constant=UNKNOWN):
    return NodeArg("number", kind, None, constant)


def infer(kind, overload="", device="cuda:0", **args):
    return find(kind, overload).infer(args, device)


def call(*args):
    """A call on row-major tensors: `("float32", (2, 3))` or an Arg."""
    described = []
    for arg in args:
        if isinstance(arg, tuple):
            dtype, sizes = arg
            strides = tuple(int(sz.evaluate(sz.product(sizes[d + 1 :]), ())) for d in range(len(sizes)))
            arg = TensorArg(dtype, "cpu", sizes, strides)
        described.append(arg)
    return Call(tuple(described))


# ---- the table


def test_every_overload_finds_its_row():
    for row in ROWS:
        for overload in row.overloads:
            assert find(row.name, overload) is row


def test_an_unknown_op_has_no_row():
    assert find("aten::add", "no such overload") is None
    assert find("aten::no_such_op") is None


def test_two_rows_for_one_overload_are_an_error():
    with pytest.raises(ValueError, match="aten::add.Tensor has two rows"):
        table.register(find("aten::add", "Scalar"))


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.name}.{r.overloads[0]}")
def test_a_row_is_well_formed(row):
    assert re.fullmatch(r"(aten|prim|tsfuser)::\w+", row.name)
    assert row.dtypes and set(row.dtypes) <= set(DTYPES) and len(set(row.dtypes)) == len(row.dtypes)
    known = {
        "broadcast",
        "joined",
        "first",
        "own",
        "reduced",
        "squeezed",
        "unsqueezed",
        "permuted",
        "swapped",
        "sliced",
        "selected",
        "viewed",
        "expanded",
        "flattened",
        "padded",
        *inspect.signature(row.evaluate).parameters,
    }
    assert {row.sizes} <= known if isinstance(row.sizes, str) else set(row.sizes) <= known
    assert not row.structural & row.symbolic
    assert row.text or row.name in ("aten::zeros_like", "aten::ones_like") or row.name.endswith("_backward")


@pytest.mark.parametrize("code", range(-1, 50))
def test_scalar_type_codes(code):
    try:
        dtype = table.scalar_type(code)
    except Refusal as refusal:
        assert str(code) in str(refusal)
        return
    assert dtype.code == code
    assert dtype.name in DTYPES


def test_every_dtype_has_a_scalar_type_code():
    assert all(table.scalar_type(d.code) is d for d in DTYPES.values())


# ---- templates

SIMPLE = [(find("aten::sinh"), 1), (find("aten::atan2"), 2), (find("aten::where", "self"), 3)]


@pytest.mark.parametrize("row, count", SIMPLE, ids=lambda x: getattr(x, "name", x))
def test_a_template_mentions_each_operand(row, count):
    names = {1: ("self",), 2: ("self", "other"), 3: ("condition", "self", "other")}[count]
    dtypes = ["bool" if n == "condition" else "float32" for n in names]
    builder = Builder(call(*((d, (4,)) for d in dtypes)), "cpu")
    builder.output(row.build(builder, **{n: builder.tensor(k) for k, n in enumerate(names)}))
    (op,) = builder.finish().ops
    fields = {
        int(f)
        for _, f, _, _ in string.Formatter().parse(find_symbol(op.symbol).template())
        if f and f.isdigit()
    }
    assert fields == set(range(count)) == set(range(len(op.operands)))


# ---- inference and refusal


@pytest.mark.parametrize(
    "a, b, result",
    [
        (tensor("float16", 2), tensor("int32", 3), ("float16", 3)),
        (tensor("float16", 1), tensor("float64", 0), ("float16", 1)),
        (tensor("int8", 1), tensor("float64", 0), ("float64", 1)),
        (tensor("uint8", 1), tensor("int8", 1), ("int16", 1)),
        (tensor("bfloat16", 1), tensor("float16", 1), ("float32", 1)),
        (tensor("bool", 1), tensor("bool", 1), ("bool", 1)),
        (tensor("float32", 1), tensor("complex128", 0), ("complex64", 1)),
    ],
)
def test_result_of_mul(a, b, result):
    assert infer("aten::mul", "Tensor", self=a, other=b) == (result,)


@pytest.mark.parametrize(
    "dtype, value, result",
    [
        ("int32", number("float"), "float32"),
        ("int8", number("int"), "int8"),
        ("bool", number("int", 2), "int64"),
        ("float16", number("float", 0.1), "float16"),
        ("float32", number("complex", 1j), "complex64"),
        ("float64", number("complex"), "complex128"),
    ],
)
def test_a_number_raises_the_kind_but_not_the_precision(dtype, value, result):
    assert infer("aten::mul", "Scalar", self=tensor(dtype), other=value) == ((result, 1),)


def test_the_default_dtype_is_the_callers():
    row, args = find("aten::sin"), {"self": tensor("int32")}
    assert row.infer(args) == (("float32", 1),)
    assert row.infer(args, default=DTYPES["float64"]) == (("float64", 1),)


def test_a_comparison_is_bool():
    assert infer("aten::lt", "Scalar", self=tensor("float16", 2), other=number("float", 0.5)) == (
        ("bool", 2),
    )


@pytest.mark.parametrize("args", [dict(self=tensor(None, 1)), dict(self=tensor("float32", None))])
def test_what_is_unknown_is_not_refused(args):
    assert infer("aten::sin", **args) is None
    assert find("aten::sin").refusal(args) is None


def test_an_unknown_structural_argument_is_not_refused():
    args = dict(self=tensor("float32"), approximate=NodeArg("string"))
    assert find("aten::gelu").refusal(args) is None


@pytest.mark.parametrize(
    "kind, overload, args, reason",
    [
        (
            "aten::sub",
            "Tensor",
            dict(self=tensor("bool"), other=tensor("bool"), alpha=number("int", 1)),
            "bool",
        ),
        (
            "aten::add",
            "Tensor",
            dict(self=tensor("int32"), other=tensor("int32"), alpha=number("float", 0.5)),
            "alpha",
        ),
        ("aten::erf", "", dict(self=tensor("complex64")), "complex64"),
        ("aten::erf", "", dict(self=tensor("complex64", None)), "complex64"),
        ("aten::lt", "Scalar", dict(self=tensor("float32"), other=number("complex", 1j)), "complex"),
        (
            "aten::dropout",
            "",
            dict(input=tensor("float32"), p=number("float", 1.5), train=number("bool", True)),
            "error in eager",
        ),
        (
            "aten::where",
            "self",
            dict(condition=tensor("uint8"), self=tensor("int8"), other=tensor("int8")),
            "bool",
        ),
        (
            "aten::clamp",
            "",
            dict(self=tensor("uint8"), min=number("int", 300), max=NodeArg("none", constant=None)),
            "300",
        ),
        ("aten::bitwise_and", "Tensor", dict(self=tensor("float32"), other=tensor("int32")), "float32"),
        ("aten::bitwise_and", "Scalar", dict(self=tensor("int32"), other=number("float", 2.0)), "float32"),
        ("aten::pow", "Tensor_Scalar", dict(self=tensor("int32"), exponent=number("int", -1)), "exponent"),
        (
            "aten::to",
            "dtype",
            dict(
                self=tensor("float32"),
                dtype=number("int", 99),
                non_blocking=number("bool", False),
                copy=number("bool", False),
                memory_format=NodeArg("none", constant=None),
            ),
            "99",
        ),
        ("aten::mul", "Scalar", dict(self=tensor("float16"), other=number("complex", 1j)), "half precision"),
    ],
)
def test_a_refusal_is_a_sentence(kind, overload, args, reason):
    said = find(kind, overload).refusal(args)
    assert said is not None and reason in said


@pytest.mark.parametrize("kind", ["aten::remainder", "aten::fmod", "aten::floor_divide"])
def test_integer_division_on_the_cpu_needs_a_known_divisor(kind):
    overload = "Scalar"
    unknown = dict(self=tensor("int64"), other=number("int"))
    assert "divisor" in find(kind, overload).refusal(unknown, "cpu")
    assert find(kind, overload).refusal(unknown, "cuda:0") is None
    assert find(kind, overload).refusal(dict(self=tensor("int64"), other=number("int", 3)), "cpu") is None
    assert "divisor" in find(kind, overload).refusal(
        dict(self=tensor("int64"), other=number("int", 0)), "cpu"
    )
    assert find(kind, overload).refusal(dict(self=tensor("float32"), other=number("int")), "cpu") is None


def test_lists_in_arguments_can_be_looked_up():
    args = dict(self=tensor("float32", 2), size=NodeArg("list", None, None, [3]))
    assert find("aten::sum_to_size").refusal(args) is None


# ---- 16-bit floats


@pytest.mark.parametrize(
    "x, half, brain",
    [
        (0.1, 0.0999755859375, 0.10009765625),
        (70000.0, float("inf"), 70144.0),
        (-1e39, -float("inf"), -float("inf")),
        (2049.0, 2048.0, 2048.0),
        (1.0, 1.0, 1.0),
        (6e-8, 5.960464477539063e-08, 6.007030606269836e-08),
        (float("inf"), float("inf"), float("inf")),
    ],
)
def test_rounding_of_literals(x, half, brain):
    assert rounded(x, HALF) == half
    assert rounded(x, BFLOAT16) == brain
    assert rounded(x, DTYPES["float64"]) == x


def test_nan_stays_nan():
    assert all(rounded(float("nan"), d) != rounded(float("nan"), d) for d in (HALF, BFLOAT16, FLOAT))


def test_integers_are_rounded_to_16_bits_and_numbers_only_where_exactness_counts():
    builder = Builder(call(("int32", (4,)), ("float16", (4,)), ScalarArg("float")), "cpu")
    whole, half, free = builder.tensor(0), builder.tensor(1), builder.number(2)
    literal = builder.literal(0.1)
    arithmetic = fit(builder, (whole, half, free, literal), HALF)
    assert arithmetic[0].dtype is HALF and arithmetic[1:] == (half, free, literal)
    compared = fit(builder, (half, free, literal), HALF, exact=True)
    assert compared[0] is half and compared[1].dtype is HALF and compared[2].literal == rounded(0.1, HALF)
    assert fit(builder, (whole, free), FLOAT, exact=True) == (whole, free)


def test_a_bool_needs_no_rounding():
    builder = Builder(call(("bool", (4,))), "cpu")
    assert round_number(builder, builder.tensor(0), HALF).dtype is BOOL


# ---- casts


def test_a_cast_to_the_same_dtype_is_the_value_itself():
    builder = Builder(call(("float32", (4,)), ("float32", ())), "cpu")
    x, y = builder.tensor(0), builder.tensor(1)
    assert find("aten::type_as").build(builder, self=x, other=y) is x
    assert find("aten::to", "prim_dtype").build(builder, self=x, dtype=None) is x
    copied = find("aten::_to_copy").build(builder, self=x, dtype=None)
    assert copied is not x and copied.dtype is x.dtype


@pytest.mark.parametrize("device, result", [("cpu", "bfloat16"), ("cuda:0", "float16")])
def test_autocast_takes_the_dtype_of_its_device(device, result):
    flags = dict(
        cuda_enabled=number("bool", True),
        cpu_enabled=number("bool", True),
        cuda_dtype=number("int", 5),
        cpu_dtype=number("int", 15),
    )
    row = find("aten::_autocast_to_reduced_precision")
    assert row.infer(dict(self=tensor("float32"), **flags), device) == ((result, 1),)
    assert row.infer(dict(self=tensor("float64"), **flags), device) == (("float64", 1),)


# ---- sum_to_size


def summed(sizes, target, dtype="float32"):
    builder = Builder(call((dtype, sizes), ListArg("int", target)), "cpu")
    x = builder.tensor(0)
    wanted = [builder.call.item(1, k) for k in range(len(target))]
    result = find("aten::sum_to_size").build(builder, self=x, size=wanted)
    builder.output(result)
    return builder, x, result


@pytest.mark.parametrize(
    "sizes, wanted, axes",
    [
        ((4, 8), (8,), 1),
        ((4, 8), (4, 1), 1),
        ((2, 4, 8), (4, 1), 2),
        ((4, 8), (), 2),
        ((1, 8), (8,), 0),
        ((2, 1, 8), (1, 8), 1),
    ],
)
def test_sum_to_size(sizes, wanted, axes):
    builder, _, result = summed(sizes, wanted)
    assert tuple(builder.call.value(s) for s in builder.sizes(result)) == wanted
    (op,) = builder.finish().ops
    assert (isinstance(op, Reduce) and len(op.axes) == axes) if axes else isinstance(op, Pointwise)


def test_sum_to_the_size_that_it_has_is_the_value_itself():
    _, x, result = summed((4, 8), (4, 8))
    assert result is x


def test_sum_to_none_is_the_value_itself():
    builder = Builder(call(("float32", (4, 8))), "cpu")
    assert find("aten::_grad_sum_to_size").build(
        builder, self=builder.tensor(0), size=None
    ) is builder.tensor(0)


def test_integers_are_summed_in_int64():
    assert summed((4, 8), (8,), "int32")[2].dtype is INT64


def test_a_size_that_does_not_broadcast_is_refused():
    with pytest.raises(Refusal, match="broadcast"):
        summed((4, 8), (3,))
    with pytest.raises(Refusal, match="more dimensions"):
        summed((8,), (4, 8))


def test_the_sizes_are_no_part_of_the_class_beyond_their_pattern():
    builder, _, _ = summed((4, 8), (8,))
    assert all(answer in (0, 1) for answer in builder.call.decisions.values())


def test_ops_without_a_row_have_sentences_and_no_row():
    assert not {row.name for row in table.all_rows()} & set(unsupported.kinds())
    assert all(
        unsupported.sentence(kind) and unsupported.sentence(kind)[0].islower() for kind in unsupported.kinds()
    )
    assert unsupported.is_view("aten::unbind") and not unsupported.is_view("aten::mm")


@pytest.mark.parametrize(
    "kind, overload", [("aten::to", "dtype_layout"), ("aten::to", "device"), ("aten::zeros_like", "")]
)
@pytest.mark.parametrize(
    "named, device, taken",
    [
        ("cuda:0", "cuda:0", True),
        ("cuda", "cuda:0", False),  # the thread's current device, which may be another one
        ("cuda:1", "cuda:0", False),
        ("cpu", "cuda:0", False),
        ("cpu", "cpu", True),
        ("cuda", "cpu", False),
    ],
)
def test_a_device_that_is_asked_for_is_that_of_the_operand(kind, overload, named, device, taken):
    args = dict(self=tensor("float32"), dtype=number("int", 6), device=NodeArg("other", None, None, named))
    refusal = find(kind, overload).refusal(args, device)
    assert (refusal is None) == taken and (taken or "a copy to" in refusal)
