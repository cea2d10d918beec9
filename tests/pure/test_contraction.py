"""Which Fusions compare values with extremes of values, so that their kernels are not contracted."""

import pytest

import tsfuser.ops  # noqa: F401  it makes the rows
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, TensorArg
from tsfuser.ir.extremes import compares_extremes
from tsfuser.ops.table import find


class Program:
    """Ops on x and y by their overloads' names: `p("mul", "Tensor", self=p.x, other=p.y)`."""

    def __init__(self, dtype="float32"):
        arg = TensorArg(dtype, "cuda:0", (6, 8), (8, 1))
        self.builder = Builder(Call((arg, arg)), "cuda:0")
        self.x, self.y = self.builder.tensor(0), self.builder.tensor(1)
        self.one = self.builder.literal(1)
        self.z = self("mul", "Tensor", self=self.x, other=self.y)

    def __call__(program, name, overload="", /, **arguments):
        return find(f"aten::{name}", overload).build(program.builder, **arguments)

    def extreme(self, name="amax"):
        return self(name, self=self.z, dim=[1], keepdim=True)

    def compares(self, *results):
        for result in results:
            self.builder.output(result)
        return compares_extremes(self.builder.finish())


@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.parametrize("comparison", ["eq", "lt", "ge"])
def test_a_comparison_with_an_extreme(name, comparison):
    p = Program()
    assert p.compares(p(comparison, "Tensor", self=p.z, other=p.extreme(name)))


def test_the_sign_of_a_distance_from_an_extreme():
    p = Program()
    assert p.compares(p("sign", self=p("sub", "Tensor", self=p.z, other=p.extreme(), alpha=p.one)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmaxes_compare_nothing(dtype):
    p = Program(dtype)
    rows = p("softmax", "int", self=p.z, dim=-1, dtype=None)
    assert not p.compares(rows, p("log_softmax", "int", self=p.x, dim=1, dtype=None), p.extreme())


def test_a_mask_beside_an_extreme():
    """No operand of the comparison depends on it."""
    p = Program()
    mask = p("gt", "Tensor", self=p.x, other=p.y)
    assert not p.compares(mask, p("sub", "Tensor", self=p.z, other=p.extreme(), alpha=p.one))


def test_a_comparison_with_a_sum():
    """Equality there is chance."""
    p = Program()
    total = p("sum", "dim_IntList", self=p.z, dim=[1], keepdim=True, dtype=None)
    assert not p.compares(p("eq", "Tensor", self=p.z, other=total))
