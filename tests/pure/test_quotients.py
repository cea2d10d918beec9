"""A division by a number that is part of the code takes a GPU no branch."""

import pytest

from kit.programs import build, tensor
from tsfuser.ir.dtypes import FLOAT
from tsfuser.ops.arithmetic import div


def symbols(divisor, dtype="float32", device="cuda:0"):
    """The symbols of `x / divisor`."""
    x = tensor(64, 64, dtype=dtype, device=device)
    _, fusion = build(lambda b, x: div(b, x, b.literal(divisor)), x, device=device)
    return [op.symbol for op in fusion.ops], fusion


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("divisor", [3.0, 3, -1.4142135623730951])
def test_a_number_is_a_reciprocal_in_two_parts(dtype, divisor):
    found, fusion = symbols(divisor, dtype)
    assert found == ["div_by_number"]
    [op] = fusion.ops
    assert op.compute is FLOAT and op.name == "div"
    assert sum(v.literal for v in op.operands[1:]) == pytest.approx(1 / divisor, rel=1e-7)


@pytest.mark.parametrize(
    "divisor, dtype, device",
    [
        (2.0, "float32", "cuda:0"),  # compilers multiply by 0.5
        (0.0, "float32", "cuda:0"),
        (True, "float32", "cuda:0"),
        (1e-39, "float32", "cuda:0"),
        (float("nan"), "float32", "cuda:0"),
        (3.0, "float64", "cuda:0"),
        (3j, "float32", "cuda:0"),
        (3.0, "float32", "cpu"),  # which has vectors of divisions
    ],
)
def test_other_divisions_stay(divisor, dtype, device):
    assert symbols(divisor, dtype, device)[0] == ["div"]
