"""Which ops of a Fusion take their fast forms."""

import pytest

import tsfuser.ops  # noqa: F401  it makes the rows
from tsfuser.ir.budgets import with_fast_forms
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, TensorArg
from tsfuser.ir.dtypes import DTYPES
from tsfuser.ir.fusion import Pointwise
from tsfuser.ops.table import find


class Program:
    """Ops on x and y, by their names: `p.sigmoid(p.x)`."""

    def __init__(self, dtype):
        arg = TensorArg(dtype, "cuda:0", (6, 8), (8, 1))
        self.builder = Builder(Call((arg, arg)), "cuda:0")
        self.x, self.y = self.builder.tensor(0), self.builder.tensor(1)

    def __getattr__(self, name):
        def op(*values, overload="", **structural):
            row = find(f"aten::{name}", overload)
            names = row.evaluate.__code__.co_varnames[1 : 1 + len(values)]
            given = [self.builder.literal(v) if isinstance(v, (int, float)) else v for v in values]
            return row.build(self.builder, **dict(zip(names, given)), **structural)

        return op

    def add(self, a, b):
        return self.__getattr__("add")(a, b, overload="Tensor")

    def div(self, a, b):
        return self.__getattr__("div")(a, b, overload="Tensor", rounding_mode=None)

    def mul(self, a, b):
        return self.__getattr__("mul")(a, b, overload="Tensor")

    def to(self, a, dtype):
        return self.__getattr__("to")(a, overload="dtype", dtype=DTYPES[dtype].code)

    def gelu(self, a):
        return self.__getattr__("gelu")(a, approximate="none")

    def sum(self, a, dtype=None):
        code = None if dtype is None else DTYPES[dtype].code
        return self.__getattr__("sum")(a, overload="dim_IntList", dim=[0], keepdim=False, dtype=code)

    def symbols(self, *results, everywhere=False):
        """The symbols of the pointwise ops that compute `results`."""
        for result in results:
            self.builder.output(result)
        fusion = self.builder.finish()
        made = with_fast_forms(fusion, everywhere)
        assert [op.output for op in made.ops] == [op.output for op in fusion.ops]
        assert with_fast_forms(made, everywhere) is made
        return [op.symbol for op in made.ops if isinstance(op, Pointwise)]


def exact(symbols):
    return not any(symbol.startswith("fast_") for symbol in symbols)


LOW = ("bfloat16", "float16")


@pytest.mark.parametrize("dtype", LOW)
def test_what_is_stored_in_16_bits_is_fast(dtype):
    p = Program(dtype)
    assert p.symbols(p.mul(p.sigmoid(p.x), p.y)) == ["fast_sigmoid", "mul"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_stored_in_32_bits_is_exact(dtype):
    p = Program(dtype)
    assert p.symbols(p.mul(p.sigmoid(p.x), p.y)) == ["sigmoid", "mul"]


def test_a_fusion_without_a_choice_is_the_same_object():
    p = Program("float32")
    p.builder.output(p.sigmoid(p.x))
    fusion = p.builder.finish()
    assert with_fast_forms(fusion) is fusion


def test_on_request_all_that_is_float32_is_fast():
    p = Program("float32")
    assert p.symbols(p.sigmoid(p.x), everywhere=True) == ["fast_sigmoid"]
    p = Program("float64")
    assert p.symbols(p.sigmoid(p.x), everywhere=True) == ["sigmoid"]


def test_one_exact_reader_is_enough():
    p = Program("bfloat16")
    s = p.sigmoid(p.x)
    assert p.symbols(s, p.to(s, "float32")) == ["sigmoid", "convert"]


@pytest.mark.parametrize("jump", ["floor", "gt", "int32"])
def test_what_decides_a_jump_is_exact(jump):
    p = Program("bfloat16")
    s = p.sigmoid(p.x)
    if jump == "floor":
        result = p.floor(s)
    elif jump == "gt":
        condition = p.__getattr__("gt")(s, p.y, overload="Tensor")
        result = p.__getattr__("where")(condition, p.x, p.y, overload="self")
    else:
        result = p.to(p.to(p.mul(s, 10.0), "int32"), "bfloat16")
    assert exact(p.symbols(result))


def test_a_sum_may_cancel_what_was_rounded_before_but_not_what_was_not():
    p = Program("bfloat16")
    assert "fast_sigmoid" in p.symbols(p.add(p.sigmoid(p.x), p.y))
    p = Program("bfloat16")
    assert exact(p.symbols(p.to(p.add(p.sigmoid(p.to(p.x, "float32")), p.to(p.y, "float32")), "bfloat16")))
    p = Program("bfloat16")
    made = p.symbols(p.to(p.mul(p.sigmoid(p.to(p.x, "float32")), p.to(p.y, "float32")), "bfloat16"))
    assert "fast_sigmoid" in made


def test_a_quotient_that_may_cancel_is_exact():
    """x - mean(x) of equal numbers is 0, which would not hold for a mean that is off."""
    p = Program("bfloat16")
    assert "fast_div" in p.symbols(p.mul(p.div(p.x, p.y), p.y))
    p = Program("bfloat16")
    assert exact(p.symbols(p.add(p.div(p.x, p.y), p.y)))


@pytest.mark.parametrize("dtype", LOW)
def test_an_error_that_grows_leaves_less(dtype):
    p = Program("float32")
    made = p.symbols(p.to(p.exp(p.mul(p.tanh(p.x), 50.0)), dtype))
    assert "fast_exp" in made and ("fast_tanh" in made) == (dtype == "bfloat16")


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_sum_of_what_is_positive_keeps_the_relative_error(name):
    for dtype, result, form in (
        ("bfloat16", None, "fast_exp"),
        ("float16", None, "fast_exp"),
        ("float32", None, "exp"),
        ("bfloat16", "float32", "exp"),
    ):
        p = Program(dtype)
        code = None if result is None else DTYPES[result].code
        softmax = p.__getattr__(name)(p.x, overload="int", dim=1, dtype=code)
        assert form in p.symbols(softmax), (dtype, result)


def test_terms_of_a_sum_have_a_64th_of_the_budget():
    for dtype, form in (("bfloat16", "fast_gelu"), ("float16", "gelu")):
        p = Program(dtype)
        assert form in p.symbols(p.sum(p.gelu(p.x)))


def test_terms_that_the_program_rounds_have_it_wherever_the_sum_is_stored():
    """As gradients of float32 weights are."""
    p = Program("bfloat16")
    assert "fast_gelu" in p.symbols(p.sum(p.gelu(p.x), "float32"))
    p = Program("bfloat16")
    product = p.mul(p.to(p.sigmoid(p.x), "float32"), p.to(p.y, "float32"))
    assert "fast_sigmoid" in p.symbols(p.sum(product))
    p = Program("bfloat16")
    in_float = p.sigmoid(p.to(p.x, "float32"))
    assert exact(p.symbols(p.sum(p.mul(in_float, p.y))))  # a term that eager does not round
    p = Program("bfloat16")
    both = p.to(p.sigmoid(p.x), "float32")
    assert exact(p.symbols(p.sum(both), both))  # stored in 32 bits, too


def test_the_derivative_of_a_norm_hides_what_it_is_given():
    p = Program("bfloat16")
    b = p.builder
    gradient = p.mul(p.y, p.sigmoid(p.x))
    statistic = p.to(p.sum(p.y), "float32")
    gradients = find("aten::native_batch_norm_backward").build(
        b, grad_out=gradient, input=p.x, weight=None, running_mean=None, running_var=None,
        save_mean=statistic, save_invstd=statistic, train=True, eps=b.literal(1e-5),
        output_mask=[True, False, False],
    )  # fmt: skip
    assert "fast_sigmoid" in p.symbols(gradients[0])


def test_what_a_norm_reduces_is_exact():
    p = Program("bfloat16")
    b = p.builder
    norm = find("aten::layer_norm").build(
        b,
        input=p.gelu(p.x),
        normalized_shape=[b.call.size(0, 1)],
        weight=None,
        bias=None,
        eps=b.literal(1e-5),
    )
    assert exact(p.symbols(norm))
